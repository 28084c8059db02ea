"""Checks the names that the processes of an app share, matches globs, and names the writer."""

from __future__ import annotations

import functools
import getpass
import os
import re
import socket
from collections.abc import Collection, Iterable

from qdo.errors import SharedNameError
from qdo.queues import QueueFilter, name_error

_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)
# Longer globs count as overlapping, because a comparison takes quadratic time.
_MOST_CHARACTERS = 400


def checked_name(what: str, name: str) -> str:
    """Return a name; raise SharedNameError if no node can have the name."""
    reason = name_error(name) if type(name) is str else f"it is a {type(name).__name__}"
    if reason:
        raise SharedNameError(what=what, name=name, reason=reason)
    return name


@functools.cache
def writer() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def match_everything(globs: Iterable[str], names: Collection[str]) -> bool:
    """Return whether these globs together match all known queues."""
    patterns = tuple(globs)
    if any("*" in glob and not glob.replace("?", "", 1).strip("*") for glob in patterns):
        return True  # "*" or "?*"
    # If an app has only one queue, a glob that matches this queue does not mean all queues.
    return len(names) > 1 and all(map(QueueFilter(patterns).matcher(), names))


def overlap(one: str, other: str) -> bool:
    """Return whether one name may match both globs. A set in brackets counts as any character."""
    if max(len(one), len(other)) > _MOST_CHARACTERS:
        return True
    first = _tokens(one)
    second = _tokens(other)
    # `possible[j]`: the tokens of `one` so far and the first j of `other` have a name in common.
    possible = [True, *[False] * len(second)]
    for j, token in enumerate(second):
        possible[j + 1] = possible[j] and token == "*"  # noqa: S105
    for mine in first:
        row = [possible[0] and mine == "*"]
        for j, theirs in enumerate(second):
            if "*" in (mine, theirs):
                row.append(row[j] or possible[j + 1])
            else:
                row.append(possible[j] and (mine == theirs or "?" in (mine, theirs)))
        possible = row
    return possible[-1]


def _tokens(glob: str) -> list[str]:
    return ["?" if len(token) > 1 else token for token in _TOKEN.findall(glob)]


def exactly(name: str) -> str:
    """Return the glob that only one name matches."""
    return re.sub(r"([*?[])", r"[\1]", name)


def only_name(glob: str) -> str | None:
    """Return the only name that a glob matches ("a*" for "a[*]"); None with wildcards."""
    name = re.sub(r"\[([*?[])\]", r"\1", glob)
    return name if exactly(name) == glob else None
