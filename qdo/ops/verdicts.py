"""Pure functions that judge the progress of a queue. A verdict has a state, a reason and a remedy.

The rules are those of Burrow's evaluator (core/internal/evaluator/caching.go), plus facts that only
qdo knows: failing messages, owners, pauses and messages in flight. The reader of the status
computes the verdict, so no worker needs to run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qdo.fleet.names import exactly
from qdo.positions import format_last
from qdo.queues import POOL, command_text
from qdo.text import fine_duration, pluralize, short_duration

if TYPE_CHECKING:
    from qdo.coordination.znodes.queue_node import FailureRecord
    from qdo.ops.status import QueueStatus, Statuses

_DECIDED = {"skip": "skip message {}", "dead-letter": "make message {} a dead letter"}
# A backlog of this many messages is "catching up" even if the owner's pace is unknown.
MANY = 1000


@dataclass(frozen=True, slots=True)
class VerdictRules:
    """The durations after which a queue needs attention."""

    # Maximum age of the next message.
    late_seconds: float = 60.0
    # Maximum time for which a message may run.
    stuck_seconds: float = 300.0
    # Maximum time for a message that runs much longer than usual.
    unusual_seconds: float = 60.0
    # Maximum time for a queue without an owner, without recorded progress or without a report.
    still_seconds: float = 30.0
    # Maximum age of the next message, as a share of the broker's retention.
    expiring_share: float = 0.5


RULES = VerdictRules()


@dataclass(frozen=True, slots=True)
class QueueSample:
    """The status of a queue at one time."""

    # Unix time by the reader's clock.
    at: float
    status: QueueStatus
    # Number of registered workers, or None if unknown.
    workers: int | None


class QueueCase:
    """Derives facts about a queue from its samples."""

    def __init__(self, samples: Sequence[QueueSample], rules: VerdictRules) -> None:
        self.rules = rules
        self.sample = samples[-1]
        # Ignore samples from before the queue was deleted and created again.
        same = (each for each in samples if each.status.created == self.sample.status.created)
        self.first = next(same)
        self.now = self.sample.at
        self.status = self.sample.status
        self.queue = self.status.queue

    @property
    def waiting(self) -> bool | None:
        if self.status.missing:
            return False
        backlog = self.status.backlog
        if backlog is None and self.age is None:
            return None
        return bool(backlog) or bool(self.age)

    @property
    def age(self) -> float | None:
        return self.status.behind_seconds

    @property
    def owned(self) -> bool:
        return self.status.owner is not None and not self.status.owner_gone

    @property
    def is_late(self) -> bool:
        return (self.age or 0.0) >= self.rules.late_seconds

    @property
    def has_work(self) -> bool:
        """Whether a worker owns the queue and messages wait."""
        return self.owned and bool(self.waiting)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the owner's last report."""
        reported = self.status.reported
        return 0.0 if reported is None else self.now - reported

    @property
    def is_silent(self) -> bool:
        return self.silent_seconds >= self.rules.still_seconds

    @property
    def still_seconds(self) -> float | None:
        """Seconds without recorded progress, or None if unknown."""
        written = self.status.written
        return max(0.0, self.now - written) if written else None

    def waits(self, reason: str, remedy: str = "") -> Verdict:
        """Return the verdict on a queue that has a good reason to wait."""
        return Verdict(QueueHealth.LAGGING if self.is_late else QueueHealth.OK, reason, remedy)


class QueueHealth(enum.Enum):
    """The states of a queue, the worst first."""

    LOST = "lost"
    EXPIRING = "expiring"
    BLOCKED = "blocked"
    STUCK = "stuck"
    STOPPED = "stopped"
    NO_JOB = "no-job"
    NO_WORKER = "no-worker"
    UNOWNED = "unowned"
    REWOUND = "rewound"
    FAILING = "failing"
    LAGGING = "lagging"
    UNKNOWN = "unknown"
    CATCHING_UP = "catching-up"
    PAUSED = "paused"
    OK = "ok"
    IDLE = "idle"

    @property
    def rank(self) -> int:
        return _RANKS[self]

    @property
    def is_critical(self) -> bool:
        """Whether messages wait until an operator acts."""
        return self.rank <= QueueHealth.UNOWNED.rank

    @property
    def is_warning(self) -> bool:
        """Whether the queue is late or may soon need an operator."""
        return QueueHealth.UNOWNED.rank < self.rank <= QueueHealth.UNKNOWN.rank

    @property
    def needs_attention(self) -> bool:
        return self.is_critical or self.is_warning


