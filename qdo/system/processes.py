"""Process trees on Linux: what happens to orphans, who belongs to a tree, its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection

LINUX = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def adopt_orphans() -> bool:
    """Make this process the parent of its descendants' orphans (Linux); return whether it worked.

    Otherwise init would adopt them, and this process could not tell when they are gone.
    """
    return LINUX and _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Ask the kernel to send this process a signal when its parent ends (Linux).

    :return: whether the parent is still alive.
    """
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def set_name(name: str) -> str:
    """Change the name of this process (Linux), which `ps -o comm` shows; return the former one."""
    before = _read("/proc/self/comm").decode().strip()
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))
    return before


def _prctl(option: int, value: object) -> bool:
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def children(parent: int, name: str | None = None) -> list[int]:
    """Return the children of a process, also those in other groups and sessions.

    Reads the state of every process of the machine: 10 µs for each of them.

    :param name: return only those with this name, see `set_name`.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
            head, _, rest = stat.rpartition(b") ")
            if int(rest.split()[1]) == parent:
                own = head.partition(b"(")[2].decode(errors="replace")
                if name is None or own == name:
                    found.append(int(entry))
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes below a process; fast, but may omit some while others exit."""
    family = [pid]
    for each in family:  # grows meanwhile
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                family += map(int, _read(f"/proc/{each}/task/{thread}/children").split())
    return family[1:]


def memory_bytes(pids: Collection[int], enough: int) -> int:
    """Return the memory of processes, as exactly as the comparison with a limit needs.

    That is their resident memory. If several processes exceed the limit by this measure, it is
    the sum of their proportional set sizes: pages that they share after a fork count once.

    :param enough: the limit.
    """
    resident = sum(_resident(pid) for pid in pids)
    if resident <= enough or len(pids) < 2:
        return resident
    return sum(_proportional(pid) for pid in pids)


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE_BYTES if fields else 0


def _proportional(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str) -> bytes:
    """Return the content of a file of /proc, nothing if its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
