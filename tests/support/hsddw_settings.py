"""HSDDW's settings as profiles of the embedded family. Run as a script, writes them for a benchmark.

``python -m tests.support.hsddw_settings DIR`` writes the ablation of the paper's Table 2, ``--window 2 4 6`` its
four curves of Fig. 7 at these windows. Then ``specctl bench $(printf -- '-p %s ' DIR/*.toml)`` runs them all side by
side.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import tomli_w

PAPERS_WINDOW = 10
SWEPT = ("draft-by-m1", "self-verify-m1", "pre-and-self-verify-once", "full")


def settings(window: int = PAPERS_WINDOW) -> dict[str, dict[str, Any]]:
    """Profile tables by name; M1 is the embedded draft, M2 the embedded mid, ``window`` the cap K of each level."""
    constant, self_verify = {"draft_length": window}, {"max_draft": window}
    # Room for all that M1 may draft and the token of M2.
    once = {"pre_verify": "once", "policy": {"name": "constant", "draft_length": window + 1}}
    return {
        "draft-by-m2": _extending("embedded-constant", model="embedded:mid", policy=constant),
        "draft-by-m1": _extending("embedded-constant", policy=constant),
        "self-verify-m2": _extending("embedded-self-verify", model="embedded:mid", policy=self_verify),
        "self-verify-m1": _extending("embedded-self-verify", policy=self_verify),
        "pre-verify-once": _extending(
            "embedded-hsddw", **once, draft={"policy": {"name": "constant", "draft_length": window}}
        ),
        "pre-and-self-verify-once": _extending("embedded-hsddw", **once, draft={"policy": self_verify}),
        "full": _extending("embedded-hsddw", policy=self_verify, draft={"policy": self_verify}),
    }


def _extending(profile: str, **draft: Any) -> dict[str, Any]:
    return {"extends": profile, "draft": draft}


def write_settings(folder: Path, windows: list[int], names: list[str], target: str | None = None) -> list[Path]:
    """One profile file for each name and window; ``target`` is a checkpoint in place of the embedded target."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for window in windows:
        for name in names:
            table = settings(window)[name] | ({"target": {"model": target}} if target else {})
            path = folder / f"{name}-{window:02}.toml"
            path.write_text(tomli_w.dumps(table), encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--window", type=int, nargs="+", help="sweep these windows")
    parser.add_argument("--target", help="a checkpoint in place of the embedded target")
    given = parser.parse_args()
    names = list(SWEPT if given.window else settings())
    write_settings(given.folder, given.window or [PAPERS_WINDOW], names, given.target)
