"""The faults: what happens, what an operator must read, and how the fleet recovers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy

from bench.drill.stage import PREFIX, SKEWED, WORKERS, DrillStage, Servers
from bench.support.processes import Program, tree
from tests.faults.full_disk import full
from tests.support.paths import ROOT
from tests.support.processes import freeze, wait_until

EU = ("--exclude", "eu-*")
AHEAD_SECONDS = 300
SKEWED_HOST = "shop-4"
LETTERS = 2000
THUMBS = 300
CGROUPS = Path("/sys/fs/cgroup")
HIDDEN_SECONDS = 600


HERE = Servers()


@dataclass(frozen=True, slots=True)
class Evidence:
    """A command or a page, and what is right to read there.

    :ivar at: words after ``qdo``, or the path of a page.
    :ivar says: regular expressions that the text must contain, all of them.
    """

    at: tuple[str, ...] | str
    says: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.at if isinstance(self.at, str) else " ".join(("qdo", *self.at))


@dataclass(slots=True)
class Incident:
    """A fault that has happened, and where it must be seen.

    :ivar first: `qdo status`.
    :ivar named: the command that docs/on-call.rst names.
    :ivar page: of the dashboard.
    :ivar subject: the queue or the check whose next step `qdo status` prints, "" for none.
    :ivar repair: ends the cause, as far as no command of qdo does.
    :ivar commands: what an operator types after the repair and the printed next step.
    """

    first: Evidence
    named: Evidence
    page: Evidence
    subject: str = ""
    repair: Callable[[], object] = lambda: None
    commands: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that can be prepared.

    :ivar title: what has happened, for the person who has found out, or not.
    :ivar section: of docs/on-call.rst.
    :ivar strike: lets it happen.
    """

    name: str
    title: str
    section: str
    strike: Callable[[DrillStage], Incident]
    place: Servers = HERE
    flags: Sequence[Sequence[str]] = field(default=((),) * WORKERS)


def _all_three(
    says: tuple[str, ...], named: tuple[str, ...]
) -> tuple[Evidence, Evidence, Evidence]:
    """Return looks at `qdo status`, at a command and at the overview that must say the same."""
    return Evidence(("status",), says), Evidence(named, says), Evidence("/", says)


def hung_job(stage: DrillStage) -> Incident:
    stage.send("mail-9", 1, "hang")
    stage.send("mail-9", 2)
    says = ("mail-9", "has run for")
    return Incident(
        Evidence(("status",), says),
        Evidence(("ps",), ("mail-9", r"shop\.py:\d+ mail")),
        Evidence("/", says),
        repair=(stage.folder / "mail-server").touch,
        subject="mail-9",
    )


def poison_message(stage: DrillStage) -> Incident:
    stage.send("pay-7", 1, "poison")
    stage.send("pay-7", 2)
    looks = _all_three(("pay-7", "blocked", "ValueError: no such account"), ("queues", "pay-7"))
    return Incident(*looks, repair=(stage.folder / "account").touch, subject="pay-7")


def no_job(stage: DrillStage) -> Incident:
    stage.send("letters", 3)
    says = ("letters", "no-job", "No worker has a job whose glob matches its name")
    named = ("queues", "--state", "no-job", "--state", "no-worker", "--state", "unowned")
    return Incident(
        *_all_three(says, named),
        repair=(stage.folder / "letters-are-deployed").touch,
        commands=[("action", "worker-*", "restart", "--yes")],
        subject="letters",
    )


def wrong_filter(stage: DrillStage) -> Incident:
    stage.send("eu-7", 3)
    says = ("eu-7", "no-worker", "queues and exclude of all workers leave it out")
    first, named, page = _all_three(says, ("workers",))
    return Incident(
        first,
        Evidence(named.at, ("FILTER", r"eu-\*")),
        page,
        repair=lambda: stage.start_worker("--queues", "eu-*"),
        subject="eu-7",
    )


def follower_down(stage: DrillStage) -> Incident:
    assert stage.ensemble is not None
    server = next(each for each in stage.ensemble.servers if each.mode() == "follower")
    server.kill()
    looks = _all_three((r"2 of 3 servers answer", f"not: {server.address}"), ("doctor",))
    return Incident(*looks, repair=server.restart, subject="coordinator-servers")


