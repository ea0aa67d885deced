"""A small pair that is served."""

import pytest
from transformers import AutoTokenizer

import specctl
from tests.support.onnx_models import small_pair


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> specctl.Decoder:
    folder = tmp_path_factory.mktemp("pair")
    small_pair(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder / "target")
    models = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    settings = ["engine=onnx", "sampling.max_new_tokens=12", "prompt.chat=false"]
    return specctl.load(**models, policy="constant:draft_length=3", overrides=settings)
