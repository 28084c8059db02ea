"""Whole worker processes on SQS queues, whose messages state their own handling."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qdo.brokers.registry import open_broker
from qdo.brokers.sqs.broker import SqsBroker
from qdo.coordination.client import Client, connect
from qdo.coordination.znodes.layout import Layout
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.ops.worker_status import worker_statuses
from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import LoggedRequest, Proxy
from tests.support.aws.server_process import ServerProcess
from tests.support.cli import QDO, Ended, command
from tests.support.paths import ROOT
from tests.support.processes import Proc, children, wait_until, whole_lines

REGION = "eu-west-1"
APP = "stage"
BATCH = 10
DEADLINE_SECONDS = 40.0

JOBS = """
import json, os, signal, time
import qdo
from qdo.brokers.sqs.broker import SqsCatalog

SqsCatalog.list_seconds = 0.3
app = qdo.App("stage")

def say(what, message):
    line = {{
        "what": what, "queue": message.queue, "key": message.key, "n": message.body["n"],
        "attempt": message.attempt, "fence": message.fence, "pid": os.getpid(),
        "at": time.time(),
    }}
    with open("said", "a") as file:
        file.write(json.dumps(line) + "\\n")

@app.job({options})
def job(message, context):
    body = message.body
    say("begin", message)
    while "gate" in body and not os.path.exists(body["gate"]):
        time.sleep(0.01)
    time.sleep(body.get("seconds", 0))
    if body.get("kills", 0) >= message.attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    failing = "until" in body and not os.path.exists(body["until"])
    if failing or body.get("fails", 0) >= message.attempt:
        say("fail", message)
        raise ValueError(f"no {{body['n']}}")
    say("end", message)

