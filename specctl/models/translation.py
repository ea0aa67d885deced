"""Drafts with another tokenizer than their target's.

`TranslatedPasses` drafts the tokens of both vocabularies (TLI). `WrittenPasses` writes text that is retokenised for the
target (SLEM, algorithm 2). Both are from Timor et al., arXiv 2502.05202.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specctl.models.files.tokenizer import PROBES, SPACE, Tokenizer, byte_of, bytes_of_letters, known_ids
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Certain, Forward, Numbers, joined, joined_numbers
from specctl.models.running.context import ENDLESS
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import Transform

if TYPE_CHECKING:
    import torch


PLAIN = (PROBES[0], PROBES[2])  # Texts that every English tokenizer must reproduce
ANCHORS = ("", "\n", ".", "a")
"""Prefix for a piece from the middle of a text, so that the tokenizer does not treat it as a text's start."""


class TokenBytes:
    """The bytes that each id of a tokenizer stands for.

    Args:
        tokenizer: byte-level BPE (``Ġ``), or SentencePiece's forms (``▁``, ``<0x0A>``).
        rows: the number of the model's logits; higher ids of the tokenizer are left out.

    Attributes:
        whole: the number of ids that both the tokenizer and the model have.
        of: bytes by id, without special tokens.
        ids: ids by bytes; of several ids with the same bytes, one that is not a byte token.
        specials: ids of special tokens by their text.
        start: the special ids at the start of every text.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self._tokenizer = tokenizer
        self.specials = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self.whole = known_ids(tokenizer, rows)
        special = {*self.specials.values()}
        spelt = {token: i for token, i in tokenizer.get_vocab().items() if i not in special and i < self.whole}
        of_bytes = sum("Ġ" in token for token in spelt) > sum(SPACE in token for token in spelt)
        self.of: Mapping[int, bytes] = {
            i: _of_piece(t) if not of_bytes else t.encode() if i in tokenizer.added_tokens_decoder else _of_letters(t)
            for t, i in spelt.items()
        }
        order = sorted(spelt, key=lambda token: (byte_of(token) is None, -spelt[token]))
        self.ids: Mapping[bytes, int] = {self.of[spelt[token]]: spelt[token] for token in order if token}
        self.start = tuple(takewhile(special.__contains__, tokenizer.encode("a", add_special_tokens=True)))
        self._longest = max(map(len, self.ids), default=0)
        self._known: dict[tuple[bytes, bool], list[int]] = {}

    @property
    def eos(self) -> int | None:
        """The id that ends a text; None if there is none."""
        found = self._tokenizer.eos_token_id
        return found if isinstance(found, int) else None

    @property
    def lost(self) -> str | None:
        """The first of the `PLAIN` texts that the tokens do not reproduce; None if they reproduce all."""
        return next((text for text in PLAIN if self.reading(text) != text), None)

    def reading(self, text: str) -> str:
        """A text encoded and decoded."""
        return self.text(self._tokenizer.encode(text, add_special_tokens=False)).decode(errors="replace").lstrip(" ")

    def text(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids; special tokens have none."""
        return b"".join(self.of.get(index, b"") for index in ids)

    def encode(self, piece: bytes, *, first: bool = False) -> list[int]:
        """Tokenise a part of a text, without special tokens.

        Invalid UTF-8, and text that the tokenizer does not reproduce, are split greedily into the longest tokens; bytes
        without a token are dropped.

        Args:
            piece: its bytes.
            first: whether it begins the text; a tokenizer may insert a space there.
        """
        key = piece, first
        if key not in self._known:
            if len(self._known) > 1 << 14:
                self._known.clear()
            self._known[key] = self._cut(piece, first)
        return self._known[key]

    @cached_property
    def puts_space(self) -> bool:
        """Whether the tokenizer puts a space before every text."""
        return self.text(self._tokenizer.encode("a", add_special_tokens=False)) == b" a"

    @cached_property
    def _anchors(self) -> Mapping[str, list[int]]:
        return {
            anchor: self._tokenizer.encode(anchor, add_special_tokens=False) if anchor else [] for anchor in ANCHORS
        }

    def _cut(self, piece: bytes, first: bool) -> list[int]:
        try:
            text = piece.decode()
        except UnicodeDecodeError as error:
            # An incomplete character at the end may continue in the next token; elsewhere such bytes are invalid.
            whole = piece[: error.start] if error.end == len(piece) else b""
            return [*(self.encode(whole, first=first) if whole else ()), *self._longest_first(piece[len(whole) :])]
        for anchor, before in self._anchors.items():
            found = self._tokenizer.encode(anchor + text, add_special_tokens=False)
            ids = found[len(before) :]
            if found[: len(before)] == before and not self._differs(ids, piece, first and not anchor):
                return ids
        return self._longest_first(piece)

    def _differs(self, ids: Iterable[int], piece: bytes, first: bool) -> bool:
        text = self.text(ids)
        return text != piece and not (first and text == b" " + piece)

    def _longest_first(self, piece: bytes) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(piece):
            ends = range(min(len(piece), start + self._longest), start, -1)
            end = next((end for end in ends if piece[start:end] in self.ids), None)
            if end is not None:
                found.append(self.ids[piece[start:end]])
            start = end or start + 1
        return found


