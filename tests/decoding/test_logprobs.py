"""Log-probabilities of a text's tokens are those of a plain pass of the target over it."""

from collections.abc import Sequence

import pytest
import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.logits.device import DeviceLogits
from specctl.decoding.logits.host import HostLogits
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.policies.setting import TreeSize
from specctl.records import ExtraToken, Round
from tests.support.toys import STOPPING, TableRunner, related_table, seeded, table

TARGET, DRAFT = table(3, eos_logit=-9.0), related_table(table(3, eos_logit=-9.0), 4)
PROMPT = [1, 2]
SETTINGS = {
    "constant": Setting("constant"),
    "svip": Setting("svip", tuple(STOPPING["svip"].items())),
    "tree": Setting("constant", tree=TreeSize(12, 2)),
    "parallel": Setting("constant", parallel="force"),
}


def played(setting: Setting | None, sampling: Sampling, most: int | None) -> list[Round]:
    target, draft = TableRunner(TARGET), TableRunner(DRAFT)
    pair = Pair(target, (draft,), None, frozenset(), 1 << 31, ())  # type: ignore[arg-type]
    drafter = None if setting is None else build_drafter(pair, setting)
    return [*decode(target, drafter, PROMPT, 40, sampling, frozenset(), seeded(5), most)]


def plain(tokens: Sequence[int]) -> torch.Tensor:
    """Of each of the tokens behind the prompt the log-probabilities of all ids."""
    rows = TableRunner(TARGET).extend([*PROMPT, *tokens[:-1]], keep=len(tokens)).logits
    return rows.double().log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", [None, *SETTINGS])
def test_they_are_a_plain_pass(name: str | None, temperature: float) -> None:
    rounds = played(SETTINGS[name] if name else None, Sampling(temperature, top_k=4), 3)
    tokens = [token for round_ in rounds for token in round_.emitted]
    told = [one for round_ in rounds for one in round_.logprobs or ()]
    logs = plain(tokens)
    assert [one.id for one in told] == tokens
    assert [one.logprob for one in told] == pytest.approx(logs[range(len(tokens)), tokens].tolist(), abs=1e-6)
    best = logs.topk(3)
    assert [[token for token, _ in one.top] for one in told] == best.indices.tolist()
    assert [value for one in told for _, value in one.top] == pytest.approx(best.values.flatten().tolist(), abs=1e-6)
    if name is not None:
        assert any(round_.accepted_tokens for round_ in rounds)
        assert any(round_.extra_kind is ExtraToken.CORRECTION for round_ in rounds)


@pytest.mark.parametrize("name", [None, *SETTINGS])
def test_who_asks_changes_no_token(name: str | None) -> None:
    setting = SETTINGS[name] if name else None
    asked, silent = played(setting, Sampling(1.0), 0), played(setting, Sampling(1.0), None)
    assert [round_.emitted for round_ in asked] == [round_.emitted for round_ in silent]
    assert all(round_.logprobs is None for round_ in silent)
    assert all(not one.top for round_ in asked for one in round_.logprobs or ())


def test_host_and_device_tell_the_same_and_leave_out_what_cannot_follow() -> None:
    logits = torch.tensor([[0.5, float("-inf"), 2.0, float("-inf")], [1.0, 0.25, -1.0, 3.0]])
    host, device = HostLogits(logits.numpy()).logprobs([0, 3], 3), DeviceLogits(logits).logprobs([0, 3], 3)
    assert [[token for token, _ in one.top] for one in host] == [[2, 0], [3, 0, 1]]
    for one, other in zip(host, device, strict=True):
        assert (one.id, [token for token, _ in one.top]) == (other.id, [token for token, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
