"""transformers' own assisted generation on the loaded models, called as users of transformers call it."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specctl.errors import UsageError
from specctl.models.files.checkpoint import locate
from specctl.models.files.library_calls import hushed
from specctl.models.files.skeleton import load_config
from specctl.models.loading.pair_members import find_head
from specctl.models.running.pair import Pair
from specctl.models.sharding import is_sharded
from specctl.peers.engines import ASSISTED, MOVING
from specctl.peers.process import Peer, PeerError, completion_of
from specctl.profile.schema import DraftTable, ModelTable, SamplingTable
from specctl.records import Completion


class _Arrivals(BaseStreamer):
    """Records the arrival time of generated tokens, once for each round; the first call receives the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002 - the streamer's signature
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


class _Counter:
    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        model.register_forward_pre_hook(self._seen)

    def _seen(self, *_: object) -> None:
        self.count += 1


def pairing_obstacle(target: ModelTable, draft: DraftTable) -> str | None:
    """The reason why transformers cannot pair a draft with a target, as the end of a sentence; None if it can.

    Raises:
        ModelError: a model cannot be found.
    """
    if not draft.has_files or find_head("draft", draft, ("target", target)) is not None:
        return "transformers drafts with a whole model only"
    located = [(locate(table, role), table.trust_remote_code) for role, table in (("target", target), ("draft", draft))]
    if any(checkpoint.weights is not None for checkpoint, _ in located):
        return "transformers runs no GGUF files as they are"
    widths = [load_config(*each).get_text_config(decoder=True).vocab_size for each in located]
    if widths[0] == widths[1]:
        return None
    return f"transformers needs logits of equal width, and these have {widths[0]} and {widths[1]} columns"


class _Thresholds:
    """Records the draft's confidence threshold in each round of transformers' generation."""

    def __init__(self, draft: PreTrainedModel) -> None:
        self.seen: list[float] = []
        self._generate: Callable[..., Any] = draft.generate  # type: ignore[assignment]
        draft.generate = self._noting  # type: ignore[assignment]

    def _noting(self, *arguments: Any, generation_config: GenerationConfig | None = None, **more: Any) -> Any:
        if (threshold := getattr(generation_config, "assistant_confidence_threshold", None)) is not None:
            self.seen.append(float(threshold))
        return self._generate(*arguments, generation_config=generation_config, **more)


class AssistedPeer(Peer):
    """transformers' assisted generation, with the `generate` method of a `Session`; its rounds are not visible.

    Args:
        pair: with a draft.
        name: of the peer.
        settings: of the draft's generation_config; None for the settings of the name.

    Attributes:
        passes: for each completion so far, forward passes of the target and of the draft.
        thresholds: for each completion so far, the confidence thresholds of its first and of its last draft, which
            differ if transformers found scikit-learn and adapted it; None without a threshold or a draft.

    Raises:
        UsageError: the pair has no draft, or transformers cannot pair the draft with the target.
    """

    def __init__(self, pair: Pair, name: str, settings: Mapping[str, Any] | None = None) -> None:
        models = [model for runner, model in pair.runners if runner.runs_model][:2]
        if len(models) < 2:
            raise UsageError(
                f"{name} needs a draft model", "choose a profile with one; transformers runs no draft heads"
            )
        target_model, draft_model = models
        if target_model is None or draft_model is None:
            raise UsageError(f"{name} cannot run GGUF files, which llama.cpp runs", "leave this peer out")
        self._models = target_model, draft_model
        if any(map(is_sharded, self._models)):
            raise UsageError(
                f"{name} cannot run models in shards: transformers would run this process's shares alone",
                'set placement = "spread", or leave this peer out',
            )
        if any(next(model.parameters()).is_meta for model in self._models):
            raise UsageError(
                f"{name} cannot run models whose weights stay in their files", "unpack them, or leave this peer out"
            )
        target, draft = (model.config.get_text_config() for model in self._models)
        if target.vocab_size != draft.vocab_size:
            raise UsageError(
                f"{name} cannot run this pair: transformers needs logits of equal width, and these have "
                f"{target.vocab_size} and {draft.vocab_size} columns",
                "leave this peer out",
            )
        super().__init__(pair)
        self._settings = ASSISTED[name] if settings is None else settings
        self._counters = [_Counter(model) for model in self._models]
        self._noted = _Thresholds(draft_model) if name in MOVING else None
        self.passes: list[tuple[int, int]] = []
        self.thresholds: list[tuple[float, float] | None] = []

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
    ) -> Completion:
        """Complete one prompt of ids. Sampling uses torch's global generator, seeded with settings.seed + seed_offset.

        Raises:
            RecordError: the prompt leaves no room in the context.
            PeerError: transformers cannot run these models.
        """
        target, draft = self._models
        eos = sorted(self._pair.eos)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=min(settings.max_new_tokens, self._pair.room(prompt)),
            do_sample=settings.temperature > 0,
            eos_token_id=eos,
            pad_token_id=eos[0] if eos else 0,
            **_warpers(settings),
        )
        for key, value in self._settings.items():
            setattr(draft.generation_config, key, value)
        torch.manual_seed(settings.seed + seed_offset)
        if self._noted is not None:
            self._noted.seen.clear()
        before = [counter.count for counter in self._counters]
        streamer = _Arrivals()
        generate: Callable[..., torch.Tensor] = target.generate  # type: ignore[assignment]
        with hushed():
            began = perf_counter()
            ids = torch.tensor([prompt], device=self._pair.target.device)
            try:
                output = generate(ids, assistant_model=draft, generation_config=config, streamer=streamer)
            except (NotImplementedError, ValueError, IndexError) as error:
                # For example of a model with a recurrent state, or a draft whose table of positions ends.
                raise PeerError(f"transformers' assisted generation cannot run this pair: {error}") from error
            tokens = output[0, len(prompt) :].tolist()
            ended = perf_counter()
        target_passes, draft_passes = (
            counter.count - start for counter, start in zip(self._counters, before, strict=True)
        )
        self.passes.append((target_passes, draft_passes))
        seen = [] if self._noted is None else self._noted.seen
        self.thresholds.append((seen[0], seen[-1]) if seen else None)
        arrivals = tuple(at - began for at in streamer.times[1:])
        first, seed = arrivals[0] if arrivals else ended - began, settings.seed + seed_offset
        return completion_of(self._pair, prompt, seed, tokens, ended - began, first, arrivals)


def _warpers(settings: SamplingTable) -> dict[str, Any]:
    if settings.temperature == 0:
        return {}
    return {
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p or None,
        "typical_p": settings.typical_p,
        "epsilon_cutoff": settings.epsilon_cutoff,
        "eta_cutoff": settings.eta_cutoff,
        "top_h": settings.top_h or None,
    }
