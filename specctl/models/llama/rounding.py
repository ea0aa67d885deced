"""Passes of a GGUF model on llama.cpp that round alike: its tokens do not depend on how many are read at once."""

from collections.abc import Sequence
from typing import NamedTuple

from specctl.models.llama.library import F16


class Rounding(NamedTuple):
    """How a model must be loaded and read so that all its passes round alike.

    Without arguments it is llama.cpp's own way, for a draft, which need not be exact.
    """

    least: int = 1  # the fewest tokens of a sequence in a pass, and the fewest of them with logits
    most: int = 512  # the most tokens in a pass, of all sequences together; at least twice `least`
    cache: int = F16  # ggml's number of the type of cached keys and values
    repack: bool = True  # whether llama.cpp may store weights in another order than the file's

    def pieces(self, count: int) -> list[int]:
        """The passes in which to read ``count`` tokens of one sequence.

        At most `most` each, and at least `least` where ``count`` allows it. The cuts depend on ``count`` alone.
        """
        found = [self.most] * (count // self.most)
        if rest := count % self.most:
            found.append(rest)
            if rest < self.least and len(found) > 1:
                found[-2:] = [self.most + rest - self.least, self.least]
        return found

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """How many tokens of each sequence a pass over ``lengths`` tokens of several sequences must read.

        llama.cpp computes as many tokens of each sequence together as the shortest has, then as many as the next one
        has left, and so on. So lengths are equal or differ by at least `least`.
        """
        found = list(lengths)
        before = 0
        for place in sorted(range(len(found)), key=found.__getitem__):
            if found[place] <= before:
                found[place] = before
            else:
                found[place] = max(found[place], before + self.least)
            before = found[place]
        return found