def _of_letters(token: str) -> bytes:
    """The bytes of a byte-level BPE token; a token with characters outside the byte alphabet is plain text."""
    found = bytes_of_letters(token)
    return token.encode() if found is None else found


def _of_piece(token: str) -> bytes:
    """The bytes of a SentencePiece token."""
    byte = byte_of(token)
    return token.replace(SPACE, " ").encode(errors="replace") if byte is None else bytes([byte])


class TokenMap:
    """The tokens shared by target and draft: equal bytes, or special tokens of equal meaning.

    Special tokens have equal meaning if they begin or end a text in both tokenizers, or are spelled alike.

    Args:
        target: of the target's tokenizer.
        draft: of the draft's.
        whole: V, the pair's vocabulary: the target's ids, perhaps with padding after them.
        writes_text: whether the draft may write any of its tokens, and their text is retokenised for the target.

    Attributes:
        target, draft, whole, writes_text: as given.
        draft_id: the draft's id for each shared target id, for reading.
        vocabulary: the target's ids that the draft can write; of equal ids, the one of the target's tokenizer.
        columns: ``(N,)`` int64, the draft's ids of ``vocabulary``.
    """

    def __init__(self, target: TokenBytes, draft: TokenBytes, whole: int, *, writes_text: bool = False) -> None:
        self.target, self.draft, self.whole, self.writes_text = target, draft, whole, writes_text
        found = {i: draft.ids[text] for i, text in target.of.items() if text in draft.ids}
        found |= {index: draft.specials[token] for token, index in target.specials.items() if token in draft.specials}
        for ours, theirs in ((target.start, draft.start), ((target.eos,), (draft.eos,))):
            if len(ours) == len(theirs) == 1 and ours[0] is not None and theirs[0] is not None:
                found[ours[0]] = theirs[0]
        self.draft_id: Mapping[int, int] = {
            i: own for i, own in found.items() if i < target.whole and own < draft.whole
        }
        # Of several target ids with one draft id, the draft writes the one that the target's tokenizer uses.
        written = {own: index for index, own in sorted(self.draft_id.items(), reverse=True)}
        written |= {
            own: index for index, own in self.draft_id.items() if target.ids.get(target.of.get(index, b"")) == index
        }
        if draft.eos is not None and target.eos is not None and self.draft_id.get(target.eos) == draft.eos:
            written[draft.eos] = target.eos  # even if another target token is spelled like the draft's end
        own_of = {index: own for own, index in written.items()}
        self.vocabulary = DraftVocabulary(own_of, whole)
        self.columns: npt.NDArray[np.int64] = np.array([own_of[index] for index in self.vocabulary.ids], dtype=np.int64)

    @property
    def summary(self) -> str:
        """What the draft does, for reports."""
        if self.writes_text:
            return "writes text, which is cut into the target's tokens"
        return f"drafts the {len(self.vocabulary):,} of {self.target.whole:,} tokens that both have"


