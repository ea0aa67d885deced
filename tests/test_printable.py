import json
import sys

import pytest

from specctl.printable import escaped, gib, harmless, one_line, printable
from tests.support.hostile import HOSTILE, commands

EVERY = "".join(map(chr, range(sys.maxunicode + 1)))


@pytest.mark.parametrize("clean", [printable, one_line])
def test_no_character_that_is_laid_out_commands_a_terminal(clean):
    assert commands(clean(EVERY)) == set()


def test_running_text_keeps_what_commands_nothing():
    assert commands(harmless(EVERY)) == {"\u200c", "\u200d"}
    family, persian, code = "\U0001f468\u200d\U0001f469\ufe0f", "\u0645\u06cc\u200c\u062e", "\tif x:\n\t\ty"
    assert harmless(family + persian + code) == family + persian + code


def test_text_may_be_cleaned_in_pieces():
    assert harmless(HOSTILE) == "".join(map(harmless, HOSTILE))
    assert harmless("\x1b[31m") == "␛[31m"


@pytest.mark.parametrize("indent", [None, 2])
def test_escaping_leaves_a_document_the_same_document(indent):
    document = json.dumps({HOSTILE: ["木\u200d", HOSTILE, 1.5]}, ensure_ascii=False, indent=indent)
    shown = escaped(document)
    assert json.loads(shown) == json.loads(document)
    assert commands(shown) <= {"\u200d"}
    assert "木" in shown


@pytest.mark.parametrize(
    ("size", "text"),
    [(5, "5 B"), (2048, "2 KiB"), (3 * 2**20, "3 MiB"), (1.5 * 2**30, "1.5 GiB"), (3000 * 2**30, "3000.0 GiB")],
)
def test_sizes_for_people(size, text):
    assert gib(size) == text
