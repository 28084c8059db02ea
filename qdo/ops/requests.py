"""Shows the pools and requests to operators, and checks and makes changes of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qdo.brokers.request_store import RequestStore, steps_to_forget
from qdo.brokers.requests import (
    OUTCOMES,
    OVER,
    PAUSED,
    RUNNING,
    STATES,
    WAITING,
    Content,
    RequestRecord,
)
from qdo.encoding import decoded_headers
from qdo.errors import RequestNotFoundError, RequestStateError
from qdo.ops.dead_letters import body_value, counts, decrypted
from qdo.ops.doctor_case import Case, Diagnosis, ok, warning
from qdo.text import iso_time, join_some, pluralize

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault

# Maximum number of listed requests.
MOST = 1000
MANY_DEAD = 10_000
# A table has too many dead rows if it has more than `MANY_DEAD`, and more than this number per live
# row.
DEAD_SHARE = 10


def records(
    store: RequestStore, pool: str | None, state: str, limit: int, of: str | None = None
) -> list[RequestRecord]:
    """Return the newest requests of a pool, or of all pools.

    :param state: one of `STATES` or `OUTCOMES`; "" for all unfinished requests.
    :param of: the id of a request; return this request and its steps in any state, oldest first.
    """
    if of is not None:
        return store.records(of=of, limit=limit)
    if state in OUTCOMES:
        return store.records(pool, (OVER,), limit, newest=True, outcome=state)
    states = (STATES.index(state),) if state else (WAITING, RUNNING, PAUSED)
    return store.records(pool, states, limit, newest=True)


def pool_items(store: RequestStore, now: float) -> list[dict[str, Any]]:
    """Return the counts of each pool with unfinished or failed requests."""
    return [
        {
            "pool": pool,
            "waiting": counts.waiting,
            "running": counts.running,
            "paused": counts.paused,
            "failed": counts.failed,
            "oldest_seconds": None if counts.oldest is None else _age(counts.oldest, now),
        }
        for pool, counts in sorted(store.counts().items())
    ]


def request_item(record: RequestRecord, now: float) -> dict[str, Any]:
    """Return a request without its body, its result and other values of the app."""
    reply = decoded_headers(record.reply) or {}
    return {
        "id": record.id,
        "parent": record.parent,
        "pool": record.pool,
        "state": _state_name(record),
        "outcome": record.outcome,
        "cancelling": record.is_cancelled,
        "age_seconds": _age(record.asked, now),
        "owner": record.take.owner or None,
        "take": record.take.number,
        "failed": record.failed,
        "priority": record.priority,
        "note": record.note,
        "error": record.error,
        "asked": iso_time(record.asked),
        "due": iso_time(record.due or None),
        "started": iso_time(record.started or None),
        "ended": iso_time(record.ended or None),
        "until": iso_time(record.until or None),
        "deadline": iso_time(record.deadline or None),
        "then": reply.get("then"),
        "key": reply.get("key"),
    }


def _state_name(record: RequestRecord) -> str:
    return "in steps" if record.in_steps else STATES[record.state]


def whole_item(
    record: RequestRecord, now: float, vault: BodyVault | None, with_body: bool
) -> dict[str, Any]:
    """Return all facts about a request. Include body, result and tag only if `with_body` is True.

    :param vault: decrypts these values; None if there are no keys.
    """
    item = request_item(record, now)
    for name, content in (("body", record.content), ("result", record.result)):
        item[f"{name}_bytes"] = None if content is None else len(content[0])
        if with_body and content is not None and content[0]:
            item |= _content_item(name, record.pool, content, vault)
    if with_body:
        item["tag"] = (decoded_headers(record.reply) or {}).get("tag")
    return item


def _content_item(
    name: str, pool: str, content: Content, vault: BodyVault | None
) -> dict[str, Any]:
    body, headers, fault = decrypted(pool, *content, vault)
    found = {"body_error": fault} if fault is not None else body_value(body, headers)
    return {key.replace("body", name, 1): value for key, value in found.items()}


def _age(since: float, now: float) -> float:
    return round(max(0.0, now - since), 1)


def found(store: RequestStore, id: str) -> RequestRecord:
    """Return a request; raise RequestNotFoundError if the request does not exist."""
    record = store.find(id)
    if record is None:
        raise RequestNotFoundError(what="request", name=id, id=id)
    return record


def state_text(record: RequestRecord) -> str:
    """Return the state of a request, or the outcome of an ended request, for people."""
    if record.is_cancelled:
        return "being cancelled"
    return record.outcome or _state_name(record)


def check_change(change: str, record: RequestRecord) -> None:
    """Raise RequestStateError if the state of a request does not allow a change.

    :param change: "cancel", "resume" or "retry".
    """
    state = state_text(record)
    if change == "cancel" and record.state == OVER:
        expected = "waiting, running or paused"
    elif change == "resume" and state != STATES[PAUSED]:
        expected = "paused"
    elif change == "retry" and (record.state != OVER or state == "done"):
        expected = "failed, skipped or cancelled"
    else:
        return
    raise RequestStateError(id=record.id, expected=expected, state=state)


def retry(store: RequestStore, id: str, since: str | None = None) -> None:
    """Let a failed, skipped or cancelled request wait again; raise RequestStateError for others.

    :param since: one of its steps; the job asks for this step and all later ones again.
    """
    if not store.retry(id, steps_to_forget(store, id, since)):
        record = found(store, id)
        check_change("retry", record)
        expected = "over, with its body"
        if record.parent is not None:
            expected = f"no step; retry request {record.parent!r}"
        raise RequestStateError(id=id, expected=expected, state=state_text(record))


def check_dead_letters(case: Case) -> Diagnosis:
    numbers = counts(case.opened())
    total = sum(numbers.values())
    if total:
        worst = max(numbers, key=lambda name: numbers[name])
        text = f"{pluralize(total, 'dead letter')}, most of them of {worst}"
        return warning(text, "see `qdo dead-letters --by error`")
    return ok("no message or request is a dead letter")


def check_requests(case: Case) -> Diagnosis:
    """Find pools that no live worker takes, and dead rows that PostgreSQL cannot delete."""
    broker = case.opened()
    if not broker.capabilities.requests:
        return ok("this broker stores no requests")
    pools = broker.requests.counts()
    takers = [each.takes.of_pools().matcher() for each in case.workers() if each.fault is None]
    waiting = {pool: each.waiting for pool, each in pools.items() if each.waiting}
    alone = [pool for pool in sorted(waiting) if not any(takes(pool) for takes in takers)]
    if alone:
        text = f"{pluralize(sum(map(waiting.__getitem__, alone)), 'request')} of {join_some(alone)}"
        return warning(
            f"{text} cannot run: no live worker takes the pool",
            "start a worker with a job for it (pool=True), whose --queues and --exclude allow it",
        )
    live, dead = broker.catalog.request_rows()
    if dead > max(MANY_DEAD, DEAD_SHARE * live):
        return warning(
            f"the table of requests has {dead} dead rows and {live} others: a transaction stays"
            " open, so PostgreSQL cannot delete them, and requests become slow",
            "find it in pg_stat_activity (the oldest xact_start), and end it",
        )
    return ok(f"{pluralize(sum(waiting.values()), 'request')} wait, and workers take their pools")
