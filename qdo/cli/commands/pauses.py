"""The commands `qdo pause` and `qdo resume`, for pauses of queues in the whole fleet."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType

import click

from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import from_coordinator, open_coordinator
from qdo.cli.options import COORDINATOR, DURATION, duration_option, require_app
from qdo.cli.output import emit, print_message
from qdo.connections.services import open_locks
from qdo.coordination.bulk_reads import names_below
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import NotFoundError, PausesUnreadableError, UsageError
from qdo.fleet import pauses as fleet_pauses
from qdo.fleet.names import match_everything
from qdo.fleet.pause_machine import Pause, PauseNode, paused_queues
from qdo.ops.items import pause_item
from qdo.queues import is_glob
from qdo.settings.settings import Settings
from qdo.system.processes import die_with_parent, module_argv
from qdo.text import join_some, pluralize

# Time after SIGTERM in which a command must end before it receives SIGKILL.
KILL_SECONDS = 10.0
_LOOK_SECONDS = 0.1
# The environment variable that passes the fence of a section to the COMMAND of `qdo pause`.
FENCE_VARIABLE = "QDO_HOLD_FENCE"
# The exit code of a shell that cannot run a command.
_CANNOT_RUN = 126


def run_bound(
    argv: Sequence[str],
    holds: Callable[[], bool],
    environ: Mapping[str, str],
    kill_seconds: float = KILL_SECONDS,
) -> int:
    """Run a command and wait for its end. Return its exit code, or 128 + N after signal N.

    Call `holds` every 0.1 s. If `holds` returns False, the command receives SIGTERM, and SIGKILL
    `kill_seconds` later. The command also receives SIGTERM if this process is killed. Call this
    function in the main thread.
    """
    parent = str(os.getpid())
    ended_at_signal = False
    process = subprocess.Popen([*module_argv(__name__), parent, *argv], env=environ)
    with _passed_on(process):
        while True:
            try:
                code = process.wait(kill_seconds if ended_at_signal else _LOOK_SECONDS)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                if ended_at_signal:
                    process.kill()
                elif not holds():
                    ended_at_signal = True
                    process.terminate()


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals to a process during a block. End the process at the end of the block."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    # The terminal itself sends Ctrl-C to the command.
    handlers = {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGINT: ignore}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()


def _become(parent: int, argv: list[str]) -> int:
    if not die_with_parent(parent, signal.SIGTERM):
        return 128 + signal.SIGTERM
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]!r}: {error.strerror}\n")
    return _CANNOT_RUN


if __name__ == "__main__":
    sys.exit(_become(int(sys.argv[1]), sys.argv[2:]))


class CommandAfterDashes(click.Command):
    """A command whose parameter `run` has the arguments after `--`; None without `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.params["run"] = tuple(args[at + 1 :]) if at < len(args) else None
        return super().parse_args(ctx, args[:at])


@dataclass(frozen=True, slots=True)
class _PlannedPause:
    """A planned pause, and the maximum wait for the messages in flight."""

    pause: Pause
    timeout_seconds: float
    allow_none: bool


@click.command(cls=CommandAfterDashes)
@click.argument("globs", metavar="GLOB... [-- COMMAND...]", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List pauses and sections; pause nothing.")
@click.option("--for", "lasting", type=DURATION, help="End by itself, after 90s, 2h or 7d.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the messages in flight.")
@duration_option("--timeout", "60s", "How long to wait for the messages in flight.")
@click.option("--allow-none", is_flag=True, help="Allow a glob that matches no queue yet.")
@changing(*COORDINATOR, "session_timeout_seconds")
def pause(
    globs: tuple[str, ...],
    run: tuple[str, ...] | None,
    listing: bool,
    lasting: float | None,
    no_wait: bool,
    timeout: float,
    allow_none: bool,
    consent: Consent,
    settings: Settings,
) -> int:
    """Pause the queues that match a GLOB in the whole fleet, also later ones.

    \b
    qdo pause 'mail-*' --for 2h --reason "SMTP is down"
    qdo pause 'mail-*' -- ./migrate.sh
    qdo pause --list

    No message of them is started; those in flight end. Positions, owners and order do not change.
    Returns once no message of these queues is in flight anywhere; after --timeout with exit code 4,
    and the queues stay paused. `qdo resume` ends the pause.

    With COMMAND, the pause lasts while COMMAND runs, and ends with this process. COMMAND receives
    SIGTERM if the queues may continue before it has ended. The exit code is that of COMMAND, or
    128 + N after signal N; 4 if they are not paused in time, and 5 if they may have continued too
    early. The command asks no question, but globs that match all queues need --yes.

    --list also names the workers that may still run messages of paused queues.
    """
    require_app(settings)
    if listing == bool(globs):
        raise UsageError(reason="give GLOB... or --list, not both")
    if listing:
        _list(consent.form, settings)
        return 0
    if run is not None and (not run or lasting is not None or no_wait):
        if not run:
            raise UsageError(reason="a COMMAND must follow `--`; without `--` the pause lasts")
        raise UsageError(reason="--for and --no-wait are for a pause without COMMAND")
    pause = fleet_pauses.new_pause(globs, consent.reason, lasting)
    planned = _PlannedPause(pause, timeout, allow_none)
    if run is not None:
        return _run_paused(planned, run, consent, settings)
    _pause(planned, consent, settings, waits=not no_wait)
    return 0


def _pause(planned: _PlannedPause, consent: Consent, settings: Settings, *, waits: bool) -> None:
    pause = planned.pause
    with open_coordinator(settings) as (client, layout):
        count = _matching(client, layout, planned)
    what = f"pause {' '.join(pause.queues)}"
    if not consent.given(what, _effect(pause, count).show, asks=_are_several(pause.queues)):
        return
    with open_coordinator(settings, create=True) as (client, layout):
        if client is None:
            raise NotFoundError(what="coordinator", name=settings.coordinator)
        zxid = fleet_pauses.pause_queues(client, layout, pause)
        workers = None
        if waits:
            try:
                workers = fleet_pauses.wait_in_force(
                    client, layout, pause, zxid, planned.timeout_seconds, _report_waiting
                )
            except KeyboardInterrupt:
                print_message(f"hint: the pause stays in force; end it: qdo resume --id {pause.id}")
                raise
    _effect(pause, count, id=pause.id, workers=workers).show(consent.form, executed=True)


def _effect(
    pause: Pause, count: int, *, id: str | None = None, workers: int | None = None
) -> Effect:
    """Return the effect of a pause. `id` is None before the pause has been written."""
    item = {**pause_item(pause), "id": id, "matching": count, "workers": workers}
    columns = ("id", "queues", "matching", "workers", "until", "why")
    return Effect("qdo.pause/1", columns, [item])


@click.command()
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("--id", "id", metavar="ID", help="End this pause.")
@click.option("--all", "everything", is_flag=True, help="End all pauses, also unreadable ones.")
@changing(*COORDINATOR)
def resume(
    globs: tuple[str, ...],
    id: str | None,
    everything: bool,
    consent: Consent,
    settings: Settings,
) -> None:
    """Let queues continue that `qdo pause` has stopped.

    GLOB is one of those that `qdo pause --list` shows, as it was given to `qdo pause`.
    If that pause has several globs, the others stay paused.
    """
    require_app(settings)
    if (bool(globs), id is not None, everything).count(True) != 1:
        raise UsageError(reason="give GLOB..., --id ID or --all, and only one of them")
    with open_coordinator(settings) as (client, layout):
        if client is None and not everything:
            raise NotFoundError(what="pause", name=id or globs[0])
        node = fleet_pauses.read_pauses(client, layout).node if client is not None else PauseNode()
        ended = fleet_pauses.chosen(node, globs, id)
        several = everything or _are_several(globs or ended[0].queues)
        what = f"resume {' '.join(globs) or id or 'all queues'}"
        asks = several and node != PauseNode()
        if consent.given(what, _resumed_effect(ended).show, asks=asks):
            if client is not None:
                ended = _resumed(client, layout, globs, id, consent.reason)
            if not ended:
                print_message("hint: nothing was paused")
            _resumed_effect(ended).show(consent.form, executed=True)


def _resumed(
    client: Client, layout: Layout, globs: Sequence[str], id: str | None, reason: str
) -> list[Pause]:
    if id is not None:
        return fleet_pauses.resume_pause(client, layout, id, reason)
    with fleet_pauses.recorded(client, layout, "resume", globs or ("*",), reason) as record:
        if globs:
            return fleet_pauses.resume_globs(client, layout, globs, record=record)
        return fleet_pauses.end_all(client, layout, record=record)


def _resumed_effect(ended: Sequence[Pause]) -> Effect:
    return Effect("qdo.resume/1", ("id", "queues", "why"), [pause_item(each) for each in ended])


def _run_paused(
    planned: _PlannedPause, run: Sequence[str], consent: Consent, settings: Settings
) -> int:
    globs = planned.pause.queues
    reason = consent.reason
    if shutil.which(run[0]) is None:
        raise UsageError(reason=f"COMMAND must be a program that can be run, got {run[0]!r}")
    with open_coordinator(settings) as (client, layout):
        count = _matching(client, layout, planned, allow_all=consent.yes)
    what = f"run {run[0]} while {' '.join(globs)} is paused"
    if not consent.given(what, _effect(planned.pause, count).show, asks=False):
        return 0
    with closing(open_locks(settings.app, settings)) as locks:
        client = locks.connection.client
        with fleet_pauses.recorded(client, locks.layout, "pause", globs, reason) as record:
            section, end = locks.pause(
                globs, reason, planned.timeout_seconds, record=record, on_wait=_report_waiting
            )
        try:
            environ = {**os.environ, FENCE_VARIABLE: str(section.fence)}
            code = run_bound(run, lambda: section.valid, environ)
            section.check()
        finally:
            end()
    return code


def _list(form: str, settings: Settings) -> None:
    """List pauses and sections with their reasons and ends."""
    read: fleet_pauses.PausesRead | None = from_coordinator(
        settings, fleet_pauses.read_pauses, None
    )
    if read is not None and read.node.fault is not None:
        raise PausesUnreadableError(reason=read.node.fault)
    if read is None or not read.node.pauses:
        print_message("hint: nothing is paused; see `qdo pause --help`")
        emit("qdo.holds/1", [], form)
        return
    late = [name for name, upto in read.obeyed.items() if upto < read.zxid]
    columns = ("id", "kind", "queues", "until", "who", "why")
    emit("qdo.holds/1", map(pause_item, read.node.pauses), form, columns)
    if late:
        print_message(
            f"hint: {pluralize(len(late), 'worker')} of {len(read.obeyed)} may still have a"
            f" message of these queues in flight: {join_some(late)}"
        )


def _are_several(globs: Sequence[str]) -> bool:
    return len(globs) > 1 or any(map(is_glob, globs))


def _matching(
    client: Client | None, layout: Layout, planned: _PlannedPause, *, allow_all: bool = True
) -> int:
    """Return the number of matching queues; raise an error if a glob is probably a mistake."""
    names = names_below(client, layout.queues) if client is not None else []
    globs = planned.pause.queues
    if not allow_all and match_everything(globs, names):
        reason = f"{' '.join(globs)} matches every queue; add --yes to pause all of them"
        raise UsageError(reason=reason)
    try:
        fleet_pauses.check_matches(() if planned.allow_none else globs, names)
    except NotFoundError:
        print_message("hint: workers have not seen such a queue; --allow-none pauses later ones")
        raise
    takes = paused_queues([planned.pause])
    return 0 if takes is None else sum(map(takes, names))


def _report_waiting(names: Sequence[str]) -> None:
    print_message(f"waiting for messages in flight: {join_some(names, fleet_pauses.NAMES_SHOWN)}")
