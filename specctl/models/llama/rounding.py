"""Passes of a GGUF model on llama.cpp that round alike: its tokens do not depend on how many are read at once.

llama.cpp computes a product with one token by other instructions than one with several where the weights are floats,
and sums the products of K- and I-quants in another order for eight tokens than for fewer, or where it has stored the
weights anew. Attention has a path of its own for 64 tokens and more over a float16 cache, and, with several threads,
one for a lone token. All widths that are left here gave the same numbers bit for bit, on Zen 3 and Zen 5, with
llama.cpp 0.5 and 0.6.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from specctl.models.files.gguf_header import Header
from specctl.models.llama.library import BF16, F16

FLOATS = frozenset({"F32", "F16", "BF16"})
NO_PRODUCT = re.compile(r"norm|conv|bias|ssm_[ad]$|rope_|position_embd|token_types|per_layer_token_embd")
"""Names of tensors that no token is multiplied with."""
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
FEW = 7  # The most tokens whose products of K-quants are never summed in tiles
BELOW_64 = 63
MOST = 512


class Rounding(NamedTuple):
    """How a model must be loaded and read so that all its passes round alike.

    Without arguments it is llama.cpp's own way, for a draft, which need not be exact.
    """

    least: int = 1  # the fewest tokens of a sequence in a pass, and the fewest of them with logits
    most: int = MOST  # the most tokens in a pass, of all sequences together; at least twice `least`
    cache: int = F16  # ggml's number of the type of cached keys and values
    repack: bool = True  # whether llama.cpp may store weights in another order than the file's

    def padded(self, lengths: Sequence[int]) -> list[int]:
        """How many tokens of each sequence a pass over ``lengths`` tokens of several sequences must read.

        llama.cpp computes as many tokens of each sequence together as the shortest has, then as many as the next one
        has left, and so on. So lengths are equal or differ by at least `least`.
        """
        found = list(lengths)
        before = 0
        for place in sorted(range(len(found)), key=found.__getitem__):
            found[place] = before = before if found[place] <= before else max(found[place], before + self.least)
        return found


def roundings(header: Header, *, one_thread: bool, accelerated: bool) -> list[Rounding]:
    """What may make all passes of a model round alike, from the fastest to the safest.

    Args:
        header: of its file.
        one_thread: whether passes run on one thread. With more the cache is bfloat16, in which nothing depends on
            their number.
        accelerated: whether the model is on an accelerator, whose products are other ones.
    """
    found = [*_on_accelerators()] if accelerated else [*_on_cpus(_product_types(header), one_thread)]
    return list(dict.fromkeys(found))


def _on_cpus(types: frozenset[str], one_thread: bool) -> Iterator[Rounding]:
    tiled = any(name.endswith("_K") or (name.startswith("IQ") and name != "IQ4_NL") for name in types)
    lone = 2 if types & FLOATS else 1
    packed, plain = Rounding(lone), Rounding(2 if "IQ4_NL" in types else lone, repack=False)
    ways = [] if tiled else [packed, packed._replace(least=2)]
    ways += [plain, plain._replace(least=2), plain._replace(least=2, most=FEW)]
    if one_thread:
        yield from (way._replace(most=min(way.most, BELOW_64)) for way in ways)
    yield from (way._replace(cache=BF16) for way in ways)


def _on_accelerators() -> Iterator[Rounding]:
    """Their products change with the number of tokens, at 8 and above, so few tokens are padded or many not read."""
    for cache in (F16, BF16):
        for least, most in ((1, MOST), (2, MOST), (1, 8), (2, 8), (9, MOST), (17, MOST)):
            yield Rounding(least, most, cache)


def _product_types(header: Header) -> frozenset[str]:
    """The types of the matrices that tokens are multiplied with; those of routers of experts count too."""
    tied = all(tensor.name != OUTPUT for tensor in header.tensors)
    return frozenset(
        tensor.type
        for tensor in header.tensors
        if sum(side > 1 for side in tensor.shape) > 1
        and NO_PRODUCT.search(tensor.name) is None
        and (tied or tensor.name != EMBEDDING)
    )
