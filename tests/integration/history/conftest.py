"""Databases for tests of the history."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'history.db'}"
    found: str = request.getfixturevalue("bare_database_url")
    return found
