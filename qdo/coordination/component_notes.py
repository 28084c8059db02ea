"""Notes in the component node of a worker, written by its parent in the worker's session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kazoo.exceptions import KazooException

from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.values import encode, load
from qdo.errors import CoordinatorUnreachableError


def note_in_component(client: Client, layout: Layout, note: Mapping[str, Any]) -> None:
    """Add keys to the component node of the client's session, if it has one.

    The worker overwrites them when it writes its node again.

    :raises CoordinatorUnreachableError: the connection is lost.
    """
    folder = f"{layout.components}/worker"
    names = read_children(client, [folder]).get(folder, [])
    session = client.client_id[0] if client.client_id is not None else 0
    for read in read_nodes(client, [f"{folder}/{name}" for name in names]):
        if read.session != session:
            continue
        value, fault = load(read.data)
        if fault is not None:
            continue
        try:
            client.set(read.path, encode({**value, **note}))
        except KazooException as error:
            raise CoordinatorUnreachableError(
                url=client.address.url, reason=f"{type(error).__name__} {error}".strip()
            ) from error
