"""Deleting queues of brokers that are logs, and the limit of their number."""

from __future__ import annotations

import pytest

from qdo.errors import UnsupportedError
from qdo.testing.contracts.deletion import *
from tests.support.fakes.scripted_broker import ScriptedBroker


def test_other_brokers_refuse() -> None:
    """Their queues belong to a service."""
    with pytest.raises(UnsupportedError):
        ScriptedBroker().delete_queue("q", 0)
