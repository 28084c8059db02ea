"""The rules that a soak of requests checks; the names are those of the design.

=======  ======================================================================================
rule     it says
=======  ======================================================================================
asked    a request that was stored exists, and a batch is stored whole or not at all (R1)
ends     each request is over, with one outcome (R1, R9)
once     a request changes after its end only if it is retried, and a result is that of the take
         that ended it (R1)
overlap  no job starts while an older take's runs, unless the process of that was frozen or cut
         off, or had no parent to keep its session (R2)
told     a queue has one message for each end, in their order, and its job gets them so (R3)
takes    takes grow one by one, and no job runs under a take that does not exist (R5, R8)
fence    no job starts under an older take, unless its process was frozen (R5)
late     no job starts after its take was over, unless its process was frozen or cut off (R5)
left     no expired request, owner, process or node of a worker is left
=======  ======================================================================================
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qdo.brokers.requests import OVER, RUNNING, WAITING, RequestRecord
from tests.soak.checks import Entry, Judged, excused, fences, overlaps
from tests.soak.request_app import POOLS
from tests.soak.request_steps import RequestStep

EVENTS = ("started", "paused")
LATE_SECONDS = 0.5
"""A job that was decided upon starts within it."""


@dataclass
class RequestFacts:
    """What a soak leaves.

    :ivar asked: lines of the ledgers of askers.
    :ivar records: the requests that the broker still has.
    :ivar told: request and outcome of each message, by queue.
    :ivar offset: what makes Unix time of `time.monotonic`.
    :ivar in_order: whether the steps are in the order of their transactions.
    """

    asked: Sequence[tuple[str, list[str]]]
    steps: Sequence[RequestStep]
    records: Sequence[RequestRecord]
    journal: Sequence[Entry]
    told: Mapping[str, list[tuple[str, str]]]
    judged: Judged
    offset: float
    in_order: bool = True


def check_requests(facts: RequestFacts) -> list[str]:
    """Return the violations."""
    steps: dict[str, list[RequestStep]] = defaultdict(list)
    for each in facts.steps:
        steps[each.id].append(each)
    runs: dict[str, list[Entry]] = defaultdict(list)
    for entry in facts.journal:
        if entry.kind != "D":
            runs[entry.queue].append(entry)
    found = list(_asked(facts.asked, steps))
    for id, own in steps.items():
        found += _changes(own)
        found += _runs(own, runs.get(id, []), facts)
    for entries in runs.values():
        found += fences(entries, facts.judged)
        found += overlaps(entries, facts.judged)
    found += [f"takes: {id} ran but does not exist" for id in runs.keys() - steps.keys()]
    return [*found, *_results(facts, runs), *_told(facts)]


def _asked(asked: Iterable[tuple[str, list[str]]], steps: Mapping[str, object]) -> Iterator[str]:
    for word, ids in asked:
        stored = sum(id in steps for id in ids)
        if stored != len(ids) and (word == "asked" or stored):
            yield f"asked: {stored} of {len(ids)} stored of {word} {ids[:3]}"


def _changes(steps: list[RequestStep]) -> Iterator[str]:
    if steps[-1].state != OVER:
        yield f"ends: {steps[-1]}"
    for before, step in pairwise(steps):
        if step.take == 0:
            continue  # asked for again after it has expired
        retried = before.state == OVER
        taken = before.state != OVER and step.state == RUNNING and step.owner != before.owner
        again = step.state == RUNNING and step.take == before.take + 1  # the answer was lost
        if retried and (step.state != WAITING or before.outcome == "done"):
            yield f"once: {before} became {step}"
        if step.take != before.take + (retried or taken or again):
            yield f"takes: {before} became {step}"


def _runs(steps: list[RequestStep], runs: list[Entry], facts: RequestFacts) -> Iterator[str]:
    taken = {each.take for each in steps if each.state == RUNNING}
    over = {
        before.take: step.at - facts.offset
        for before, step in pairwise(steps)
        if before.state not in (WAITING, OVER) and step.state in (WAITING, OVER)
    }
    for run in runs:
        if run.kind == "S" and run.fence not in taken:
            yield f"takes: {run} has no take"
        late = run.kind == "S" and run.at > over.get(run.fence, run.at) + LATE_SECONDS
        if late and not excused(run, run.at, facts.judged):
            yield f"late: {run} after its end at {over[run.fence]}"


def _results(facts: RequestFacts, runs: Mapping[str, list[Entry]]) -> Iterator[str]:
    for each in facts.records:
        if each.outcome == "done":
            take = None if each.result is None else json.loads(each.result[0])["take"]
            ran = any(run.kind == "S" and run.fence == take for run in runs.get(each.id, ()))
            if take != each.take.number or not ran:
                yield f"once: {each.take} has the result of take {take}, which ran: {ran}"


def _told(facts: RequestFacts) -> Iterator[str]:
    ends: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for each in facts.steps:
        if each.state == OVER and each.then:
            ends[each.then].append((each.id, each.outcome or ""))
    got: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    for entry in facts.journal:
        if entry.kind == "D":
            queue, id, outcome = entry.queue.split("|")
            if outcome not in EVENTS:
                got[queue][id, outcome] = None
    for queue in {*ends, *facts.told}:
        told = [each for each in facts.told.get(queue, ()) if each[1] not in EVENTS]
        # The steps of PostgreSQL are numbered before it is certain which commits first.
        if told != ends[queue] and (facts.in_order or sorted(told) != sorted(ends[queue])):
            more, less = Counter(told) - Counter(ends[queue]), Counter(ends[queue]) - Counter(told)
            yield f"told: {queue} has {[*more][:3]} too often and lacks {[*less][:3]}"
        if [*got[queue]] != [*dict.fromkeys(told)]:
            yield f"told: the job of {queue} got {len(got[queue])} of {len(told)}"


def waits(steps: Iterable[RequestStep], faults: Iterable[float], quiet: float) -> list[float]:
    """Return how long requests waited once they were due, while there was a place (R7).

    :param faults: Unix times; requests that waited up to `quiet` seconds after one are left out.
    """
    times, found = sorted(faults), []
    since: dict[str, tuple[float, bool]] = {}
    present: dict[str, set[str]] = defaultdict(set)
    for each in steps:
        others = present[each.pool]
        if each.state == WAITING and each.pool in POOLS:
            since[each.id] = max(each.at, each.due), len(others - {each.id}) < POOLS[each.pool]
        elif each.state == RUNNING and each.id in since:
            at, had_place = since.pop(each.id)
            if had_place and not any(fault < each.at and at < fault + quiet for fault in times):
                found.append(max(0.0, each.at - at))
        (others.discard if each.state == OVER else others.add)(each.id)
    return sorted(found)


def recoveries(facts: RequestFacts, died: Iterable[tuple[int, float]]) -> list[float]:
    """Return the times from the deaths of processes until what they ran was given back."""
    dead = dict(died)
    running = {(each.queue, each.fence): each for each in facts.journal if each.kind == "S"}
    for each in facts.journal:
        if each.kind in "EX":
            running.pop((each.queue, each.fence), None)
    found = []
    for step in facts.steps:
        run = running.get((step.id, step.take)) if step.state == WAITING else None
        if run is not None and run.at < dead.get(run.pid, 0.0):
            found.append(step.at - facts.offset - dead[run.pid])
    return sorted(found)


def spread(values: Sequence[float]) -> str:
    """Return the distribution of seconds as text."""
    if len(values) < 2:
        return f"{len(values)} {[round(each, 2) for each in values]}"
    p50, p99 = statistics.median(values), values[int(0.99 * (len(values) - 1))]
    return f"{len(values)}: p50 {p50:.3f} s, p99 {p99:.3f} s, most {values[-1]:.3f} s"
