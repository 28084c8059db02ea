"""The commands of `qdo requests`: list, show, cancel, resume and retry requests of pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from qdo.brokers.request_store import RequestStore
from qdo.brokers.requests import OUTCOMES, STATES, RequestRecord
from qdo.cli.changing import Consent, Effect, changing
from qdo.cli.connections import note_in_action_log, open_connections
from qdo.cli.options import limit_option, require_app, with_output
from qdo.cli.output import (
    duration_text,
    each_shown,
    emit,
    json_text,
    print_facts,
    print_heading,
    print_message,
)
from qdo.cli.readings import SHARED
from qdo.encoding import decode_strictly
from qdo.errors import RequestNotFoundError, UsageError
from qdo.ops import requests as ops
from qdo.requests.calls import Handle, RequestCalls
from qdo.settings.settings import Settings
from qdo.settings.vaults import vault_of

_POOL_COLUMNS = ("pool", "waiting", "running", "paused", "failed", "oldest")
_COLUMNS = ("id", "pool", "state", "age", "owner", "failed", "note")


@click.group()
def requests() -> None:
    """List and change requests. A request is work that any worker of the app can do.

    \b
    qdo requests list --app shop:app
    qdo requests list --app shop:app invoice --state running
    qdo requests show --app shop:app ID
    qdo requests cancel --app shop:app ID --reason "wrong order"
    qdo requests resume --app shop:app ID '"approved"'
    qdo requests retry --app shop:app ID
    """


@contextmanager
def _store(settings: Settings) -> Iterator[RequestStore | None]:
    """Yield the store of the app's requests; None before the first message or request."""
    require_app(settings)
    with open_connections(settings, coordinator=False) as connections:
        broker = connections.known_broker()
        yield None if broker is None else broker.requests


@contextmanager
def _opened_request(settings: Settings, id: str) -> Iterator[tuple[RequestCalls, RequestRecord]]:
    """Yield a request, and the app's functions for requests, which use the open broker."""
    require_app(settings)
    with open_connections(settings, coordinator=False) as connections:
        broker = connections.known_broker()
        if broker is None:
            raise RequestNotFoundError(what="request", name=id, id=id)
        calls = RequestCalls(settings.app, {})
        with calls.override_broker(broker, settings):
            yield calls, ops.found(broker.requests, id)


@requests.command("list")
@click.argument("pool", required=False)
@click.option(
    "--state",
    type=click.Choice((*STATES, *OUTCOMES)),
    help="Only requests in this state, or over with this outcome.",
)
@click.option("--of", metavar="ID", help="Only request ID and its steps, in the order of asking.")
@limit_option(100, "The number of requests, the newest first.", ops.MOST)
@with_output(*SHARED)
def list_(
    pool: str | None, state: str | None, of: str | None, limit: int, form: str, settings: Settings
) -> None:
    """List the pools with requests that are not over or failed, or those of POOL, newest first.

    OLDEST is the age of the oldest request that waits and is due. With --state but without POOL,
    list the requests of all pools; without --state, those that are not over. FAILED counts requests
    that failed for good, or failed attempts of one. NOTE is the progress that the job reported, or
    its last error. A request that is over is listed until its result expires; one that failed is
    listed until `qdo dead-letters` retries or discards it.
    """
    with _store(settings) as store:
        if pool is None and state is None and of is None:
            _list_pools([] if store is None else ops.pool_items(store, time.time()), form)
            return
        records = [] if store is None else ops.records(store, pool, state or "", limit + 1, of)
        if not records:
            print_message("no such requests; see also --state over")
        with each_shown(lambda each: f"request {each.id}") as rows:
            items = rows(records[:limit], partial(ops.request_item, now=time.time()))
            columns = [key for key in _COLUMNS if key != "pool" or not pool]
            emit("qdo.requests/1", items, form, columns, cells=_cells)
        if len(records) > limit:
            print_message(f"hint: only the newest {limit} requests are listed; see --limit")


def _list_pools(items: list[dict[str, Any]], form: str) -> None:
    if not items:
        print_message("hint: no request waits or runs, and none has failed")
    emit(
        "qdo.pools/1",
        items,
        form,
        _POOL_COLUMNS,
        cells=lambda item: {"oldest": duration_text(item["oldest_seconds"])},
    )


def _cells(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "state": "being cancelled" if item["cancelling"] else item["outcome"] or item["state"],
        "age": duration_text(item["age_seconds"]),
        "note": item["note"] or item["error"],
    }


