"""A marker in bodies is nowhere in clear: files, logs, packets and process listings of fleets."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.aws.clients import REGION, client
from tests.support.aws.kinesis_server import KinesisStub
from tests.support.aws.server_process import ServerProcess
from tests.support.cli import QDO, WORKER, command
from tests.support.fakes.key_files import key, write_keys
from tests.support.fakes.wiretap import Wiretap, tapped
from tests.support.kinesis import kinesis_url
from tests.support.processes import Proc, descendants, wait_until, whole_lines
from tests.support.zookeeper import Ensemble
from tests.support.zookeeper_txn_log import read_log

MARKER = "MARKER-d41d8cd98f00b204"
JOBS = """
import hashlib, os
import qdo

app = qdo.App("a", processes=2, log_level="debug")
policy = qdo.Policy(1, then=THEN)
out = os.open("out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def write(message):
    body = message.body if isinstance(message.body, bytes) else str(message.body).encode()
    digest = hashlib.sha256(body).hexdigest()
    os.write(out, f"{digest}\\n".encode())
    if b"fail" in body:
        raise ValueError("as asked for")

@app.job("*", order=ORDER, policy=policy)
def job(message, context):
    write(message)

@app.job("p*", executor="process", policy=policy)
def in_process(message, context):
    write(message)

@app.job("b*", batch=5, policy=policy)
def batched(batch, context):
    for message in batch:
        write(message)
"""
LARGE = 3000
"""Bytes of a body that SQS gets as an object of S3."""


@dataclass
class Stage:
    """A fleet with its files, and everything that others may read of it.

    :ivar servers: folders with files of servers.
    """

    folder: Path
    broker: str
    coordinator: str
    queues: tuple[str, ...]
    order: str = "queue"
    then: str = "dead-letter"
    taps: list[Wiretap] = field(default_factory=list)
    servers: list[Path] = field(default_factory=list)
    seen: bytes = b""

    def environment(self, encrypted: bool) -> dict[str, str]:
        keys = write_keys(self.folder / "keys", key("k1"))
        found = {"QDO_APP": "jobs:app", "QDO_BROKER": self.broker}
        found |= {"QDO_COORDINATOR": self.coordinator}
        return {**found, "QDO_KEYS": keys, "QDO_ENCRYPT": "bodies"} if encrypted else found

    def run(self, encrypted: bool, hide: str = "") -> None:
        """Send to a fleet from another process until all is processed, some as dead letters."""
        env = {**self.environment(encrypted), "QDO_HIDE": hide}
        jobs = JOBS.replace("ORDER", repr(self.order)).replace("THEN", repr(self.then))
        (self.folder / "jobs.py").write_text(jobs)
        bodies = [json.dumps({"n": n, "text": MARKER}) for n in range(8)]
        bodies += [json.dumps({"text": f"fail {MARKER}"}), json.dumps(MARKER * (LARGE // 20))]
        with Proc.python(*WORKER, env=env, cwd=self.folder) as fleet:
            for queue in self.queues:
                sent = command(
                    *QDO, "send", queue, "--file", "-", cwd=self.folder, env=env,
                    stdin="\n".join(bodies).encode(),
                )  # fmt: skip
                assert sent.code == 0, sent.err
                self.seen += sent.out.encode() + sent.err.encode()
            wanted = len(self.queues) * len(bodies)

            def done() -> bool:
                self._look_at_processes(fleet.pid)
                return len(whole_lines(self.folder / "out")) >= wanted

            wait_until(done, f"{wanted} messages", 60.0)
            fleet.wait_for_line("is a dead letter|skipped in attempt 1")
            for command_line in (("queues",), ("workers",), ("admin", "tree"), ("dead-letters",)):
                shown = command(*QDO, *command_line, cwd=self.folder, env=env)
                self.seen += shown.out.encode() + shown.err.encode()
            self._look_at_files()
            fleet.kill()
            self.seen += fleet.output.encode()
        self._look_at_files()
        for tap in self.taps:
            self.seen += tap.recorded()

    def _look_at_processes(self, pid: int) -> None:
        for each in (pid, *descendants(pid)):
            for name in ("cmdline", "environ"):
                try:
                    self.seen += Path(f"/proc/{each}/{name}").read_bytes()
                except OSError:
                    continue

    def _look_at_files(self) -> None:
        for top in (self.folder, *self.servers):
            for folder, _, names in os.walk(top):
                for name in names:
                    path = Path(folder, name)
                    if path.is_file():
                        self.seen += path.read_bytes()


def shows(data: bytes, text: str = MARKER) -> bool:
    """Return whether bytes have a text, in clear or in base64 at any offset."""
    forms = [text.encode()]
    for offset in range(3):
        whole = base64.b64encode(b"\0" * offset + text.encode())
        forms.append(whole[4:-4])
    return any(form in data for form in forms)


def test_the_search_finds_what_is_there() -> None:
    """In clear, and encoded at any offset."""
    for offset in range(6):
        data = b"x" * offset + MARKER.encode() + b"rest"
        assert shows(data)
        assert shows(base64.b64encode(data))
    assert not shows(b"MARKER" * 100)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def tap(stack: ExitStack) -> Callable[[int], Wiretap]:
    return lambda port: stack.enter_context(tapped(port))


Tap = Callable[[int], Wiretap]
QUEUES = ("q", "p", "b")


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [True, False])
def test_files_have_no_body_in_clear(tmp_path: Path, encrypted: bool) -> None:
    """Of the embedded broker and coordinator; without encryption the search finds them."""
    files = tmp_path / "data"
    files.mkdir()
    broker, coordinator = f"sqlite:{files}/messages.db", f"sqlite:{files}/coordination.db"
    stage = Stage(tmp_path, broker, coordinator, QUEUES)
    stage.run(encrypted)
    assert shows(stage.seen) is not encrypted


@pytest.mark.slow
def test_zookeeper_has_no_body_in_clear(
    tmp_path: Path, zookeeper_server: Ensemble, tap: Tap
) -> None:
    """Neither its transaction log nor the packets."""
    (server,) = zookeeper_server.servers
    wire = tap(server.port)
    coordinator = f"zookeeper://127.0.0.1:{wire.port}/encryption"
    stage = Stage(tmp_path, f"sqlite:{tmp_path}/messages.db", coordinator, QUEUES)
    stage.taps.append(wire)
    stage.servers.append(server.folder)
    stage.run(encrypted=True, hide="errors,hosts")
    assert b'"last"' in stage.seen
    assert not shows(stage.seen)
    changes = [change for txn in read_log(server.folder) for change in txn.changes]
    ours = [each for each in changes if each.path.startswith("/encryption/")]
    assert any(b"hidden" in (each.data or b"") for each in ours)
    host = socket.gethostname()
    assert not any(f"/{host}-" in each.path for each in ours)
    assert not any(f'"host":"{host}"'.encode() in (each.data or b"") for each in ours)


@pytest.mark.slow
def test_sqs_and_s3_get_no_body_in_clear(
    tmp_path: Path, moto_server: ServerProcess, aws_prefix: str, aws_bucket: str, tap: Tap
) -> None:
    """Neither in messages and dead letters nor in objects."""
    wire = tap(urlsplit(moto_server.url).port or 0)
    s3: Any = client("s3", moto_server.url, region=REGION)
    s3.create_bucket(Bucket=aws_bucket)
    # A worker that has already started lists new queues only once a minute.
    client("sqs", moto_server.url, region=REGION).create_queue(QueueName=f"{aws_prefix}q")
    options = "create=standard&wait_seconds=0&idle_seconds=0.1&max_body=2000"
    broker = f"sqs://{REGION}/{aws_prefix}?endpoint=http://127.0.0.1:{wire.port}&{options}"
    coordinator = f"sqlite:{tmp_path}/coordination.db"
    stage = Stage(tmp_path, f"{broker}&bucket={aws_bucket}", coordinator, ("q",), "none")
    stage.taps.append(wire)
    stage.run(encrypted=True)
    assert b"SendMessageBatch" in stage.seen
    assert not shows(stage.seen)


@pytest.mark.slow
def test_kinesis_gets_no_body_in_clear(
    tmp_path: Path, kinesis: KinesisStub, aws_stream: str, tap: Tap
) -> None:
    """Sent to the stream, received from its shards."""
    wire = tap(urlsplit(kinesis.url).port or 0)
    kinesis.make(aws_stream, 2)
    broker = kinesis_url(f"http://127.0.0.1:{wire.port}", aws_stream)
    coordinator = f"sqlite:{tmp_path}/coordination.db"
    stage = Stage(tmp_path, broker, coordinator, (aws_stream,), then="skip")
    stage.taps.append(wire)
    stage.run(encrypted=True)
    assert b"PutRecords" in stage.seen
    assert not shows(stage.seen)


@pytest.mark.slow
def test_an_operator_may_end_a_message_without_key(tmp_path: Path) -> None:
    """Any sender can name a key that does not exist; a burst does not wait for it."""
    stage = Stage(tmp_path, f"sqlite:{tmp_path}/m.db", f"sqlite:{tmp_path}/c.db", ("q",))
    env = stage.environment(encrypted=True)
    (tmp_path / "jobs.py").write_text(JOBS.replace("ORDER", "'queue'").replace("THEN", "'skip'"))
    assert command(*QDO, "send", "q", "1", cwd=tmp_path, env=env).code == 0
    env["QDO_KEYS"] = write_keys(tmp_path / "other", key("k2"))
    assert command(*QDO, "send", "q", "2", cwd=tmp_path, env=env).code == 0
    burst = (*WORKER, "jobs:app", "--burst")
    assert command(*burst, cwd=tmp_path, env=env).code == 0
    assert not whole_lines(tmp_path / "out")
    ended = command(*QDO, "dead-letters", "add", "q", "--all", cwd=tmp_path, env=env)
    assert ended.code == 0, ended.err
    assert command(*burst, cwd=tmp_path, env=env).code == 0
    assert len(whole_lines(tmp_path / "out")) == 1
    shown = command(*QDO, "dead-letters", "export", cwd=tmp_path, env=env)
    assert "k1" in json.loads(shown.out)["body_error"]


@pytest.mark.slow
def test_a_worker_without_its_key_file_does_not_start(tmp_path: Path) -> None:
    """It exits with code 2, and is not restarted."""
    env = {"QDO_KEYS": str(tmp_path / "none"), "QDO_BROKER": f"sqlite:{tmp_path}/m.db"}
    (tmp_path / "jobs.py").write_text(JOBS.replace("ORDER", "'queue'").replace("THEN", "'skip'"))
    ended = command(*WORKER, "jobs:app", "--burst", cwd=tmp_path, env=env)
    assert ended.code == 2, ended.err
    assert "setting keys" in ended.err
