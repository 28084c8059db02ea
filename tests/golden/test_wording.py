"""The list of sentences is that of the source."""

from tests.golden.wording import GOLDEN, collect


def test_sentences_are_those_of_the_golden_list() -> None:
    """After a change: ``python -m tests.golden.wording``, and read the diff."""
    assert GOLDEN.read_text(encoding="utf-8") == collect()
