"""Every family of transformers that writes text, as a target and as a draft, with a tiny random model: a table.

python -W ignore -m tests.faults.families [FAMILY ...] [--output families.jsonl] [--engine eager]

Each model is saved and loaded as a user loads it. It writes alone, with drafts of a copy with noise on its weights, and
three texts at once; each text is compared with that of transformers' ``generate``. What specctl refuses is named with
its reason. A line for each family is appended to the output, families that it has are left out, and the table of all
is written beside it (``families.md``). The exit code is 1 if a text is wrong or an error is not one of specctl's own.
"""

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import specctl
from specctl.errors import SpecctlError
from specctl.models.passes.cache import cache_argument
from specctl.models.passes.layer_sizes import cached_values
from tests.faults.tiny_families import ENDS, built, class_of, families, noisy, tiny_config
from tests.support.checkpoints import tiny_tokenizer

END: int = ENDS["eos_token_id"]
LENGTH, DRAFT = 32, 5
PATIENCE = 240
"""Seconds for a family."""
TIE = 2e-3
"""Two tokens whose logits are no further apart, as a share of their spread, may come in either order: a pass rounds
in another way than one of another width."""
COLUMNS = ("alone", "drafts", "batch", "batch of drafts")
SAME, WRONG, ERROR, REFUSED, TIED, UNBUILT = "same", "WRONG", "ERROR", "refused", "tie", "not built"


def prompts() -> list[list[int]]:
    """Three of 5, 20 and 60 ids; the last one repeats a part of itself."""
    draws = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(2, 200, (count,), generator=draws).tolist()

    part = some(12)
    return [some(5), some(20), [*part, *some(18), *part, *some(12), *part[:6]]]


PROMPTS = prompts()


def ended(tokens: Sequence[int]) -> list[int]:
    """The tokens up to the first end of sequence."""
    return list(tokens[: tokens.index(END) + 1]) if END in tokens else list(tokens)


def generated(model: PreTrainedModel, prompt: list[int], *, cached: bool) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([prompt])
    found: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LENGTH,
        use_cache=cached,
        eos_token_id=END,
        pad_token_id=END,
    )
    return ended(found[0, len(prompt) :].tolist())


def gap(model: PreTrainedModel, text: list[int]) -> float:
    """How far apart the two largest logits behind a text are, as a share of the standard deviation of all."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([text])).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return float((first - second) / logits.std())


def compared(model: PreTrainedModel, prompt: list[int], tokens: list[int], wanted: list[int]) -> tuple[str, str]:
    """``same``, ``tie`` or ``WRONG``, and where."""
    if tokens == wanted:
        return SAME, ""
    at = next((i for i, (one, other) in enumerate(zip(tokens, wanted, strict=False)) if one != other), -1)
    if at < 0:
        return WRONG, f"{len(tokens)} tokens in place of {len(wanted)}"
    apart = gap(model, [*prompt, *wanted[:at]])
    where = f"token {at} behind {len(prompt)}, {apart:.1e} apart"
    return (TIED if apart < TIE else WRONG), where


def own_difference(model: PreTrainedModel, texts: list[list[int]]) -> list[str]:
    """A note where transformers itself writes other texts without a cache than with it."""
    try:
        anew = [generated(model, prompt, cached=False) for prompt in PROMPTS]
    except TimeoutError:
        raise
    except Exception as error:
        return [f"transformers cannot write without a cache ({type(error).__name__})"]
    found = [compared(model, *each) for each in zip(PROMPTS, anew, texts, strict=True)]
    differs = next((where for outcome, where in found if outcome == WRONG), None)
    return [f"transformers' own texts with and without a cache differ ({differs})"] if differs else []


def save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def failure(error: Exception) -> tuple[str, str]:
    """What an exception of specctl is."""
    if isinstance(error, SpecctlError):
        return REFUSED, " ".join(f"{error.message} {error.hint}".split())
    at = traceback.extract_tb(error.__traceback__)[-1]
    return ERROR, f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({Path(at.filename).name}:{at.lineno})"


def worst(found: Sequence[tuple[str, str]]) -> tuple[str, str]:
    return min(found, key=lambda each: (ERROR, WRONG, REFUSED, TIED, SAME).index(each[0]))


def runs(folder: Path, model: PreTrainedModel, texts: list[list[int]], engine: str) -> Iterator[tuple[str, str, str]]:
    """For each of `COLUMNS` what came of it, and details."""
    settings = [f"engine={engine}", "compile=false", "target.dtype=float32", "prompt.chat=false"]
    for draft in (None, f"{folder}+noisy"):
        more = [] if draft is None else ["draft.dtype=float32"]
        policy = None if draft is None else f"constant:draft_length={DRAFT}"
        alone, batch = ("alone", "batch") if draft is None else ("drafts", "batch of drafts")
        try:
            pair = specctl.load(target=str(folder), draft=draft, policy=policy, overrides=[*settings, *more])
        except TimeoutError:
            raise
        except Exception as error:
            yield alone, *failure(error)
            return
        for column in (alone, batch):
            try:
                if column == alone:
                    done = [pair.generate(prompt, max_new_tokens=LENGTH) for prompt in PROMPTS]
                else:
                    done = list(pair.generate_many(PROMPTS, batch=len(PROMPTS), max_new_tokens=LENGTH))
                for each in done:
                    if isinstance(each, Exception):
                        raise each
                found = [
                    compared(model, prompt, ended(each.tokens), text)
                    for prompt, each, text in zip(PROMPTS, done, texts, strict=True)
                ]
                outcome, details = worst(found)
                if draft is not None and outcome == SAME:
                    rounds = [round_ for each in done for round_ in each.rounds]
                    kept, drafted = sum(one.accepted for one in rounds), sum(one.drafted for one in rounds)
                    details = f"{kept} of {drafted} accepted"
                yield column, outcome, details
            except TimeoutError:
                raise
            except Exception as error:
                yield column, *failure(error)


def held(model: PreTrainedModel) -> int | None:
    """Numbers by which transformers' cache grows with each token; None where it has no cache of that kind."""
    from transformers import DynamicCache

    name, cache = cache_argument(type(model)), DynamicCache(config=model.config)
    if not name or any(hasattr(layer, "compress_rate") for layer in cache.layers):
        return None  # entries for several tokens grow by leaps
    sizes = []
    for text in (PROMPTS[1][:3], PROMPTS[1][3:5]):  # shorter than any window
        model(input_ids=torch.tensor([text]), use_cache=True, **{name: cache})
        parts = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values", "indexer_keys")]
        sizes.append(sum(part.numel() for part in parts if isinstance(part, torch.Tensor)))
    return (sizes[1] - sizes[0]) // 2


