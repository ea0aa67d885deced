"""A draft that writes some ids only changes how many tokens are accepted, and never which follow."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from law_table import DRAFT, FEW, LENGTH, MID, SAMPLINGS, enumerate_decode, error, expected_law

from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits import judging
from specctl.decoding.logits.judging import judge, verify
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.passes.trimmed_output import TrimmedOutput, trim_output, trims, vocabulary_of
from specctl.models.running.config_rules import TokenRules
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import NarrowPasses
from specctl.policies import POLICIES
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.profile.schema import Verification
from specctl.records import Round
from tests.support.few_tokens import FewTokens, trimmed
from tests.support.onnx_models import needs_onnx, onnx_runner
from tests.support.toys import FAMILIES, Replays, TableRunner, generated, noisy_copy, random_model, seeded

EXACT, BIASED = 3e-7, 1e-2
GREEDY, PLAIN, FILTERED = Sampling(), SAMPLINGS["T=1"], Sampling(temperature=0.8, top_p=0.9)
KNOWN = (1, 2)
"""Of three ids; the one that ends a text is not among them."""
SOME = tuple(range(1, 64, 2))
PROMPT = (1, 5, 9)
TOKENS = 24


@pytest.fixture(params=[True, False], ids=["on the host", "as on a device"])
def somewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of rows."""
    if not request.param:
        monkeypatch.setattr(judging, "on_host", lambda _: False)


def chain(policy: str = "constant", ids: Sequence[int] = KNOWN, **settings: object) -> Drafter:
    return ModelDrafter(FewTokens(DRAFT, ids), POLICIES[policy](**settings))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "a chain": lambda: chain(draft_length=3),
    "a chain without the first id": lambda: chain(ids=(0, 2), draft_length=3),
    "a chain of one token": lambda: chain(ids=(2,), draft_length=2),
    "a policy that reads the law": lambda: chain("svip", threshold=0.3),
    "a policy that learns": lambda: chain("cost-optimal", max_draft=2),
    "a tree": lambda: TreeDrafter(FewTokens(DRAFT, KNOWN), Constant(2), TreeSize(4, 2)),
    "below another draft": lambda: PreVerifiedDrafter(
        ModelDrafter(FewTokens(DRAFT, KNOWN), Constant(1)), TableRunner(MID), Constant(2)
    ),
    "with fewer rows than the target": lambda: ModelDrafter(
        Slot(NarrowPasses(TableRunner(DRAFT[..., :2]), 2, 3)), Constant(2)
    ),
}


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("sampling", ["T=1", "T=1 by block", FEW, f"{FEW} by block"])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.representatives(
    "on the host-a chain-T=1",
    "on the host-a chain without the first id-T=0.7",
    "on the host-a chain of one token-T=1",
    "on the host-a policy that reads the law-T=1",
    "on the host-a policy that learns-T=1",
    "on the host-a tree-T=0.7",
    "on the host-below another draft-T=1 by block",
    "on the host-with fewer rows than the target-T=1",
    "as on a device-a chain-T=1",
    "as on a device-a tree-T=0.7",
    slow=("T=1 by block",),
)
def test_the_output_has_the_law_of_the_target(name: str, sampling: str) -> None:
    length = 3 if name == "below another draft" else LENGTH
    found = enumerate_decode(DRAFTERS[name], SAMPLINGS[sampling], length, length)
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(SAMPLINGS[sampling], length)) < EXACT


def test_columns_that_are_taken_for_ids_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above would see a residual of other ids than the draft's."""
    monkeypatch.setattr(DraftVocabulary, "less", lambda _, rows, columns: rows - np.pad(columns, (0, 1)))
    found = enumerate_decode(DRAFTERS["a chain"], PLAIN)
    assert error(found, expected_law(PLAIN)) > BIASED


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(8))
def test_a_verdict_is_the_one_on_the_whole_law(rule: Verification, seed: int) -> None:
    draws = seeded(seed)
    known = DraftVocabulary((0, 3, 4, 6), 7)
    draft, target = torch.rand(3, 4, generator=draws).softmax(-1), torch.rand(4, 7, generator=draws).softmax(-1)
    columns = torch.randint(0, 4, (3,), generator=draws)
    tokens = known.ids_on(draft.device)[columns]
    whole = known.widened(draft, 0.0)
    found = verify(tokens, draft, target, seeded(seed), rule, known)
    expected = verify(tokens, whole, target, seeded(seed), rule)
    assert replace(found, chances=None) == replace(expected, chances=None)
    assert found.chances == pytest.approx(expected.chances)


def test_numpy_and_torch_agree() -> None:
    known = DraftVocabulary((5, 0, 3, 9), 7)
    assert known.ids.tolist() == [0, 3, 5]
    assert len(known) == 3
    rows, columns = torch.arange(14.0).view(2, 7), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    expected = [[-1, 1, 2, 1, 4, 2, 6], [3, 8, 9, 5, 11, 6, 13]]
    assert known.less(rows, columns).tolist() == expected
    assert known.less(rows.numpy(), columns.numpy()).tolist() == expected
    assert known.less(rows[1], columns[1]).tolist() == expected[1]
    assert known.less(rows.numpy()[1], columns.numpy()[1]).tolist() == expected[1]
    assert rows.tolist()[0] == [*range(7)], "what is given stays as it is"
    wide = known.widened(columns, -torch.inf)
    assert wide.tolist() == known.widened(columns.numpy(), -np.inf).tolist()
    assert wide[0].tolist() == [1, -torch.inf, -torch.inf, 2, -torch.inf, 3, -torch.inf]
    assert known.columns([5, 0]).tolist() == known.columns_of(torch.tensor([5, 0])).tolist() == [2, 0]
    assert known.digest == DraftVocabulary((0, 3, 5), 7).digest != DraftVocabulary((0, 3, 4), 7).digest


