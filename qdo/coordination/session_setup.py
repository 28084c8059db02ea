"""The steps of a new session before its worker registers."""

from __future__ import annotations

from functools import partial

from kazoo.exceptions import KazooException
from kazoo.retry import KazooRetry

from qdo.coordination.client import Client
from qdo.coordination.leader_queues import unreachable
from qdo.coordination.protocol.lease import Lease
from qdo.coordination.znodes.layout import Layout
from qdo.system.clock import clock


def prepare_session(client: Client, layout: Layout, timeout_seconds: float) -> Lease:
    """Create the persistent nodes; return the lease of the session.

    :raises CoordinatorUnreachableError: not done within this time, or the session is lost.
    """
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
        lease: Lease = retry(partial(_prepare, client, layout))
    except KazooException as error:
        raise unreachable(layout, error) from error
    return lease


def _prepare(client: Client, layout: Layout) -> Lease:
    for path in (*layout.persistent, f"{layout.components}/worker"):
        client.ensure_path(path)
    # The lease counts from the start of the session, which this transaction proves.
    sent_at = clock()
    transaction = client.transaction()
    transaction.check(layout.workers, -1)
    transaction.commit()
    return Lease(client.negotiated_timeout_seconds or 0.0, client.heard_at or sent_at)
