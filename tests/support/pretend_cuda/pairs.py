"""Tiny models, draft heads and runners of them on pretended devices."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.placing.engine_table import build_runner
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.records import DraftStep, StopReason
from tests.support.pretend_cuda.devices import Devices
from tests.support.toy_heads import random_block, random_eagle3
from tests.support.toys import noisy_copy, random_model, seeded

VOCABULARY = 64
TEXT: list[int] = torch.randint(0, 60, (1600,), generator=seeded(9)).tolist()


def tiny_model(layers: int = 1, *, context: int = 4096) -> PreTrainedModel:
    """A random Llama of 64 tokens whose context is longer than buffers are at first."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
    )
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval()


def chain_head() -> Any:
    """A random draft head for a `random_model` Llama that writes a token a pass."""
    shape = LayerShape(hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
    return random_eagle3(layers=(0, 1, -1), states=32, vocabulary=VOCABULARY, shape=shape, spread=0.5)


def block_head() -> Any:
    """The same that writes a block a pass."""
    shape = LayerShape(hidden_size=32, intermediate_size=24, heads=2, kv_heads=1, head_dim=16)
    return random_block(layers=(0, 1), vocabulary=VOCABULARY, markov="rnn", shape=shape, spread=0.3)


HEADS: dict[str, Callable[[], Any]] = {"chain": chain_head, "block": block_head}


def on(devices: Devices, model: PreTrainedModel, device: str) -> PreTrainedModel:
    """A copy of a model on a device."""
    moved: PreTrainedModel = devices.move(deepcopy(model), device)
    return moved


def runner_of(
    engine: str,
    model: PreTrainedModel,
    notice: Callable[[str], None] | None = None,
    name: str = "the model",
) -> Slot:
    """A runner that is made as specctl makes them; the static one uncompiled.

    Args:
        engine: of the profile.
        model: on its device.
        notice: told where the engine falls back; without it that is a failure.
        name: the model's, in notices.
    """
    if engine == "static":
        return Slot(StaticPasses(model, VOCABULARY))
    settings = EngineSettings(engine=engine, notice=notice or unexpected)  # type: ignore[arg-type]
    return build_runner(model, VOCABULARY, name, settings)


def unexpected(notice: str) -> None:
    """Fail: nothing was to be noted."""
    raise AssertionError(notice)


def spread(devices: Devices, model: PreTrainedModel, first: str, second: str) -> PreTrainedModel:
    """A copy of a model whose last layer, norm and output layer are on a second device, with accelerate's hooks."""
    model = deepcopy(model)
    behind = ("model.layers.1.", "model.norm.", "lm_head.")
    for device in (first, second):
        devices.move(model, device, lambda name, to=device: (second if name.startswith(behind) else first) == to)
    model.hf_device_map = {"": first, "model.layers.1": second}  # type: ignore[assignment]
    skip: Any = model._skip_keys_device_placement
    parts = "model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"
    for name in ("", *parts):
        to = second if f"{name}.".startswith(behind) else first
        hook = _InPlace(execution_device=torch.device(to), io_same_device=not name, skip_keys=skip)
        add_hook_to_module(model.get_submodule(name), hook)
    return model


class _InPlace(AlignDevicesHook):  # type: ignore[misc]
    """accelerate's hook on a module whose weights are where they belong."""

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


class Tokenizer:
    """Enough of one for a completion's text."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


def pair_on(
    cuda: Devices,
    *devices: str,
    engine: str = "eager",
    kinds: tuple[PreTrainedModel, ...] | None = None,
) -> Pair:
    """Runners of models that are moved each to a device, a random target and a draft of it where none are given."""
    kinds = kinds or (random_model("llama"), noisy_copy("llama"))
    target, *drafts = (runner_of(engine, on(cuda, kind, device)) for kind, device in zip(kinds, devices, strict=False))
    tokenizer: Any = Tokenizer()
    return Pair(target, tuple(drafts), tokenizer, frozenset(), target.context, (), ({},) * len(drafts))


Written = tuple[tuple[DraftStep, ...], int, int | None, StopReason | None]
"""A round but for its times: steps, how many of them were accepted, the target's token, why drafting stopped."""


def rounds_of(target: Slot, drafter: ModelDrafter, tokens: int, sampling: Sampling) -> list[Written]:
    """What a pair on the first device writes behind the beginning of `TEXT`."""
    prefill(target, drafter, TEXT[:20])
    draws = torch.Generator("cuda:0").manual_seed(1)
    rounds = decode(target, drafter, TEXT[:20], tokens, sampling, frozenset(), draws)
    return [(round_.steps, round_.accepted, round_.extra, round_.stop) for round_ in rounds]
