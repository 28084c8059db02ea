"""The commands of `qdo dead-letters`: list, show, add, retry, discard and export."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any

import click

from qdo.brokers.base import Broker
from qdo.brokers.registry import kind_of
from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.commands.decide import add_dead_letters
from qdo.cli.connections import note_in_action_log, open_connections
from qdo.cli.options import DURATION, limit_option, require_app, with_output, with_settings
from qdo.cli.output import Rows, each_shown, emit, json_text, print_message
from qdo.cli.readings import SHARED
from qdo.errors import NotFoundError, PartialFailureError, UsageError
from qdo.ops import dead_letters as ops
from qdo.ops.dead_letters import Filter, Letter, LetterResult
from qdo.ops.items import kind_item, letter_row
from qdo.ops.timers import failed_elsewhere
from qdo.positions import Positions
from qdo.settings.settings import Settings
from qdo.settings.vaults import vault_of
from qdo.text import did_you_mean, join_some, pluralize, printable_lines

SCHEMA = "qdo.dead-letters/2"


def dead_letter_page(item: dict[str, Any]) -> str:
    """Return the exported fields of a dead letter, one per line, and the traceback."""
    if "body" in item:
        body = json_text(item["body"])
    else:
        reason = item.get("body_error", "not JSON; `export` writes them in base64")
        body = f"{item['body_bytes']} bytes, {reason}"
    is_request = item["kind"] == "request"
    lines = {
        "pool" if is_request else "queue": item["queue"],
        "id": item["id"],
        **({} if is_request else {"position": item["position"]}),
        "asked" if is_request else "sent": item["time"],
        **({"due": item["due_time"]} if item["due_time"] else {}),
        "dead since": item["dead_time"],
        "attempts": item["attempts"],
        "worker": item["worker"],
        "take" if is_request else "fence": item["fence"],
        **({} if is_request else {"key": item["key"]}),
        "headers": json_text(item["headers"]) if item["headers"] else None,
        "error": item["error"],
        "body": body,
    }
    width = max(map(len, lines)) + 2
    margin = " " * width
    facts = [
        f"{name:{width}}{printable_lines(_text(value), margin)}" for name, value in lines.items()
    ]
    return "\n".join([*facts, "", printable_lines(_text(item["traceback"]).rstrip())])


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


class ListByDefault(click.Group):
    """A group with `list` as its default command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in (*self.commands, "--help", "-h"):
            hint = did_you_mean(first, self.commands, cutoff=0.7)
            if hint:
                raise click.UsageError(
                    f"there is no command {first!r}{hint}; for queues with this name write: "
                    f"list {first}",
                    ctx,
                )
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ListByDefault, name="dead-letters")
def dead_letters() -> None:
    """Manage dead letters: messages and requests that failed in their last attempt.

    \b
    qdo dead-letters --app mail:app
    qdo dead-letters --app mail:app --by error --newer 24h
    qdo dead-letters show --app mail:app QUEUE ID
    qdo dead-letters add --app mail:app QUEUE ID
    qdo dead-letters retry --app mail:app QUEUE ID
    qdo dead-letters retry --app mail:app 'eu-*' --error Timeout --newer 2h
    qdo dead-letters export --app mail:app > letters.jsonl

    Without a command, list them. ID is the id of a message or its position, or the id of a request,
    whose QUEUE is its pool.
    """


def _filters(function: Any) -> Any:
    """Add the options that select dead letters, as `filters`."""

    def call(error: str | None, older: float | None, newer: float | None, **arguments: Any) -> Any:
        return function(filters=Filter("*", error, older, newer), **arguments)

    update_wrapper(call, function)
    click.option("--newer", type=DURATION, help="Dead for at most this long.")(call)
    click.option("--older", type=DURATION, help="Dead for at least this long: 2h, 7d.")(call)
    return click.option("--error", metavar="TEXT", help="Only those whose error contains TEXT.")(
        call
    )


@contextmanager
def _broker(settings: Settings) -> Iterator[Broker | None]:
    require_app(settings)
    with open_connections(settings, coordinator=False) as connections:
        yield connections.known_broker()


def _matching(broker: Broker | None, glob: str, filters: Filter) -> list[Letter]:
    return ops.find(broker, replace(filters, queues=glob), time.time()) if broker else []


# --- reading ---


