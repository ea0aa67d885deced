"""A tiny random model of every causal language model in transformers, whole and in two shards, as a table.

python -W ignore -m tests.faults.sharded_families [--placement tensor|pipeline] [--all] [FAMILY ...]

A text is read in passes with rollbacks between them; logits that differ by more than rounding are WRONG. Families that
specctl refuses are named with the reason; with --all those that are refused as untested are tried too.
"""

import argparse
import logging
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specctl.errors import ModelError
from specctl.models.loading.model import load_model
from specctl.models.loading.model_runners import sharded_runner
from specctl.models.placing import placement
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.slot import Slot
from specctl.models.sharding import dismiss
from specctl.profile.schema import ModelTable
from tests.faults.families import PATIENCE
from tests.faults.tiny_families import built

TEXT = torch.randint(1, 64, (120,), generator=torch.Generator().manual_seed(5)).tolist()
ROUNDING = 1e-3
"""The largest difference of two logits, as a share of their standard deviation, that sums in another order explain."""


@torch.inference_mode()
def read(runner: Slot) -> torch.Tensor:
    """Logits ``(R, V)`` of several passes with rollbacks between them."""
    rows = [runner.extend(TEXT[:20], keep=1).logits.clone()]
    for start, end in ((20, 26), (23, 24), (24, 104), (90, 95), (90, 91)):
        runner.rollback(start)
        rows.append(runner.extend(TEXT[runner.length : end], keep=1).logits.clone())
    return torch.cat(rows)


def tried(family: str, placement: str) -> tuple[str, str]:
    """What became of a family: ``same``, ``refused``, ``not built`` or ``WRONG``, and details."""
    model = built(family)
    if isinstance(model, tuple):
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        table = ModelTable.model_validate({"model": str(Path(folder)), "shards": 2, "placement": placement})
        try:
            share = load_model(table, role="target")
        except ModelError as error:
            return ("refused" if "in shards" in error.message else "failed"), error.message[:110]
        assert share.sharding is not None
        settings = EngineSettings("eager", compile=False)
        found = read(sharded_runner(share.model, share.sharding, 64, family, settings))
        whole = read(Slot(EagerPasses(load_model(ModelTable(model=folder), role="target").model, 64)))
    error = float((found - whole).square().mean(-1).sqrt().max() / whole.std(-1).min())
    return ("same" if error < ROUNDING else "WRONG"), f"logits differ by {error:.1e} of their spread"


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"took more than {PATIENCE} s")


def main() -> None:
    """Print a line for each family; exit with 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--placement", choices=["tensor", "pipeline"], default="tensor")
    parser.add_argument("--all", action="store_true", help="families that are refused as untested too")
    parser.add_argument("family", nargs="*", help="only these, by model_type")
    given = parser.parse_args()
    if given.all:
        known = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        placement.SPLIT = placement.STAGED = frozenset([*known, *(f"{family}_text" for family in known)])
    signal.signal(signal.SIGALRM, _too_slow)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for family in given.family or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        signal.alarm(PATIENCE)
        try:
            outcome, details = tried(family, given.placement)
        except Exception as error:
            outcome, details = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
        finally:
            signal.alarm(0)
        if outcome == "failed":
            dismiss()
        counts[outcome] += 1
        print(f"{family:26} {outcome:10} {details}", flush=True)
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()))
    sys.exit(bool(counts["WRONG"]))


if __name__ == "__main__":
    main()
