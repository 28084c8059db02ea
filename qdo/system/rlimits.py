"""Raises the limit of open files and connections of a process."""

from __future__ import annotations

import resource

RESERVE = 256
"""Descriptors reserved for everything else: logs, databases, the connections of jobs."""


def ensure_open_files(connections: int) -> int:
    """Raise the limit of open files for `connections`; return how many the process may open.

    The usual soft limit of 1,024 open files exists only for programs that use select(). Every
    process may raise its own up to the hard limit, and its child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    wanted = connections + RESERVE
    if soft < wanted and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(connections, max(soft - RESERVE, soft // 2, 1))
