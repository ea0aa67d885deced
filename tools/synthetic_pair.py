"""Pairs of any real shape with random weights, for measuring speed where real weights are not available.

Some tokens have a likely successor and the others have none, so that easy and hard positions alternate. The text of
such a pair is noise. Its acceptance rate and entropy are chosen, so every number measured on it must be called
synthetic.

    python -m tools.synthetic_pair llama3-8b-1b FOLDER

writes both checkpoints, prompts of 128 and 2,048 tokens, and a profile for ``specctl bench --profile``.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specctl.models.files.library_calls import hushed
from specctl.profile.writing import write_profile
from tools.synthetic.shapes import MARK, SHAPES, Dials, Traits
from tools.synthetic.weights import build_pair, dial, measure


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, filled up with tokens that no text contains; no end of sequence."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"<{MARK}-{index}>" for index in range(len(letters), vocabulary))]
    core = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]


def write_pair(folder: Path, name: str, target: LlamaForCausalLM, draft: LlamaForCausalLM, traits: Traits) -> None:
    """Write checkpoints, profile and prompts to a folder; configurations and profile are marked as synthetic."""
    words = tokenizer(draft.config.vocab_size)
    with hushed():
        for role, model in (("target", target), ("draft", draft)):
            model.save_pretrained(folder / role)
            words.save_pretrained(folder / role)
    table = {"device": "auto", "dtype": str(target.dtype).removeprefix("torch.")}
    profile = {
        "schema_version": 1,
        "description": f"SYNTHETIC pair of the shape {name}: random weights, agreement set to {traits.agreement:.2f}",
        "target": {"model": str((folder / "target").absolute()), **table},
        "draft": {"model": str((folder / "draft").absolute()), **table, "policy": {"name": "constant"}},
        "provenance": {MARK: True, "agreement": traits.agreement, "entropy": traits.entropy},
    }
    write_profile(folder / "profile.toml", profile, overwrite=True)
    draws = torch.Generator().manual_seed(1)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for length in (128, 2048):
            if length < target.config.max_position_embeddings:
                for number in range(4):
                    letters = torch.randint(97, 123, (length,), generator=draws).tolist()
                    record = {
                        "id": f"{length}-{number}",
                        "category": f"{length} tokens",
                        "prompt": "".join(map(chr, letters)),
                    }
                    file.write(json.dumps(record) + "\n")


def main() -> None:
    usual = Dials()
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.synthetic_pair", description=summary)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--agreement",
        type=float,
        default=0.8,
        help="share of positions at which both models choose the same token (default: 0.8)",
    )
    parser.add_argument("--sharpness", type=float, default=usual.sharpness, help="standard deviation of the logits")
    parser.add_argument("--easy", type=float, default=usual.easy, help="share of tokens with a likely successor")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    given = parser.parse_args()
    dials = Dials(sharpness=given.sharpness, easy=given.easy, seed=given.seed)
    target, draft = build_pair(*SHAPES[given.shape], dials, dtype=getattr(torch, given.dtype), device=given.device)
    damping = dial(target, draft, dials, given.agreement)
    traits = measure(target, draft, tokens=512, seed=1)
    write_pair(given.folder, given.shape, target, draft, traits)
    print(f"synthetic pair in {given.folder}: damping {damping:.3f}, {traits}")


if __name__ == "__main__":
    main()