@dead_letters.command("list")
@click.argument("glob", default="*")
@limit_option(None, "Only the newest N.")
@click.option("--by", type=click.Choice(["error"]), help="Count those with the same error.")
@_filters
@with_output(*SHARED)
def list_(
    glob: str, limit: int | None, by: str | None, filters: Filter, form: str, settings: Settings
) -> None:
    """List the dead letters of queues and pools that match GLOB (default: all), oldest first.

    With --by error, errors that differ only in numbers and ids are counted together, the most
    frequent first. If no option leaves any out, timers that cannot send and messages that an outbox
    keeps, because the broker refused them, are counted as well.
    """
    if by is not None:
        _list_kinds(glob, filters, form, settings)
        return
    with _broker(settings) as broker:
        letters = _matching(broker, glob, filters)
        if not letters:
            print_message("no dead letters")
        if limit is not None and len(letters) > limit:
            print_message(f"hint: only the newest {limit} of {len(letters)} are listed")
            letters = letters[-limit:]
        has_requests = any(each.request is not None for each in letters)
        columns = {
            "queue": "QUEUE",
            "id": "ID",
            **({"kind": "KIND"} if has_requests else {}),
            "dead_time": "DEAD SINCE",
            "attempts": "ATTEMPTS",
            "error": "ERROR",
        }
        with each_shown(_name) as rows:
            if form == "table" or broker is None:
                emit(SCHEMA, rows(letters, letter_row), form, columns)
            else:
                emit(SCHEMA, _exported(broker, letters, settings, rows), form, columns)


def _list_kinds(glob: str, filters: Filter, form: str, settings: Settings) -> None:
    """Count all failures that wait for an operator, by error."""
    require_app(settings)
    is_whole = glob == "*" and filters == Filter()
    with open_connections(settings, coordinator=is_whole) as connections:
        groups = ops.grouped(_matching(connections.known_broker(), glob, filters))
        if is_whole and connections.client is not None:
            groups += failed_elsewhere(connections.client, connections.layout, time.time())
    if not groups:
        print_message("no dead letters")
    columns = ("kind", "count", "queues", "oldest", "newest", "error")
    emit("qdo.dead-letter-kinds/1", map(kind_item, groups), form, columns)


def _exported(
    broker: Broker, letters: Iterable[Letter], settings: Settings, rows: Rows
) -> Iterator[Any]:
    """Yield exported dead letters.

    Read one dead letter at a time, because all bodies together may not fit into memory.
    """
    vault = vault_of(settings, settings.app, broker.stream_of)

    def item(letter: Letter) -> Any:
        try:
            record = ops.read(broker, letter)
        except NotFoundError:
            print_message(f"{_name(letter)} no longer exists")
            return None
        return ops.exported(letter, record, broker.positions, vault)

    return (each for each in rows(letters, item) if each is not None)


def _name(letter: Letter) -> str:
    return f"{letter.id} of queue {letter.entry.queue}"


@dead_letters.command()
@click.argument("queue")
@click.argument("id")
@with_output(*SHARED)
def show(queue: str, id: str, form: str, settings: Settings) -> None:
    """Show one dead letter completely: message, error, traceback."""
    with _broker(settings) as broker:
        letters = ops.named(broker, queue, [id]).letters if broker else ()
        if broker is None or not letters:
            raise NotFoundError(what=f"dead letter of queue {queue}", name=id)
        record = ops.read(broker, letters[0])
        vault = vault_of(settings, settings.app, broker.stream_of)
        item = ops.exported(letters[0], record, broker.positions, vault)
    if form == "table":
        click.echo(dead_letter_page(item))
    else:
        emit(SCHEMA, [item], form)


@dead_letters.command()
@click.argument("glob", default="*")
@_filters
@with_settings(*SHARED)
def export(glob: str, filters: Filter, settings: Settings) -> None:
    """Write complete dead letters to stdout, one JSON object per line, with `body` or, where the
    body is not JSON, `body_base64`."""
    with _broker(settings) as broker:
        letters = _matching(broker, glob, filters)
        if broker is not None:
            with each_shown(_name) as rows:
                emit(SCHEMA, _exported(broker, letters, settings, rows), "jsonl")
    print_message(f"exported {pluralize(len(letters), 'dead letter')}")


# --- changing ---

dead_letters.add_command(add_dead_letters)


def _changing_letters(function: Any) -> Any:
    """Add the arguments and options of a command that changes dead letters."""
    call = _filters(changing(*SHARED)(function))
    click.option("--all", "every", is_flag=True, help="All dead letters of the matching queues.")(
        call
    )
    click.argument("ids", metavar="[ID]...", nargs=-1)(call)
    return click.argument("queue", metavar="QUEUE|GLOB")(call)


@dead_letters.command()
@_changing_letters
def retry(**chosen: Any) -> None:
    """Send dead letters again: each becomes the newest message of its queue.

    A request waits again in its pool, and its attempts are counted from 1.

    Name them as QUEUE ID..., or give a GLOB of queues and one of --all, --error, --older and
    --newer. The message keeps its id; its header qdo-retried counts how often it was sent again.
    """
    # Ask for confirmation even if the glob matches only one queue, because it may soon match more.
    _change("retry", "retried", ops.retry, asks=not chosen["ids"], **chosen)


