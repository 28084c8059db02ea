"""Which globs are of every queue."""

from __future__ import annotations

import pytest

from qdo.fleet.names import match_everything


@pytest.mark.parametrize(
    ("globs", "names", "expected"),
    [
        (("*",), (), True),
        (("a", "***"), (), True),
        (("?*",), (), True),
        (("*?*",), ("a",), True),
        (("??*",), (), False),
        (("?",), (), False),
        (("",), (), False),
        (("a",), ("a",), False),
        (("a", "b"), ("a", "b"), True),
        (("a", "b"), ("a", "b", "c"), False),
        (("[ab]*",), ("a", "b2"), True),
    ],
)
def test_globs_of_every_queue(
    globs: tuple[str, ...], names: tuple[str, ...], expected: bool
) -> None:
    """All that are known, if there are several, or all whatever their names."""
    assert match_everything(globs, names) is expected