def tried(family: str, engine: str) -> dict[str, Any]:
    """The line of a family: its name, what became of each of `COLUMNS`, why it was refused, and notes."""
    line: dict[str, Any] = {"family": family, "engine": engine, "notes": []}
    model = built(family)
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name) / "model"
        if isinstance(model, tuple):
            line |= unbuilt(family, folder, model[1])
            return line
        save(model, folder)
        with torch.inference_mode(False):
            save(noisy(model), Path(f"{folder}+noisy"))
        try:
            model = class_of(family).from_pretrained(folder, dtype=torch.float32)
            texts = [generated(model, prompt, cached=True) for prompt in PROMPTS]
        except TimeoutError:
            raise
        except Exception as error:
            line["notes"].append(f"{type(model).__name__} cannot write: {failure(error)[1]}")
            try:  # Llama 4's whole model fails without a picture
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                texts = [generated(model, prompt, cached=True) for prompt in PROMPTS]
            except Exception:
                texts = [[] for _ in PROMPTS]
        for column, outcome, details in runs(folder, model, texts, engine):
            line[column] = outcome
            if outcome == REFUSED:
                line["refused"] = details
            elif details and not (outcome == SAME and column == "batch of drafts"):
                line["notes"].append(f"{column}: {details}")
        if WRONG in line.values() and any(texts):
            line["notes"] += own_difference(model, texts)
        if line["alone"] == SAME and (cached := held(model)) not in (None, cached_values(model.config)):
            line["notes"].append(f"its cache is counted as {cached_values(model.config)} numbers a token, not {cached}")
    return line


def unbuilt(family: str, folder: Path, why: str) -> dict[str, Any]:
    """Of a family without a tiny model: whether its configuration is refused."""
    try:
        tiny_config(family, 2).save_pretrained(folder)
    except Exception:
        try:
            class_of(family).config_class().save_pretrained(folder)
        except Exception:
            return {"alone": UNBUILT, "notes": [why]}
    tiny_tokenizer().save_pretrained(folder)
    try:
        specctl.load(target=str(folder), overrides=["prompt.chat=false"])
    except Exception as error:
        outcome, details = failure(error)
        if outcome == ERROR:
            return {"alone": ERROR, "notes": [details]}
        lacks = ("no weights", "of its config.json: ", "for its weights in")  # the folder has a configuration alone
        if not any(each in details for each in lacks):
            return {"alone": REFUSED, "refused": details}
    return {"alone": UNBUILT, "notes": [why]}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each family, in Markdown."""
    head = ("family", *COLUMNS, "refused because", "notes")
    rows = [
        [
            line["family"],
            *(line.get(column, "") for column in COLUMNS),
            line.get("refused", ""),
            "; ".join(line["notes"]),
        ]
        for line in sorted(lines, key=lambda line: line["family"])
    ]
    marked = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in marked)


def outcome_of(line: dict[str, Any]) -> str:
    """The worst of a family's outcomes."""
    found = [line[column] for column in COLUMNS if column in line]
    return UNBUILT if UNBUILT in found else worst([(each, "") for each in found])[0]


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"took more than {PATIENCE} s")


def main() -> None:
    """Try the families, and write a line for each and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("family", nargs="*", help="only these, by model_type")
    parser.add_argument("--output", type=Path, default=Path("families.jsonl"), help="a line for each; those are kept")
    parser.add_argument("--engine", default="eager")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGALRM, _too_slow)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    lines = [json.loads(line) for line in given.output.read_text().splitlines()] if given.output.exists() else []
    done = {line["family"] for line in lines}
    for family in given.family or families():
        if family in done:
            continue
        signal.alarm(PATIENCE)
        try:
            line = tried(family, given.engine)
        except TimeoutError as error:
            line = {"family": family, "engine": given.engine, "alone": UNBUILT, "notes": [str(error)]}
        except Exception as error:
            line = {"family": family, "engine": given.engine, "alone": ERROR, "notes": [failure(error)[1]]}
        finally:
            signal.alarm(0)
        lines.append(line)
        with given.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        given.output.with_suffix(".md").write_text(table(lines))
        told = line.get("refused") or "; ".join(line["notes"])
        print(f"{family:30} {outcome_of(line):10} {told}", flush=True)
    counts = Counter(map(outcome_of, lines))
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()))
    sys.exit(bool(counts[WRONG] + counts[ERROR]))


if __name__ == "__main__":
    main()
