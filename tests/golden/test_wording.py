"""The list of sentences is that of the source."""

from __future__ import annotations

import re

from tests.golden.wording import GOLDEN, collect

COUNTED = re.compile(r"%d (queues|workers|assignments|jobs|processes)\b")


def test_sentences_are_those_of_the_golden_list() -> None:
    """After a change: ``python -m tests.golden.wording``, and read the diff."""
    assert GOLDEN.read_text(encoding="utf-8") == collect()


def test_counts_in_the_log_agree_with_their_nouns() -> None:
    """Not "1 queues over 1 workers": `qdo.text.pluralize` writes the number with its noun."""
    assert [line for line in collect().splitlines() if COUNTED.search(line)] == []
