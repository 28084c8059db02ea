"""Start, restart, stop and reap worker processes in the parent process.

The parent is a single-threaded loop without gevent. The parent never imports the app, so a fault of
the app cannot stop the parent. Settings in the app's code, such as `processes`, apply when the
first child reports them. The parent sleeps until a signal, a child's report or a due time.
`qdo.worker.supervisor.restarts` decides the actions, and `qdo.worker.supervisor.child` reaps. With
the setting `http`, a second thread serves HTTP on a separate gevent event loop.

=============  ==================================================================
signal         meaning
=============  ==================================================================
SIGTERM, INT   first: drain; second: abort the jobs and release; third: kill
SIGHUP         drain, however often it arrives: a closed terminal sends it twice;
               not handled where it is ignored (nohup)
SIGCHLD        look which child has exited
=============  ==================================================================

After a SIGKILL of the parent, each child notices that its pipe has closed. The child then drains,
as intended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from qdo.brokers.registry import kind_of
from qdo.errors import SettingsError
from qdo.fleet.actions import DRAIN, RELOAD, RESTART
from qdo.settings.settings import Settings
from qdo.system import logs
from qdo.system.processes import adopt_orphans
from qdo.text import describe
from qdo.worker.metrics.catalog import check_library
from qdo.worker.metrics.monitor import STEP_SECONDS, Monitor, MonitoredChild, PlaceView
from qdo.worker.supervisor.blocked import BlockedLoops
from qdo.worker.supervisor.child import CHILD_ARGV, ChildProcess, Reaper, next_ended
from qdo.worker.supervisor.restarts import (
    Action,
    GiveUp,
    Kill,
    Phase,
    Restart,
    RestartPolicy,
    Spawn,
    StopLevel,
    Terminate,
    WaitForReload,
)
from qdo.worker.supervisor.sessions import prepare_closing

if TYPE_CHECKING:
    from qdo.system.web_server import WebServer

_log = logging.getLogger(__name__)

HTTP_CONNECTIONS = 64
# Seconds between two checks of files. The parent reports a change only after a check without
# further changes, because an editor or a checkout writes many files.
POLL_SECONDS = 0.3
# Seconds for which the parent waits for sessions to close after the third stop signal.
LAST_SECONDS = 1.0
_STATES = {Phase.RUNNING: "running", Phase.WAITING: "restarting", Phase.ENDED: "ended"}
_STOPPING = {
    StopLevel.DRAIN: "draining the workers; send it again to abort their jobs",
    StopLevel.ABORT: "aborting jobs; send it again to kill the workers",
    StopLevel.KILL: "killing the workers",
}

_Mark = tuple[int, int, int]


class HttpService:
    """The HTTP server of a parent; without an address in the settings, it does nothing."""

    def __init__(self) -> None:
        self._server: WebServer | None = None
        self._monitor: Monitor | None = None

    def listen(self, settings: Settings) -> None:
        """Serve at the address in the settings, unless this process already serves.

        :raises SettingsError: the server cannot listen at the address, or a library is missing.
        """
        if not settings.http or self._server is not None:
            return
        from qdo.system.web_server import WebServer  # imports gevent: 17 ms, 5 MB

        check_library()
        monitor = Monitor(settings.session_timeout_seconds)
        host, _, port = settings.http.rpartition(":")
        try:
            address = host.strip("[]"), int(port)
            self._server = WebServer(monitor, address, connections=HTTP_CONNECTIONS)
        except (OSError, UnicodeError) as error:
            raise SettingsError(
                name="http",
                reason=f"cannot listen at {settings.http}: {describe(error)}; name a free port of"
                " this machine",
            ) from error
        self._monitor = monitor
        host, bound = self._server.address
        shown = f"[{host}]" if ":" in host else host
        _log.info("serving metrics and health at http://%s:%d", shown, bound)

    @property
    def next_at(self) -> float | None:
        """The time of the next `look` by `time.monotonic`; None for never."""
        return None if self._monitor is None else time.monotonic() + STEP_SECONDS

    def look(self, policy: RestartPolicy, children: Mapping[int, MonitoredChild]) -> None:
        if self._monitor is not None:
            self._monitor.look(
                [
                    PlaceView(
                        process_name(place),
                        _STATES[entry.phase],
                        policy.is_stopping(place),
                        children.get(place),
                    )
                    for place, entry in enumerate(policy.places)
                ]
            )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def process_name(place: int) -> str:
    return f"process {place + 1}"


class SourceWatcher:
    """Polls the source files that the app's workers report, with the setting `reload`."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark | None] = {}
        self._changed: set[str] = set()

    def add(self, paths: Iterable[str]) -> None:
        """Watch additional files. A missing file counts as changed when it appears."""
        for path in paths:
            if path not in self._marks:
                self._marks[path] = _mark(path)

    def look(self) -> list[str]:
        """Return the changed files after a look without further changes."""
        now = {path: _mark(path) for path in self._marks}
        fresh = {path for path, mark in now.items() if mark != self._marks[path]}
        self._marks = now
        self._changed |= fresh
        if fresh or not self._changed:
            return []
        changed = sorted(self._changed)
        self._changed.clear()
        return changed


