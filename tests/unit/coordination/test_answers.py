"""Requests that the coordinator never answers, with both kinds of handlers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qdo.coordination import bulk_reads, transactions
from qdo.coordination.client import Client, connect
from qdo.coordination.protocol.machine import CreateOp, NoResponse
from qdo.errors import CoordinatorUnreachableError


@pytest.fixture(params=["threading", "gevent"])
def deaf(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client that sends nothing, so nobody answers."""
    client = connect(f"sqlite:{tmp_path / 'coordination.db'}", handler=request.param)

    def silence(request: Any, pending: Any) -> None:
        pass

    monkeypatch.setattr(client, "_call", silence)
    monkeypatch.setattr(client, "get_children_async", lambda path: client.handler.async_result())
    monkeypatch.setattr(bulk_reads, "TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(transactions, "ANSWER_SECONDS", 0.01)
    return client


def test_a_read_without_an_answer_has_lost_the_connection(deaf: Client) -> None:
    """An error of qdo: whatever else gevent raises would end the duty of a worker."""
    with pytest.raises(CoordinatorUnreachableError):
        bulk_reads.read_children(deaf, ["/a"])
    with pytest.raises(CoordinatorUnreachableError):
        bulk_reads.read_nodes(deaf, ["/a"])
    with pytest.raises(CoordinatorUnreachableError):
        transactions.read(deaf, "/a")


def test_a_transaction_without_an_answer_is_in_doubt(deaf: Client) -> None:
    assert transactions.commit(deaf, [CreateOp("/a", b"")]) == NoResponse()
