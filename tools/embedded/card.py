"""The embedded family's model card, written from the facts of a training run."""

from pathlib import Path
from typing import Any

CARD = """# The embedded model family

Three small Llama-architecture models with one byte-level BPE tokenizer of 4,096 entries, shipped with specctl so that
every command works on a machine without weights. **They are demonstration models**: they write short children's
stories, and grade-school maths that looks right but often is not. Use them to see specctl work, not for their text.

| model | layers x width | parameters | steps | tokens seen | validation loss, stories | validation loss, maths |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

Validation loss is the mean next-token cross-entropy in nats on held-out stories and on held-out questions with their
answers. Context: 1,024 tokens. Weights: bfloat16 safetensors, tied embeddings.

The target has [draft heads](../../../docs/draft-heads.md) with cards of their own: [EAGLE-3](eagle3/README.md) and
[DSpark](dspark/README.md). The draft and the EAGLE-3 head each have an [acceptance head](../../../docs/heads.md)
([draft](draft-head/README.md), [EAGLE-3](eagle3-head/README.md)), the draft also one for [DISCO](disco-head/README.md).

## How they were made

`python -m tools.embedded.train --corpus DIR` with seed {seed} (torch {torch}). The
target learned {corpus_tokens:,} tokens of text; then it wrote {generated_tokens:,} tokens of its own
({greedy:.0%} greedily) from training prompts and from questions it made up, and mid and draft learned its distributions
on that text and some of the corpus (forward KL), its likeliest token counting extra. Muon trains the matrices, AdamW
all other weights.

Settings: {recipe}.

## Data and licences

- TinyStories (Eldan and Li, 2023), training and validation splits, CDLA-Sharing-1.0.
- GSM8K (Cobbe et al., 2021), training split, calculator marks stripped, MIT; its last 2 % is held out.

The text is not part of the project. The weights carry the project's licence, Apache-2.0.

## Checksums (sha256)

{checksums}
"""
SHAPES = {"target": "12 x 192", "mid": "4 x 128", "draft": "1 x 128"}


def write_card(path: Path, facts: dict[str, Any]) -> None:
    """Fill in the card from what `tools.embedded.train` recorded."""
    rows, checksums = [], []
    for name in SHAPES:
        model = facts["models"][name]
        loss = model["validation_loss"]
        rows.append(
            f"| {name} | {SHAPES[name]} | {model['parameters']:,} | {model['steps']:,} | {model['tokens_seen']:,} "
            f"| {loss['stories']:.3f} | {loss['maths']:.3f} |"
        )
        checksums.append(f"- `{name}/model.safetensors`: `{model['sha256']}`")
    settings = ", ".join(f"{key} {value}" for key, value in facts["recipe"].items())
    path.write_text(
        CARD.format(
            rows="\n".join(rows),
            checksums="\n".join(checksums),
            recipe=settings,
            seed=facts["recipe"]["seed"],
            torch=facts["torch"],
            corpus_tokens=facts["corpus_tokens"],
            generated_tokens=facts["generated_tokens"],
            greedy=facts["recipe"]["greedy_share"],
        ),
        encoding="utf-8",
    )