class Columns:
    """Selects columns of logits, in numpy or on any device.

    Args:
        ids: ``(N,)`` int64, the columns.
    """

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self.ids = ids
        self._there: dict[str, torch.Tensor] = {}

    def of(self, numbers: "Numbers", rows: Sequence[int]) -> "Numbers":
        """A copy of the columns ``(R, N)`` of R rows."""
        if isinstance(numbers, np.ndarray):
            found: npt.NDArray[np.float32] = numbers[np.array(rows, np.int64)[:, None], self.ids]
            return found
        import torch

        kept = (
            numbers
            if len(rows) == len(numbers) == 1
            else numbers[torch.tensor(rows, device=numbers.device, dtype=torch.long)]
        )
        return kept.index_select(1, self._on(kept.device))

    def _on(self, device: "torch.device") -> "torch.Tensor":
        if str(device) not in self._there:
            import torch

            with torch.inference_mode(False):
                self._there[str(device)] = torch.from_numpy(self.ids).to(device)
        return self._there[str(device)]


LONGEST_WORD = 32  # The most tokens of a word; a longer one is split


class DraftText:
    """The target's growing text in the draft's ids.

    The ids depend on the text alone, not on its history, so that a replayed draft reads the same ids as live. A
    finished word is tokenised by the draft's tokenizer. In the last word, each token maps to the draft's token of equal
    bytes; if one has none, the whole word is retokenised after each token. A special token is a word of its own; if the
    draft lacks it, its spelling is read as text. The text starts as the draft's tokenizer starts texts.

    Args:
        tokens: of the target and the draft.

    Attributes:
        tokens: the target's ids.
        ids: the draft's, never empty.
    """

    def __init__(self, tokens: TokenMap) -> None:
        self._map = tokens
        self._spelt = {index: token.encode() for token, index in tokens.target.specials.items()}
        # A draft without a start token still must read a token before it can write one.
        self._empty = [next((one for one in (tokens.draft.eos,) if one is not None), 0)]
        self.tokens: list[int] = []
        self.ids: list[int] = []
        self._words: list[tuple[int, int]] = []  # where each word begins, in the target's and in the draft's ids
        self.truncate(0)

    def append(self, token: int) -> int:
        """Add a target token; returns the number of leading draft ids that are unchanged."""
        if self._opens(token):
            kept = self._put(closed=True)
            # For a draft without a start token, the first word replaces the placeholder for an empty text.
            place = len(self._map.draft.start if self._silent(len(self.tokens)) else self.ids)
            self._words.append((len(self.tokens), place))
        else:
            kept = len(self.ids)
        self.tokens.append(token)
        return min(kept, self._put(closed=False))

    def truncate(self, length: int) -> int:
        """Keep only the first target tokens; returns the number of leading draft ids that are unchanged."""
        if length >= len(self.tokens) and self.tokens:
            return len(self.ids)
        while len(self._words) > 1 and self._words[-1][0] >= length:
            self._words.pop()
        del self.tokens[length:]
        if not self.tokens:
            self._words, self.ids = [(0, len(self._map.draft.start))], [*(self._map.draft.start or self._empty)]
            return 0
        return self._put(closed=False)

    @property
    def word(self) -> Sequence[int]:
        """The target's ids of the last word; empty after a special token and at the start of the text."""
        if not self.tokens or self.tokens[-1] not in self._map.target.of:
            return ()
        return self.tokens[self._words[-1][0] :]

    @property
    def begins(self) -> bool:
        """Whether the last word is the first of the text."""
        return self._silent(len(self.tokens) - len(self.word))

    def _opens(self, token: int) -> bool:
        """Whether a token begins a word."""
        start = self._words[-1][0]
        if len(self.tokens) == start:
            return False
        last, text = self.tokens[-1], self._map.target.of.get(token)
        before = self._map.target.of.get(last)
        if text is None or before is None or len(self.tokens) - start >= LONGEST_WORD:
            return True
        return text.startswith(b" ") and not before[-1:].isspace()

    def _put(self, *, closed: bool) -> int:
        """Rewrite the draft's ids of the last word; returns the number of leading ids that are unchanged."""
        start, place = self._words[-1]
        new = [] if self._silent(len(self.tokens)) else self._read(self.tokens[start:], closed)
        if not place and not new:
            new = self._empty
        old = self.ids[place:]
        same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self.ids[place:] = new
        return place + same

    def _read(self, word: Sequence[int], closed: bool) -> Sequence[int]:
        own = self._map.draft_id
        if len(word) == 1 and word[0] in self._spelt:
            return [own[word[0]]] if word[0] in own else self._map.draft.encode(self._spelt[word[0]])
        begins = self._silent(self._words[-1][0])
        spaced = begins and self._map.target.puts_space
        if not closed and not spaced and all(token in own for token in word):
            return [own[token] for token in word]
        text = self._map.target.text(word)
        return self._map.draft.encode(text.removeprefix(b" ") if spaced else text, first=begins)

    def _silent(self, count: int) -> bool:
        """Whether the text's first ``count`` tokens are the target tokenizer's start tokens."""
        start = self._map.target.start
        return count <= len(start) and start[:count] == (*self.tokens[:count],)


