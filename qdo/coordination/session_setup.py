"""The steps of a new session before its worker registers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kazoo.exceptions import (
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
)
from kazoo.retry import KazooRetry

from qdo.coordination.access import acl_rejected
from qdo.coordination.client import Client
from qdo.coordination.leader_queues import unreachable
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.broker_node import BrokerNode
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.rights import NodeRights
from qdo.errors import BrokerMismatchError, NodeRefusedError, OpenTreeError
from qdo.system.clock import clock

_Result = TypeVar("_Result")


def prepare_session(client: Client, layout: Layout, timeout_seconds: float) -> Lease:
    """Create the persistent nodes; return the lease of the session.

    :raises CoordinatorUnreachableError: not done within this time, or the session is lost.
    """
    return _retried(partial(_prepare, client, layout), client, layout, timeout_seconds)


def check_rights(client: Client, layout: Layout, timeout_seconds: float) -> None:
    """Reject nodes that accounts without a role can change, if the settings require that.

    `qdo acl apply` does these nodes last. So the other nodes have their rights when these have.

    :raises OpenTreeError: an account without a role can change a node.
    :raises NodeRefusedError: this account may not read its rights.
    :raises CoordinatorUnreachableError: not done within this time, or the session is lost.
    """
    rights = client.access.rights
    if rights is not None and rights.required:
        check = partial(_check_rights, client, layout, rights)
        _retried(check, client, layout, timeout_seconds)


def _check_rights(client: Client, layout: Layout, rights: NodeRights) -> None:
    for path in (layout.root, *layout.persistent):
        with contextlib.suppress(NoNodeError):
            stranger = rights.stranger(client.get_acls(path)[0])
            if stranger is not None:
                raise OpenTreeError(path=path, account=stranger)


def check_broker(
    client: Client, layout: Layout, broker: BrokerNode, timeout_seconds: float
) -> None:
    """Compare the broker file of a worker with that of the first worker of its app.

    Workers with different files would share the queues by name, and each would miss the messages
    in the files of the others.

    :raises CoordinatorUnreachableError: not done within this time, or the session is lost.
    :raises BrokerMismatchError: it is another file.
    """
    read = partial(_first_broker, client, layout, broker)
    first = _retried(read, client, layout, timeout_seconds)
    if first.id != broker.id:
        raise BrokerMismatchError(
            app=layout.root.rpartition("/")[2],
            address=broker.address,
            host=broker.host,
            first_address=first.address,
            first_host=first.host,
        )


def _retried(
    step: Callable[[], _Result], client: Client, layout: Layout, timeout_seconds: float
) -> _Result:
    # Retries if the connection is lost, but not if the session is lost.
    retry = KazooRetry(
        max_tries=-1,
        delay=0.05,
        max_delay=0.5,
        ignore_expire=False,
        sleep_func=client.handler.sleep_func,
        deadline=timeout_seconds,
    )
    try:
        result: _Result = retry(step)
    except InvalidACLError as error:
        raise acl_rejected() from error
    except NoAuthError as error:
        # Not unreachable: a service manager would restart the worker forever.
        account = client.access.account_name()
        raise NodeRefusedError(path=layout.root, account=account) from error
    except KazooException as error:
        raise unreachable(layout, error) from error
    return result


def _prepare(client: Client, layout: Layout) -> Lease:
    rights = client.access.rights
    # With ACLs, senders may not create the folder of doorbells themselves.
    doorbells = (layout.doorbells,) if rights is not None and rights.accounts else ()
    for path in (*layout.persistent, f"{layout.components}/worker", *doorbells):
        client.ensure_path(path)
    # The lease counts from the start of the session, which this transaction proves.
    sent_at = clock()
    transaction = client.transaction()
    transaction.check(layout.workers, -1)
    for result in transaction.commit():
        if isinstance(result, NoAuthError):
            raise result
    return Lease(client.negotiated_timeout_seconds or 0.0, client.heard_at or sent_at)


def _first_broker(client: Client, layout: Layout, mine: BrokerNode) -> BrokerNode:
    """Return the broker file of the first worker, which may be this one."""
    if not client.exists(layout.broker):
        with contextlib.suppress(NodeExistsError):
            client.ensure_path(layout.root)
            client.create(layout.broker, mine.encode())
    return BrokerNode.parse(client.get(layout.broker)[0])