_RANKS = {state: rank for rank, state in enumerate(QueueHealth)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a queue."""

    state: QueueHealth
    # The reason as a sentence, or "".
    reason: str = ""
    # The remedy, usually a command; "" if no action is needed.
    remedy: str = ""
    # Seconds until the queue has caught up, or None if unknown.
    eta_seconds: float | None = None
    # The commands of a remedy with several commands.
    choices: tuple[str, ...] = ()

    @property
    def remedies(self) -> tuple[str, ...]:
        """The remedy, or each of its commands."""
        return self.choices or ((self.remedy,) if self.remedy else ())


def judge(samples: Sequence[QueueSample], rules: VerdictRules = RULES) -> Verdict:
    """Return the verdict on one queue.

    With one sample, a late queue is "lagging". Two samples show whether the queue catches up or was
    moved back.

    :param samples: at least one sample, the oldest first.
    """
    case = QueueCase(samples, rules)
    verdict = next((each for rule in _RULES if (each := rule(case)) is not None), None)
    return _with_expiry(case, _with_long_run(case, verdict or Verdict(QueueHealth.OK)))


def judge_all(
    readings: Sequence[Statuses], rules: VerdictRules = RULES
) -> list[tuple[QueueStatus, Verdict]]:
    samples: dict[str, list[QueueSample]] = {each.queue: [] for each in readings[-1].queues}
    for reading in readings:
        for each in reading.queues:
            if each.queue in samples:
                samples[each.queue].append(QueueSample(reading.at, each, reading.workers))
    return [(each, judge(samples[each.queue], rules)) for each in readings[-1].queues]


# --- rules, in the order in which `judge` tries them ---------------------------------------------


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _lost(case: QueueCase) -> Verdict | None:
    if not case.status.lost:
        return None
    return Verdict(
        QueueHealth.LOST,
        _sentence(case.status.fault or ""),
        command_text("seek", case.queue, "earliest"),
    )


def _with_expiry(case: QueueCase, verdict: Verdict) -> Verdict:
    """Add a warning to a verdict if the broker may delete unread messages because of their age."""
    kept = case.status.retention_seconds
    age = case.age
    if not kept or not age or age < kept * case.rules.expiring_share or case.status.lost:
        return verdict
    left = short_duration(max(0.0, kept - age))
    reason = f"Its next message is {short_duration(age)} old, and the broker deletes it in {left}."
    why = f"{reason} {verdict.reason}".strip()
    return replace(verdict, state=QueueHealth.EXPIRING, reason=why)


def _blocked(case: QueueCase) -> Verdict | None:
    marks = case.status.marks
    if marks is None or not marks.blocked:
        return None
    if not marks.held:
        reason = f"A message waits for its key: {marks.error}."
        return Verdict(QueueHealth.BLOCKED, reason, "qdo admin keys list")
    failed = pluralize(marks.attempts, "attempt")
    since = short_duration(case.now - marks.blocked_since)
    reason = f"A message failed in {failed} and has blocked its queue or key for {since}"
    reason += f": {marks.error}."
    others = len(case.status.also_blocking)
    if others:
        reason += f" {pluralize(others, 'more message')} {'does' if others == 1 else 'do'} so."
    position = str(marks.position)
    retry = command_text("retry-now", case.queue)
    add = command_text("dead-letters add", case.queue, position)
    skip = command_text("skip", case.queue, position)
    # The last command drops the message.
    remedy = f"{retry}, {add} or {skip}"
    return Verdict(QueueHealth.BLOCKED, reason, remedy, choices=(retry, add, skip))


def _paused(case: QueueCase) -> Verdict | None:
    held = case.status.held
    if held is None:
        return None
    return Verdict(QueueHealth.PAUSED, _sentence(held), "qdo pause --list")


def _stuck(case: QueueCase) -> Verdict | None:
    run = case.status.running
    if run is None:
        return None
    unusual = run.usual_seconds is not None and run.seconds >= case.rules.unusual_seconds
    if run.seconds < case.rules.stuck_seconds and not unusual:
        return None
    reason = f"{run.text()} on {case.status.owner or 'its worker'}, attempt {run.attempt}."
    return Verdict(QueueHealth.STUCK, reason, _ps(case))


def _ps(case: QueueCase) -> str:
    return command_text("ps", exactly(case.queue), options="--stacks")


def _with_long_run(case: QueueCase, verdict: Verdict) -> Verdict:
    """Add the name of a message that runs much longer than usual to the reason of a verdict."""
    run = case.status.running
    if run is None or run.usual_seconds is None or verdict.state is QueueHealth.STUCK:
        return verdict
    reason = f"{verdict.reason} {run.text()}.".strip()
    return replace(verdict, reason=reason, remedy=verdict.remedy or _ps(case))


def _faulty(case: QueueCase) -> Verdict | None:
    fault = case.status.fault
    if fault is None:
        return None
    half_deleted = case.status.deleted and not case.status.missing
    remedy = command_text("delete", case.queue) if half_deleted else ""
    return Verdict(QueueHealth.STOPPED, _sentence(fault), remedy)


def _nothing_waits(case: QueueCase) -> Verdict | None:
    if case.waiting is None or case.waiting:
        return None
    return Verdict(QueueHealth.OK if case.status.running else QueueHealth.IDLE)


def _untaken(case: QueueCase) -> Verdict | None:
    untaken = case.status.untaken
    if untaken is None or not case.waiting or case.owned:
        return None
    if untaken == POOL:
        reason = "It has the name of a pool, whose job gets requests and no messages."
        return Verdict(QueueHealth.NO_JOB, reason, "use app.request")
    if untaken == "no job":
        reason = "No worker has a job whose glob matches its name."
        return Verdict(QueueHealth.NO_JOB, reason, "qdo workers")
    reason = "The settings queues and exclude of all workers leave it out."
    return Verdict(QueueHealth.NO_WORKER, reason, "qdo workers")


def _without_worker(case: QueueCase) -> Verdict | None:
    if case.sample.workers != 0 or not case.waiting:
        return None
    return Verdict(QueueHealth.NO_WORKER, "No worker is registered.", "start qdo-worker")


def _unowned(case: QueueCase) -> Verdict | None:
    status = case.status
    still = case.rules.still_seconds
    if case.owned or not case.waiting or (status.owner_gone is None and status.owner):
        return None
    if status.waits_for:
        remedy = command_text("queues", status.waits_for[0]) if case.is_late else ""
        return case.waits(f"It begins once {', '.join(status.waits_for)} is finished.", remedy)
    # A handover takes less than a second. Workers notice a new queue within ten seconds.
    if min(case.age or still, case.still_seconds or still) < still:
        return Verdict(QueueHealth.OK, "It has no owner yet.")
    why = f"It is {status.unclaimed}." if status.unclaimed else "No worker has claimed it."
    return Verdict(QueueHealth.UNOWNED, why, "qdo workers")


def _rewound(case: QueueCase) -> Verdict | None:
    before = case.first.status
    after = case.status
    if after.last >= before.last or after.seek != before.seek:
        return None
    return Verdict(
        QueueHealth.REWOUND,
        f"Its position went back from {format_last(before.last)} without `qdo seek`.",
        command_text("audit", exactly(case.queue)),
    )


def _of_a_paused_job(case: QueueCase) -> Verdict | None:
    """Judge a queue whose owner has paused the job. The message is not the cause."""
    error = case.status.paused_job
    if error is None or not case.has_work or case.is_silent:
        return None
    reason = f"Its job is paused, because all that it does fails: {error}. One message at a time"
    reason += " is tried, and no attempt counts."
    remedy = "repair what the job needs; then it continues by itself"
    return Verdict(QueueHealth.FAILING, reason, remedy)


def _failing(case: QueueCase) -> Verdict | None:
    marks = case.status.marks
    if marks is None or marks.only_begun:
        return None
    if marks.decision:
        return _decided(case, marks)
    if not marks.attempts:  # the job requested the retry (see `qdo.Retry`)
        return case.waits(f"Its next message waits before it runs again: {marks.error}.")
    failed = pluralize(marks.attempts, "attempt")
    reason = f"Its next message failed in {failed}, and runs again: {marks.error}."
    return Verdict(QueueHealth.FAILING, reason, command_text("retry-now", case.queue))


def _decided(case: QueueCase, marks: FailureRecord) -> Verdict:
    """Judge a failing message about which an operator has decided.

    A running owner executes the decision soon.
    """
    owner = case.status.owner if case.owned else None
    what = _DECIDED[marks.decision].format(marks.position)
    reason = f"An operator decided to {what}; "
    if owner is None:
        return Verdict(
            QueueHealth.FAILING, f"{reason}no owner has carried it out yet.", "qdo workers"
        )
    reason += f"its owner {owner} has not carried it out yet."
    remedy = f"qdo workers {owner}"
    stopped = _stopped(case)
    if stopped is None:
        return Verdict(QueueHealth.FAILING, reason, remedy)
    return Verdict(stopped.state, f"{reason} {stopped.reason}", remedy)


def _limited(case: QueueCase) -> Verdict | None:
    names = case.status.limits
    if not case.has_work or not names or case.is_silent:
        return None
    word = "limit" if len(names) == 1 else "limits"
    reason = f"Its next message waits for permits of the {word} {', '.join(names)}."
    return case.waits(reason, "qdo limits list")


def _stopped(case: QueueCase) -> Verdict | None:
    """Judge an idle owner, whose process hangs or waits."""
    status = case.status
    if not case.has_work or status.running is not None:
        return None
    remedy = f"qdo action {status.owner} stacks"
    if case.is_silent:
        reason = f"{status.owner} has not reported for {short_duration(case.silent_seconds)}."
        return Verdict(QueueHealth.STOPPED, reason, remedy)
    still = case.still_seconds or 0.0
    least = case.rules.still_seconds
    if status.in_line or still < least + status.rest_seconds or (case.age or least) < least:
        return None
    reason = f"{status.owner} has recorded nothing for {short_duration(still)}."
    if status.in_flight:
        return _starved(reason, status.in_flight)
    return Verdict(QueueHealth.STOPPED, reason, remedy)


def _starved(reason: str, in_flight: int) -> Verdict:
    """Judge an owner that polls the broker but receives no messages.

    Stacks would not show the cause.
    """
    count = pluralize(in_flight, "message")
    return Verdict(
        QueueHealth.STOPPED,
        f"{reason} It runs none, and about {count} {'is' if in_flight == 1 else 'are'} in flight:"
        " another consumer has received from this queue.",
        "stop the other consumer; its messages return after their visibility timeout",
    )


def _late(case: QueueCase) -> Verdict | None:
    status = case.status
    if not case.waiting:
        return None
    eta = _eta(case)
    needed = _needed_seconds(case)
    if not case.is_late:
        return _burst(case, needed if eta is None else eta)
    if eta is not None:
        reason = f"It will have caught up in about {short_duration(eta)}{_numbers(case)}."
        return Verdict(QueueHealth.CATCHING_UP, reason, eta_seconds=eta)
    why = f"Its next message is {short_duration(case.age or 0.0)} old"
    remedy = ""
    if needed is not None:
        why = f"Its backlog needs about {short_duration(needed)}"
    run = status.running
    if run is not None and run.usual_seconds is None:
        why = run.text()
        remedy = _ps(case)
    elif case.owned and status.in_line:
        why = f"It {status.in_line}"
        remedy = "raise concurrency, or start more workers"
    elif case.owned and status.rest_seconds:
        rest = short_duration(status.rest_seconds)
        why = f"Its job rests for up to {rest} between two messages"
    return Verdict(QueueHealth.LAGGING, f"{why}{_numbers(case)}.", remedy, needed)


def _burst(case: QueueCase, needed: float | None) -> Verdict | None:
    """Judge a backlog that is not late yet, but whose last message will be late."""
    count = case.status.backlog or 0
    if needed is None and count >= MANY:
        return Verdict(QueueHealth.CATCHING_UP, f"{pluralize(count, 'message')} wait.")
    if needed is None or needed < case.rules.late_seconds:
        return None
    reason = f"Its backlog needs about {short_duration(needed)}{_numbers(case)}."
    return Verdict(QueueHealth.CATCHING_UP, reason, eta_seconds=needed)


def _needed_seconds(case: QueueCase) -> float | None:
    """Return the time for the backlog at the pace of its owner, without new messages."""
    status = case.status
    if not case.owned or not status.backlog or not status.per_second:
        return None
    return status.backlog / status.per_second


def _numbers(case: QueueCase) -> str:
    """Return the end of a sentence: output rate, duration of a message, and input rate."""
    status = case.status
    said = []
    if case.owned and status.per_second and status.message_seconds:
        each = fine_duration(status.message_seconds)
        said.append(f"{_rate(status.per_second)} end, {each} each")
    if status.sent_per_second:
        said.append(f"{_rate(status.sent_per_second)} were sent")
    return f": {'; '.join(said)}" if said else ""


def _rate(per_second: float) -> str:
    for word, seconds in (("a second", 1), ("a minute", 60)):
        if per_second * seconds >= 1:
            return f"{per_second * seconds:,.3g} {word}"
    return f"{per_second * 3600:,.3g} an hour"


def _eta(case: QueueCase) -> float | None:
    """Return the seconds until a queue has caught up; None if the queue will not, or if unknown."""
    seconds = case.now - case.first.at
    for before, after in (
        (case.first.status.backlog, case.status.backlog),
        (case.first.status.behind_seconds, case.status.behind_seconds),
    ):
        if before is not None and after is not None and after < before and seconds > 0:
            return after / ((before - after) / seconds)
    return None


def _unknown(case: QueueCase) -> Verdict | None:
    if case.waiting is not None:
        return None
    if case.status.error is not None:
        return Verdict(QueueHealth.UNKNOWN, _sentence(case.status.error), "qdo doctor")
    reason = "The broker was not asked for its backlog."
    return Verdict(QueueHealth.UNKNOWN, reason, "qdo queues --budget N")


_RULES: tuple[Callable[[QueueCase], Verdict | None], ...] = (
    *(_lost, _blocked, _paused, _stuck, _faulty, _nothing_waits),
    *(_without_worker, _untaken, _rewound, _unowned, _of_a_paused_job, _failing, _limited),
    *(_stopped, _late, _unknown),
)