FARTHEST = 8  # After this number of draft tokens, the target's next token is taken from the text so far


class Continuation:
    """Retokenises a draft's continuation of a text with the target's tokenizer.

    The text's last word is retokenised with its continuation. If this changes the text's tokens, the continuation is
    tokenised alone. Special tokens are drafted if both models have them; no token spans one.

    Args:
        tokens: of the target and the draft.

    Attributes:
        writable: the draft's text tokens, and the special tokens shared with its target.
    """

    def __init__(self, tokens: TokenMap) -> None:
        self._target, self._draft = tokens.target, tokens.draft
        theirs = dict(zip(tokens.columns.tolist(), tokens.vocabulary.ids.tolist(), strict=True))
        special = {*tokens.draft.specials.values()}
        self._special = {own: index for own, index in theirs.items() if own in special}
        spelt = (own for own, text in tokens.draft.of.items() if text)
        self.writable = Columns(np.array(sorted({*spelt, *self._special}), dtype=np.int64))
        self._any = min(tokens.target.of, default=0)

    def next(self, text: DraftText, written: Sequence[int]) -> int | None:
        """The target's next token; None until more text determines it.

        A token is known once another follows it, because the last one may be the start of a longer token. If `FARTHEST`
        tokens give no target token, a token that is most likely wrong is returned.

        Args:
            text: so far.
            written: the draft's ``writable`` ids after it; only the last one may be special.
        """
        if not written:
            return None
        data, special = self._draft.text(written), self._special.get(written[-1])
        settled = special is not None or len(written) >= FARTHEST
        found = self._cut(text, data, settled) if data else ()
        if len(found) > 1 or (found and settled):
            return found[0]
        return special if special is not None else self._any if settled else None

    def _cut(self, text: DraftText, data: bytes, settled: bool) -> Sequence[int]:
        """The target's ids of bytes after a text; incomplete characters are left out unless ``settled``."""
        word, begins = text.word, text.begins
        before = self._target.text(word)
        if begins and not word and self._draft.puts_space:
            data = data.removeprefix(b" ")
        elif begins and self._target.puts_space:
            before = before.removeprefix(b" ")
        if not settled:
            data = data[: max(0, len(_characters(before + data)) - len(before))]
        if not data:
            return ()
        whole = self._target.encode(before + data, first=begins)
        if whole[: len(word)] == [*word]:
            return whole[len(word) :]
        return self._target.encode(data)


