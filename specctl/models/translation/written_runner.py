"""A draft that writes text in tokens of its own, as a runner of its target's ids (SLEM: Timor et al., 2502.05202)."""

from collections.abc import Sequence

import numpy as np

from specctl.models.passes.forward import Certain, Numbers, joined_numbers
from specctl.models.running.runner import Forward, Runner
from specctl.models.translation.continuation import FARTHEST, Continuation
from specctl.models.translation.own_text_runner import OwnTextRunner
from specctl.models.translation.token_map import TokenMap


class WrittenRunner(OwnTextRunner):
    """A `Runner` that predicts the next of its target's tokens in what its draft would write.

    Behind the text the draft writes the likeliest of its own tokens until they tell the next one of the target's
    (`Continuation`). So each prediction is certain, and one of the text alone. Its signals are of the law of the token
    that the draft begins with. What it wrote is not written again where a text goes on with it.

    Args:
        runner, tokens: as of `OwnTextRunner`.
    """

    AHEAD = FARTHEST

    def __init__(self, runner: Runner, tokens: TokenMap) -> None:
        super().__init__(runner, tokens)
        self.writes_text, self.verifies = True, False
        self._continuation = Continuation(tokens)
        self._ids: list[int] = [*self._text.ids]  # the text's in the draft's, and those written behind it
        self._laws: dict[int, Numbers] = {}  # (1, N), of those written, by their place
        self._laws_outside = 0

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        assert not hidden, "the states behind a token of the target's are of no token of the draft's"
        text, behind = self._text, len(tokens) - keep
        for token in tokens[:behind]:
            self._moved(text.append(token))
        found: list[int] = []
        laws: list[Numbers] = []
        for token in tokens[behind:]:
            self._moved(text.append(token))
            found.append(self._next())
            laws.append(self._laws[len(text.ids)])
        if keep:
            return Forward(joined_numbers(laws), certain=Certain(found, self._map.whole))
        self._go_on_from_text()
        self._pass(self._ids, len(text.ids), len(text.ids), 0, hidden=False)
        return Forward(np.zeros((0, self._map.whole), np.float32))

    def _next(self) -> int:
        length = len(self._text.ids)
        self._go_on_from_text()
        while (token := self._continuation.next(self._text, self._ids[length:])) is None:
            end = len(self._ids)
            self._forget(end - 1)
            found = self._pass(self._ids, length, end, 1, hidden=False)
            assert found is not None, "an id is read"
            law = self._continuation.writable.of(found.columns, [0])
            self._laws[end] = law
            self._ids.append(int(self._continuation.writable.ids[int(law[0].argmax())]))
        return token

    def _moved(self, kept: int) -> None:
        new, old = self._text.ids, self._ids
        while kept < min(len(new), len(old)) and new[kept] == old[kept]:
            kept += 1
        if kept < len(new):
            old[kept:] = new[kept:]
            self._laws.clear()
            self._forget(kept)

    def _go_on_from_text(self) -> None:
        """Forget what is behind the text, unless the draft would write the same again."""
        length = len(self._text.ids)
        if (outside := self._outside(length)) != self._laws_outside:
            self._laws.clear()
            self._laws_outside = outside
        self._laws = {place: law for place, law in self._laws.items() if place >= length}
        if length not in self._laws:
            self._laws.clear()
            del self._ids[length:]
            self._forget(length)
