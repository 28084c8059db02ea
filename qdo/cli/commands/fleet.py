"""The commands `qdo timers`, `qdo locks`, `qdo audit` and `qdo admin outbox`."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import from_coordinator, note_in_action_log
from qdo.cli.options import COORDINATOR, DURATION, limit_option, require_app, with_output
from qdo.cli.output import (
    change_cells,
    emit,
    emit_newest,
    iso_time,
    print_message,
)
from qdo.errors import NotFoundError, UsageError
from qdo.fleet.audit import read_entries
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
@with_output(*COORDINATOR)
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
@click.option("--since", type=DURATION, help="Only entries at most this old: 2h, 7d.")
@limit_option(50, "The number of entries, the newest first.")
@with_output(*COORDINATOR)
def audit(glob: str, since: float | None, limit: int, form: str, settings: Settings) -> None:
    """List the changes that operators made with commands, newest first.

    GLOB selects entries by their command, or by the name of what was changed, such as a queue; a
    change of all queues of a glob counts for each of them. The log keeps the last 5,000 entries,
    for 30 days.
    """
    app = require_app(settings)
    oldest = 0.0 if since is None else time.time() - since
    read = partial(
        read_entries, limit=limit + 1, selects=lambda each: each.matches(glob), since=oldest
    )
    emit_newest(
        "qdo.audit/1",
        list(map(audit_item, from_coordinator(settings, read, []))),
        limit,
        form,
        ("time", "by", "command", "target", "from", "to", "reason", "fault"),
        nouns="entries",
        empty=f"no entry in the action log of app {app!r} matches",
        cells=change_cells,
    )


@click.group()
def timers() -> None:
    """List timers, which send messages by the clock, and run one now.

    \b
    qdo timers list --app reports:app
    qdo timers run --app reports:app nightly --reason "asked by finance"
    """


@timers.command("list")
@with_output(*COORDINATOR, pass_app=True)
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
@changing(*COORDINATOR, "broker", pass_app=True)
def run_timer(name: str, consent: Consent, settings: Settings, code: App | None) -> None:
    """Send the message of a timer now; its schedule does not change."""
    if code is None:
        raise UsageError(reason="--app must be MODULE:APP: timers are declared in code")
    if name not in code.timers:
        raise NotFoundError(what="timer", name=f"{name}{did_you_mean(name, code.timers)}")
    timer = code.timers[name]
    item = {"timer": name, "queue": timer.queue, "id": None}
    if consent.given(f"run timer {name!r}", _timer_effect(item).show, asks=False):
        due = [(timer, Occurrence(int(time.time())))]
        with code:
            (id,) = send_occurrences(code, due, runs=True)
        after = {"queue": timer.queue, "id": id}
        note_in_action_log(settings, "timers run", name, {}, after, consent.reason)
        _timer_effect({"timer": name, **after}).show(consent.form, executed=True)


def _timer_effect(item: Mapping[str, Any]) -> Effect:
    return Effect("qdo.timers-run/1", ("timer", "queue", "id"), [item])


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
@with_output(*COORDINATOR, pass_app=True)
def list_refused(form: str, settings: Settings, code: App | None) -> None:
    """List the messages that the broker refused, with its reason."""
    items = _refused(code)
    if not items:
        print_message("hint: no message of an outbox is refused")
    emit("qdo.outbox/1", items, form, ("table", "id", "queue", "key", "reason"))


def _changing_refused(function: Any) -> Any:
    call = changing(*COORDINATOR, pass_app=True)(function)
    click.option("--all", "every", is_flag=True, help="All messages that were refused.")(call)
    return click.argument("ids", metavar="[ID]...", nargs=-1)(call)


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
    settings: Settings,
    code: App | None,
) -> None:
    if bool(ids) == every:
        raise UsageError(reason="name messages by their ids, or give --all")
    items = _refused(code, ids)
    if missing := set(ids) - {each["id"] for each in items}:
        raise NotFoundError(what="refused message", name=", ".join(sorted(missing)))
    columns = ("table", "id", "queue", "reason")
    effect = Effect(f"qdo.outbox-{verb}/1", columns, items)
    asks = verb == "drop" and bool(items)
    if consent.given(f"{verb} {pluralize(len(items), 'message')}", effect.show, asks=asks):
        refused = [each["id"] for each in items]
        for each in code.outboxes if code and items else ():
            getattr(each, verb)(refused)
            note_in_action_log(
                settings,
                f"admin outbox {verb}",
                str(each.table.name),
                {},
                {"count": len(refused)},
                consent.reason,
            )
        effect.show(consent.form, executed=True)
        if verb == "retry" and items:
            print_message("hint: `qdo admin outbox list` soon shows those that are refused again")
