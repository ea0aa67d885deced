"""How much a drafted token and a round's verdict may ask of a device: kernels and replays, copies, waits.

A Llama of two layers drafts four tokens with entropies read; all that is captured was captured before. A change that
adds a launch, a copy or a wait changes a number here, and in docs/engines.md, which has the same table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.logits.judging import judge
from specctl.decoding.sampling import Sampling
from specctl.decoding.steps_ahead import Lead
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES
from tests.support.pretend_cuda import Devices, Tally
from tests.support.pretend_cuda.pairs import TEXT, on, runner_of
from tests.support.toys import random_model

GREEDY, SAMPLED, FILTERED = Sampling(), Sampling(1.0), Sampling(0.8, top_k=20, top_p=0.9)
NAMES = {GREEDY: "greedy", SAMPLED: "temperature 1", FILTERED: "top-k and top-p"}
DRAFTED = 4


@dataclass(frozen=True)
class Budget:
    """Of a drafted token after the first, of the first where two tokens are pending, and of a round's verification."""

    token: Tally
    first: Tally
    verdict: Tally


BUDGETS = {
    ("eager", GREEDY): Budget(Tally(97, 2, 1), Tally(106, 2, 1), Tally(100, 2, 1)),
    ("eager", SAMPLED): Budget(Tally(102, 2, 1), Tally(112, 2, 1), Tally(136, 3, 1)),
    ("eager", FILTERED): Budget(Tally(116, 2, 1), Tally(126, 2, 1), Tally(149, 3, 1)),
    ("static", GREEDY): Budget(Tally(108, 2, 1), Tally(112, 2, 1), Tally(106, 2, 1)),
    ("static", SAMPLED): Budget(Tally(114, 2, 1), Tally(118, 2, 1), Tally(142, 3, 1)),
    ("static", FILTERED): Budget(Tally(128, 2, 1), Tally(132, 2, 1), Tally(155, 3, 1)),
    # A drafted token is one replay, a small copy each way and one wait; its distribution is kept by one more kernel.
    ("graph", GREEDY): Budget(Tally(1, 2, 1), Tally(1, 2, 1), Tally(6, 2, 1)),
    ("graph", SAMPLED): Budget(Tally(2, 2, 1), Tally(3, 2, 1), Tally(42, 3, 1)),
    ("graph", FILTERED): Budget(Tally(2, 2, 1), Tally(3, 2, 1), Tally(55, 3, 1)),
}
"""By engine and sampling; tallies are of launches, copies, waits."""
AHEAD = {
    ("svip", GREEDY): Tally(2, 2, 1),
    ("svip", SAMPLED): Tally(3, 2, 1),
    ("constant", GREEDY): Tally(2, 2, 0),
    ("constant", SAMPLED): Tally(3, 2, 0),
}
"""Of a drafted token of the graph engine that was started before the one before it was read: its id comes from the
device, and a policy that never stops waits for the whole draft at once."""


@pytest.fixture(scope="module")
def cuda() -> Iterator[Devices]:
    with Devices() as devices:
        yield devices


def spent(cuda: Devices, target: Slot, draft: Slot, sampling: Sampling, policy: str = "svip") -> Budget:
    """What one round asks for, the second of its kind."""
    drafter = ModelDrafter(draft, POLICIES[policy](**({"threshold": 100.0} if policy == "svip" else {})))
    generator = torch.Generator("cuda:0").manual_seed(0)
    drafter.begin(sampling, frozenset(), generator)
    text = TEXT[:30]
    for runner in (target, draft):
        runner.rollback(0)
        runner.extend(text[:-1], keep=0)
    for _ in range(2):
        target.rollback(29)
        tallies = []
        for pending, count in ((1, 1), (2, 1), (1, DRAFTED)):
            draft.rollback(len(text) - pending)
            if draft.length < len(text) - pending:
                draft.extend(text[draft.length : -pending], keep=0)
            cuda.ledger.clear()
            block = drafter.draft(text, count)
            assert len(block.tokens) == count
            tallies.append(cuda.ledger.tally())
        cuda.ledger.clear()
        forward = target.extend([text[-1], *block.tokens], keep=DRAFTED + 1)
        judge(block, forward, sampling, generator)
        verdict = cuda.ledger.tally()
    alone, pending_two, whole = tallies
    each = whole.launches - alone.launches, whole.copies - alone.copies, whole.waits - alone.waits
    assert all(number % (DRAFTED - 1) == 0 for number in each), "tokens of one round that ask for different things"
    return Budget(Tally(*(number // (DRAFTED - 1) for number in each)), pending_two, verdict)


def versioned(engine: str) -> tuple[pytest.MarkDecorator, ...]:
    """What transformers and torch launch for a pass changes with their versions; a captured pass is one launch."""
    known = torch.__version__.startswith("2.13.") and transformers.__version__.startswith(("5.23.", "5.24."))
    return (
        ()
        if engine == "graph"
        else (pytest.mark.skipif(not known, reason="counted with torch 2.13 and transformers 5.23 and 5.24"),)
    )


@pytest.mark.parametrize(
    ("engine", "sampling"),
    [pytest.param(*each, marks=versioned(each[0]), id=f"{each[0]}-{NAMES[each[1]]}") for each in BUDGETS],
)
@pytest.mark.representatives("static-greedy", "graph-temperature 1", "graph-top-k and top-p")
def test_what_a_round_asks_of_the_device(cuda: Devices, engine: str, sampling: Sampling) -> None:
    with torch.inference_mode():
        target, draft = (runner_of(engine, on(cuda, random_model("llama", 2, seed), "cuda:0")) for seed in (0, 1))
        with patch.object(Lead, "pays", lambda _, __: False):
            assert spent(cuda, target, draft, sampling) == BUDGETS[engine, sampling]


@pytest.mark.parametrize(
    ("policy", "sampling"), [pytest.param(*each, id=f"{each[0]}-{NAMES[each[1]]}") for each in AHEAD]
)
@pytest.mark.representatives("svip-greedy", "constant-temperature 1")
def test_what_a_token_asks_for_whose_step_runs_ahead(cuda: Devices, policy: str, sampling: Sampling) -> None:
    with torch.inference_mode(), patch.object(Lead, "pays", lambda _, __: True):
        target, draft = (runner_of("graph", on(cuda, random_model("llama", 2, seed), "cuda:0")) for seed in (0, 1))
        assert spent(cuda, target, draft, sampling, policy).token == AHEAD[policy, sampling]


def test_the_documentation_has_the_same_table() -> None:
    page = (Path(__file__).parents[2] / "docs/engines.md").read_text(encoding="utf-8")
    for (engine, sampling), budget in BUDGETS.items():
        cells = [
            ", ".join(map(str, (each.launches, each.copies, each.waits)))
            for each in (budget.token, budget.first, budget.verdict)
        ]
        assert f"| `{engine}`, {NAMES[sampling]} | {' | '.join(cells)} |" in page