def full_disk(stage: DrillStage) -> Incident:
    stack = ExitStack()
    stage.at_end(stack.close)
    stack.enter_context(full(stage.data))
    # A command that must write to open a session says so itself, and prints nothing else.
    looks = _all_three((f"{stage.data}", "disk is full", "free disk space"), ("doctor",))
    return Incident(*looks, repair=stack.close)


def clock_skew(stage: DrillStage) -> Incident:
    program = start_skewed(stage)
    looks = _all_three(("clock", f"ahead of the coordinator's: {SKEWED_HOST}"), ("doctor",))

    def correct() -> None:
        program.stop(30.0)
        stage.start_worker()

    return Incident(*looks, repair=correct, subject="clocks")


def start_skewed(stage: DrillStage) -> Program:
    """Start one more worker, on a host whose clock is ahead."""
    return stage.start_worker(
        PYTHONPATH=f"{SKEWED}{os.pathsep}{ROOT}",
        DRILL_AHEAD_SECONDS=str(AHEAD_SECONDS),
        DRILL_HOST=SKEWED_HOST,
    )


def starved_group(stage: DrillStage) -> Incident:
    queue = stage.name("mail-1")
    # Workers poll all the time: only a paused or blocked queue leaves its messages to others.
    stage.send("mail-1", 1)
    wait_until(lambda: stage.missing(queue) == 0, "the queue has been found", 90.0, 0.5)
    stage.qdo("pause", queue)
    stage.send("mail-1", 3)
    url = stage.sqs.get_queue_url(QueueName=PREFIX + queue)["QueueUrl"]
    taken = stage.sqs.receive_message(
        QueueUrl=url, MaxNumberOfMessages=1, VisibilityTimeout=HIDDEN_SECONDS
    )["Messages"][0]
    stage.qdo("resume", queue)

    def give_back() -> None:
        stage.sqs.change_message_visibility(
            QueueUrl=url, ReceiptHandle=taken["ReceiptHandle"], VisibilityTimeout=0
        )

    says = (queue, "stopped", "another consumer has received from this queue")
    return Incident(*_all_three(says, ("queues", queue)), repair=give_back, subject=queue)


def frozen_worker(stage: DrillStage) -> Incident:
    pids = [pid for pid, _ in tree(stage.process(0).pid)]
    name = next(each["worker"] for each in stage.items("workers") if each["pid"] in pids)
    # A process that is stopped while it writes to a file of SQLite stops all others.
    for pid in pids:
        freeze(pid, f"sqlite:{stage.folder / 'orders.db'}")

    def thaw() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    says = "lost-workers", name
    return Incident(
        Evidence(("status",), says),
        Evidence(("action", "worker-*", "ping"), (f"{name} +unanswered",)),
        Evidence("/", says),
        repair=thaw,
    )


