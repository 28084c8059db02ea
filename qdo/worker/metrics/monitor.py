"""Answer HTTP requests about a parent process and its worker processes, on any thread.

The main loop of the parent reports its processes in each step. For each request, the monitor reads
the kernel and the memory that the processes share with their parent. So a hung or stopped process
is visible from outside.

`MetricsPage` holds the metrics of a worker process, in memory that its parent shares. The process
writes its metrics about once a second. The parent reads the metrics for each request, even if the
process hangs or has just died. Reader and writer never wait for each other.

A page contains the time until which its process leads. After that time another worker may lead. The
parent then omits the app's facts of this process, because the process may be frozen.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from qdo._version import __version__
from qdo.system import logs
from qdo.system.clock import clock
from qdo.worker.metrics import catalog
from qdo.worker.metrics.catalog import (
    CONTENT_TYPE,
    Metric,
    MetricTotals,
    Series,
    add,
    exposition,
    parse,
)
from qdo.worker.shared_memory import LoopReport, make_memory

# A page has two halves, which the process writes in turn. A half has the number of the write (8
# bytes), the length and the CRC-32 of its content (4 bytes each), and JSON. If the process dies
# during a write, or a job overwrites a half, the other half is still valid. Bytes of each half,
# enough for hundreds of jobs. Memory that was never written takes no room.
HALF_BYTES = 1 << 18
_HEADER = struct.Struct("<QII")
# Maximum pause between two steps of the main loop, in seconds, if the parent serves requests.
STEP_SECONDS = 1.0
# Seconds without a step after which the main loop does not count as supervising.
SILENT_SECONDS = 10.0
# Seconds after which an event loop counts as blocked. A running loop stores the time four times a
# second.
BLOCKED_SECONDS = 1.0
# Minimum seconds between two renderings of the metrics, for any number of clients.
RENDER_SECONDS = 0.5


class MetricsPage:
    """The memory in which this process publishes its metrics.

    :param fd: descriptor of the memory; None without a parent, because no process reads the
      metrics.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd
        self._number = 0

    def write(self, values: Any) -> None:
        """Publish values as JSON; raise ValueError if the page is too small."""
        if self._fd is None:
            return
        content = json.dumps(values).encode()
        if len(content) > HALF_BYTES - _HEADER.size:
            raise ValueError(f"{len(content)} bytes are more than {HALF_BYTES}")
        self._number += 1
        header = _HEADER.pack(self._number, len(content), zlib.crc32(content))
        os.pwrite(self._fd, header + content, self._number % 2 * HALF_BYTES)


class ChildMetrics:
    """The parent's access to the metrics of one child, for any thread."""

    def __init__(self) -> None:
        self.fd = make_memory("qdo-metrics")
        self._using = threading.Lock()
        self._last: Any = None

    def read(self) -> Any:
        """Return the latest values of the child; None before its first write."""
        with self._using:
            if self.fd >= 0:
                self._last = _read(self.fd) or self._last
            return self._last

    def close(self) -> None:
        """Read the values one last time, after the death of the child."""
        self.read()
        with self._using:
            os.close(self.fd)
            self.fd = -1


