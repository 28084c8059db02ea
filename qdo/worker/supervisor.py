"""The parent of the worker processes: starts them, restarts them, stops them, buries them.

A plain single-threaded loop without gevent that never imports the app: whatever the app does
to its worker, the parent goes on. It sleeps until a signal, a word from a child or a due time;
what to do is decided by `qdo.worker.roster`.

When a child dies, the order is what makes it safe: its process group is killed while the dead
leader still holds its number, the leader is reaped, every other member of the group is waited
for, and only then its coordinator session is closed (`qdo.worker.sessions`).

=============  ==================================================================
signal         meaning
=============  ==================================================================
SIGTERM, INT   first: drain; second: abort the jobs and release; third: kill
SIGHUP         drain, however often it comes: a closed terminal sends it twice;
               left alone where it is ignored (nohup)
SIGCHLD        look which child has ended
=============  ==================================================================

A parent that is killed itself leaves its children behind on purpose: each sees the other end
of its pipe close, and drains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from qdo import log
from qdo.brokers import closing_seconds, positions_of
from qdo.coordination.crashes import InHand
from qdo.settings import Settings
from qdo.worker.processes import CHILD_ARGV, Child, adopt_orphans, next_ended
from qdo.worker.reloading import POLL_SECONDS, FileWatch
from qdo.worker.roster import Action, Ask, Await, GiveUp, Kill, Restart, Roster, Spawn, Stop
from qdo.worker.sessions import Closer, prepare_closing

LAST_SECONDS = 1.0
"""How long a parent that was told to kill still waits for sessions to be closed."""

_log = logging.getLogger(__name__)


def supervise(
    settings: Settings,
    target: str | None,
    *,
    argv: Sequence[str] = CHILD_ARGV,
    child: type[Child] = Child,
) -> int:
    """Run `settings.processes` worker processes until they end; return the exit code.

    To be called on the main thread of a process that has no other children.

    :param target: the app as ``MODULE:APP``; None: the job named in the settings.
    :param argv: the command of a child, and `child` its class: tests use others.
    :returns: the code of a child that could not even begin, else the worst of the last codes.
    """
    log.configure(settings.log_level)
    adopt_orphans()
    prepare_closing(settings.coordinator)
    parent = _Parent(settings, target, argv, child)
    with parent.signals():
        return parent.run()


@dataclasses.dataclass(slots=True)
class _Grave:
    """A dead child of whose group something may still live."""

    child: Child
    give_up_at: float
    in_hand: list[InHand]
    reason: str


class _Parent:
    def __init__(
        self, settings: Settings, target: str | None, argv: Sequence[str], kind: type[Child]
    ) -> None:
        self._settings = settings
        self._target = target
        self._argv = argv
        self._kind = kind
        ending = max(settings.drain_seconds, closing_seconds(settings.broker))
        self._roster = Roster(settings.processes, ending, settings.reload)
        self._watch = FileWatch() if settings.reload else None
        self._look_at = 0.0
        self._children: dict[int, Child] = {}
        """By place."""
        self._graves: list[_Grave] = []
        self._left: list[int] = []
        self._closers: list[Closer] = []
        self._presses = 0
        self._hung_up = False
        self._leave_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    # --- signals: set a flag, ring the bell -----------------------------------------

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to signals for the time of the block."""
        handlers = {
            signal.SIGTERM: self._on_press,
            signal.SIGINT: self._on_press,
            signal.SIGCHLD: self._on_child,
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._on_hang_up
        old_fd = signal.set_wakeup_fd(self._ringer.fileno(), warn_on_full_buffer=False)
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_fd)
            self._selector.close()
            self._bell.close()
            self._ringer.close()

    def _on_press(self, number: int, frame: FrameType | None) -> None:
        self._presses += 1

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        """Only there so that the signal rings the bell."""

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody is left to hear
            self._ringer.send(b"\0")

    # --- the loop ---------------------------------------------------------------------

    def run(self) -> int:
        """Go on until every place has ended and every session of the dead is closed."""
        self._do(self._roster.begin(time.monotonic()))
        while not self._finished():
            self.step()
        return self._roster.exit_code

    def step(self) -> None:
        """Sleep until something happens, and answer it."""
        for key, _ in self._selector.select(self._patience()):
            if key.data is None:
                self._empty_bell()
            else:
                self._hear(key.data)
        self._obey()
        self._bury()
        self._reload()
        self._do(self._roster.tick(time.monotonic()))

    def _finished(self) -> bool:
        if not self._roster.done:
            return False
        hurried = self._leave_at is not None and self._leave_at <= time.monotonic()
        return hurried or not (self._graves or self._closers)

    def _patience(self) -> float | None:
        times = [grave.give_up_at for grave in self._graves]
        times += [due for due in (self._roster.next_at, self._leave_at) if due is not None]
        if self._watch is not None:
            times.append(self._look_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _empty_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def _obey(self) -> None:
        if self._hung_up:
            self._hung_up = False
            self._do(self._roster.drain(time.monotonic()))
        while self._presses:
            self._presses -= 1
            self._do(self._roster.press(time.monotonic()))
            _log.info("asked to stop: %s", _STOPPING[self._roster.stop])
            if self._roster.stop is Stop.KILL and self._leave_at is None:
                self._leave_at = time.monotonic() + LAST_SECONDS

    def _reload(self) -> None:
        """Replace the workers if files of the app have changed."""
        now = time.monotonic()
        if self._watch is None or now < self._look_at:
            return
        self._look_at = now + POLL_SECONDS
        changed = self._watch.look()
        if changed and self._roster.stop is Stop.NO:
            _log.info("workers start anew: %s changed", ", ".join(map(os.path.relpath, changed)))
            self._do(self._roster.reload(now))

    # --- children -----------------------------------------------------------------------

    def _hear(self, place: int) -> None:
        child = self._children[place]
        if not child.hear():
            self._selector.unregister(child.pipe)
        self._heard(place, child)

    def _heard(self, place: int, child: Child) -> None:
        self._roster.registered(place, child.registered)
        if self._watch is not None:
            self._watch.add(child.files)

    def _bury(self) -> None:
        """Reap whoever has ended, and close the sessions of those of whom nothing lives."""
        places = {child.pid: place for place, child in self._children.items()}
        while (pid := next_ended()) is not None:
            if pid in places:
                self._reap(places.pop(pid))
            else:
                os.waitpid(pid, 0)
        self._visit_graves()
        self._closers = [closer for closer in self._closers if not closer.finished]

    def _reap(self, place: int) -> None:
        child = self._children.pop(place)
        with contextlib.suppress(KeyError):  # it closed its end before it died
            self._selector.unregister(child.pipe)
        code = child.reap()
        now = time.monotonic()
        asked = self._roster.asked(place)
        if child.registered:
            give_up_at = now + self._settings.session_timeout_seconds
            # What an operator kills dies of no message.
            in_hand = [] if asked else child.in_hand
            self._graves.append(_Grave(child, give_up_at, in_hand, _how(child, code)))
        else:
            os.close(child.receipts)
        self._visit_graves()
        self._heard(place, child)
        _log.log(*_obituary(child, code, stopping=asked))
        self._do(self._roster.exited(place, code, now))

    def _visit_graves(self) -> None:
        for grave in list(self._graves):
            if grave.child.group_gone():
                self._graves.remove(grave)
                self._left.append(grave.child.receipts)
                self._close_sessions(grave)
            elif grave.give_up_at <= time.monotonic():
                self._graves.remove(grave)
                os.close(grave.child.receipts)
                _log.warning(
                    "%s (pid %d): part of its process group could not be killed; its session is "
                    "left to time out",
                    grave.child.name,
                    grave.child.pid,
                )

    def _close_sessions(self, grave: _Grave) -> None:
        child = grave.child
        closer = Closer(
            f"{child.name} (pid {child.pid})",
            child.sessions,
            self._settings.session_timeout_seconds,
            self._ring,
            grave.in_hand,
            grave.reason,
            positions_of(self._settings.broker),
        )
        self._closers.append(closer)
        closer.start()

    # --- what the roster wants -----------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(place):
                    self._spawn(place)
                case Ask(place):
                    self._children[place].ask()
                case Kill(place, reason):
                    child = self._children[place]
                    _log.warning("%s (pid %d) is killed: %s", child.name, child.pid, reason)
                    child.kill()
                case Restart(place, after_seconds):
                    _log.info("%s starts again in %.1f s", _name(place), after_seconds)
                case Await(place):
                    _log.warning("%s waits until a file of the app changes", _name(place))
                case GiveUp(place, code):
                    _log.error(
                        "%s could not begin (exit code %d): qdo-worker ends", _name(place), code
                    )

    def _spawn(self, place: int) -> None:
        try:
            left = self._left
            # What a new version of the app asks for is looked at as at the start.
            again = self._roster.ran(place) and self._watch is None
            child = self._kind(
                _name(place), self._argv, self._settings, self._target, left, again
            )
        except OSError as error:
            _log.error("%s could not be started: %s", _name(place), error)
            self._do(self._roster.exited(place, 1, time.monotonic()))
            return
        self._left = []
        for fd in left:
            os.close(fd)
        self._children[place] = child
        self._selector.register(child.pipe, selectors.EVENT_READ, place)
        _log.info("%s started (pid %d)", child.name, child.pid)


_STOPPING = {
    Stop.DRAIN: "workers drain; ask again to abort their jobs",
    Stop.ABORT: "jobs are aborted; ask again to kill the workers",
    Stop.KILL: "workers are killed",
}


def _name(place: int) -> str:
    return f"process {place + 1}"


def _signal_name(number: int) -> str:
    """Return the name of a signal; most real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _obituary(child: Child, code: int, *, stopping: bool) -> tuple[int, str]:
    """Return log level and words for the end of a child."""
    if code == 0:
        return logging.INFO, f"{child.name} (pid {child.pid}) finished"
    level = logging.INFO if stopping and code == -signal.SIGTERM else logging.WARNING
    return level, _how(child, code)


def _how(child: Child, code: int) -> str:
    """Return how a child that had not finished ended."""
    how = f"ended with exit code {code}" if code >= 0 else f"died of {_signal_name(-code)}"
    return f"{child.name} (pid {child.pid}) {how}"
