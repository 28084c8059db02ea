"""The list of what qdo publishes is that of the source."""

from __future__ import annotations

import re

import pytest

from tests.golden.published import GOLDEN, collect
from tests.support.paths import ROOT

SCHEMA = re.compile(r"\bqdo\.[\w{}.-]+/\d+")


@pytest.fixture(scope="module")
def published() -> str:
    return collect()


def test_what_is_published_is_the_golden_list(published: str) -> None:
    """After a change: ``python -m tests.golden.published``, and read the diff."""
    assert GOLDEN.read_text(encoding="utf-8") == published


def test_every_schema_in_the_code_is_listed(published: str) -> None:
    """Also one that no command of the list prints; a part in braces stands for a word."""
    listed = re.findall(r"^# (qdo\S+/\d+):", published, re.MULTILINE)
    files = [path for folder in ("qdo", "workers") for path in (ROOT / folder).rglob("*.py")]
    known = {each for path in files for each in SCHEMA.findall(path.read_text(encoding="utf-8"))}
    assert len(known) > 50
    patterns = [re.compile(re.sub(r"\\\{.*?\\\}", ".+", re.escape(each))) for each in sorted(known)]
    assert [each.pattern for each in patterns if not any(map(each.fullmatch, listed))] == []
    assert [each for each in listed if not any(one.fullmatch(each) for one in patterns)] == []


def test_every_command_with_an_output_is_run(published: str) -> None:
    """The collector has a line for each."""
    assert "prints: nothing" not in published