def _read(fd: int) -> Any:
    """Return the content of the newest valid half of a page."""
    found = []
    for start in (0, HALF_BYTES):
        data = os.pread(fd, HALF_BYTES, start)
        if len(data) < _HEADER.size:
            continue
        number, length, checksum = _HEADER.unpack_from(data)
        content = data[_HEADER.size : _HEADER.size + length]
        if number and len(content) == length and zlib.crc32(content) == checksum:
            found.append((number, content))
    for _, content in sorted(found, reverse=True):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(content)
    return None


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class MonitoredChild(Protocol):
    """A worker process of the parent; see `supervisor.child.ChildProcess`."""

    name: str
    metrics: ChildMetrics

    @property
    def pid(self) -> int: ...
    @property
    def registered(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def loop(self) -> LoopReport | None: ...


@dataclass(frozen=True, slots=True)
class PlaceView:
    """The state of a place for one worker process."""

    name: str
    # "running", "restarting" (the place waits for the next start) or "ended".
    state: str
    # Whether the parent has asked the process to exit.
    stopping: bool
    # The process of the place; None while no process runs.
    child: MonitoredChild | None


class Monitor:
    """A WSGI app that answers for one parent process at three fixed paths.

    :param silent_after: maximum seconds for which the event loop of a healthy process may be
      blocked.
    """

    def __init__(self, silent_after: float) -> None:
        self.silent_after = silent_after
        self._places: Sequence[PlaceView] = ()
        self._stepped_at = time.monotonic()
        self._changing = threading.Lock()
        self._living: dict[str, MonitoredChild] = {}
        self._started: Counter[str] = Counter()
        self._totals = MetricTotals()
        self._rendered: tuple[float, bytes] = (0.0, b"")

    def look(self, places: Sequence[PlaceView]) -> None:
        """Record the processes. The main loop calls this method in each step."""
        self._stepped_at = time.monotonic()
        living = {each.name: each.child for each in places if each.child is not None}
        with self._changing:
            self._places = places
            for name, child in self._living.items():
                if living.get(name) is not child:
                    self._totals.end(_published(child)[1])
            self._started.update(
                name for name, child in living.items() if self._living.get(name) is not child
            )
            self._living = living

    def __call__(
        self, environ: Mapping[str, Any], start_response: Callable[..., object]
    ) -> list[bytes]:
        answer = self._answer_to(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ]
        if answer.status == 405:
            headers.append(("Allow", "GET, HEAD"))
        start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
        return [answer.body]

    def _answer_to(self, method: str, path: str) -> HttpAnswer:
        routes = {"/metrics": self.metrics, "/healthz": self.healthz, "/readyz": self.readyz}
        if method not in ("GET", "HEAD"):
            return HttpAnswer(405, b"only GET and HEAD are allowed\n")
        if path not in routes:
            return HttpAnswer(404, f"there are only {', '.join(routes)}\n".encode())
        return routes[path]()

    def healthz(self) -> HttpAnswer:
        """Answer whether the parent supervises, and whether its processes are alive."""
        return _answer([*self._faults()])

    def readyz(self) -> HttpAnswer:
        """Answer whether every process is registered and not draining."""
        return _answer([*self._faults(), *self._obstacles()])

    def metrics(self) -> HttpAnswer:
        now = time.monotonic()
        rendered_at, text = self._rendered
        if not text or now - rendered_at >= RENDER_SECONDS:
            text = exposition(self._collect())
            self._rendered = now, text
        return HttpAnswer(200, text, CONTENT_TYPE)

    def _faults(self) -> Iterator[str]:
        silent = time.monotonic() - self._stepped_at
        if silent > SILENT_SECONDS:
            yield f"the parent process has not supervised for {silent:.0f} s"
        for place in self._places:
            if place.state == "restarting":
                yield f"{place.name} has ended, and starts again soon"
            elif place.child is not None and (fault := self._standstill(place.child)):
                yield f"{place.name} (pid {place.child.pid}) {fault}"

    def _standstill(self, child: MonitoredChild) -> str:
        if child.is_stopped():
            return "is stopped by a signal or a debugger"
        blocked = _blocked_seconds(child)
        if blocked > self.silent_after:
            return f"has not run its event loop for {blocked:.0f} s; its log names the job"
        return ""

    def _obstacles(self) -> Iterator[str]:
        if not self._places:
            yield "no worker process has started"
        for place in self._places:
            if place.state == "ended":
                yield f"{place.name} has ended"
            elif place.child is not None:
                state, values = _published(place.child)
                if place.stopping or state == "draining":
                    yield f"{place.name} drains"
                elif not place.child.registered or values[catalog.REGISTERED].get(()) != [1.0]:
                    yield f"{place.name} is not registered at the coordinator"
                elif values[catalog.LEASE].get(()) == [0.0]:
                    yield f"{place.name} starts no message: the coordinator does not respond"

    def _collect(self) -> dict[Metric, Series]:
        with self._changing:  # do not read pages here, because the main loop may wait for the lock
            places = self._places
            living = [*self._living.values()]
            metrics = self._totals.copy()
            restarts = sum(self._started.values()) - len(self._started)
        for child in living:
            add(_published(child)[1], metrics)
        add({catalog.LOG_DROPPED: {(): [float(logs.lines_missing())]}}, metrics)
        states = Counter(each.state for each in places)
        blocked = [_blocked_seconds(each) for each in living]
        metrics |= {
            catalog.BUILD: {(__version__, platform.python_version()): [1.0]},
            catalog.PROCESSES: {
                (state,): [states[state]] for state in ("running", "restarting", "ended")
            },
            catalog.RESTARTS: {(): [restarts]},
            catalog.LOOP_BLOCKED: {(): [max(blocked, default=0.0)]},
            catalog.HEALTHY: {(): [float(self.healthz().status == 200)]},
            catalog.READY: {(): [float(self.readyz().status == 200)]},
        }
        return metrics


def _published(child: MonitoredChild) -> tuple[str, dict[Metric, Series]]:
    values = child.metrics.read()
    if values is not None:
        with contextlib.suppress(ValueError):
            metrics = parse(values)
            until = values.get("leads_until")
            if not isinstance(until, float) or until <= clock():
                metrics |= {metric: {} for metric in catalog.FROM_LEADER}
            return values.get("state", ""), metrics
    return "", parse({"metrics": {}})


def _blocked_seconds(child: MonitoredChild) -> float:
    """Return the seconds for which an event loop is blocked; 0 if it runs or is unwatched."""
    report = child.loop()
    if report is None:
        return 0.0
    silent = clock() - report.beat
    return silent if silent >= BLOCKED_SECONDS else 0.0


def _answer(reasons: list[str]) -> HttpAnswer:
    value = {"schema": "qdo.health/1", "ok": not reasons, "reasons": reasons}
    body = json.dumps(value).encode() + b"\n"
    return HttpAnswer(503 if reasons else 200, body, "application/json")
