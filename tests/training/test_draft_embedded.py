"""The draft head that ships is worth more than the draft model that ships, and needs the states it was trained on."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import specctl.prompts
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.eagle3 import Eagle3Head
from specctl.models.draft_heads.file_layout import read_head
from specctl.models.draft_heads.training import Lesson, Teacher, drafted_steps
from specctl.profile.schema import model_path
from specctl.training.draft_heads import Answer, acceptance_in_rounds, drafts_of_head, drafts_of_model

SUITE = Path(specctl.prompts.__file__).parent / "embedded_suite.jsonl"
TOKENS = 80


def model(name: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_path(name), dtype=torch.float32).eval()


def embedded_eagle3(target: LlamaForCausalLM) -> Eagle3Head:
    folder = model_path("eagle3")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return read_head("eagle3", config, load_file(folder / "model.safetensors"), target).float()


@cache
def answers() -> list[Answer]:
    """What the target writes greedily to a prompt of each category."""
    target, tokenizer = model("target"), AutoTokenizer.from_pretrained(model_path("target"))
    records = [json.loads(line) for line in SUITE.read_text("utf-8").splitlines()]
    firsts = {record["category"]: record["prompt"] for record in reversed(records)}
    found = []
    for prompt in firsts.values():
        ids = torch.tensor(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            text = target.generate(ids[None], do_sample=False, max_new_tokens=TOKENS, pad_token_id=1)[0]
        found.append(Answer(len(found), True, ids, text[len(ids) :]))
    return found


@pytest.mark.slow
def test_the_embedded_eagle3_head_is_accepted_more_than_the_embedded_draft() -> None:
    target = model("target")
    head = embedded_eagle3(target)
    drafts = {"head": drafts_of_head(head, 5), "model": drafts_of_model(model("draft"), 5)}
    own, other = acceptance_in_rounds(Teacher(target, head.layers), drafts, answers(), Sampling(), 5)
    assert own.rounds > 100
    assert own.lengths[-1] > 1.05 * other.lengths[-1]


@pytest.mark.slow
def test_states_of_another_place_or_layer_cost_acceptance() -> None:
    target = model("target")
    head = embedded_eagle3(target)
    teacher = Teacher(target, range(1, 11))
    lessons = [teacher.lesson(answer.prompt, answer.tokens) for answer in answers()]

    def overlap(layers: int = 0, places: int = 0) -> float:
        """Mean probability that a token is accepted, with states that are off by this much."""
        found = []
        for lesson in lessons:
            states = {layer: lesson.states[layer + layers].roll(places, 0) for layer in head.layers}
            with torch.no_grad():
                (step,) = drafted_steps(head, Lesson(lesson.ids, lesson.first, states, lesson.logits), 1)
            law = lesson.logits[step.answer_rows].softmax(-1)
            found.append(torch.minimum(law, step.logits.softmax(-1)).sum(-1))
        return float(torch.cat(found).mean())

    right = overlap()
    for shift in (-1, 1):
        assert overlap(places=shift) < right - 0.15
        # Neighbouring layers of so small a target hold nearly the same.
        assert overlap(layers=shift) < right - 0.002