{more}
"""
"""Bodies are objects with a number ``n``, and with instructions for the job: ``gate``, the name of
a file to wait for; ``seconds`` to sleep; ``kills`` and ``fails``, the number of attempts that kill
their process or fail; ``until``, the name of a file without which the job fails."""


class SqsWorkers:
    """An app whose job follows the instructions in messages, and its queues.

    :ivar proxy: proxy that workers use as SQS; None: the server itself.
    :param faults: the server can inject faults, as the fast one can.
    """

    def __init__(
        self, folder: Path, server: ServerProcess, prefix: str, faults: bool = True
    ) -> None:
        self.folder = folder
        self.server = server
        self.prefix = prefix
        self.proxy: Proxy | None = None
        self._faults = faults
        self._session: Client | None = None
        self.coordinator = f"sqlite:{folder / 'coordination.db'}"
        self.sqs = client("sqs", server.url, region=REGION)
        self.urls: dict[str, str] = {}
        self._workers: list[Proc] = []
        self.job()

    # --- before ---

    def job(self, options: str = "", more: str = "") -> None:
        """Write the app, with options of its job as they stand in Python, and more at its end."""
        (self.folder / "jobs.py").write_text(JOBS.format(options=options, more=more))

    def make(self, name: str, **attributes: str) -> str:
        """Create a queue; return its URL."""
        if name.endswith(".fifo"):
            attributes["FifoQueue"] = "true"
        made = self.sqs.create_queue(QueueName=self.prefix + name, Attributes=attributes)
        self.urls[name] = str(made["QueueUrl"])
        return self.urls[name]

    def send(self, queue: str, *bodies: dict[str, Any], key: str = "") -> None:
        """Send bodies in order, to one message group where the queue has groups."""
        fifo = queue.endswith(".fifo")
        for start in range(0, len(bodies), BATCH):
            entries = []
            for number, body in enumerate(bodies[start : start + BATCH]):
                entry: dict[str, Any] = {"Id": str(number), "MessageBody": json.dumps(body)}
                if fifo:
                    entry["MessageGroupId"] = key or "-"
                    entry["MessageDeduplicationId"] = uuid.uuid4().hex
                entries.append(entry)
            answer = self.sqs.send_message_batch(QueueUrl=self.urls[queue], Entries=entries)
            assert not answer.get("Failed"), answer

    def take_proxy(self, proxy: Proxy) -> None:
        """Have workers ask a proxy from now on."""
        self.proxy = proxy

    def spoil(self, fault: str, action: str, queue: str = "", **terms: Any) -> None:
        """Have the proxy spoil requests, of this queue or of all; see `FaultRule`."""
        if self.proxy is not None:
            name = self.prefix + queue if queue else ""
            self.proxy.spoil(fault, action, name=name, **terms)

    def asked(self, action: str, queue: str) -> list[LoggedRequest]:
        """Return the requests at the proxy for a queue."""
        name = self.prefix + queue
        return [each for each in self.proxy.log(action) if each.name == name] if self.proxy else []

    def all_asked(self) -> list[LoggedRequest]:
        """Return the requests at the proxy for any queue, and for all together."""
        return self.proxy.log() if self.proxy is not None else []

    def url(self, **options: Any) -> str:
        """Return the address of the broker."""
        given = {
            "endpoint": self.server.url if self.proxy is None else self.proxy.url,
            "visibility_seconds": 2,
            "wait_seconds": 1,
            "idle_seconds": 0.2,
            **options,
        }
        text = "&".join(f"{name}={value}" for name, value in given.items())
        return f"sqs://{REGION}/{self.prefix}?{text}"

    # --- processes ---

    def start(self, *flags: str, **options: Any) -> Proc:
        """Start ``qdo-worker``.

        :param options: of the broker's address.
        """
        worker = Proc.python(
            *("-m", "qdo.cli.worker", "jobs:app"),
            *("--broker", self.url(**options)),
            *("--coordinator", self.coordinator),
            *("--session-timeout-seconds", "2"),
            *flags,
            cwd=self.folder,
            env={
                "PYTHONPATH": str(ROOT),
                "QDO_BACKOFF_SECONDS": "0.02",
                "QDO_BACKOFF_MAX_SECONDS": "0.05",
            },
        )
        self._workers.append(worker)
        return worker

    def child(self, worker: Proc) -> int:
        """Return the pid of the process of a worker that runs jobs."""
        self.until(lambda: len(children(worker.pid)) == 1, "the worker has a child")
        return children(worker.pid)[0]

    def qdo(self, *words: str, env: Mapping[str, str] | None = None) -> Ended:
        """Run the command line of an operator, or of a sender."""
        known = {"QDO_APP": APP, "QDO_BROKER": self.url(), "QDO_COORDINATOR": self.coordinator}
        return command(*QDO, *words, cwd=self.folder, env={**known, **(env or {})})

    def open(self, gate: str) -> None:
        """Let jobs pass a gate."""
        (self.folder / gate).touch()

    # --- after ---

    def said(self, what: str = "", **fields: Any) -> list[dict[str, Any]]:
        """Return the reports of jobs, in order: of one kind, with these values."""
        found = [json.loads(line) for line in whole_lines(self.folder / "said")]
        wanted = {**({"what": what} if what else {}), **fields}
        return [each for each in found if wanted.items() <= each.items()]

    def numbers(self, what: str = "end", **fields: Any) -> list[int]:
        """Return the numbers of the messages with such reports, in order."""
        return [each["n"] for each in self.said(what, **fields)]

    def wait(self, count: int, what: str = "end", **fields: Any) -> float:
        """Wait for this number of reports; return the seconds it took."""
        return self.until(
            lambda: len(self.said(what, **fields)) >= count, f"{count} times {what} {fields}"
        )

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for a condition; return the seconds it took."""
        told = lambda: f"{what}; the workers said:\n{self.output()}"  # noqa: E731
        return wait_until(condition, told, DEADLINE_SECONDS)

    def wait_empty(self, *queues: str) -> None:
        """Wait until nothing is left in queues, or in all of them."""
        for queue in queues or self.urls:
            self.until(lambda queue=queue: self.left(queue) == 0, f"{queue} is empty")  # type: ignore[misc]

    def left(self, queue: str) -> int:
        """Return how many messages a queue has, hidden ones too."""
        counts = self.counts(queue)
        return counts["waiting"] + counts["hidden"]

    def counts(self, queue: str) -> dict[str, int]:
        """Return how many messages of a queue are ``waiting``, and how many ``hidden``."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        url = self.urls[queue]
        found = self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        return {"waiting": int(found[names[0]]), "hidden": int(found[names[1]])}

    def requests(self, action: str, queue: str, count: str = "requests") -> int:
        """Return a count of the server's log, of one action with one queue."""
        name = self.prefix + queue
        return sum(
            each[count]
            for each in self.server.ask("/_log")["requests"]
            if (each["action"], each["queue"]) == (action, name)
        )

    def open_polls(self, queue: str) -> int:
        """Return how many long polls of a queue are open at the server."""
        waiting: dict[str, int] = self.server.ask("/_log")["waiting"]
        return waiting.get(self.prefix + queue, 0)

    def fail_entries(self, action: str, queue: str, entries: int = 1, **terms: Any) -> None:
        """Let entries of batches fail; see `EntryFault`."""
        rule = {"action": action, "queue": self.prefix + queue, "entries": entries, **terms}
        self.server.ask("/_fail_entries", rule)

    def output(self) -> str:
        """Return the output of the workers."""
        return "\n---\n".join(worker.output for worker in self._workers)

    @property
    def session(self) -> Client:
        """A session at the coordinator that looks on."""
        if self._session is None:
            self._session = connect(self.coordinator, handler="threading")
            self._session.open(5.0)
        return self._session

    def node(self, queue: str) -> QueueNode:
        """Return the node of a queue, an empty one if it does not exist yet."""
        path = Layout.of(APP).queue(queue)
        found = self.session.exists(path)
        return QueueNode.parse(self.session.get(path)[0]) if found else QueueNode()

    def assigned(self) -> list[int]:
        """Return how many queues each registered worker has or is to get."""
        return [each.assigned for each in worker_statuses(self.session, Layout.of(APP))]

    def broker(self, **options: Any) -> SqsBroker:
        """Return a broker as operators have it, straight at the server if nothing else is said.

        To be closed.
        """
        broker = open_broker(self.url(**{"endpoint": self.server.url, **options}), APP)
        assert isinstance(broker, SqsBroker)
        return broker

    def close(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._session.close()
        for worker in self._workers:
            with worker:
                pass
        if self._faults:
            self.server.ask("/_fail_entries", {})


def once_in_order(numbers: Iterable[int]) -> list[int]:
    """Return numbers without repetitions, in the order of their first coming."""
    return list(dict.fromkeys(numbers))
