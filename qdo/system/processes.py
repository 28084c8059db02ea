"""Processes on Linux (trees, memory, command lines, limits), and the flag that stops jobs.

A flag tells jobs to end. `Message.stopping` reads the flag. A worker shares the memory page of the
flag with the child processes that run its jobs. Therefore a computing job sees the flag without a
thread, a message or a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Collection

from qdo.system.clock import clock

LINUX = sys.platform.startswith("linux")
# The bytes with which a parent process tells a worker process to drain or to abort its jobs.
STOP_REQUEST = b"S"
# Number of descriptors for logs, databases, connections of jobs, and other uses.
RESERVE = 256
_LEASE_AT = 8
_LEASE = struct.Struct("@dQ")
_COUNT_AT = 24
_COUNT = struct.Struct("@Q")
_CLAIMS_AT = 32
_TOKEN_BYTES = 8
# Number of ended claims that fit into the page. Jobs of further claims run to their end.
_MOST_CLAIMS = (mmap.PAGESIZE - _CLAIMS_AT) // _TOKEN_BYTES
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def adopt_orphans() -> bool:
    """Become the parent of orphaned descendants (Linux); return whether the call succeeded."""
    # Otherwise init would adopt the orphans, and this process would not notice their end.
    return LINUX and _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Request a signal for the end of the parent (Linux); return False if it has ended."""
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def reset_signals_in_forks() -> None:
    """Restore Python's signal handlers in forks, so libraries can end forks with SIGTERM."""
    os.register_at_fork(after_in_child=_reset_signals)


def _reset_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def set_name(name: str) -> str:
    """Change the name of this process in `ps -o comm` (Linux); return the former name."""
    before = _read("/proc/self/comm").decode().strip()
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))
    return before


def _prctl(option: int, value: object) -> bool:
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def children(parent: int, name: str | None = None) -> list[int]:
    """Return the children of a process, even in other groups, optionally only those with a name."""
    # Reading the state of every process on the machine takes 10 µs per process.
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
    """Return the descendants of a process. The result may lack some while others exit."""
    family = [pid]
    for each in family:  # the loop appends to the list
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                family += map(int, _read(f"/proc/{each}/task/{thread}/children").split())
    return family[1:]


def memory_bytes(pids: Collection[int], enough: int) -> int:
    """Return the memory of processes, accurately enough for a comparison with `enough`."""
    # If the resident memory of several processes exceeds the limit, add up their proportional set
    # sizes. Proportional set sizes count shared pages only once.
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


def waited_seconds(thread: int) -> float:
    """Return the seconds for which a thread of this process waited for a processor (Linux)."""
    fields = _read(f"/proc/self/task/{thread}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _read(path: str) -> bytes:
    """Read a file of /proc; return b"" if the process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def module_argv(module: str) -> tuple[str, ...]:
    """Return a command that runs a module. Python does not search the current folder."""
    # ``python -m`` searches the current folder first. A file in this folder could replace a module
    # of qdo, of its libraries or of Python. If the app is in this folder, `qdo.loading` appends the
    # folder to the path.
    return (sys.executable, "-P", "-m", module)


def ensure_open_files(connections: int) -> int:
    """Raise the limit of open files for `connections`; return the new limit."""
    # The usual soft limit of 1,024 open files protects only programs that use select(). A process
    # may raise its soft limit to the hard limit. Child processes inherit the new limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    needed = connections + RESERVE
    if soft < needed and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(connections, max(soft - RESERVE, soft // 2, 1))


class StopFlag:
    """The reasons why jobs of a worker process must stop, in memory that its job processes share.

    One byte tells whether the worker drains. The next values are the end of its lease and the
    number of its registrations, because a job must not continue under a later lease. Then follow
    the claims that ended or were paused while a job of the claim runs.

    :ivar claims: the tokens of these claims, in the worker process.
    """

    def __init__(self) -> None:
        self.claims: dict[bytes, None] = {}
        self._page: mmap.mmap | bytearray = bytearray(mmap.PAGESIZE)
        self._file = -1
        self.show(False)

    def raised(self) -> bool:
        """Return whether the worker of this process is draining or has lost its lease."""
        return self.draining() or not self.leased()

    def draining(self) -> bool:
        return self._page[0] != 0

    def leased(self) -> bool:
        """Return whether the worker's lease is valid; True in a process without a worker."""
        return clock() < float(_LEASE.unpack_from(self._page, _LEASE_AT)[0])

    def registration(self) -> int:
        """Return the number of registrations of the worker of this process."""
        return int(_LEASE.unpack_from(self._page, _LEASE_AT)[1])

    def show(self, stopping: bool) -> None:
        """Show whether the worker is draining. False also resets the lease."""
        self._page[0] = stopping
        if not stopping:
            _LEASE.pack_into(self._page, _LEASE_AT, math.inf, 0)

    def begin_lease(self) -> None:
        """Count a registration of the worker. `move_lease` then shows the lease."""
        _LEASE.pack_into(self._page, _LEASE_AT, -math.inf, self.registration() + 1)

    def move_lease(self, until: float) -> None:
        """Show the time at which the worker's lease ends."""
        _LEASE.pack_into(self._page, _LEASE_AT, until, self.registration())

    def claim_ended(self, queue: str, fence: int) -> bool:
        """Return whether the queue has left the worker, will soon leave, or is paused."""
        count = int(_COUNT.unpack_from(self._page, _COUNT_AT)[0])
        ends = range(_CLAIMS_AT, _CLAIMS_AT + count * _TOKEN_BYTES, _TOKEN_BYTES)
        return count > 0 and _token(queue, fence) in (self._page[at : at + 8] for at in ends)

    def end_claim(self, queue: str, fence: int) -> None:
        """Tell the jobs of a claim to stop, until `forget_claim`."""
        self.claims[_token(queue, fence)] = None
        self._show_claims()

    def forget_claim(self, queue: str, fence: int) -> None:
        """Remove the claim, because no job of the claim runs or the claim is not paused anymore."""
        if self.claims:
            self.claims.pop(_token(queue, fence), None)
            self._show_claims()

    def _show_claims(self) -> None:
        # A child may read at the same time. The child then finds a token of these claims, or no
        # token.
        tokens = b"".join(list(self.claims)[:_MOST_CLAIMS])
        self._page[_CLAIMS_AT : _CLAIMS_AT + len(tokens)] = tokens
        _COUNT.pack_into(self._page, _COUNT_AT, len(tokens) // _TOKEN_BYTES)

    def share(self) -> int:
        """Return a file descriptor that a child process passes to `adopt`."""
        if self._file < 0:
            handle = _unnamed_file()
            os.ftruncate(handle, mmap.PAGESIZE)
            page = mmap.mmap(handle, mmap.PAGESIZE)
            page[:] = bytes(self._page)
            self._page = page
            self._file = handle
        return self._file

    def adopt(self, handle: int) -> None:
        """Use the flag of the process that shared this descriptor, and close the descriptor."""
        self._page = mmap.mmap(handle, mmap.PAGESIZE)
        os.close(handle)


def _token(queue: str, fence: int) -> bytes:
    # Include the queue, because queues that a worker claims together have the same fence.
    name = f"{fence} {queue}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=_TOKEN_BYTES).digest()


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("qdo-stopping")
    handle, path = tempfile.mkstemp(prefix="qdo-stopping-")
    os.unlink(path)
    return handle


# The stop flag of this process.
SIGN = StopFlag()
