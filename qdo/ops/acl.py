"""Compares the access control lists of an app's nodes with the settings, and corrects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qdo.coordination.access import acl_text, same_list
from qdo.coordination.bulk_reads import pipelined, read_permitted_children
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.text import describe


@dataclass(frozen=True, slots=True)
class AclDifference:
    """A node whose list differs from the settings.

    `found` is None if this account may not read the list.
    """

    path: str
    found: str | None
    expected: str


def acl_differences(client: Client, layout: Layout) -> list[AclDifference]:
    """Return the nodes of an app whose list differs from the settings, children before parents."""
    return differences_of(client, list(_paths(client, layout.root)))


def differences_of(client: Client, paths: Sequence[str]) -> list[AclDifference]:
    """Return the nodes whose list differs from the settings, in the given order."""
    differences = []
    for path, answer in pipelined(client, client.get_acls_async, paths):
        expected = client.access.acl_of(path)
        if isinstance(answer, Exception):
            differences.append(AclDifference(path, None, acl_text(expected)))
        elif answer is not None and not same_list(answer[0], expected):
            differences.append(AclDifference(path, acl_text(answer[0]), acl_text(expected)))
    return differences


def apply_acls(client: Client, differences: Sequence[AclDifference]) -> dict[str, str]:
    """Set the lists of these nodes.

    Return the paths that the coordinator refused, with the reasons.
    """

    def send(path: str) -> Any:
        return client.set_acls_async(path, client.access.acl_of(path))

    # Keep this order: the node of the app comes last. Workers with acl = "required" check this
    # node. Such a worker must not start while other nodes are open.
    paths = [each.path for each in differences]
    return {
        path: describe(answer)
        for path, answer in pipelined(client, send, paths)
        if isinstance(answer, Exception)
    }


def _paths(client: Client, root: str) -> Iterator[str]:
    """Return the node at `root` and all nodes below it, children before parents."""
    levels = [[root]]
    while levels[-1]:
        listed = read_permitted_children(client, levels[-1])
        levels.append([f"{path}/{name}" for path, names in listed.items() for name in names or ()])
    for level in reversed(levels):
        yield from level
