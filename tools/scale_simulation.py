"""Print the tables of docs/scale.md: ``python -m tools.scale_simulation``.

The second table takes minutes; ``--records`` makes its runs shorter.
"""

import argparse
from dataclasses import replace

from tools.scale.passes import LLAMA_1B, LLAMA_8B, LLAMA_70B, Card, Kind, Network, best_round, pass_seconds
from tools.scale.run import Plan, simulated

ACCEPTANCE = 0.75
HOST = 0.34e-3
"""Seconds in which eager passes prepare a layer: 4.06 ms for the 12 of the embedded target on a CPU, its
arithmetic included."""
ORDER = 100e-6
"""Seconds of a round that a message to the followers adds."""
OUTPUT_BYTES, TRACE_BYTES = 13, 247
"""Of a generated token: 12 records of 64 tokens with the embedded pair wrote 9,838 and 189,485 bytes."""

Split = tuple[Network, Kind, int]


def passes_table(card: Card) -> None:
    """Rounds of Llama 70B with drafts in several places."""
    heads = "target ms  draft ms   K  tokens  round ms  tokens/s  speedup  messages a round"
    print(f"70B on 4 cards  draft                {heads}")
    rows: list[tuple[Split, Split | None]] = [
        ((LLAMA_70B, "pipeline", 4), None),
        ((LLAMA_70B, "pipeline", 4), (LLAMA_8B, "one card", 1)),
        ((LLAMA_70B, "tensor", 4), None),
        ((LLAMA_70B, "tensor", 4), (LLAMA_1B, "one card", 1)),
        ((LLAMA_70B, "tensor", 4), (LLAMA_8B, "one card", 1)),
        ((LLAMA_70B, "tensor", 4), (LLAMA_8B, "tensor", 4)),
    ]
    for host in (0.0, HOST):
        print("the cards set the pace:" if not host else f"Python sets it, {host * 1e3:.2f} ms a layer (eager):")
        for (network, kind, shards), draft in rows:
            target = pass_seconds(network, kind, shards, card, host)
            alone = 1 / (target + ORDER)
            name, each, messages = "none", float("inf"), 1.0
            if draft is not None:
                each = pass_seconds(*draft, card, host) + (ORDER if draft[1] == "tensor" else 0.0)
                name = f"{draft[0].layers} layers, {draft[1]}"
            best = best_round(target, each if draft is not None else 1.0, ACCEPTANCE, ORDER, 40 if draft else 0)
            if draft is not None and draft[1] == "tensor":
                messages += best.drafted
            print(
                f"{kind:14}  {name:20} {target * 1e3:6.1f} {'' if draft is None else f'{each * 1e3:.1f}':>9} "
                f"{best.drafted:3} {best.tokens:7.2f} {best.seconds * 1e3:9.1f} {best.per_second:9.0f} "
                f"{best.per_second / alone:8.2f} {messages:17.0f}"
            )


def runs_table(card: Card, records: int | None) -> None:
    """10^9 tokens on 64 cards, and what changes when something else does."""
    one = pass_seconds(LLAMA_1B, "one card", 1, card)
    small = best_round(pass_seconds(LLAMA_8B, "one card", 1, card), one, ACCEPTANCE)
    large = best_round(pass_seconds(LLAMA_70B, "tensor", 4, card), one, ACCEPTANCE, ORDER)
    eights = Plan(replicas=64, per_second=small.per_second, weights=LLAMA_8B.weight_bytes + LLAMA_1B.weight_bytes)
    seventies = replace(
        eights,
        replicas=16,
        cards=4,
        per_second=large.per_second,
        weights=LLAMA_70B.weight_bytes + LLAMA_1B.weight_bytes,
        link=8e9,
        start=40.0,
    )
    plans = {
        "8B and 1B, 64 x 1 card": eights,
        "  storage 1 GB/s": replace(eights, storage=1e9, link=1e9),
        "  window 2": replace(eights, window=2),
        "  100 times the failures": replace(eights, between_failures=eights.between_failures / 100),
        "  256 cards": replace(eights, replicas=256),
        "  512 cards": replace(eights, replicas=512),
        "70B and 1B, 16 x 4 cards": seventies,
        "  its storage 1 GB/s": replace(seventies, storage=1e9, link=1e9),
        "  100 times its failures": replace(seventies, between_failures=seventies.between_failures / 100),
    }
    heads = "tokens/s  start s   hours  failures  repeated  window waits   down  command busy"
    print(f"\nrun                       {heads}")
    for name, plan in plans.items():
        found = simulated(plan if records is None else replace(plan, records=records))
        total = found.seconds * plan.replicas
        print(
            f"{name:25} {found.generated / found.seconds:9.0f} {found.starting:8.0f} {found.seconds / 3600:7.2f} "
            f"{found.failures:9} {found.repeated / found.generated:9.4%} {found.held / total:12.2%} "
            f"{found.down / total:6.3%} {found.commanding:12.1%}"
        )
    print(f"10^9 tokens write {OUTPUT_BYTES} GB of output and, with --trace, {TRACE_BYTES} GB more.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, help="of each run, 3,900,000 without it")
    given = parser.parse_args()
    passes_table(Card())
    runs_table(Card(), given.records)


if __name__ == "__main__":
    main()
