import pytest
from tokenizers import normalizers

from specctl.errors import ModelError
from specctl.models.files.tokenizer import check_vocabulary
from tests.support.checkpoints import tiny_tokenizer

KNOWN = 258  # <eos>, 256 bytes, one merge


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(KNOWN, KNOWN), (320, 272), (272, 320), (320, KNOWN)], ids=str)
def test_padding_rows_are_left_out(target_rows: int, draft_rows: int) -> None:
    assert check_vocabulary(tiny_tokenizer(), tiny_tokenizer(), target_rows, draft_rows) == KNOWN


def test_tokens_the_target_cannot_emit_do_not_count() -> None:
    assert check_vocabulary(tiny_tokenizer(), tiny_tokenizer(), target_rows=250, draft_rows=300) == 250


def test_added_tokens_count() -> None:
    target, draft = tiny_tokenizer(added=["<user>"]), tiny_tokenizer(added=["<user>"])

    assert check_vocabulary(target, draft, 300, 300) == KNOWN + 1


def test_a_draft_with_fewer_rows_than_the_target_uses_is_an_error() -> None:
    with pytest.raises(ModelError, match="draft has 250 output rows, but the target can emit 258"):
        check_vocabulary(tiny_tokenizer(), tiny_tokenizer(), target_rows=320, draft_rows=250)


@pytest.mark.parametrize(
    ("target", "draft", "difference"),
    [
        ({"merges": [("t", "h")]}, {"merges": [("h", "e")]}, "id 257 is 'th' in the target and 'he' in the draft"),
        ({}, {"added": ["<pad>"]}, "id 258 is nothing in the target and '<pad>' in the draft"),
        ({"added": ["<a>", "<b>"]}, {"added": ["<b>", "<a>"]}, "id 258 is '<a>' in the target and '<b>' in the draft"),
    ],
)
def test_the_first_difference_is_named(target, draft, difference: str) -> None:
    with pytest.raises(ModelError, match=difference) as caught:
        check_vocabulary(tiny_tokenizer(**target), tiny_tokenizer(**draft), 300, 300)

    assert "target's own family" in caught.value.hint


def test_a_token_special_in_one_only_is_no_difference() -> None:
    """Only ids matter to verification, and only the target's tokenizer reads the prompt."""
    target, draft = tiny_tokenizer(added=["<user>"]), tiny_tokenizer()
    draft.add_tokens(["<user>"], special_tokens=True)

    assert check_vocabulary(target, draft, 300, 300) == 259


def test_text_cut_otherwise_is_a_difference() -> None:
    draft = tiny_tokenizer()
    draft.backend_tokenizer.normalizer = normalizers.Lowercase()

    with pytest.raises(ModelError, match=r"the target continues with 'The' where the draft continues with 'the '"):
        check_vocabulary(tiny_tokenizer(), draft, 300, 300)
