"""The rules that a soak checks, on the journal of all runs.

========  =====================================================================================
rule      it says
========  =====================================================================================
lost      every message ended, or became a dead letter
order     a message starts for the first time after its predecessor has ended
fence     no message starts under a fence once the queue has a newer one, unless its process was
          frozen between the decision and the start
overlap   no message of a queue starts while another run of it continues elsewhere, unless the
          process of that run was frozen or cut off, or blocked without a parent to keep its
          session
attempts  a message that blocks for ever becomes a dead letter after its attempts; no other does
limit     no more runs at once than their limit allows, beside those of processes that were frozen
          or cut off
lock      the fences of a lock grow
section   no message starts while a section holds its queue
left      nothing is left behind
owner     one owner at every zxid (ZooKeeper only)
limits    shares add up to at most what a limit allows, at every zxid (ZooKeeper only)
log       no part of a worker fails
========  =====================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from qdo.brokers.streams import StreamShard
from qdo.coordination.znodes.layout import Layout
from tests.soak.app import BLOCK_ATTEMPTS, HELD, MOST_AT_ONCE, TIMEOUT_SECONDS
from tests.support.ownership_oracle import Oracle
from tests.support.zookeeper_txn_log import Txn

KEYS = 3
"""Keys of the queues whose messages wait for those of their key only."""
AFTER_FREEZE = 1.0
"""Seconds after its end within which a frozen process does what it had decided before."""


class Entry(NamedTuple):
    """A line of the journal, see `app`."""

    kind: str
    queue: str
    number: int
    fence: int
    attempt: int
    pid: int
    at: float


@dataclass
class SoakRun:
    """One run of a job; `end` is its place in the journal, None if the run was cut short."""

    first: Entry
    place: int
    end: int | None = None


@dataclass
class Judged:
    """The facts beside the journal; see `fleet.SoakFleet`."""

    sent: Mapping[str, int]
    endless: Set[tuple[str, int]] = frozenset()
    letters: Set[tuple[str, int]] = frozenset()
    stopped: Sequence[tuple[int, float, float]] = ()
    unkept: Sequence[tuple[int, float, float]] = ()
    outages: Sequence[tuple[float, float]] = ()
    sections: Sequence[tuple[float, float]] = ()
    most_at_once: int = MOST_AT_ONCE
    died: Sequence[tuple[int, float]] = ()


def read_journal(text: str) -> list[Entry]:
    """Return all complete lines."""
    entries = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        kind, queue, number, fence, attempt, pid, at = line.split()
        entries.append(
            Entry(kind, queue, int(number), int(fence), int(attempt), int(pid), float(at))
        )
    return entries


def unfinished(journal: Iterable[Entry], facts: Judged) -> list[tuple[str, int]]:
    """Return the messages that neither ended nor became a dead letter."""
    ended = {(each.queue, each.number) for each in journal if each.kind == "E"}
    return [
        (queue, number)
        for queue, count in facts.sent.items()
        for number in range(count)
        if (queue, number) not in ended and (queue, number) not in facts.letters
    ]


def check_journal(journal: Sequence[Entry], facts: Judged) -> list[str]:
    """Return the violations of the rules on runs."""
    by_queue: dict[str, list[Entry]] = defaultdict(list)
    for entry in journal:
        by_queue[entry.queue].append(entry)
    own = {queue: by_queue[queue] for queue in facts.sent}
    found = [f"lost: {queue} {number}" for queue, number in unfinished(journal, facts)]
    for queue, entries in by_queue.items():
        found += fences(entries, facts)
        if not queue.startswith(("key", "opskey", "opsbatch")):
            found += overlaps(entries, facts)
    for entries in own.values():
        found += _order(entries, facts)
        found += _attempts(entries, facts)
    return [*found, *limits(journal, facts), *_locks(journal, facts), *_sections(journal, facts)]


@dataclass
class JudgedStreams:
    """What `check_streams` found.

    :ivar begun: the newest start of each key and number.
    :ivar repeated: number of repetitions by their excuse.
    :ivar gaps: seconds from the last start of a shard's parents to its own first one.
    """

    violations: list[str] = field(default_factory=list)
    begun: dict[tuple[str, int], Entry] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)


def check_streams(
    journal: Iterable[Entry], shards: Sequence[StreamShard], facts: Judged
) -> JudgedStreams:
    """Return where starts of messages violate the rules of streams.

    ========  ==================================================================================
    rule      it says
    ========  ==================================================================================
    order     the messages of a key start for the first time in the order of their numbers
    heirs     none starts in a shard once a descendant has started one of its key, unless its
              process was frozen between the decision and the start
    repeated  one starts again only if it failed, or its process was killed, frozen or cut off
    fence     as above
    ========  ==================================================================================

    :param journal: its entries have ``shard/key`` in place of a queue.
    """
    judged, heirs = JudgedStreams(), descendants(shards)
    newest: dict[str, int] = defaultdict(lambda: -1)
    used: dict[str, set[str]] = defaultdict(set)
    queues: dict[str, list[Entry]] = defaultdict(list)
    failed: set[tuple[str, int]] = set()
    for each in journal:
        queue, _, key = each.queue.partition("/")
        message = key, each.number
        if each.kind == "X":
            failed.add(message)
            continue
        if (before := judged.begun.get(message)) is not None:
            why = "failed" if message in failed else _excuse(before, each, facts)
            failed.discard(message)
            judged.repeated[why] += 1
            if not why:
                judged.violations.append(f"repeated: {each} after {before}")
        elif each.number < newest[key]:
            judged.violations.append(f"order: {each} after {newest[key]}")
        if not heirs[queue].isdisjoint(used[key]) and not within(
            facts.stopped, each.pid, each.at - AFTER_FREEZE, each.at
        ):
            judged.violations.append(f"heirs: {each} after {heirs[queue] & used[key]}")
        judged.begun[message], newest[key] = each, max(newest[key], each.number)
        used[key].add(queue)
        queues[queue].append(each)
    for own in queues.values():
        judged.violations += fences(own, facts)
    for shard in shards:
        ends = [queues[each][-1].at for each in shard.parents if each in queues]
        if ends and shard.queue in queues:
            judged.gaps.append(queues[shard.queue][0].at - max(ends))
    return judged


def descendants(shards: Sequence[StreamShard]) -> dict[str, set[str]]:
    """Return the descendants of each shard; parents come before their children."""
    found: dict[str, set[str]] = {each.queue: set() for each in shards}
    for each in reversed(shards):
        for parent in each.parents:
            found[parent] |= {each.queue, *found[each.queue]}
    return found


def _excuse(before: Entry, again: Entry, facts: Judged) -> str:
    """Return why a message was started again; "" if there is no reason."""
    dead = (at for pid, at in facts.died if pid == before.pid)
    if any(before.at - TIMEOUT_SECONDS < at < again.at for at in dead):
        return "killed"
    return "frozen or cut off" if excused(before, again.at, facts) else ""


def check_owners(transactions: Iterable[Txn]) -> list[str]:
    """Return the violations of the rule of one owner."""
    oracle = Oracle(Layout.of("soak"))
    oracle.replay(transactions)
    return [f"owner: {each}" for each in oracle.violations]


def check_log(output: str) -> list[str]:
    """Return the lines that report a failed part of a worker."""
    bad = (" CRITICAL ", "coordination loop failed")
    return [f"log: {line}" for line in output.splitlines() if any(word in line for word in bad)]


def _order(entries: Iterable[Entry], facts: Judged) -> Iterable[str]:
    ended: set[int] = set()
    seen: set[int] = set()
    for each in entries:
        if each.kind == "E":
            ended.add(each.number)
        if each.kind != "S" or each.number in seen:
            continue
        seen.add(each.number)
        before = each.number - (KEYS if each.queue.startswith("key") else 1)
        if before >= 0 and before not in ended and (each.queue, before) not in facts.letters:
            yield f"order: {each} before the end of {before}"


def fences(entries: Iterable[Entry], facts: Judged) -> Iterable[str]:
    newest = 0
    for each in entries:
        if each.kind != "S":
            continue
        if each.fence < newest and not within(
            facts.stopped, each.pid, each.at - AFTER_FREEZE, each.at
        ):
            yield f"fence: {each} after a start under {newest}"
        newest = max(newest, each.fence)


def overlaps(entries: list[Entry], facts: Judged) -> Iterable[str]:
    runs = _runs(entries)
    for index, run in enumerate(runs):
        for later in runs[index + 1 :]:
            if run.end is None or later.place > run.end:
                break
            if not excused(run.first, later.first.at, facts):
                yield f"overlap: {later.first} while {run.first} was running"


def _runs(entries: Iterable[Entry]) -> list[SoakRun]:
    runs: list[SoakRun] = []
    open_runs: dict[tuple[str, int, int], SoakRun] = {}
    for place, each in enumerate(entries):
        key = (each.queue, each.pid, each.fence)
        if each.kind == "S":
            open_runs[key] = SoakRun(each, place)
            runs.append(open_runs[key])
        elif each.kind in "EX" and key in open_runs:
            open_runs.pop(key).end = place
    return runs


def excused(run: Entry, until: float, facts: Judged) -> bool:
    """Return whether the process of a run may not have known what happened meanwhile."""
    start = run.at - TIMEOUT_SECONDS
    return (
        within(facts.stopped, run.pid, start, until)
        or within(facts.unkept, run.pid, start, until)
        or any(began < until and over > start - TIMEOUT_SECONDS for began, over in facts.outages)
    )


def limits(journal: Iterable[Entry], facts: Judged) -> Iterable[str]:
    unended: list[SoakRun] = []
    for later in _runs(each for each in journal if each.queue.startswith("limit")):
        unended = [run for run in unended if run.end is not None and run.end > later.place]
        beside = [run for run in unended if not excused(run.first, later.first.at, facts)]
        if len(beside) >= facts.most_at_once and not excused(later.first, later.first.at, facts):
            yield f"limit: {later.first} beside {len(beside)} others"
        unended.append(later)


def _locks(journal: Iterable[Entry], facts: Judged) -> Iterable[str]:
    newest = 0
    for each in journal:
        if each.kind == "L":
            if each.fence <= newest and not excused(each, each.at, facts):
                yield f"lock: {each} after a holder with fence {newest}"
            newest = max(newest, each.fence)


def _sections(journal: Iterable[Entry], facts: Judged) -> Iterable[str]:
    for each in journal:
        if each.kind == "S" and fnmatchcase(each.queue, HELD) and not excused(each, each.at, facts):
            for began, ended in facts.sections:
                if began < each.at < ended:
                    yield f"section: {each} within {began} to {ended}"


def _attempts(entries: Iterable[Entry], facts: Judged) -> Iterable[str]:
    """Attempts that nobody can count are excused: those without a parent or a coordinator."""
    excuse = len(facts.unkept) + len(facts.outages)
    starts = Counter((each.queue, each.number) for each in entries if each.kind == "S")
    for message, count in starts.items():
        endless = message in facts.endless
        if endless and count > BLOCK_ATTEMPTS + excuse:
            yield f"attempts: {message} was started {count} times"
        if not endless and message in facts.letters and count < BLOCK_ATTEMPTS:
            yield f"attempts: {message} is a dead letter after {count} starts"


def within(times: Iterable[tuple[int, float, float]], pid: int, start: float, end: float) -> bool:
    """Return whether something was so for a process at a time between `start` and `end`."""
    return any(who == pid and began < end and over > start for who, began, over in times)
