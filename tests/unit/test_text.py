"""Text for people."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.text import error_kind, printable, printable_lines
from tests.support.fakes.hostile_text import HOSTILE, unsafe
from tests.support.paths import ROOT

SEEN = {"L", "M", "N", "P", "S"}
"""The first letters of Unicode's categories of visible characters."""


def test_every_strange_character_is_escaped():
    """As Python spells it, so that its number can be read."""
    assert printable("a\x1b[2J\r\n\u202eb\U000e0041\ud800") == (
        "a\\x1b[2J\\r\\n\\u202eb\\U000e0041\\ud800"
    )
    assert unsafe(printable(HOSTILE)) == set()
    assert "\n" not in printable(HOSTILE)


def test_readable_text_stays_as_it_is():
    """Of any script."""
    text = "Größe C:\\x naïve 日本語 שלום مرحبا ไทย हिन्दी 👍"
    assert printable(text) == text


def test_lines_after_the_first_are_indented():
    assert printable_lines("a\nb\r\n\nc", "  ") == "a\n  b\\r\n  \n  c"


@given(st.text())
def test_any_text_becomes_visible(text: str):
    shown = printable(text)
    assert unsafe(shown) == set()
    assert all(each == " " or unicodedata.category(each)[0] in SEEN for each in shown)
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ValueError: bob@example.com", "ValueError"),
        ("shop.errors.Refused: x", "shop.errors.Refused"),
        ("TimeoutError", "TimeoutError"),
        ("bob", "hidden"),
        ("bob@example.com has no account", "hidden"),
        ("no account: bob", "hidden"),
        ("", "hidden"),
    ],
)
def test_kind_of_an_error_holds_nothing_of_its_text(text: str, kind: str) -> None:
    assert error_kind(text) == kind


def test_no_sentence_installs_qdo_from_an_index() -> None:
    """The program of this name there is another one."""
    files = [*ROOT.glob("qdo/**/*.py"), *ROOT.glob("workers/**/*.py")]
    assert len(files) > 300
    assert [str(path) for path in files if "qdo[" in path.read_text(encoding="utf-8")] == []
