"""A graph's weights are read one at a time, when its file is written, and each is in the file once."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.support.onnx_models import needs_onnx

pytestmark = needs_onnx
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 320}
SIZES |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 64}


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **settings)).eval()


def gemma() -> Any:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=16)).eval()


def gpt2() -> Any:
    """Its products have their weights ``(K, N)``, as the graph has them."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=64)).eval()


MODELS = [pytest.param(lambda: llama(tie_word_embeddings=True), id="tied llama"), llama, gemma, gpt2]


class Watched:
    """A model's weights, and the names of those that were read, in order."""

    def __init__(self, model: Any) -> None:
        from specctl.models.onnx.weights import LoadedWeights

        self.read: list[str] = []
        watched = self

        class Reading(LoadedWeights):
            def array(self, name: str) -> "np.ndarray":
                watched.read.append(name)
                return super().array(name)

        self.weights = Reading(model)


@pytest.mark.parametrize("make", MODELS)
def test_a_trace_reads_no_weight_and_the_file_has_each_once(make: Any, tmp_path: Path) -> None:
    import onnx_ir as ir

    from specctl.models.onnx.export import exported
    from specctl.models.onnx.rewriting import fuse, position_table
    from specctl.models.onnx.weights import EXTERNAL, PAGE, save

    model = make()
    watched = Watched(model)
    graph = exported(model, watched.weights)
    fuse(graph, lambda value: position_table(graph, value, 64))
    assert watched.read == []
    save(graph, tmp_path / "model.onnx", "weights.bin")
    own = dict(model.named_parameters(remove_duplicate=False))
    assert set(Counter(own[name].data_ptr() for name in watched.read).values()) == {1}
    again = ir.load(tmp_path / "model.onnx").graph
    assert all(value.uses() for value in again.initializers.values())
    assert not any(
        node.op_type == "Transpose" and value is not None and value.is_initializer()
        for node in again
        for value in node.inputs
    )
    weights = sum(weight.nbytes for weight in model.parameters() if weight.nbytes >= EXTERNAL)
    named = {name: value.const_value for name, value in again.initializers.items()}
    tables = sum(table.nbytes for name, table in named.items() if table and name.startswith(("cosines", "sines")))
    assert 0 <= (tmp_path / "weights.bin").stat().st_size - weights - tables < PAGE * len(named)


def test_constants_with_one_key_are_stored_once(tmp_path: Path) -> None:
    import onnx_ir as ir

    from specctl.models.onnx.weights import EXTERNAL, Lazy, save

    numbers = np.arange(EXTERNAL, dtype=np.float32)
    read: list[str] = []

    def lazy(name: str, key: str) -> Lazy:
        def fetch() -> "np.ndarray":
            read.append(name)
            return numbers

        return Lazy(name, key, fetch, numbers.shape, ir.DataType.FLOAT)

    tensors = [lazy("a", "x"), lazy("b", "x"), lazy("c", "y"), ir.tensor(numbers + 1, name="d"), lazy("unused", "z")]
    values = [ir.val(str(tensor.name), const_value=tensor) for tensor in tensors]
    total = ir.node("Sum", values[:4])
    total.outputs[0].name, total.outputs[0].type = "total", ir.TensorType(ir.DataType.FLOAT)
    total.outputs[0].shape = ir.Shape(numbers.shape)
    graph = ir.Graph([], total.outputs, nodes=[total], initializers=values, opset_imports={"": 21}, name="g")
    save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx", "weights.bin")
    assert read == ["a", "c"]
    assert (tmp_path / "weights.bin").stat().st_size == 3 * numbers.nbytes
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {})
    assert np.array_equal(found, 4 * numbers + 1)


def test_joined_and_transposed_weights() -> None:
    import onnx_ir as ir

    from specctl.models.onnx.weights import LoadedWeights, Weight

    model = llama()
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    source, parameters = LoadedWeights(model), dict(model.named_parameters())
    parts = [Weight(source, [name], parameters[name].shape, ir.DataType.FLOAT).transposed() for name in names]
    whole = Weight.joined(parts)
    expected = torch.cat([parameters[name] for name in names]).detach().numpy()
    assert whole.shape.numpy() == (64, 128)
    assert np.array_equal(whole.numpy(), expected.T)
    assert np.array_equal(whole.by_output(), expected)
    assert np.array_equal(whole.transposed().numpy(), expected)
    assert whole.transposed().key != whole.key
    assert Weight(LoadedWeights(model), names[:1], parts[0].shape, ir.DataType.FLOAT, turned=True).key != parts[0].key


@pytest.mark.parametrize("make", [llama, gemma, gpt2])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_embeddings_and_the_output_layer_tied_to_them_share_their_bytes(
    make: Any, bits: int, tmp_path: Path
) -> None:
    import onnx_ir as ir
    import onnxruntime

    from specctl.models.onnx.blocks import rounded
    from specctl.models.onnx.export import exported
    from specctl.models.onnx.rewriting import fuse, position_table, quantize
    from specctl.models.onnx.weights import save

    model = make()
    graph = exported(model)
    fuse(graph, lambda value: position_table(graph, value, 64))
    # GPT-2's other products have a bias, which the graph's product takes along, and stay as they are.
    assert (quantize(graph, bits) > 0) == (model.config.model_type != "gpt2")
    save(graph, tmp_path / "model.onnx", "weights.bin")
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    again = ir.load(tmp_path / "model.onnx").graph
    (looked,) = [node for node in again if node.op_type == "GatherBlockQuantized"]
    product = next(node for node in reversed(again) if node.op_type == "MatMulNBits")
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (make is not llama)
    for mine, theirs in ((0, 1), (2, 2)):  # codes, scales
        one, other = looked.inputs[mine].const_value, product.inputs[theirs].const_value  # type: ignore[union-attr]
        assert isinstance(one, ir.ExternalTensor)
        assert isinstance(other, ir.ExternalTensor)
        assert one.length == other.length
        assert (one.offset == other.offset) == tied
    codes = looked.inputs[0].const_value.numpy()  # type: ignore[union-attr]
    expected = rounded(model.get_input_embeddings().weight.detach().numpy(), 8).codes
    assert np.array_equal(codes, expected.reshape(len(codes), -1))
