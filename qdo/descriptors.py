"""How many files and connections a process may have open."""

from __future__ import annotations

import resource

RESERVE = 256
"""Descriptors that are left for everything else: logs, databases, the connections of jobs."""


def room_for(connections: int) -> int:
    """Return how many of so many connections a process may open, having asked for more room.

    The usual soft limit of 1,024 open files is only there for programs that use select(); every
    process may raise its own up to the hard limit, and all that it starts inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    wanted = connections + RESERVE
    if soft < wanted and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(connections, max(soft - RESERVE, soft // 2, 1))