@requests.command()
@click.argument("id")
@click.option("--body", "with_body", is_flag=True, help="Also show body, result and tag.")
@with_output(*SHARED, "keys")
def show(id: str, with_body: bool, form: str, settings: Settings) -> None:
    """Show everything about a request; its body, result and tag only with --body.

    They are decrypted if `keys` has their keys. The body of a request that is done is deleted.
    """
    with _opened_request(settings, id) as (calls, record):
        stream_of = calls.broker.stream_of
        vault = vault_of(settings, settings.app, stream_of) if with_body else None
        item = ops.whole_item(record, time.time(), vault, with_body)
    if form != "table":
        emit("qdo.request/1", [item], form)
        return
    row = {**item, **_cells(item)}
    print_heading(f"{item['id']}: {row['state']}", item["error"], None)
    facts = {key: row[key] for key in ("pool", "owner", "note", "asked", "due", "started", "until")}
    facts |= {key: item[key] for key in ("deadline", "parent")}
    facts |= {key: item[key] for key in ("take", "failed", "priority", "then", "key")}
    for name in ("body", "result"):
        facts[name] = _content_text(name, item)
    facts["tag"] = None if item.get("tag") is None else json_text(item["tag"])
    print_facts([(key, None if text is None else str(text)) for key, text in facts.items()])


def _content_text(name: str, item: dict[str, Any]) -> str | None:
    if name in item:
        return json_text(item[name])
    size = item[f"{name}_bytes"]
    if size is None:
        return None
    text = item.get(f"{name}_base64") or item.get(f"{name}_error")
    return f"{size} bytes" if text is None else f"{size} bytes: {text}"


# --- changing ---


def _changing_request(function: Any) -> Any:
    """Add the argument and the options of a command that changes a request."""
    return requests.command()(click.argument("id")(changing(*SHARED)(function)))


@_changing_request
def cancel(consent: Consent, **arguments: Any) -> None:
    """Cancel a request: one that waits never runs, the job of a running one is interrupted.

    --reason becomes the error of the request. If `then` was given, that queue gets the message.
    """
    _change("cancel", lambda handle: handle.cancel(consent.reason), consent, asks=True, **arguments)


@_changing_request
@click.argument("value", default="null")
def resume(value: str, **arguments: Any) -> None:
    """Let a paused request continue: its job gets VALUE, which is JSON, by default null."""
    try:
        parsed = decode_strictly(value)
    except (ValueError, RecursionError) as error:
        reason = (
            f"VALUE must be JSON, got {value[:60]!r}: {str(error) or 'it is nested too deeply'}"
        )
        raise UsageError(reason=f"{reason}; write text in double quotes") from error
    _change("resume", lambda handle: handle.resume(parsed), **arguments)


@_changing_request
@click.option(
    "--from", "since", metavar="STEP", help="Repeat this step of the request and all later ones."
)
def retry(since: str | None, **arguments: Any) -> None:
    """Let a request wait again that has failed, or was skipped or cancelled.

    Its attempts are counted from 1. A request that is done cannot: its body is deleted. The queue
    of `then` gets another message when it ends. A request with steps repeats those that are not
    done; with --from, the step with this id and all that were asked for after it.
    """
    _change("retry", None, since=since, **arguments)


def _change(
    verb: str,
    act: Callable[[Handle], object] | None,
    consent: Consent,
    id: str,
    settings: Settings,
    asks: bool = False,
    since: str | None = None,
) -> None:
    """Change a request, and then write an entry to the action log."""
    with _opened_request(settings, id) as (calls, record):
        ops.check_change(verb, record)
        was = ops.state_text(record)
        item = {"id": id, "pool": record.pool, "was": was, "state": None}
        effect = Effect(f"qdo.requests-{verb}/1", ("id", "pool", "was", "state"), [item])
        if not consent.given(f"{verb} request {id}", effect.show, asks=asks):
            return
        store = calls.broker.requests
        if act is None:
            ops.retry(store, id, since)
        elif act(Handle(calls, id)) is False:
            ops.check_change(verb, ops.found(store, id))  # the request has ended
        after = store.find(id)
        item["state"] = None if after is None else ops.state_text(after)
        note_in_action_log(
            settings,
            f"requests {verb}",
            id,
            {"state": was},
            {"pool": record.pool, "state": item["state"]},
            consent.reason,
        )
        effect.show(consent.form, executed=True)
