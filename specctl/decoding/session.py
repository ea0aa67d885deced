"""A loaded pair with one policy, ready for requests."""

from collections.abc import Callable, Sequence, Set

import torch

from specctl.decoding.completion import Request, complete
from specctl.decoding.drafters import Drafter, ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.text import special_ids
from specctl.models.pair import Pair
from specctl.policies import Signal, StoppingPolicy
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, Round

READABLE: frozenset[Signal] = frozenset({"entropy", "top_prob", "token_prob"})


def build_drafter(pair: Pair, policy: StoppingPolicy, record: Set[Signal] = frozenset()) -> Drafter | None:
    """The drafter a policy needs over a pair's drafts; None for target-only decoding."""
    if not pair.drafts or not policy.drafts:
        return None
    return ModelDrafter(pair.drafts[0], policy, record)


class Session:
    """Generates with one pair and one drafter; the policy's state goes from request to request as it asks for.

    Args:
        pair: loaded models.
        drafter: from `build_drafter`, or None for target-only decoding.
    """

    def __init__(self, pair: Pair, drafter: Drafter | None) -> None:
        self.pair = pair
        self._drafter = drafter

    def generate(
        self,
        prompt: Sequence[int],
        settings: SamplingTable,
        *,
        seed_offset: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> Completion:
        """Complete one prompt of ids; a limit beyond the context is lowered to it.

        Args:
            prompt: ids.
            settings: the sampling table in force.
            seed_offset: added to the seed, so that each record of a stream has its own randomness whatever came before.
            on_round: sees each round as it ends.

        Raises:
            RecordError: the prompt leaves no room in the context.
        """
        room = self.pair.room(prompt)
        # torch takes 64 bits; people may write more.
        generator = torch.Generator(self.pair.target.device).manual_seed((settings.seed + seed_offset) % (1 << 64))
        request = Request(
            prompt,
            min(settings.max_new_tokens, room),
            Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p),
            settings.stop,
        )
        eos = self.pair.eos | special_ids(self.pair.tokenizer, settings.stop)
        return complete(self.pair.target, self._drafter, self.pair.tokenizer, request, eos, generator, on_round)
