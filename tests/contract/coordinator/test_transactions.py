"""Blocking transactions on both coordinators: conflicts, refusals, lost answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qdo.coordination import transactions
from qdo.coordination.client import Client
from qdo.coordination.protocol.machine import (
    CheckOp,
    CommitError,
    Committed,
    CreateOp,
    DeleteOp,
    NodeMissing,
    NodeRead,
    NoResponse,
    Op,
    Rejected,
    SetOp,
)


def appended(path: str, text: bytes) -> Callable[[transactions.Node], list[Op]]:
    """Return a decision that appends to a node, or creates it."""

    def decide(node: transactions.Node) -> list[Op]:
        if isinstance(node, NodeMissing):
            return [CreateOp(path, text)]
        return [SetOp(path, node.data + text, node.version)]

    return decide


def test_a_transaction_takes_effect_or_names_what_failed(outsider: Client) -> None:
    assert transactions.read(outsider, "/n") == NodeMissing()
    answer = transactions.commit(outsider, [CreateOp("/n", b"1"), CreateOp("/m", b"")])
    assert isinstance(answer, Committed)
    assert answer.versions == (0, 0)
    node = transactions.read(outsider, "/n")
    assert isinstance(node, NodeRead)
    assert (node.data, node.version) == (b"1", 0)
    assert node.mzxid > 0
    late = transactions.commit(outsider, [DeleteOp("/m"), SetOp("/n", b"2", 7)])
    assert isinstance(late, Rejected)
    assert (late.index, late.fault) == (1, CommitError.BAD_VERSION)
    assert isinstance(transactions.read(outsider, "/m"), NodeRead)


def test_a_change_is_decided_again_after_a_conflict(outsider: Client) -> None:
    outsider.create("/n", b"a")
    seen: list[bytes] = []

    def decide(node: transactions.Node) -> list[Op]:
        assert isinstance(node, NodeRead)
        seen.append(node.data)
        if len(seen) < 3:
            outsider.set("/n", node.data + b"x")
        return [SetOp("/n", node.data + b"b", node.version)]

    answer = transactions.change(outsider, "/n", decide, root="/n")
    assert isinstance(answer, Committed)
    assert seen == [b"a", b"ax", b"axx"]
    assert outsider.get("/n")[0] == b"axxb"


def test_no_operations_change_nothing(outsider: Client) -> None:
    assert transactions.change(outsider, "/n", lambda node: None, root="/") is None
    assert outsider.exists("/n") is None


@pytest.mark.parametrize("took_effect", [True, False])
def test_a_lost_answer_is_adopted_behind_a_barrier(
    outsider: Client, took_effect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is made once, whether or not the unanswered transaction took effect."""
    outsider.create("/n", b"")
    real = transactions.commit
    asked: list[list[Op]] = []

    def lossy(client: Client, ops: list[Op]) -> object:
        asked.append(ops)
        if len(asked) == 1:
            if took_effect:
                real(client, ops)
            return NoResponse()
        return real(client, ops)

    monkeypatch.setattr(transactions, "commit", lossy)
    answer = transactions.change(
        outsider,
        "/n",
        appended("/n", b"mine;"),
        root="/n",
        is_mine=lambda node: node.data.endswith(b"mine;"),
    )
    node = transactions.read(outsider, "/n")
    assert isinstance(node, NodeRead)
    assert node.data == b"mine;"
    assert answer == Committed(node.mzxid, (node.version,))
    assert asked[1] == [CheckOp("/n")]
