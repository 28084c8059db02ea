"""Read and change nodes with blocking calls, for commands and senders.

A transaction has one of three results: `Committed`, `Rejected` because of an operation, or
`NoResponse`. No result raises an error. After `NoResponse`, the transaction may have taken
effect, or may take effect later. After a call of `settle`, a read shows the outcome.

All functions raise NodeRefusedError if the account may not read or change a node. After a timeout,
all functions raise CoordinatorUnreachableError, but a change may have taken effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import ConnectionLoss, KazooException, NoNodeError
from kazoo.protocol.serialization import GetData, Transaction

from qdo.coordination.bulk_reads import AGAIN_SECONDS, connection_lost, is_refusal
from qdo.coordination.client import Client
from qdo.coordination.kazoo_driver import committed, node_read, operation
from qdo.coordination.protocol import machine as m
from qdo.errors import NodeRefusedError
from qdo.system.clock import clock

# The time for which a caller waits for an answer, even if it reconnects meanwhile.
ANSWER_SECONDS = 15.0
# The time for which `change` retries if its transactions get no answer.
CHANGE_SECONDS = 2 * ANSWER_SECONDS
Node = m.NodeRead | m.NodeMissing
Decide = Callable[[Node], Sequence[m.Op] | None]


def read(client: Client, path: str) -> Node:
    deadline = clock() + ANSWER_SECONDS
    while True:
        answer = client.handler.async_result()
        client._call(GetData(client.chroot + path, None), answer)
        try:
            return node_read(client.answer_to(answer, max(0.0, deadline - clock())))
        except NoNodeError:
            return m.NodeMissing()
        except (KazooException, client.handler.timeout_exception) as error:
            _wait_again(client, path, error, deadline)


def _wait_again(client: Client, path: str, error: Exception, deadline: float) -> None:
    if is_refusal(error):
        raise NodeRefusedError(path=path, account=client.access.account_name()) from error
    if not isinstance(error, ConnectionLoss) or clock() > deadline:
        raise connection_lost(client, error) from error
    client.handler.sleep_func(AGAIN_SECONDS)


def commit(client: Client, ops: Sequence[m.Op]) -> m.Committed | m.Rejected | m.NoResponse:
    """Perform all operations in a transaction, or none of them."""
    return commit_each(client, [ops])[0]


def commit_each(
    client: Client, transactions: Sequence[Sequence[m.Op]]
) -> list[m.Committed | m.Rejected | m.NoResponse]:
    """Perform several transactions in order, without waiting for each answer in turn."""
    answers = []
    for ops in transactions:
        answers.append(client.handler.async_result())
        client._call(Transaction([operation(client, op) for op in ops]), answers[-1])
    return [_answered(client, answer) for answer in answers]


def _answered(client: Client, answer: Any) -> m.Committed | m.Rejected | m.NoResponse:
    try:
        results: Any = client.answer_to(answer, ANSWER_SECONDS)
    except (KazooException, client.handler.timeout_exception):
        return m.NoResponse()
    return committed(results)


def make_folder(client: Client, path: str) -> None:
    """Create a node without data, and all nodes above it, unless they exist."""
    deadline = clock() + ANSWER_SECONDS
    while True:
        try:
            client.ensure_path(path)
            return
        except KazooException as error:
            _wait_again(client, path, error, deadline)


def settle(client: Client, root: str) -> None:
    """Wait until no earlier transaction of this client can still take effect."""
    # A committed check of the existing node `root` is a barrier without a change.
    deadline = clock() + ANSWER_SECONDS
    while isinstance(commit(client, [m.CheckOp(root)]), m.NoResponse):
        if client.session_over or clock() > deadline:
            raise connection_lost(client, TimeoutError("no answer"))
        client.handler.sleep_func(AGAIN_SECONDS)


def change(
    client: Client,
    path: str,
    decide: Decide,
    *,
    root: str,
    is_mine: Callable[[m.NodeRead], bool] = lambda node: False,
    guess: Node | None = None,
) -> m.Committed | None:
    """Read a node and change it at the same version; retry after other clients' changes.

    :param decide: a function of the node. The function returns the operations, first the operation
        on this node, or None for no change. `change` calls this function again after a conflict.
        The function may raise an error.
    :param root: the path of an existing node, for `settle`.
    :param is_mine: a function that returns whether this call wrote a node. Without this function,
        `change` calls `decide` again with the current node after a lost answer.
    :param guess: the node for the first decision. A correct guess saves a read.
    :returns: the transaction; None if `decide` returned None.
    """
    unanswered = False
    deadline = clock() + CHANGE_SECONDS
    while True:
        node = guess or read(client, path)
        guess = None
        if unanswered and isinstance(node, m.NodeRead) and is_mine(node):
            return m.Committed(node.mzxid, (node.version,))
        ops = decide(node)
        if ops is None:
            return None
        answer = commit(client, ops)
        if isinstance(answer, m.Committed):
            return answer
        if isinstance(answer, m.Rejected):
            if answer.refuses(answer.index):
                refused = ops[answer.index].path
                raise NodeRefusedError(path=refused, account=client.access.account_name())
        else:
            settle(client, root)
            unanswered = True
            if clock() > deadline:  # perhaps the request itself ends each connection
                raise connection_lost(client, TimeoutError("no answer"))
