"""`qdo timers`, `qdo locks`, `qdo audit` and `qdo admin outbox`: what an app shares."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import click

from qdo.cli.changing import Consent, changing
from qdo.cli.connections import from_coordinator, note_in_action_log
from qdo.cli.options import COORDINATOR, output_option, require_app, with_settings
from qdo.cli.output import (
    emit,
    emit_newest,
    iso_time,
    parse_duration,
    print_message,
    values_text,
)
from qdo.errors import NotFoundError, UsageError
from qdo.fleet.audit import read_entries
from qdo.fleet.audit_entries import AuditEntry
from qdo.fleet.timer_node import read_timers
from qdo.jobs.timers import Occurrence
from qdo.ops.items import audit_item
from qdo.ops.locks import locks as read_locks
from qdo.ops.timers import timer_items
from qdo.sending.timers import send_occurrences
from qdo.settings.settings import Settings
from qdo.text import did_you_mean, pluralize

if TYPE_CHECKING:
    from qdo.app import App


@click.command()
@with_settings(*COORDINATOR)
@output_option
def locks(form: str, settings: Settings) -> None:
    """List the holders of each lock of an app, and the processes that wait for it, in order."""
    rows = from_coordinator(settings, read_locks, [])
    if not rows:
        print_message("hint: no process holds a lock or waits for one")
    items = [
        {
            "lock": row.lock,
            "state": "held" if row.holds else "waiting",
            "kind": "shared" if row.shared else "exclusive",
            "who": row.who,
            "since": iso_time(row.since),
            "why": row.why,
        }
        for row in rows
    ]
    columns = ("lock", "state", "kind", "who", "since", "why")
    emit("qdo.locks/1", items, form, columns)


@click.command()
@click.argument("glob", default="*")
@click.option("--since", metavar="DURATION", help="Only entries at most this old: 2h, 7d.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="The number of entries, the newest first.",
)
@with_settings(*COORDINATOR)
@output_option
def audit(glob: str, since: str | None, limit: int, form: str, settings: Settings) -> None:
    """List the changes that operators made with commands, newest first.

    GLOB selects entries by their command, or by the name of what was changed, such as a queue; a
    change of all queues of a glob counts for each of them. The log keeps the last 5,000 entries,
    for 30 days.
    """
    app = require_app(settings)
    oldest = 0.0 if since is None else time.time() - parse_duration(since, "--since")
    read = partial(
        read_entries, limit=limit + 1, selects=lambda each: each.matches(glob), since=oldest
    )
    found = from_coordinator(settings, read, [])
    items = [_audit_item(each, form) for each in found]
    columns = ("time", "by", "command", "target", "from", "to", "reason", "fault")
    emit_newest(
        "qdo.audit/1",
        items,
        limit,
        form,
        columns,
        nouns="entries",
        empty=f"no entry in the action log of app {app!r} matches",
    )


def _audit_item(entry: AuditEntry, form: str) -> dict[str, Any]:
    item = audit_item(entry)
    if form == "table":
        item |= {"from": values_text(entry.before), "to": values_text(entry.after)}
    return item


@click.group()
def timers() -> None:
    """List timers, which send messages by the clock, and run one now.

    \b
    qdo timers list --app reports:app
    qdo timers run --app reports:app nightly --reason "asked by finance"
    """


@timers.command("list")
@with_settings(*COORDINATOR, pass_app=True)
@output_option
def list_timers(form: str, settings: Settings, code: App | None) -> None:
    """List the timers of an app; times are UTC.

    STATE is ok, overdue, or says why a timer waits. LAST is the last occurrence that was sent, or
    that counts as missed.
    """
    nodes = from_coordinator(settings, read_timers, {})
    items = timer_items(nodes, time.time(), None if code is None else code.timers)
    if not items:
        print_message("hint: the app has no timers; declare one with app.timer")
    emit("qdo.timers/1", items, form, ("timer", "when", "next", "last", "queue", "state"))


@timers.command("run")
@click.argument("name")
@changing
@with_settings(*COORDINATOR, "broker", pass_app=True)
@output_option
def run_timer(name: str, consent: Consent, form: str, settings: Settings, code: App | None) -> None:
    """Send the message of a timer now; its schedule does not change."""
    if code is None:
        raise UsageError(reason="--app must be MODULE:APP: timers are declared in code")
    if name not in code.timers:
        raise NotFoundError(what="timer", name=f"{name}{did_you_mean(name, code.timers)}")
    timer = code.timers[name]
    show = partial(_show_run, {"timer": name, "queue": timer.queue, "id": None, "executed": False})
    if consent.given(f"run timer {name!r}", show, form, asks=False):
        due = [(timer, Occurrence(int(time.time())))]
        with code:
            (id,) = send_occurrences(code, due, runs=True)
        after = {"queue": timer.queue, "id": id}
        note_in_action_log(settings, "timers run", name, {}, after, consent.reason)
        _show_run({"timer": name, **after, "executed": True}, form)


def _show_run(item: dict[str, Any], form: str, out: TextIO | None = None) -> None:
    emit("qdo.timers-run/1", [item], form, ("timer", "queue", "id"), out)


@click.group()
def outbox() -> None:
    """List the messages of outboxes that the broker refused; retry or drop them.

    \b
    qdo admin outbox list --app orders:app
    qdo admin outbox retry --app orders:app --all --reason "max_queues is larger"
    """


def _refused(code: App | None, ids: Collection[str] = ()) -> list[dict[str, Any]]:
    if code is None:
        raise UsageError(reason="--app must be MODULE:APP: outboxes are declared in code")
    return [
        {"table": each.table.name, "id": id, "queue": queue, "key": key, "reason": reason}
        for each in code.outboxes
        for id, queue, key, reason in each.refused()
        if not ids or id in ids
    ]


@outbox.command("list")
@with_settings(*COORDINATOR, pass_app=True)
@output_option
def list_refused(form: str, settings: Settings, code: App | None) -> None:
    """List the messages that the broker refused, with its reason."""
    items = _refused(code)
    if not items:
        print_message("hint: no message of an outbox is refused")
    emit("qdo.outbox/1", items, form, ("table", "id", "queue", "key", "reason"))


def _changing_refused(function: Any) -> Any:
    shared = changing(with_settings(*COORDINATOR, pass_app=True)(output_option(function)))
    every = click.option("--all", "every", is_flag=True, help="All messages that were refused.")
    return click.argument("ids", metavar="[ID]...", nargs=-1)(every(shared))


@outbox.command("retry")
@_changing_refused
def retry_refused(**chosen: Any) -> None:
    """Send refused messages again; the leader does it within a second."""
    _change_refused("retry", **chosen)


@outbox.command("drop")
@_changing_refused
def drop_refused(**chosen: Any) -> None:
    """Delete refused messages permanently."""
    _change_refused("drop", **chosen)


def _change_refused(
    verb: str,
    ids: tuple[str, ...],
    every: bool,
    consent: Consent,
    form: str,
    settings: Settings,
    code: App | None,
) -> None:
    if bool(ids) == every:
        raise UsageError(reason="name messages by their ids, or give --all")
    items = _refused(code, ids)
    if missing := set(ids) - {each["id"] for each in items}:
        raise NotFoundError(what="refused message", name=", ".join(sorted(missing)))
    show = partial(_show_refused, verb, items, False)
    asks = verb == "drop" and bool(items)
    if consent.given(f"{verb} {pluralize(len(items), 'message')}", show, form, asks=asks):
        found = [each["id"] for each in items]
        for each in code.outboxes if code and items else ():
            getattr(each, verb)(found)
            note_in_action_log(
                settings, f"admin outbox {verb}", str(each.table.name), {}, {"count": len(found)},
                consent.reason,
            )  # fmt: skip
        _show_refused(verb, items, True, form)
        if verb == "retry" and items:
            print_message("hint: `qdo admin outbox list` soon shows those that are refused again")


def _show_refused(
    verb: str, items: Sequence[dict[str, Any]], executed: bool, form: str, out: TextIO | None = None
) -> None:
    shown = [{**each, "executed": executed} for each in items]
    emit(f"qdo.outbox-{verb}/1", shown, form, ("table", "id", "queue", "reason"), out)
