"""Errors that the coordinator returns for one node: they concern nothing but that node."""

from __future__ import annotations

from kazoo.exceptions import (
    BadArgumentsError,
    EphemeralOnLocalSessionError,
    InvalidACLError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NotEmptyError,
    QuotaExceededError,
)

from qdo.text import describe

_OF_A_NODE = (
    BadArgumentsError,
    EphemeralOnLocalSessionError,
    InvalidACLError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NotEmptyError,
    QuotaExceededError,
)


def is_refusal(error: object) -> bool:
    """Return whether an error is about one node, so that a repetition would fail as well."""
    return isinstance(error, _OF_A_NODE)


def refusal_reason(error: Exception, action: str = "read") -> str:
    """Return why a node cannot be read or written, with the remedy."""
    remedy = "; restore its ACL" if isinstance(error, NoAuthError) else ""
    return f"the node cannot be {action}: {describe(error)}{remedy}"
