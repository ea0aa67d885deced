"""What is said of several texts' drafts at once is what is said of each alone."""

from collections.abc import Sequence
from math import nextafter
from typing import Any

import numpy as np
import pytest
import torch

from specctl.decoding.draft import Draft, Drafted
from specctl.decoding.draws import HostGenerator
from specctl.decoding.logits import judging
from specctl.decoding.logits.host import HostLogits, picked
from specctl.decoding.logits.judging import Judge, judge
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.decoding.sampling import Sampling
from specctl.errors import RecordError
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.policies import DISTRIBUTION_SIGNALS
from tests.support.toys import seeded

IDS = 40
SAMPLINGS = {
    "greedy": Sampling(),
    "token": Sampling(1.0),
    "block": Sampling(1.0, verification="block"),
    "filtered": Sampling(0.8, top_k=9, top_p=0.9, verification="block"),
}
FEW = DraftVocabulary(range(0, IDS, 2), IDS)
KINDS = {
    "drawn": lambda draft: draft,
    "copied": lambda draft: Draft(draft.tokens, None, (), None),
    "copied behind": lambda draft: Draft(draft.tokens, draft.probs[: len(draft.tokens) // 2], (), None),
    "few ids": lambda draft: Draft(
        [token // 2 * 2 for token in draft.tokens], draft.probs[:, ::2].contiguous() + 0.01, (), None, vocabulary=FEW
    ),
}


@pytest.fixture(params=["on the host", "as on a device"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "as on a device":
        monkeypatch.setattr(judging, "on_host", lambda _: False)
    return bool(request.param == "as on a device")


def texts(lengths: Sequence[int], kind: str, seed: int) -> tuple[list[Forward], list[Draft]]:
    forwards, drafts = [], []
    for text, count in enumerate(lengths):
        generator = seeded(seed + text)
        logits = 2 * torch.randn(count + 1, IDS, generator=generator)
        probs = (logits[:count] + 0.7 * torch.randn(count, IDS, generator=generator)).softmax(-1)
        tokens = [int(row.multinomial(1, generator=generator)) for row in probs]
        forwards.append(Forward(logits))
        drafts.append(KINDS[kind](Draft(tokens, probs, (), None)) if count else Draft(tokens, None, (), None))
    return forwards, drafts


def alone(draft: Draft, forward: Forward, sampling: Sampling, seed: int) -> Any:
    return judge(draft, forward, sampling, HostGenerator(seed))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_text_has_the_verdict_that_it_has_alone(
    device: bool, kind: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    monkeypatch.setattr(judging, "TOGETHER", 8 * IDS)  # no more than a text or two
    for seed, lengths in enumerate([(5, 0, 3, 1), (0, 0), (2,), (1, 1, 7), (4, 4, 4, 4)] * 3):
        forwards, drafts = texts(lengths, kind, 100 * seed)
        asked = [Drafted(draft, HostGenerator(seed + text)) for text, draft in enumerate(drafts)]
        for text, found in enumerate(Judge(sampling).read_rows(forwards, asked)):
            assert not isinstance(found, RecordError)
            forward, (verdict, laws) = found
            expected, own = alone(drafts[text], forwards[text], sampling, seed + text)
            assert forward is forwards[text]
            assert (verdict.accepted, verdict.extra, verdict.kind) == (
                expected.accepted,
                expected.extra,
                expected.kind,
            )
            assert verdict.chances == (pytest.approx(expected.chances, abs=1e-7) if device else expected.chances)
            assert (laws is None) == (own is None)
            assert laws is None or torch.equal(torch.as_tensor(laws), torch.as_tensor(own))
            seen.add(verdict.accepted)
    assert len(seen) > 2


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", ["greedy", "block"])
def test_logits_that_are_no_numbers_are_one_texts_error(name: str) -> None:
    forwards, drafts = texts((2, 3, 1), "drawn", 5)
    forwards[1].columns[3, 7] = torch.nan
    found = Judge(SAMPLINGS[name]).read_rows(forwards, [Drafted(draft, HostGenerator(1)) for draft in drafts])
    assert [isinstance(each, RecordError) for each in found] == [False, True, False]


def test_a_verdict_that_is_asked_for_again_is_the_same(device: bool) -> None:
    if not device:
        pytest.skip("on the host memory does not run out after the draws")
    forwards, drafts = texts((5, 3), "drawn", 3)
    asked = [Drafted(draft, HostGenerator(text)) for text, draft in enumerate(drafts)]
    first, again = (Judge(SAMPLINGS["token"]).read_rows(forwards, asked) for _ in range(2))
    assert [one[1][0] for one in first] == [one[1][0] for one in again]  # type: ignore[index]


EVERY = frozenset(DISTRIBUTION_SIGNALS)
ROW_SAMPLINGS = {
    "greedy": Sampling(0.0),
    "plain": Sampling(1.0),
    "warm": Sampling(0.7),
    "filtered": Sampling(0.9, top_k=7, top_p=0.9, min_p=0.01),
    "shaped": Sampling(0.9, typical_p=0.8, epsilon_cutoff=0.002, eta_cutoff=0.01, top_h=0.9),
}


def logits(rows: int, vocabulary: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    found = 4 * np.random.default_rng(vocabulary).standard_normal((rows, vocabulary)).astype(np.float32)
    found[0, 1::2] = -np.inf
    found[1] = 0  # all alike
    found[2, 3] = 90  # a certain token
    return found


@pytest.mark.parametrize("vocabulary", [5, 64, 1000, 4096])
@pytest.mark.parametrize("sampling", ROW_SAMPLINGS.values(), ids=ROW_SAMPLINGS)
def test_a_row_is_read_as_it_is_alone(sampling: Sampling, vocabulary: int) -> None:
    rows = logits(5, vocabulary)
    uniforms = [None] * 5 if sampling.greedy else [0.3, 0.0, 0.5, nextafter(1.0, 0.0), 0.77]
    ids = DraftVocabulary(range(0, 2 * vocabulary, 2), 2 * vocabulary)
    for sampler in (
        TokenSampler(sampling),
        TokenSampler(sampling, EVERY, tops=True),
        TokenSampler(sampling, frozenset({"top_prob"}), vocabulary=ids),
    ):
        for row, (numbers, law) in enumerate(sampler.read_rows([Forward(rows.copy())], uniforms)):
            (wanted,), alone = HostLogits(rows[row : row + 1]).sample(sampler, [uniforms[row]])
            assert numbers == wanted
            assert (law is None) == (alone is None)
            if law is not None and alone is not None:
                np.testing.assert_array_equal(law, alone[0])


def test_rows_that_hold_no_numbers_are_left_to_who_says_so() -> None:
    rows = logits(3, 100)
    rows[1] = np.nan
    sampler = TokenSampler(Sampling(1.0))
    alone = [HostLogits(rows[row : row + 1]).sample(sampler, [0.4])[0][0] for row in range(3)]
    assert [numbers for numbers, _ in sampler.read_rows([Forward(rows)], [0.4] * 3)] == alone


def test_what_rounds_to_the_whole_is_never_behind_the_last_weight() -> None:
    laws = np.zeros((2, 100), dtype=np.float32)
    laws[0, :3] = laws[1, 97:] = np.float32(1 / 3)
    assert picked(laws, [nextafter(1.0, 0.0)] * 2) == [2, 99]