def dead_letters(stage: DrillStage) -> Incident:
    for number in range(4):
        stage.send(f"scan-{number}", LETTERS // 4)
    error = "LookupError: the service of scans is down"

    def repair() -> None:
        stage.qdo("pause", "scan-*", "--yes", "--reason", "the service of scans is down")
        (stage.folder / "scanner").touch()

    return Incident(
        Evidence(("status",), (rf"\b{LETTERS} dead letters",)),
        Evidence(("dead-letters", "list", "scan-*"), (r"scan-\d", error)),
        Evidence("/dead-letters", (error, f"{LETTERS:,}")),
        repair=repair,
        commands=[
            ("resume", "scan-*", "--yes"),
            ("dead-letters", "retry", "scan-*", "--error", "service of scans", "--yes"),
        ],
    )


def failed_requests(stage: DrillStage) -> Incident:
    stage.send("thumb", THUMBS, "fail")
    error = "LookupError: the service of thumbnails is down"
    return Incident(
        Evidence(("status",), ("thumb", rf"\b{THUMBS} dead letters")),
        Evidence(("dead-letters", "list", "--by", "error"), (error, rf"\b{THUMBS}\b")),
        Evidence("/dead-letters", (error, rf"\b{THUMBS}\b")),
        repair=(stage.folder / "thumbnailer").touch,
        commands=[("dead-letters", "retry", "thumb", "--all", "--yes")],
    )


def refused_row(stage: DrillStage) -> Incident:
    """A row that the broker cannot take, as of another program that writes to the table."""
    table = stage.outbox.table
    with stage.orders.begin() as transaction:
        id = stage.outbox.send(transaction, "tenant-1", {})
        changed = sqlalchemy.update(table).where(table.c.id == id)
        transaction.execute(changed.values(queue="no/queue"))
    stage.send("tenant-outbox", 3)
    first, _, page = _all_three(("outbox", "1 message", "refused"), ())
    return Incident(
        first,
        Evidence(("admin", "outbox", "list"), ("no/queue",)),
        page,
        subject="outbox",
        commands=[("admin", "outbox", "drop", "--all", "--yes")],
    )


def starved_worker(stage: DrillStage) -> Incident:
    worker = tree(stage.process(0).pid)[-1][0]
    name = next(each["worker"] for each in stage.items("workers") if each["pid"] == worker)
    group = CpuQuota()
    stage.at_end(group.close)
    group.add(worker)
    says = ("starved-workers", name, "waited for a processor")
    return Incident(*_all_three(says, ("doctor",)), repair=group.close, subject="starved-workers")


class CpuQuota:
    """A control group whose processes share a hundredth of a processor; needs root."""

    def __init__(self) -> None:
        self._root = next(filter(Path.is_dir, (CGROUPS / "cpu", CGROUPS)))
        self._group = self._root / f"qdo-drill-{os.getpid()}"
        self._group.mkdir()
        if (self._group / "cpu.max").exists():
            (self._group / "cpu.max").write_text("1000 100000")
        else:
            (self._group / "cpu.cfs_period_us").write_text("100000")
            (self._group / "cpu.cfs_quota_us").write_text("1000")

    def add(self, pid: int) -> None:
        (self._group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Let its processes run freely; may be called again."""
        if self._group.exists():
            for pid in (self._group / "cgroup.procs").read_text().split():
                (self._root / "cgroup.procs").write_text(pid)
            self._group.rmdir()


FAULTS = (
    Fault("hung-job", "a job of mail-9 waits forever", "A queue is stuck", hung_job),
    Fault("poison-message", "a message blocks pay-7", "A queue is blocked", poison_message),
    Fault("no-job", "no worker has a job for letters", "No worker takes a queue", no_job),
    Fault(
        "wrong-filter",
        "all workers exclude eu-7",
        "No worker takes a queue",
        wrong_filter,
        flags=(EU,) * WORKERS,
    ),
    Fault(
        "follower-down", "a follower of ZooKeeper is down", "The coordinator is lost", follower_down
    ),
    Fault(
        "full-disk",
        "the disk of messages and progress is full",
        "A disk is full",
        full_disk,
        Servers("embedded", "sqlite", own_disk=True),
    ),
    Fault("clock-skew", f"the clock of {SKEWED_HOST} is ahead", "Clocks differ", clock_skew),
    Fault(
        "starved-group",
        "a foreign consumer holds the group of mail-1.fifo",
        "A group of SQS is starved",
        starved_group,
        Servers("embedded", "sqs"),
    ),
    Fault("frozen-worker", "a worker is frozen", "A worker is silent or frozen", frozen_worker),
    Fault(
        "dead-letters",
        f"{LETTERS} messages of scan-* are dead letters",
        "Dead letters by the thousand",
        dead_letters,
    ),
    Fault(
        "failed-requests",
        f"{THUMBS} requests of the pool thumb have failed",
        "Dead letters by the thousand",
        failed_requests,
    ),
    Fault(
        "refused-row", "the broker refuses a row of an outbox", "A message is refused", refused_row
    ),
    Fault(
        "starved-worker",
        "a worker hardly gets a processor",
        "A worker is silent or frozen",
        starved_worker,
    ),
)
