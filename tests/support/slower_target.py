"""A target that says the same and takes longer: idle layers on top. Run as a script, writes such a checkpoint.

``python -m tests.support.slower_target OUT --layers 36`` makes the embedded target's 12 layers 48, for measurements of
what pays when the target is slow: ``specctl bench -p embedded-hsddw --set target.model=OUT``.
"""

from argparse import ArgumentParser
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specctl.profile.schema import model_path


def add_idle_layers(model: PreTrainedModel, count: int) -> None:
    """Append ``count`` copies of a Llama model's last layer that add nothing: their output projections are zero."""
    layers = model.model.layers
    for _ in range(count):
        layer = deepcopy(layers[-1])
        layer.self_attn.layer_idx = len(layers)
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        layers.append(layer)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[0]] * len(layers)


def write_slower_target(folder: Path, layers: int, source: Path | None = None) -> None:
    """Write the embedded target, or a Llama checkpoint from ``source``, with so many idle layers more."""
    source = source or model_path("target")
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    add_idle_layers(model, layers)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--layers", type=int, default=36, help="idle layers to add")
    parser.add_argument("--source", type=Path, help="a Llama checkpoint instead of the embedded target")
    given = parser.parse_args()
    write_slower_target(given.folder, given.layers, given.source)
