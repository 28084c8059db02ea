"""The rules on the queues that operators change, on the journal and the operators' ledgers.

=========  ====================================================================================
rule       it says
=========  ====================================================================================
lost       a message ended, is a dead letter, or was dropped by an operator who asked for that
repeated   a message that has ended starts again only after a seek back or an import, a retry of
           its dead letter, or a crash of its process before the next checkpoint
order      a message starts after the one before it has ended, or was dropped
cancelled  a message that was reported as cancelled does not start, unless a seek goes back
paused     no message starts between the answer to a pause and a request to resume
audit      a request that was answered has its entry in the action log, and no second one
=========  ====================================================================================

A request without an answer counts as made if it has an entry: it is whole, or it is absent. What
changes the broker only has its entry after the change.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from tests.soak.app import CREW_QUEUES, KEPT, KEYED
from tests.soak.checks import Entry, Judged, excused
from tests.soak.ledger import TIMELESS, OperatorRequest

CHECKPOINT_SECONDS = 5.0
"""Within this time after its end a message is recorded as done. The interval of the app is shorter,
but messages block event loops."""
LATE_SECONDS = 15.0
"""How long the owner of a queue may take to notice a seek: messages block its event loop."""
CANCELLED = ("cancelled", "already-cancelled")
UNTOLD = (*CANCELLED, "unknown")
MOVES = ("seek", "import")
LOGGED = ("pause", "seek", "import", "decide")
"""Requests with exactly one entry, if they were answered without an error."""


class StoredMessage(NamedTuple):
    """A message as the broker stores it; one that is sent again has several positions."""

    queue: str
    position: int
    number: int
    key: str


@dataclass
class CrewFacts:
    """The facts beside the journal.

    :ivar letters: queue and number of each dead letter.
    :ivar logged: number of entries in the action log, by their reasons: the ids of requests.
    """

    sent: Mapping[str, int]
    stored: Sequence[StoredMessage] = ()
    letters: Set[tuple[str, int]] = frozenset()
    requests: Sequence[OperatorRequest] = ()
    logged: Mapping[str, int] = field(default_factory=dict)

    def made(self, *kinds: str) -> Iterator[OperatorRequest]:
        """Yield the requests of some kinds that may have had an effect."""
        for each in self.requests:
            if each.what in kinds and (each.answer is not None or self.logged.get(each.id)):
                yield each


class CrewQueue:
    """What happened to the messages of one queue."""

    def __init__(self, queue: str, entries: list[Entry], crew: CrewFacts, fleet: Judged) -> None:
        self.queue = queue
        self._entries = entries
        self._fleet = fleet
        self._letters = {number for name, number in crew.letters if name == queue}
        self._former_letters: set[int] = set()
        self._count = crew.sent.get(queue, 0)
        self._stored = sorted(each for each in crew.stored if each.queue == queue)
        self._positions: dict[int, list[int]] = defaultdict(list)
        for each in self._stored:
            self._positions[each.number].append(each.position)
        asked = [each for each in crew.requests if each.queue == queue]
        made = [each for each in crew.made(*MOVES, "purge", "decide") if each.queue == queue]
        self._cancels = [each for each in asked if each.what == "cancel"]
        self._moves = [each for each in made if each.what in MOVES]
        self._passing = [each for each in made if each.what in (*MOVES, "purge")]
        self._skips = [each for each in made if each.args.get("decision") == "skip"]
        self._purges = [each for each in asked if each.what == "purge"]
        self._retries = [each for each in asked if each.what == "retry"]
        self._discards = [each for each in asked if each.what == "discard"]
        self._deletions = [each for each in asked if each.what == "delete"]
        for each in (*self._retries, *self._discards):
            self._former_letters.update(each.args["numbers"])

    # --- what operators did ----------------------------------------------------------------

    def dropped_by(self, number: int, before: float = TIMELESS) -> OperatorRequest | None:
        """Return a request made before a time that may have dropped a message."""
        places = self._positions[number]
        for each in self._cancels:
            outcome = (each.answer or {}).get(str(number), "" if each.answer else "unknown")
            if number in each.args["named"].values() and outcome in UNTOLD and each.asked < before:
                return each
        for each in self._passing:
            if each.asked < before and any(place <= each.args["last"] for place in places):
                return each
        for each in self._purges:
            if each.asked < before and number in each.args["numbers"]:
                return each
        for each in self._skips:
            chosen = None if each.answer is None else each.answer["positions"]
            if each.asked < before and (chosen is None or set(chosen) & set(places)):
                return each
        for each in self._discards:
            if each.asked < before and number in each.args["numbers"]:
                return each
        return next((each for each in self._deletions if each.asked < before), None)

    def _goes_back(self, each: OperatorRequest, number: int) -> bool:
        return any(place > each.args["last"] for place in self._positions[number])

    # --- the rules -------------------------------------------------------------------------

    def lost(self) -> Iterator[str]:
        ended = {each.number for each in self._entries if each.kind == "E"}
        for number in range(self._count):
            if number not in ended | self._letters and self.dropped_by(number) is None:
                yield f"lost: {self.queue} {number}"

    def repeated(self) -> Iterator[str]:
        ends: dict[int, Entry] = {}
        used: set[tuple[str, int]] = set()
        for each in self._entries:
            if each.kind == "E":
                ends[each.number] = each
            elif each.kind == "S" and each.number in ends:
                end = ends.pop(each.number)
                if self._crashed(end, each.at):
                    continue
                if each.fence < end.fence and excused(each, each.at, self._fleet):
                    continue  # a batch of a former owner goes on when its process is thawed
                reason = self._why_again(end, each, used)
                if reason is None:
                    yield f"repeated: {each} after {end}"
                else:
                    used.add((reason.id, each.number))

    def _why_again(
        self, end: Entry, start: Entry, used: set[tuple[str, int]]
    ) -> OperatorRequest | None:
        late = end.at - LATE_SECONDS
        for each in (*self._moves, *self._retries):
            if each.asked >= start.at or (each.id, end.number) in used:
                continue
            # A message that is sent again may wait behind any backlog.
            if each.what == "retry" and end.number in each.args["numbers"]:
                return each
            if each.what in MOVES and each.told > late and self._goes_back(each, end.number):
                return each
        return None

    def _crashed(self, end: Entry, until: float) -> bool:
        soon = end.at + CHECKPOINT_SECONDS
        died = any(pid == end.pid and end.at <= at < soon for pid, at in self._fleet.died)
        return died or excused(end, min(until, soon), self._fleet)

    def order(self) -> Iterator[str]:
        keyed = self.queue in KEYED
        before: dict[int, StoredMessage] = {}
        newest: dict[str, StoredMessage] = {}
        for each in self._stored:
            group = each.key if keyed else ""
            if group in newest and len(self._positions[each.number]) == 1:
                before[each.number] = newest[group]
            newest[group] = each
        ended: set[int] = set()
        for entry in self._entries:
            if entry.kind == "E":
                ended.add(entry.number)
            former = before.get(entry.number)
            if entry.kind != "S" or former is None or former.number in ended:
                continue
            dead = former.number in self._letters | self._former_letters
            if not dead and self.dropped_by(former.number, entry.at) is None:
                yield f"order: {entry} before the end of {former.number}"

    def cancelled(self) -> Iterator[str]:
        for request in self._cancels:
            for name, outcome in (request.answer or {}).items():
                if outcome in CANCELLED:
                    yield from self._started_after(request, int(name))

    def _started_after(self, request: OperatorRequest, number: int) -> Iterator[str]:
        for each in self._entries:
            if each.kind != "S" or each.number != number or each.at < request.told:
                continue
            if any(move.asked < each.at and self._goes_back(move, number) for move in self._moves):
                continue
            if any(number in retry.args["numbers"] for retry in self._retries):
                continue  # its owner died after it had stored a dead letter: that one was retried
            if not excused(each, each.at, self._fleet):
                yield f"cancelled: {each} after {request.id} was told so"


def check_crew(entries: Iterable[Entry], crew: CrewFacts, fleet: Judged) -> list[str]:
    """Return the violations."""
    by_queue: dict[str, list[Entry]] = defaultdict(list)
    journal = [each for each in entries if each.queue in CREW_QUEUES]
    for entry in journal:
        by_queue[entry.queue].append(entry)
    found: list[str] = []
    for queue in CREW_QUEUES:
        history = CrewQueue(queue, by_queue[queue], crew, fleet)
        found += history.lost()
        found += history.repeated()
        if queue in KEPT:
            found += history.order()
            found += history.cancelled()
    return [*found, *_paused(journal, crew, fleet), *_audit(crew)]


def _paused(journal: Iterable[Entry], crew: CrewFacts, fleet: Judged) -> Iterator[str]:
    starts = [each for each in journal if each.kind == "S"]
    ends: dict[str, float] = {}
    for each in crew.requests:
        if each.what == "resume":
            ends[each.args["hold"]] = min(each.asked, ends.get(each.args["hold"], TIMELESS))
    ahead = time.monotonic() - time.time()
    for each in crew.requests:
        if each.what != "pause" or each.answer is None:
            continue
        until = each.args["until"]
        over = TIMELESS if until is None else until + ahead
        over = min(over, ends.get(each.args["hold"], TIMELESS))
        for entry in starts:
            held = each.answer["in_force"] < entry.at < over
            held = held and fnmatchcase(entry.queue, each.queue)
            if held and not excused(entry, entry.at, fleet):
                yield f"paused: {entry} although {each.id} paused {each.queue}"


def _audit(crew: CrewFacts) -> Iterator[str]:
    for each in crew.requests:
        count = crew.logged.get(each.id, 0)
        answered = each.answer is not None and each.answer.get("done", True)
        if each.what in LOGGED and answered and count != 1:
            yield f"audit: {each} has {count} entries"
        if each.what in (*LOGGED, "resume", "move") and count > 1:
            yield f"audit: {each} has {count} entries"


def summary(crew: CrewFacts) -> str:
    """Return how many requests were made, for people."""
    made = Counter(each.what for each in crew.requests)
    answered = sum(each.answer is not None for each in crew.requests)
    failed = sum(bool(each.error) for each in crew.requests)
    return f"{len(crew.requests)} requests {dict(made)}, {answered} answered, {failed} failed"