def _mark(path: str) -> _Mark | None:
    """Return a value that changes with each write or replacement of a file; None without a file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def supervise(
    settings: Settings,
    target: str | None,
    *,
    argv: Sequence[str] = CHILD_ARGV,
    child: type[ChildProcess] = ChildProcess,
) -> int:
    """Run `settings.processes` worker processes until they end; return the exit code.

    Call this function on the main thread of a process without other children, then exit with the
    code. The process ignores stop signals afterwards.

    :param target: the app as ``MODULE:APP``; None for the job that the settings name.
    :param argv: the command of a child; tests replace the command and the class `child`.
    :returns: the code of a child that could not start, otherwise the highest last code of all
      children.
    :raises SettingsError: the parent cannot serve HTTP at the address in the settings.
    """
    logs.set_up(settings.logging)
    adopt_orphans()
    prepare_closing(settings.coordinator)
    parent = _Parent(settings, target, argv, child)
    with parent.signals(), contextlib.closing(parent.http):
        parent.http.listen(settings)
        return parent.run()


class _Parent:
    def __init__(
        self, settings: Settings, target: str | None, argv: Sequence[str], kind: type[ChildProcess]
    ) -> None:
        self._settings = settings
        self._target = target
        self._argv = argv
        self._kind = kind
        self._in_force = settings
        self.http = HttpService()
        self._policy = RestartPolicy(
            settings.processes, _drain_seconds(settings), settings.reload, settings.burst
        )
        self._operations: dict[str, Callable[[int, float], list[Action]]] = {
            DRAIN: self._policy.retire,
            RESTART: self._policy.restart,
            RELOAD: lambda place, now: self._policy.reload(now),
        }
        self._reaper = Reaper(settings, self._wake_up)
        self._loops = BlockedLoops(settings.session_timeout_seconds, self._wake_up)
        self._watcher = SourceWatcher() if settings.reload else None
        self._look_at = 0.0
        self._children: dict[int, ChildProcess] = {}
        self._stop_signals = 0
        self._hung_up = False
        self._leave_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle signals within the block, and ignore stop signals after the block."""
        handlers = {
            signal.SIGTERM: self._on_stop_signal,
            signal.SIGINT: self._on_stop_signal,
            signal.SIGCHLD: self._on_child,
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._on_hang_up
        old_fd = signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        try:
            yield
        finally:
            # Ignore late signals, because the default handler would change the exit code of this
            # process.
            for number in handlers:
                ignored = number is not signal.SIGCHLD
                signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
            signal.set_wakeup_fd(old_fd)
            self._selector.close()
            self._wakeup.close()
            self._wakeup_end.close()

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        """Do nothing. The signal wakes the loop because it has a handler."""

    def _wake_up(self) -> None:
        # If the pipe is full, the loop is about to wake. If the pipe is closed, the loop has ended.
        with contextlib.suppress(OSError):
            self._wakeup_end.send(b"\0")

    def run(self) -> int:
        """Run until all places have ended and all sessions of dead children are closed."""
        self._do(self._policy.start(time.monotonic()))
        while not self._is_finished():
            self.step()
        return self._policy.exit_code

    def step(self) -> None:
        """Sleep until the next event, and handle the event."""
        self.http.look(self._policy, self._children)
        for key, _ in self._selector.select(self._timeout()):
            if key.data is None:
                self._empty_wakeup()
            else:
                self._receive(key.data)
        self._handle_signals()
        self._act_for(self._children.items())
        self._reap_dead()
        self._reload()
        for child, reason in self._loops.look(self._children.values()):
            self._kill(child, reason)
        self._do(self._policy.tick(time.monotonic()))

    def _is_finished(self) -> bool:
        if not self._policy.done:
            return False
        hurried = self._leave_at is not None and self._leave_at <= time.monotonic()
        return hurried or not self._reaper.busy

    def _timeout(self) -> float | None:
        due = [self._reaper.next_at, self._policy.next_at, self._leave_at, self.http.next_at]
        if self._children:
            due.append(self._loops.next_at)
        if self._watcher is not None:
            due.append(self._look_at)
        times = [at for at in due if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _empty_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass

    def _handle_signals(self) -> None:
        if self._hung_up:
            self._hung_up = False
            self._do(self._policy.drain(time.monotonic()))
        while self._stop_signals:
            self._stop_signals -= 1
            self._do(self._policy.stop_signal(time.monotonic()))
            _log.info("stop signal: %s", _STOPPING[self._policy.stop])
            if self._policy.stop is StopLevel.KILL and self._leave_at is None:
                self._leave_at = time.monotonic() + LAST_SECONDS

    def _reload(self) -> None:
        """Replace the workers if source files of the app have changed."""
        now = time.monotonic()
        if self._watcher is None or now < self._look_at:
            return
        self._look_at = now + POLL_SECONDS
        changed = self._watcher.look()
        if changed and self._policy.stop is StopLevel.NO:
            _log.info("reloading the workers: %s changed", ", ".join(map(os.path.relpath, changed)))
            self._do(self._policy.reload(now))

    def _receive(self, place: int) -> None:
        child = self._children[place]
        if not child.receive():
            self._selector.unregister(child.pipe)
        if child.settings is not None and child.settings != self._in_force:
            self._use(child.settings)
        self._update(place, child)

    def _use(self, settings: Settings) -> None:
        """Apply the settings that a child reports. Children still get the original settings."""
        before = self._in_force
        self._in_force = self._reaper.settings = settings
        if settings.logging != before.logging:
            logs.set_up(settings.logging)
        prepare_closing(settings.coordinator)
        if settings.reload and self._watcher is None:
            self._watcher = SourceWatcher()
            self._policy.watching = True
        self._policy.drain_seconds = _drain_seconds(settings)
        try:
            self.http.listen(settings)
        except SettingsError as error:
            _log.error("%s; stopping qdo-worker", error)
            self._do(self._policy.drain(time.monotonic(), error.exit_code))
        self._do(self._policy.grow(settings.processes, time.monotonic()))

    def _update(self, place: int, child: ChildProcess) -> None:
        self._policy.registered(place, child.registered)
        if self._watcher is not None:
            self._watcher.add(child.files)

    def _act_for(self, children: Iterable[tuple[int, ChildProcess]]) -> None:
        """Perform the actions on workers that operators requested."""
        for place, child in [*children]:
            while child.asked:
                action = child.asked.pop(0)
                if (change := self._operations.get(action)) is not None:
                    _log.info(
                        "%s: an operator asked for the action %s", process_name(place), action
                    )
                    self._do(change(place, time.monotonic()))

    def _reap_dead(self) -> None:
        """Reap the children and adopted orphans that have exited."""
        places = {child.pid: place for place, child in self._children.items()}
        while (pid := next_ended()) is not None:
            if pid in places:
                self._reap(places.pop(pid))
            else:
                os.waitpid(pid, 0)
        self._reaper.step()

    def _reap(self, place: int) -> None:
        child = self._children.pop(place)
        with contextlib.suppress(KeyError):  # the child had closed its end before its death
            self._selector.unregister(child.pipe)
        code = self._reaper.reap(child, stopping=self._policy.is_stopping(place))
        self._update(place, child)
        self._act_for([(place, child)])
        self._do(self._policy.exited(place, code, time.monotonic()))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(place):
                    self._spawn(place)
                case Terminate(place) if place in self._children:
                    self._children[place].terminate()
                case Kill(place, reason):
                    self._kill(self._children[place], reason)
                case Restart(place, after_seconds):
                    _log.info("%s: restarting in %.1f s", process_name(place), after_seconds)
                case WaitForReload(place):
                    _log.warning(
                        "%s cannot start, waiting until a file of the app changes",
                        process_name(place),
                    )
                case GiveUp(place, code):
                    _log.error(
                        "%s cannot start (exit code %d); stopping qdo-worker",
                        process_name(place),
                        code,
                    )

    def _kill(self, child: ChildProcess, reason: str) -> None:
        child.kill()  # kill before logging, because a handler of a log_config may block
        _log.warning("killing %s (pid %d): %s", child.name, child.pid, reason)

    def _spawn(self, place: int) -> None:
        receipts = self._reaper.left
        # After a reload the app may be a new version, so the worker must check its jobs again.
        restarted = self._policy.places[place].ever_registered and self._watcher is None
        try:
            name = process_name(place)
            deaths = self._reaper.deaths(name)
            child = self._kind(
                name, self._argv, self._settings, self._target, receipts, restarted, deaths
            )
        except OSError as error:
            _log.error("cannot start %s, retrying: %s", process_name(place), error)
            self._do(self._policy.exited(place, 1, time.monotonic()))
            return
        self._reaper.left = []
        for fd in receipts:
            os.close(fd)
        self._children[place] = child
        self._selector.register(child.pipe, selectors.EVENT_READ, place)
        _log.info("%s started (pid %d)", child.name, child.pid)


def _drain_seconds(settings: Settings) -> float:
    broker = settings.broker
    return max(settings.drain_seconds, kind_of(broker).closing_seconds(broker))
