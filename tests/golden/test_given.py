"""The types of settings in code are those of their declarations."""

from __future__ import annotations

from tests.golden.given import GOLDEN, collect


def test_types_of_given_settings_are_declared() -> None:
    """After a change: ``python -m tests.golden.given``."""
    assert GOLDEN.read_text(encoding="utf-8") == collect()
