"""The versions of ZooKeeper that lose nothing that they have acknowledged."""

from __future__ import annotations

import pytest

from qdo.coordination.session_setup import is_safe


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 7, 2), False),
        ((3, 8, 0), False),
        ((3, 8, 4), True),
        ((3, 9, 1), False),
        ((3, 9, 2), True),
        ((3, 9, 3), False),
        ((3, 9, 4), True),
        ((3, 10, 0), True),
        ((4, 0, 0), True),
    ],
)
def test_safe_versions(version: tuple[int, int, int], safe: bool) -> None:
    assert is_safe(version) == safe
