"""The table of engines: speeds in decoding and in whole calls, and how many times as fast specctl's policy is."""

from specctl.observing.results import Difference, Run, RunSet
from tests.benchmark.factory import PREFILL_MS, candidate, peer, peer_run, run_set
from tools.measure.engines import engines_table

SHORT, LONG = 4, 20
CANDIDATES = [candidate("none"), candidate("cost-optimal"), peer("quick"), peer("slow")]
TOKEN_MS = {"none": 10.0, "cost-optimal": 4.0, "quick": 5.0, "slow": 8.0}


def runs(ends: int = LONG, difference: Difference | None = None, **prompt_ms: float) -> list[Run]:
    """Two prompts to both limits; a token takes a candidate TOKEN_MS, and its prompt PREFILL_MS and ``prompt_ms``."""
    found = []
    for prompt in ("a", "b"):
        for length in (SHORT, LONG):
            for label, token_ms in TOKEN_MS.items():
                count = min(length, ends if prompt == "b" else LONG)
                took = count * token_ms + prompt_ms.get(label, 0.0)
                differs = difference if label == "slow" else None
                found.append(peer_run(label, prompt, count, took, length=length, difference=differs))
    return found


def made(found: list[Run]) -> RunSet:
    return run_set(CANDIDATES, found, lengths=(SHORT, LONG))


def row(label: str, found: list[Run]) -> list[str]:
    return next(row[1:] for row in engines_table({"1 thread": made(found)})[1] if row[0] == f"`{label}`")


def test_decoding_is_what_more_tokens_take_longer() -> None:
    headings, rows, _ = engines_table({"1 thread": made(runs()), "2 threads": made(runs())})
    assert headings == [
        "candidate",
        *(f"{n}: {what}" for n in ("1 thread", "2 threads") for what in ("decoding", "whole calls")),
    ]
    assert [one[0] for one in rows] == [f"`{label}`" for label in TOKEN_MS]
    assert row("cost-optimal", runs())[0] == "250"
    assert row("quick", runs())[0] == "200, 1.25 [1.25, 1.25]"


def test_the_prompt_counts_in_whole_calls_only() -> None:
    slower = runs(quick=100.0)
    assert row("quick", slower)[0] == row("quick", runs())[0]
    whole_ms = PREFILL_MS + LONG * TOKEN_MS["quick"] + 100
    ours_ms = PREFILL_MS + LONG * TOKEN_MS["cost-optimal"]
    assert row("quick", slower)[1].startswith(f"{LONG / whole_ms * 1e3:.0f}, {whole_ms / ours_ms:.2f} ")


def test_a_text_that_ends_early_is_in_whole_calls_only() -> None:
    ended = runs(ends=SHORT - 1)
    assert row("quick", ended)[0] == "200, 1.25"  # one prompt has no interval
    assert row("quick", ended)[1].endswith("]")


def test_the_fastest_peer_is_named_and_texts_are_compared() -> None:
    differing = Difference(turn=0, position=4, expected=11, found=12, gap=0.5)
    note = engines_table({"1 thread": made(runs(difference=differing))})[2]
    assert note.startswith("`cost-optimal` over the fastest peer: 1.25 [1.25, 1.25] of `quick` (1 thread: decoding);")
    assert note.endswith(
        "Of 12 greedy runs, 4 differed from `none`, where the target's two best logits are at most 0.5 apart."
    )


def test_a_peer_that_failed_is_left_out() -> None:
    without = [run for run in runs() if run.candidate != "quick"]
    _, rows, note = engines_table({"1 thread": made(without)})
    assert [one[0] for one in rows] == ["`none`", "`cost-optimal`", "`slow`"]
    assert "2.00 [2.00, 2.00] of `slow`" in note