@dead_letters.command()
@_changing_letters
def discard(**chosen: Any) -> None:
    """Delete dead letters permanently; if in doubt, `export` them first.

    Name them as QUEUE ID..., or give a GLOB of queues and one of --all, --error, --older and
    --newer.
    """
    _change("discard", "discarded", ops.discard, asks=True, **chosen)


def _change(
    verb: str,
    participle: str,
    operate: Callable[[Broker, Sequence[Letter]], Iterator[LetterResult]],
    *,
    asks: bool,
    queue: str,
    ids: tuple[str, ...],
    every: bool,
    filters: Filter,
    consent: Consent,
    settings: Settings,
) -> None:
    with _broker(settings) as broker:
        letters, missing = _chosen(broker, queue, ids, every, filters)
        positions = kind_of(settings.broker).positions
        task = _LetterTask(verb, participle, queue, letters, missing, positions)
        what = f"{verb} {pluralize(len(letters), 'dead letter')}"
        planned = task.effect([LetterResult(each, done=False) for each in letters])
        if consent.given(what, planned.show, asks=asks and bool(letters)):
            results = operate(broker, letters) if broker else iter(())
            task.report(results, consent, settings)
        else:
            task.check(len(letters), missing)


def _chosen(
    broker: Broker | None, queue: str, ids: tuple[str, ...], every: bool, filters: Filter
) -> tuple[Sequence[Letter], Sequence[str]]:
    """Return the selected dead letters, and the ids without a dead letter."""
    is_filtered = every or filters != Filter()
    if bool(ids) == is_filtered:
        raise UsageError(
            reason="name dead letters as QUEUE ID..., or select those of queues that match GLOB "
            "with --all, --error, --older or --newer"
        )
    if is_filtered:
        letters = _matching(broker, queue, filters)
        if not letters:
            print_message("no dead letters match")
        return letters, ()
    selected = ops.named(broker, queue, ids) if broker else ops.Selected((), ids)
    if not selected.letters:
        raise NotFoundError(what=f"dead letter of queue {queue}", name=", ".join(ids))
    return selected.letters, selected.missing


@dataclass(frozen=True, slots=True)
class _LetterTask:
    """The dead letters that a command retries or discards, and their display."""

    verb: str
    participle: str
    queue: str
    letters: Sequence[Letter]
    missing: Sequence[str]
    positions: Positions

    def report(
        self, operation: Iterator[LetterResult], consent: Consent, settings: Settings
    ) -> None:
        """Print the results, even after an error; raise an error if dead letters are left."""
        results: list[LetterResult] = []
        try:
            for each in operation:
                results.append(each)  # noqa: PERF402 - keep the results before an error
        finally:
            done = [each for each in results if each.done]
            if done:  # do this first, because stdout may be full or closed
                note_in_action_log(
                    settings,
                    f"dead-letters {self.verb}",
                    self.queue,
                    {"dead_letters": len(self.letters)},
                    {self.participle: len(done)},
                    consent.reason,
                )
            self.effect(done).show(consent.form)
            print_message(f"{pluralize(len(done), 'dead letter')} {self.participle}")
        failed = [each for each in results if not each.done]
        gone = [each.letter.id for each in failed if each.error is None]
        kept = [f"{each.letter.id} ({each.error})" for each in failed if each.error is not None]
        self.check(len(done), [*self.missing, *gone], kept)

    def check(self, done: int, gone: Sequence[str], kept: Sequence[str] = ()) -> None:
        reasons = [f"{join_some(gone)}: not found, or no longer there"] if gone else []
        reasons += kept[:1]
        if len(kept) > 1:
            reasons.append(f"{len(kept) - 1} more like it")
        if reasons:
            raise PartialFailureError(
                done=done,
                total=len(self.letters) + len(self.missing),
                what=f"dead letters can be {self.participle}",
                rest="; ".join(reasons),
            )

    def effect(self, results: Sequence[LetterResult]) -> Effect:
        columns = {"queue": "QUEUE", "id": "ID"}
        if self.verb == "retry":
            columns["sent_time"] = "SENT AGAIN"
        items = [self._item(each) for each in results]
        return Effect(f"qdo.dead-letters-{self.participle}/1", columns, items)

    def _item(self, result: LetterResult) -> dict[str, Any]:
        entry = result.letter.entry
        item: dict[str, Any] = {
            "queue": entry.queue,
            "id": result.letter.id,
            "was": None if result.letter.request else str(entry.position),
        }
        if self.verb == "retry":
            position = result.position
            item["position"] = None if position is None else str(position)
            item["sent_time"] = (
                None if position is None else ops.sent_time(position, self.positions)
            )
        return {**item, "executed": result.done}
