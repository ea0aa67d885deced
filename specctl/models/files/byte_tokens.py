"""Tokens that stand for bytes, by the spellings of vocabularies."""

import re
from collections.abc import Mapping

from specctl.models.files.tokenizer import Tokenizer

SPACE = "▁"
"""SentencePiece's spelling of a space."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""SentencePiece's spelling of a byte."""


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level BPE spells the 256 bytes: printable ones as they are, the others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


LETTERS = _byte_letters()


def bytes_of_letters(token: str) -> bytes | None:
    """What a token of byte-level BPE stands for; None where it is spelled by other letters."""
    letters = [LETTERS.get(letter) for letter in token]
    return None if None in letters else bytes(letter for letter in letters if letter is not None)


def byte_of(token: str) -> int | None:
    """The byte that SentencePiece spells so; None for other tokens."""
    found = BYTE.fullmatch(token)
    return int(found[1], 16) if found else None


def byte_ids(tokenizer: Tokenizer) -> Mapping[int, int]:
    """The byte of each id that is spelled as one, all 256; none where the tokenizer does not decode them as bytes."""
    vocabulary = tokenizer.get_vocab()
    found = {vocabulary[name]: byte for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary}
    euro = [vocabulary.get(f"<0x{byte:02X}>", 0) for byte in "€".encode()]
    return found if len(found) == 256 and str(tokenizer.decode(euro)).strip() == "€" else {}
