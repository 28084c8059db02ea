"""Stores of requests look at everything, however busy the machine is."""

from __future__ import annotations

import math

import pytest

from qdo.brokers.postgresql import requests


@pytest.fixture(autouse=True)
def whole_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that takes long has read dead rows, or the machine was busy."""
    monkeypatch.setattr(requests, "CHEAP_SECONDS", math.inf)
