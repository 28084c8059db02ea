"""The app of the drill with its servers, three workers, and healthy queues beside the fault."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy

from bench.support import services
from bench.support.processes import Program, ProgramError
from qdo import App
from qdo.errors import QdoError
from qdo.outbox import Outbox
from tests.support.aws.clients import client, stand_in
from tests.support.aws.server_process import serving
from tests.support.cli import QDO, Ended, clean_environment, command
from tests.support.paths import ROOT
from tests.support.postgresql.schema import prepared
from tests.support.processes import wait_until
from tests.support.zookeeper import Ensemble

SHOP = Path(__file__).with_name("shop.py")
SKEWED = Path(__file__).with_name("skewed")
WORKERS = 3
HEALTHY = tuple(f"tenant-{number}" for number in range(6))
YOUNG = ("thumb", "visit", "tenant-outbox")
"""A pool, a stream, and a queue whose messages go through an outbox."""
EVERY_SECONDS = 0.3
START_SECONDS = 60.0
REGION = "us-east-1"
PREFIX = "drill-"
DISK_BYTES = 1536 << 20
"""`qdo doctor` warns of less than 1 GiB. The file of this size has holes."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where a stage has its state.

    :ivar coordinator: "zookeeper", an ensemble of three, or "embedded".
    :ivar broker: "postgresql", "sqlite" or "sqs".
    :ivar own_disk: both files are on a file system of their own.
    """

    coordinator: str = "zookeeper"
    broker: str = "postgresql"
    own_disk: bool = False


class DrillStage:
    """The app in a folder.

    :ivar data: the folder of the files of qdo.
    :ivar ensemble: None with the embedded coordinator.
    :ivar sqs: a client of the loopback server, None without SQS.
    """

    def __init__(self, folder: Path, place: Servers, stack: ExitStack) -> None:
        self.folder = self.data = folder
        self.ensemble: Ensemble | None = None
        self.sqs: Any = None
        self._stack = stack
        self._workers: list[Program] = []
        self.at_end = stack.callback
        self.port = 0
        self._sent: list[tuple[str, int]] = []
        self._stop = threading.Event()
        shutil.copy(SHOP, folder / SHOP.name)
        if place.own_disk:
            self.data = stack.enter_context(own_disk(folder))
        self._environment = {
            "QDO_APP": "shop:app",
            "QDO_COORDINATOR": self._coordinator(place),
            "QDO_BROKER": self._broker(place),
        }
        if self.sqs is not None:
            stand_in(self._environment)
        self._suffix = ".fifo" if self.sqs is not None else ""
        self._app = stack.enter_context(App("shop", broker=self.environment["QDO_BROKER"]))
        self._healthy = HEALTHY if self.sqs is not None else (*HEALTHY, *YOUNG)
        self._visits = self._app.stream("visit", shards=2) if self.sqs is None else None
        self.orders = sqlalchemy.create_engine(f"sqlite:///{folder}/orders.db")
        self._stack.callback(self.orders.dispose)
        self.outbox = Outbox(self._app, self.orders)
        with self.orders.begin() as transaction:
            self.outbox.create(transaction)

    @property
    def environment(self) -> Mapping[str, str]:
        """What an operator exports."""
        return self._environment

    def _coordinator(self, place: Servers) -> str:
        if place.coordinator == "embedded":
            return f"sqlite:{self.data / 'coordination.db'}"
        self.ensemble = Ensemble(self.folder / "zookeeper", 3)
        self._stack.callback(self.ensemble.close)
        self.ensemble.start()
        return self.ensemble.url("/drill")

    def _broker(self, place: Servers) -> str:
        if place.broker == "sqlite":
            return f"sqlite:{self.data / 'messages.db'}"
        if place.broker == "postgresql":
            server = self._stack.enter_context(services.postgresql())
            return prepared(server.address.url(server.address.create_database()))
        stand_in(os.environ)
        server = self._stack.enter_context(serving("tests.support.aws.sqs_server"))
        self.sqs = client("sqs", server.url, region=REGION)
        return f"sqs://{REGION}/{PREFIX}?endpoint={server.url}&wait_seconds=1&idle_seconds=1"

    # --- workers ---

    def start(self, flags: Sequence[Sequence[str]] = ((),) * WORKERS) -> None:
        """Send to the healthy queues, and start one worker for each list of flags."""
        for queue in self._healthy:
            self.send(queue, 1)
        for each in flags:
            self.start_worker(*each)
        wait_until(
            lambda: len(self.workers()) == len(flags) and self.missing() == 0,
            lambda: f"the workers run all messages: {self.missing()} missing, {self.workers()}",
            START_SECONDS,
            0.5,
        )
        thread = threading.Thread(target=self._send_on, daemon=True)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._stop.set)

    def start_worker(self, *flags: str, **environment: str) -> Program:
        """Start ``qdo-worker``, with its log in the folder."""
        log = self.folder / f"worker-{len(self._workers) + 1}.log"
        argv = (sys.executable, "-m", "qdo.cli.worker", "--drain-seconds", "5", *flags)
        shell = ("sh", "-c", 'log=$1; shift; exec "$@" >> "$log" 2>&1', "sh", str(log))
        program = Program(
            [*shell, *argv],
            folder=self.folder,
            environment={"PYTHONPATH": f"{ROOT}", **self._environment, **environment},
        )
        self._workers.append(program)
        self._stack.callback(program.stop)
        return program

    def process(self, number: int) -> Program:
        """Return a worker by the order of start."""
        return self._workers[number]

    # --- messages ---

    def name(self, queue: str) -> str:
        """Return the name of a queue at this broker."""
        return queue + self._suffix

    def send(self, queue: str, count: int, what: str = "") -> None:
        """Send messages that the job takes as `what`; each is counted."""
        name = self.name(queue)
        if self.sqs is not None:
            self.sqs.create_queue(QueueName=PREFIX + name, Attributes={"FifoQueue": "true"})
        first = len(self._sent)
        bodies = [{"n": first + number, "what": what} for number in range(count)]
        self._store(queue, name, bodies)
        self._sent += [(name, int(str(body["n"]))) for body in bodies]

    def _store(self, queue: str, name: str, bodies: Sequence[dict[str, object]]) -> None:
        if queue == "thumb":
            self._app.request_many([{"pool": queue, "body": body} for body in bodies])
        elif queue == "visit" and self._visits is not None:
            self._visits.send_many([(str(body["n"]), body) for body in bodies])
        elif queue == "tenant-outbox":
            with self.orders.begin() as transaction:
                for body in bodies:
                    self.outbox.send(transaction, queue, body)
        else:
            self._app.send_many([(name, body) for body in bodies])

    def _send_on(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            # What was not stored is not counted.
            with contextlib.suppress(QdoError):
                self.send(self._healthy[len(self._sent) % len(self._healthy)], 1)

    def missing(self, queue: str = "") -> int:
        """Return how many messages, of one queue or of all, no job has finished yet."""
        path = self.folder / "done"
        text = path.read_text() if path.exists() else ""
        done = {tuple(line.split()) for line in text[: text.rfind("\n") + 1].splitlines()}
        sent = [each for each in list(self._sent) if not queue or each[0] == queue]
        return sum((name, str(number)) not in done for name, number in sent)

    def rest(self) -> None:
        """Send no more to the healthy queues."""
        self._stop.set()

    # --- an operator ---

    def qdo(self, *words: str) -> Ended:
        """Run a command as an operator types it."""
        return command(*QDO, *words, cwd=self.folder, env=self._environment)

    def items(self, *words: str) -> list[dict[str, Any]]:
        """Return the items of a command that lists something."""
        ended = self.qdo(*words, "-o", "json")
        if ended.code:
            raise ProgramError(f"qdo {' '.join(words)} ended with {ended.code}: {ended.err}")
        found: list[dict[str, Any]] = json.loads(ended.out)["items"]
        return found

    def workers(self) -> list[str]:
        """Return the names of the registered workers."""
        return [each["worker"] for each in self.items("workers")]

    def dashboard(self) -> Program:
        """Start a dashboard; see `port`."""
        self.port = services.free_port()
        argv = [sys.executable, *QDO, "dashboard", "--listen", f"127.0.0.1:{self.port}"]
        environment = clean_environment(self._environment)
        program = Program(argv, folder=self.folder, environment=environment)
        self._stack.callback(program.stop)
        return program


@contextlib.contextmanager
def staged(place: Servers) -> Iterator[DrillStage]:
    """Make a stage, and end its processes and servers."""
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="qdo-drill-"))
        yield DrillStage(Path(name), place, stack)


@contextlib.contextmanager
def own_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of `DISK_BYTES` in a file; needs root."""
    image, mounted = folder / "disk.image", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        os.truncate(file.fileno(), DISK_BYTES)
    for argv in (
        ("mkfs.ext4", "-q", "-m", "0", str(image)),
        ("mount", "-o", "loop", str(image), str(mounted)),
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ProgramError(f"{argv[0]} needs root and loop devices: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
