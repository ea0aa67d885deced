"""The tool that times passes by engine."""

import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.onnx_models import needs_onnx, small_pair
from tools import pass_times


@needs_onnx
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_engines_and_what_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quantize: str | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pass_times, "PROBE", 1 << 16)
    folder = small_pair(tmp_path).target.model
    more = [] if quantize is None else ["--quantize", quantize]
    engines = ["onnx"] if quantize else ["onnx", "eager"]
    monkeypatch.setattr(sys, "argv", ["pass_times", folder, "--rounds", "2", "--engines", *engines, *more])
    pass_times.main()
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()[0] in engines}
    assert list(rows) == engines
    assert all(line.count("(") == len(pass_times.WIDTHS) for line in rows.values())
    model = AutoModelForCausalLM.from_pretrained(folder)
    table = model.model.embed_tokens.weight.nbytes
    norms = sum(weight.nbytes for weight in model.parameters() if weight.dim() == 1)
    weights = sum(weight.nbytes for weight in model.parameters())
    assert pass_times.torch_bytes(model) == weights - table
    products = weights - table - norms
    narrow = sum(layer.mlp.down_proj.weight.nbytes for layer in model.model.layers)  # with 32 inputs, others have 64
    if quantize is not None:  # the output layer too
        products = narrow * (1 + 4 / 32) / 4 + (products - narrow) * (1 + 4 / 64) / 4
    assert pass_times.graph_bytes(model, quantize) == products