def runners(family: str) -> dict[str, Slot]:
    model = trimmed(family, SOME)
    return {
        "eager": Slot(EagerPasses(model, 64)),
        "static": Slot(StaticPasses(model, 64)),
        "graph": Slot(GraphPasses(model, 64, Replays())),
    }


@pytest.mark.parametrize("engine", ["eager", "static", "graph"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama-eager", "gemma2-static", "gpt-neox-graph")
def test_greedy_tokens_are_those_of_generate(family: str, engine: str) -> None:
    runner = runners(family)[engine]
    assert runner.draft_vocabulary is not None
    rounds = played(Slot(EagerPasses(random_model(family), 64)), runner)
    assert [token for round_ in rounds for token in round_.emitted] == generated(random_model(family), PROMPT, TOKENS)
    drafted = {step.token for round_ in rounds for step in round_.steps}
    assert drafted <= set(SOME)
    assert len(drafted) > 1


def played(target: Slot, draft: Slot, sampling: Sampling = GREEDY) -> list[Round]:
    drafter = ModelDrafter(draft, POLICIES["svip"](c=1.0, threshold=1.2))
    with torch.inference_mode():
        prefill(target, drafter, PROMPT)
        return list(decode(target, drafter, PROMPT, TOKENS, sampling, frozenset(), seeded(3)))


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, FILTERED], ids=["greedy", "T=1", "T=0.8 top_p=0.9"])
def test_every_engine_drafts_alike(sampling: Sampling) -> None:
    found = []
    for runner in runners("llama").values():
        rounds = played(Slot(EagerPasses(random_model("llama"), 64)), runner, sampling)
        found.append([([step.token for step in round_.steps], round_.emitted) for round_ in rounds])
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_graph_computes_the_logits_of_few_ids(quantize: str | None) -> None:
    model = trimmed("llama", SOME)
    runner = onnx_runner(model, 64, quantize)
    assert runner.extend(PROMPT, keep=2).columns.shape == (2, len(SOME))
    runner.rollback(0)
    rounds = played(Slot(EagerPasses(random_model("llama"), 64)), runner)
    expected = generated(random_model("llama"), PROMPT, TOKENS)
    assert [token for round_ in rounds for token in round_.emitted] == expected
    twin = runner.fresh()
    assert twin.extend(PROMPT, keep=1).vocabulary is runner.draft_vocabulary


def test_an_output_layer_is_cut_and_its_embeddings_are_not() -> None:
    model, whole = trimmed("llama", SOME), noisy_copy("llama")
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        few, all_ = model(ids).logits, whole(ids).logits
    torch.testing.assert_close(few, all_[..., list(SOME)])
    assert vocabulary_of(whole) is None
    assert model.get_input_embeddings().weight.shape == whole.get_input_embeddings().weight.shape
    output = model.get_output_embeddings()
    assert isinstance(output, TrimmedOutput)
    assert not trims(output)
    assert not output.weight.requires_grad


def test_of_tied_weights_the_embeddings_stay() -> None:
    model = deepcopy(noisy_copy("gemma2"))
    model.tie_weights()
    embeddings = model.get_input_embeddings().weight.clone()
    trim_output(model, DraftVocabulary(SOME, 64))
    assert torch.equal(model.get_input_embeddings().weight, embeddings)
    assert model.get_output_embeddings().weight.shape[0] == len(SOME)


def test_rules_about_tokens_read_and_write_all_ids() -> None:
    rules = TokenRules.of(
        random_model("llama").generation_config.__class__(suppress_tokens=[3], repetition_penalty=1.3),
        frozenset(),
        64,
        torch.device("cpu"),
    )
    assert rules.active
    ruled = Slot(RuledPasses(Slot(EagerPasses(trimmed("llama", SOME), 64)), rules))
    assert ruled.draft_vocabulary is None
    target = Slot(RuledPasses(Slot(EagerPasses(random_model("llama"), 64)), rules))
    rounds = played(target, ruled)
    drafted = {step.token for round_ in rounds for step in round_.steps}
    assert drafted <= set(SOME) - {3}
    alone = Slot(RuledPasses(Slot(EagerPasses(random_model("llama"), 64)), rules))
    with torch.inference_mode():
        expected = [token for round_ in decode(alone, None, PROMPT, TOKENS, Sampling()) for token in round_.emitted]
    assert [token for round_ in rounds for token in round_.emitted] == expected


def test_a_verdict_of_a_round_reads_the_drafts_ids() -> None:
    known = DraftVocabulary((1, 3), 4)
    draft = Draft([3], torch.tensor([[0.5, 0.5]]), (), None, vocabulary=known)
    logits = torch.tensor([[0.0, 0.0, 50.0, 0.0], [0.0, 50.0, 0.0, 0.0]])
    verdict, _ = judge(draft, Forward(logits), Sampling(temperature=1.0), seeded(0))
    assert (verdict.accepted, verdict.extra) == (0, 2)


def test_a_runner_of_fewer_rows_gives_states_to_who_asks() -> None:
    runner = Slot(NarrowPasses(TableRunner(DRAFT[..., :2]), 2, 3))
    assert runner.extend([0, 2], keep=1, hidden=True).hidden is not None
    assert runner.extend([1], keep=1).hidden is None
