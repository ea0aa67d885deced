"""Penalties and biases of a text: those of transformers and of OpenAI's interface, for each place's own text."""

import numpy as np
import pytest
import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specctl.errors import RecordError
from specctl.models.running.text_rules import Penalties
from specctl.profile.schema import SamplingTable

PROMPT, V = [3, 5, 3], 9
TEXT = [*PROMPT, 7, 5, 7, 7]
ROWS = np.random.default_rng(0).normal(0, 2, (4, V)).astype(np.float32)
ROWS[1, 4] = -np.inf


def rule(**settings: object) -> Penalties:
    return Penalties(SamplingTable.model_validate(settings), PROMPT, V)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_biases_and_repetition_are_those_of_transformers(kind) -> None:
    bias = {"7": 2.5, "5": -100.0}
    found = rule(repetition_penalty=1.7, logit_bias=bias).apply(kind(ROWS), TEXT)
    biased = SequenceBiasLogitsProcessor([[[int(token)], value] for token, value in bias.items()])
    repeated = RepetitionPenaltyLogitsProcessor(1.7)
    for row, scores in enumerate(torch.tensor(ROWS)):
        before = torch.tensor([TEXT[: len(TEXT) - len(ROWS) + 1 + row]])
        expected = repeated(before, biased(before, scores[None].clone()))
        assert torch.allclose(torch.as_tensor(found[row]), expected[0], atol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.7])
def test_rules_about_the_prompt_are_those_of_transformers(kind, size: int, penalty: float) -> None:
    """In its order, behind others; of a prompt that has ids which the logits have no column for."""
    prompt = [3, 5, 3, 7, 5, 3, 70]
    text = [*prompt, 3, 5, 3, 7]
    table = SamplingTable(
        encoder_no_repeat_ngram_size=size,
        encoder_repetition_penalty=penalty,
        repetition_penalty=1.3,
        logit_bias={"7": 2.5},
    )
    found = Penalties(table, prompt, V).apply(kind(ROWS), text)
    known = torch.tensor([[token for token in prompt if token < V]])
    asked = EncoderRepetitionPenaltyLogitsProcessor(penalty, known)
    repeated, biased = RepetitionPenaltyLogitsProcessor(1.3), SequenceBiasLogitsProcessor([[[7], 2.5]])
    rows = EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([prompt[:-1]]))
    for row, scores in enumerate(torch.tensor(ROWS)):
        before = torch.tensor([text[: len(text) - len(ROWS) + 1 + row]])
        seen = before[before < V][None]
        expected = rows(before, repeated(seen, asked(before, biased(before, scores[None].clone()))))
        assert torch.equal(torch.as_tensor(found[row]), expected[0])


def test_the_prompt_is_what_it_was_at_the_start() -> None:
    """What was written since counts for neither rule."""
    table = SamplingTable(encoder_no_repeat_ngram_size=1, encoder_repetition_penalty=2.0)
    found = Penalties(table, [3], V).apply(ROWS[:1], [3, 7, 7])
    assert np.isinf(found[0]).tolist() == [token == 3 for token in range(V)]
    assert np.array_equal(np.delete(found[0], 3), np.delete(ROWS[0], 3))


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_presence_and_frequency_count_what_was_written(kind) -> None:
    found = rule(presence_penalty=0.5, frequency_penalty=0.25).apply(kind(ROWS), TEXT)
    for row in range(len(ROWS)):
        written = TEXT[len(PROMPT) : len(TEXT) - len(ROWS) + 1 + row]
        taken = [0.5 * (token in written) + 0.25 * written.count(token) for token in range(V)]
        assert np.asarray(found[row]) == pytest.approx(ROWS[row] - np.array(taken, np.float32), abs=1e-6)


def test_a_bias_of_what_is_no_id_is_an_error() -> None:
    with pytest.raises(RecordError, match="9 is not an id"):
        rule(logit_bias={"9": 1.0})
    with pytest.raises(ValueError, match="pattern"):
        SamplingTable.model_validate({"logit_bias": {"the": 1.0}})


def test_a_table_tells_its_rules() -> None:
    table = SamplingTable(presence_penalty=1.0, regex="a", temperature=0.5)
    assert table.rules == ["presence_penalty", "regex"]
    assert table.unruled == SamplingTable(temperature=0.5)
