"""The tool that distils a small draft from a real target's answers, on toy sizes."""

import json
import re
import sys

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specctl.models.files.token_counts import TokenCounts
from specctl.profile.schema import model_path
from tools.real_draft.answers import (
    LIKELIEST,
    Answer,
    AnswerShards,
    Target,
    prompt_batches,
    read_answers,
    read_prompts,
    write_answers,
)
from tools.real_draft.gguf_file import gguf_name, write_gguf
from tools.real_draft.student import (
    agreement,
    candidates,
    collate,
    distillation_loss,
    drafted_states,
    frequencies,
    new_student,
    reduce_output,
)
from tools.real_draft.train import Lessons, epoch_batches, main


@pytest.fixture(scope="module")
def target():
    folder = model_path("draft")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return Target(model, AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def answers(target):
    prompts = [target.encode(text) for text in ("How many apples?", "Tom has 3 cats and 2 dogs. How many are there?")]
    return target.write(prompts, 12)


def test_answers_in_a_batch_are_those_of_the_target_alone(target, answers):
    for answer in answers:
        again = target.read(answer.ids, answer.first)
        assert len(again.top_ids) == len(answer.ids) - answer.first
        assert torch.equal(again.top_ids[:, 0], answer.top_ids[:, 0])
        torch.testing.assert_close(again.states, answer.states, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(again.top_log_probs, answer.top_log_probs, atol=2e-2, rtol=1e-2)
        assert answer.ids[-12:].tolist() == answer.top_ids[-12:, 0].tolist()  # greedy
        assert answer.first == len(target.opening)


def test_likeliest_tokens_have_the_log_probabilities_of_the_whole_vocabulary(target, answers):
    answer = answers[0]
    with torch.inference_mode():
        whole = target.model(answer.ids[None]).logits[0, answer.first - 1 : -1].log_softmax(-1)
    wanted = whole.topk(LIKELIEST)
    torch.testing.assert_close(answer.top_log_probs.float(), wanted.values, atol=2e-2, rtol=1e-2)


def test_shards_return_what_was_written_and_are_written_once(tmp_path, target, answers):
    batches = [["One?", "Two?"], None, ["three" * 300]]
    shards = AnswerShards(tmp_path / "written")
    shards.write(0, answers)
    written = list(write_answers(target, iter(batches), shards, 200, 4, 0))
    assert [number for number, _ in written] == [1]  # the first is there, the last one's prompt is too long
    assert list(write_answers(target, iter(batches[:2]), shards, 200, 4, 0)) == []
    first = shards.read()[: len(answers)]
    for found, wanted in zip(first, answers, strict=True):
        assert found.first == wanted.first
        assert torch.equal(found.ids, wanted.ids)
        assert torch.equal(found.top_ids, wanted.top_ids)
        assert torch.equal(found.states, wanted.states)


def test_given_answers_are_read_with_or_without_their_prompts(tmp_path, target):
    class Given:
        prompt, tokens = target.encode("How many?").int(), torch.tensor([5, 6, 7], dtype=torch.int32)

    for answers_only, learned in ((True, 3), (False, len(Given.prompt) - len(target.opening) + 3)):
        shards = AnswerShards(tmp_path / str(answers_only))
        assert list(read_answers(target, [Given()], shards, 8, answers_only)) == [(0, learned)]
        assert shards.read()[0].ids.tolist() == [*Given.prompt.tolist(), 5, 6, 7]


def test_held_back_prompts_are_never_answered(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in (*range(5), 1)), encoding="utf-8")
    questions = [f"q{i}" for i in range(4)]
    batches = list(prompt_batches(read_prompts(path), questions, {"p2", "q3"}, 3, 0))
    assert batches[:2] == [["p0", "p1", "p3"], ["p4"]]
    assert batches[2] is None  # made up by the target
    assert sorted(batches[3]) == ["q0", "q1", "q2"]
    assert batches == list(prompt_batches(read_prompts(path), questions, {"p2", "q3"}, 3, 0))


def drawn_states(count, width, seed=0):
    """States whose directions differ in size, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(1, -2, width)
    return torch.randn(count, width, generator=generator) * sizes[torch.randperm(width, generator=generator)]


def test_a_reduction_to_the_whole_width_keeps_the_logits():
    states, output = drawn_states(400, 16), torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    whole = reduce_output(output, states, torch.full((50,), 1 / 50), 16)
    torch.testing.assert_close(states @ whole.states @ whole.table.T, states @ output.T, atol=1e-3, rtol=1e-3)
    assert float((whole.importance * whole.scale.square()).mean()) == pytest.approx(1, rel=1e-3)


def test_a_reduction_keeps_more_of_the_likeliest_tokens_than_that_of_the_output_alone():
    states, output = drawn_states(2000, 32), torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
    likeliest = (states @ output.T).argmax(-1)
    counts = torch.bincount(likeliest, minlength=200) / len(likeliest)
    ours = reduce_output(output, states, counts, 8)
    kept = ((states @ ours.states @ ours.table.T).argmax(-1) == likeliest).float().mean()
    right = torch.linalg.svd(output).Vh[:8].T
    plain = ((states @ right @ (output @ right).T).argmax(-1) == likeliest).float().mean()
    assert kept > plain + 0.2


def test_candidates_stand_for_the_whole_vocabulary():
    logits = torch.randn(400, generator=torch.Generator().manual_seed(3))
    frequent = torch.arange(400).flip(0)
    estimates = []
    for seed in range(300):
        ids, stands_for = candidates(torch.tensor([[7, 9]]), frequent, 20, 40, torch.Generator().manual_seed(seed))
        assert len(ids) == len(set(ids.tolist())) == 62
        assert {7, 9, *range(380, 400)} <= set(ids.tolist())
        estimates.append(float((logits[ids] + stands_for).exp().sum()))
    assert sum(estimates) / 300 == pytest.approx(float(logits.exp().sum()), rel=0.02)
    ids, stands_for = candidates(torch.tensor([[7]]), frequent, 20, 1000, torch.Generator().manual_seed(0))
    assert sorted(ids.tolist()) == list(range(400))
    assert not stands_for.any()


def toy_answers(vocabulary, width):
    """Answers in which the state, and so the target's token, follows from the token before."""
    generator = torch.Generator().manual_seed(0)
    output, inputs = (torch.randn(vocabulary, width, generator=generator) for _ in range(2))
    answers = []
    for length in (9, 14, 30, 30):
        ids = torch.randint(vocabulary, (length,), generator=generator)
        states = inputs[ids[2:-1]]
        top = (states @ output.T).log_softmax(-1).topk(LIKELIEST)
        answers.append(Answer(ids, 3, top.indices, top.values.half(), states.half()))
    return answers, output


def test_batches_hold_each_answer_once_and_predict_at_the_token_before():
    answers, _ = toy_answers(40, 8)
    batches = list(epoch_batches(answers, 60, 0))
    assert len(batches) == 2  # two of at most 60 tokens, padding included
    assert sum(len(batch.places) for batch in batches) == sum(len(answer.top_ids) for answer in answers)
    for batch in batches:
        assert batch.ids.numel() <= 60
    alone = collate(answers[:1])
    assert alone.places.tolist() == list(range(2, 8))
    assert torch.equal(alone.ids[0], answers[0].ids[:-1])


def test_a_student_learns_what_the_target_says():
    answers, output = toy_answers(40, 8)
    states = torch.cat([answer.states for answer in answers]).float()
    reduction = reduce_output(output, states, frequencies(answers, 40), 8)
    learned = [
        Answer(a.ids, a.first, a.top_ids, a.top_log_probs, (a.states.float() @ reduction.states).half())
        for a in answers
    ]
    torch.manual_seed(0)
    model = new_student(LlamaConfig(vocab_size=40), reduction, 1, 16, 8)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    batches = list(epoch_batches(learned, 60, 0))
    before, losses = agreement(model, batches), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        for batch in batches:
            chosen = candidates(batch.top_ids, reduction.frequent, 10, 10, generator)
            found = drafted_states(model, batch)
            table = model.model.embed_tokens.weight
            loss = distillation_loss(found, table, batch, chosen, 1.0, 1.0, reduction.importance)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert agreement(model, batches) > max(0.8, before)
    assert agreement(model, batches, reduction.frequent[:5]) < agreement(model, batches)


def test_the_loss_is_least_where_the_draft_says_what_the_target_says():
    answers, output = toy_answers(40, 8)
    batch = collate(answers)
    everything = torch.arange(40), torch.zeros(40)
    exact = distillation_loss(batch.states, output, batch, everything, 0.0, 1.0, torch.ones(8))
    assert float(exact) < 1e-2  # what is missing to 0 lies outside the likeliest
    other = distillation_loss(batch.states + 0.3, output, batch, everything, 0.0, 0.0, torch.ones(8))
    assert float(other) > float(exact)
    distance = distillation_loss(batch.states + 0.3, output, batch, everything, 0.0, 2.0, torch.ones(8)) - other
    assert float(distance) == pytest.approx(2 * 0.09, rel=1e-2)


def test_lessons_read_new_shards_when_an_epoch_starts(tmp_path):
    answers, _ = toy_answers(40, 8)
    AnswerShards(tmp_path / "written").write(0, answers[:1])
    lessons = Lessons(tmp_path, ["written"], torch.eye(8)[:, :4])
    epochs = lessons.epochs(60, 0)
    assert len(next(epochs).ids) == 1
    AnswerShards(tmp_path / "written").write(1, answers[1:2])
    assert sum(len(answer.ids) for answer in lessons.answers) == 9
    next(epochs)
    assert sum(len(answer.ids) for answer in lessons.answers) == 23
    assert lessons.answers[0].states.shape[1] == 4


def test_a_run_goes_on_from_its_checkpoint_with_another_end(tmp_path, monkeypatch, capsys, answers):
    for name in ("given", "dev"):
        AnswerShards(tmp_path / "answers" / name).write(0, answers)
    command = ["train", "--target", str(model_path("draft")), "--answers", str(tmp_path / "answers")]
    command += ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "draft")]
    command += ["--width", "32", "--head", "16", "--layers", "1", "--feed-forward", "32", "--tokens-per-step", "64"]
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for steps in (2, 3):
        monkeypatch.setattr(sys, "argv", [*command, "--steps", str(steps)])
        main()
        assert torch.load(tmp_path / "work" / "draft.pt", weights_only=True)["step"] == steps
    assert len(re.findall(r"agreement 0\.\d+, of 8192 tokens 0\.\d+", capsys.readouterr().out)) == 2
    trained = torch.load(tmp_path / "work" / "draft.pt", weights_only=True)["draft"]["model"]
    draft = LlamaForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert draft.config.vocab_size == 4096
    torch.testing.assert_close(draft.model.embed_tokens.weight, trained["model.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").eos_token_id == draft.generation_config.eos_token_id
    counts = TokenCounts.read(tmp_path / "draft" / "token_counts.json")
    assert sum(counts.counts.values()) == sum(len(answer.top_ids) for answer in answers)


def test_names_of_weights_in_gguf():
    assert gguf_name("model.layers.12.self_attn.o_proj.weight") == "blk.12.attn_output.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"


def test_a_gguf_file_holds_the_same_model_and_the_targets_tokenizer(tmp_path):
    gguf = pytest.importorskip("gguf")
    from tests.support import tiny_gguf

    target = tiny_gguf.write(tmp_path / "target.gguf", words=320)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.train(False)
    model.save_pretrained(tmp_path / "draft")
    write_gguf(tmp_path / "draft", target, tmp_path / "draft.gguf", "F32")
    again = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="draft.gguf", dtype=torch.float32)
    ids = torch.randint(320, (1, 20))
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    fields = [gguf.GGUFReader(path).fields for path in (target, tmp_path / "draft.gguf")]
    names = [name for name in fields[0] if name.startswith("tokenizer.")]
    assert len(names) > 3
    for name in names:
        assert fields[1][name].contents() == fields[0][name].contents()