def _characters(data: bytes) -> bytes:
    """Bytes without an incomplete character at their end."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start] if error.end == len(data) else data
    return data


AGREEMENT_TOKENS = 512  # Tokens of each text that are compared
AGREEMENT_BYTES = 64  # The most bytes that a draft writes for one token of the target


def agreement(tokens: TokenMap, texts: Iterable[Iterable[int]]) -> float:
    """The share of a text's tokens reproduced if the draft writes the same text in its own tokens.

    It is an upper bound of the acceptance rate of any draft with this tokenizer.

    Args:
        tokens: of the target and the draft.
        texts: in ids of the target's tokenizer.
    """
    continuation, same, whole = Continuation(tokens), 0, 0
    for some in texts:
        ids = [*some][:AGREEMENT_TOKENS]
        text = DraftText(tokens)
        for place, token in enumerate(ids):
            rest = tokens.target.text(ids[place:])[:AGREEMENT_BYTES]
            written = tokens.draft.encode(rest)
            found = (continuation.next(text, written[: length + 1]) for length in range(len(written)))
            same += next((one for one in found if one is not None), None) == token
            whole += 1
            text.append(token)
    return same / whole if whole else 0.0


class OwnTextPasses(Transform):
    """A `Slot` of a draft that takes the target's ids and reads their text in its own ids (`DraftText`).

    The draft's cache is rolled back to the first changed id. Of a text longer than its context, it reads the end.

    Args:
        inner: the draft, with its own ids.
        tokens: of both models.
    """

    AHEAD = 0
    """The most ids after the text that the draft may write."""

    def __init__(self, inner: Slot, tokens: TokenMap) -> None:
        super().__init__(inner)
        self.no_trees = "its draft has another tokenizer"
        self.context = ENDLESS
        self.translates = tokens.summary
        self._map = tokens
        self._text = DraftText(tokens)
        self._room = max(1, inner.context - self.AHEAD)
        self._read = 0  # the number of the draft's cached ids, including those left out at the start
        self._left_out = 0

    @property
    def length(self) -> int:
        return len(self._text.tokens)

    def over_slot(self, inner: Slot) -> Slot:
        return Slot(type(self)(inner, self._map))

    @abstractmethod
    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward: ...

    def begin(self, prompt: int) -> None:  # noqa: ARG002 - the draft has the prompt in its own ids
        self.inner.begin(0)

    def take_back(self, length: int) -> None:
        if not length:
            self.inner.rollback(0)
            self._read = self._left_out = 0
        self._moved(self._text.truncate(length))

    def _outside(self, length: int) -> int:
        """The number of ids left out at a text's start: a multiple of half the draft's context.

        It depends on the length alone, so that drafts do not depend on earlier rounds. Rounds across the limit are read
        twice.
        """
        half = max(1, self._room // 2)
        return max(0, -((self._room - length) // half)) * half

    def _moved(self, kept: int) -> None:
        """Note that the text changed after the first ``kept`` draft ids."""
        self._forget(kept)

    def _forget(self, kept: int) -> None:
        self._read = min(self._read, kept)

    def _pass(self, ids: Sequence[int], length: int, end: int, keep: int, hidden: bool) -> Forward | None:
        """Run the draft's pass over the uncached ones of its first ``end`` ids; None if all are cached.

        Args:
            ids: of the text.
            length: of the text, which determines the number of ids left out.
            end: the number of ids to read.
            keep: the number of last ids that need logits.
            hidden: whether hidden states are wanted.
        """
        runner, outside = self.inner, self._outside(length)
        if outside != self._left_out:
            runner.rollback(0)
            self._left_out = outside
        runner.rollback(max(0, self._read - outside))
        cached = outside + runner.length
        fed = ids[cached:end]
        self._read = end
        if not fed:
            assert not keep, "the last id is read for its logits"
            return None
        return runner.extend(fed, keep=keep, hidden=hidden)


class TranslatedPasses(OwnTextPasses):
    """A draft that writes only tokens shared with its target.

    It drafts from the softmax over these tokens' logits, and its signals come from this distribution.
    """

    def __init__(self, inner: Slot, tokens: TokenMap) -> None:
        super().__init__(inner, tokens)
        self.draft_vocabulary = tokens.vocabulary
        self._shared = Columns(tokens.columns)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        text, behind = self._text, len(tokens) - keep
        for token in tokens[:behind]:
            self._forget(text.append(token))
        if not keep:
            return self._rows(text.ids, [len(text.ids)], 0, hidden)
        parts: list[Forward] = []
        ends: list[int] = []  # the text's end for each row of the next pass
        for token in tokens[behind:]:
            before = [*text.ids] if ends else []
            kept = text.append(token)
            if ends and (kept < ends[-1] or self._outside(len(text.ids)) != self._outside(ends[0])):
                parts.append(self._rows(before, ends, len(ends), hidden))
                ends = []
            if not ends:
                self._forget(min(kept, len(text.ids) - 1))
            ends.append(len(text.ids))
        parts.append(self._rows(text.ids, ends, len(ends), hidden))
        return joined(parts) if len(parts) > 1 else parts[0]

    def _rows(self, ids: Sequence[int], ends: Sequence[int], keep: int, hidden: bool) -> Forward:
        """Logits after the ids up to each of the ascending ``ends``; ``keep`` is their number, or 0 for no logits."""
        found = self._pass(ids, ends[0], ends[-1], ends[-1] - ends[0] + 1 if keep else 0, hidden)
        if found is None:
            return Forward(np.zeros((0, len(self._map.vocabulary)), np.float32), vocabulary=self.draft_vocabulary)
        rows = [end - ends[0] for end in ends[:keep]]
        return Forward(
            self._shared.of(found.columns, rows),
            found.hidden[rows] if found.hidden is not None else None,
            None,
            self.draft_vocabulary,
        )


class WrittenPasses(OwnTextPasses):
    """A draft that writes text, which is retokenised for its target.

    After the text the draft writes its likeliest tokens until the target's next token is known (`Continuation`). So its
    predictions are deterministic and depend on the text alone. Its signals come from the distribution of the draft's
    first token. Written tokens are reused if the text continues with them.
    """

    AHEAD = FARTHEST

    def __init__(self, inner: Slot, tokens: TokenMap) -> None:
        super().__init__(inner, tokens)
        self.writes_text, self.verifies = True, False
        self._continuation = Continuation(tokens)
        self._ids: list[int] = [*self._text.ids]  # ids of the text, and ids written after it
        self._written: dict[int, Numbers] = {}  # logits (1, N) of the written ids, by position
        self._written_outside = 0

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        assert not hidden, "a token of the target's has no state of its own in the draft"
        text, before = self._text, len(tokens) - keep
        for token in tokens[:before]:
            self._moved(text.append(token))
        found: list[int] = []
        logits: list[Numbers] = []
        for token in tokens[before:]:
            self._moved(text.append(token))
            found.append(self._next())
            logits.append(self._written[len(text.ids)])
        if keep:
            return Forward(joined_numbers(logits), certain=Certain(found, self._map.whole))
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
            logits = self._continuation.writable.of(found.columns, [0])
            self._written[end] = logits
            self._ids.append(int(self._continuation.writable.ids[int(logits[0].argmax())]))
        return token

    def _moved(self, kept: int) -> None:
        new, old = self._text.ids, self._ids
        while kept < min(len(new), len(old)) and new[kept] == old[kept]:
            kept += 1
        if kept < len(new):
            old[kept:] = new[kept:]
            self._written.clear()
            self._forget(kept)

    def _go_on_from_text(self) -> None:
        """Drop the written tokens after the text, unless the draft would write the same again."""
        length = len(self._text.ids)
        if (outside := self._outside(length)) != self._written_outside:
            self._written.clear()
            self._written_outside = outside
        self._written = {place: logits for place, logits in self._written.items() if place >= length}
        if length not in self._written:
            self._written.clear()
            del self._ids[length:]
            self._forget(length)
