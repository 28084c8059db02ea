"""The programs as users start them: in real workers, configured by environment."""

from __future__ import annotations

import gzip
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from standardwebhooks.webhooks import Webhook

from qdo.programs.churn import TotalsFile
from qdo.programs.webhook import new_secret
from tests.support.cli import QDO, WORKER, Ended, clean_environment, command
from tests.support.processes import Proc, alive, wait_until
from tests.support.webhook_receiver import Answer, Receiver, receiving

SECRET = new_secret()
QUICK = {"QDO_SESSION_TIMEOUT_SECONDS": "2.5"}


class Site:
    """A folder with the files of one app, and commands that run in it."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder = folder
        self.program = program
        self.environment = {**QUICK, "QDO_APP": program}

    def send(self, queue: str, *bodies: Any) -> None:
        lines = "".join(json.dumps(body) + "\n" for body in bodies).encode()
        ended = command(
            *QDO, "send", queue, "--file", "-", cwd=self.folder, stdin=lines, env=self.environment
        )
        assert ended.code == 0, ended.err

    def work(self, *options: str) -> Ended:
        """Run a worker until every queue is done."""
        return command(
            *WORKER,
            f"qdo.programs.{self.program}:app",
            "--burst",
            *options,
            cwd=self.folder,
            env=self.environment,
        )

    def start(self, *options: str) -> Proc:
        """Start a worker that stays."""
        return Proc.python(
            *WORKER,
            f"qdo.programs.{self.program}:app",
            *options,
            cwd=self.folder,
            env={**clean_environment(), **self.environment},
        )

    def dead_letters(self) -> list[dict[str, Any]]:
        ended = command(
            *QDO, "dead-letters", "list", "-o", "jsonl", cwd=self.folder, env=self.environment
        )
        assert ended.code == 0, ended.err
        return [json.loads(line) for line in ended.out.splitlines()]


# --- webhook --------------------------------------------------------------------------


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def webhook(tmp_path: Path, receiver: Receiver) -> Site:
    site = Site(tmp_path, "webhook")
    site.environment["QDO_WEBHOOK_URL"] = f"{receiver.url}/hooks/{{queue}}"
    site.environment["QDO_WEBHOOK_SECRET"] = SECRET
    return site


def test_webhooks_are_delivered_in_order(webhook: Site, receiver: Receiver) -> None:
    """Each one signed, and retries do not let the next one overtake."""
    receiver.answers = [Answer(), Answer(503), Answer(429, headers={"Retry-After": "0"})]
    webhook.send("orders", *({"n": number} for number in range(4)))
    ended = webhook.work()
    assert ended.code == 0, ended.err
    told = [Webhook(SECRET).verify(each.body, dict(each.headers)) for each in receiver.requests]
    assert [each["n"] for each in told] == [0, 1, 1, 1, 2, 3]
    assert [each.headers["qdo-attempt"] for each in receiver.requests] == list("112311")
    assert len({each.headers["webhook-id"] for each in receiver.requests}) == 4
    assert {each.path for each in receiver.requests} == {"/hooks/orders"}


def test_a_receiver_that_drips_is_cut_off(webhook: Site, receiver: Receiver) -> None:
    """A byte now and then keeps a connection alive, but not for longer than a request may take."""
    webhook.environment["QDO_WEBHOOK_TIMEOUT_SECONDS"] = "0.5"
    receiver.answers = [Answer(200, b"x" * 1000, drip_seconds=0.1)]
    webhook.send("orders", 1)
    ended = webhook.work()
    assert ended.code == 0, ended.err
    assert "UndeliveredError" in ended.err
    assert "0.5 s" in ended.err
    assert [each.headers["qdo-attempt"] for each in receiver.requests] == ["1", "2"]


def test_a_slow_receiver_holds_up_its_own_queue_only(webhook: Site, receiver: Receiver) -> None:
    """Requests wait in greenlets."""
    receiver.answers = [Answer(200, b"x" * 1000, drip_seconds=60.0)]
    webhook.send("slow", 1)
    with webhook.start() as worker:
        wait_until(lambda: len(receiver.requests) == 1, "the slow request has arrived")
        webhook.send("quick", *range(5))
        wait_until(lambda: len(receiver.requests) == 6, "all others are delivered")
        receiver.closing.set()
        worker.send(signal.SIGTERM)
        assert worker.wait(60) == 0, worker.output


def test_wrong_options_are_refused_at_the_start(webhook: Site, receiver: Receiver) -> None:
    """With the exit code for settings, and before any message is touched."""
    webhook.environment["QDO_WEBHOOK_SECRET"] = "hunter2"
    webhook.send("orders", 1)
    ended = webhook.work()
    assert ended.code == 2, ended.err
    assert "QDO_WEBHOOK_SECRET: " in ended.err
    assert "hunter2" not in ended.err
    assert receiver.requests == []


def test_an_app_of_another_name(webhook: Site, receiver: Receiver) -> None:
    """The job serves any app, if it is named with its context; without, nothing is touched."""
    webhook.environment["QDO_APP"] = "shop"
    webhook.send("orders", 1)
    for context, code, requests in (("", 0, 0), ("qdo.programs.webhook:job_context", 0, 1)):
        ended = command(
            *WORKER,
            *("--job", "qdo.programs.webhook:job", "--burst"),
            cwd=webhook.folder,
            env={**webhook.environment, **({"QDO_JOB_CONTEXT": context} if context else {})},
        )
        assert ended.code == code, ended.err
        assert len(receiver.requests) == requests
        assert ("QDO_JOB_CONTEXT" in ended.err) is not bool(context)


# --- shell ----------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path: Path) -> Site:
    return Site(tmp_path, "shell")


def test_commands_run_in_order(shell: Site) -> None:
    """One after the other in a queue; their output becomes the worker's output."""
    shell.environment["QDO_SHELL_COMMAND"] = 'echo "$QDO_MESSAGE_QUEUE $(cat)"'
    shell.send("a", *range(20))
    ended = shell.work()
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [f"a {number}" for number in range(20)]


def test_a_command_may_send_messages(shell: Site) -> None:
    """The variables that a command gets for its message do not disturb qdo's own commands."""
    shell.environment["QDO_SHELL_COMMAND"] = (
        f"[ $QDO_MESSAGE_QUEUE = out ] && exit 0; {_qdo()} send out '{{}}'"
    )
    shell.send("in", 1, 2)
    assert shell.work().code == 0
    ended = command(*QDO, "queues", "-o", "jsonl", cwd=shell.folder, env=shell.environment)
    assert [json.loads(line)["queue"] for line in ended.out.splitlines()] == ["in", "out"]
    assert shell.dead_letters() == []


def _qdo() -> str:
    return " ".join((sys.executable, *QDO))


def test_an_aborted_command_is_killed(shell: Site) -> None:
    """When the worker's time to drain is over."""
    shell.environment["QDO_SHELL_COMMAND"] = "echo $$ > new; mv new pid; exec sleep 60"
    shell.environment["QDO_DRAIN_SECONDS"] = "0.2"
    shell.send("a", 1)
    with shell.start() as worker:
        wait_until((shell.folder / "pid").exists, "the command runs")
        pid = int((shell.folder / "pid").read_text())
        worker.send(signal.SIGTERM)
        assert worker.wait(60) == 1, worker.output
        assert not alive(pid)


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("program", ["webhook", "shell", "archive"])
def test_programs_in_other_executors(
    tmp_path: Path, receiver: Receiver, program: str, executor: str
) -> None:
    """Named by their job, they run as configured; if one cannot, nothing is touched."""
    site = Site(tmp_path, program)
    site.environment |= {
        "QDO_WEBHOOK_URL": receiver.url,
        "QDO_WEBHOOK_SECRET": SECRET,
        "QDO_SHELL_COMMAND": "cat >> got",
        "QDO_ARCHIVE_URL": "file:kept",
        "QDO_CONFIG": "settings.toml",
    }
    (tmp_path / "settings.toml").write_text(
        f'job = "qdo.programs.{program}:job"\njob_context = "qdo.programs.{program}:job_context"\n'
        f'executor = "{executor}"\n'
    )
    site.send("a", 1, 2)
    ended = command(*WORKER, "--burst", cwd=tmp_path, env=site.environment)
    assert ended.code == 0, ended.err
    works = executor != "thread" or program == "archive"
    assert ("runs in a native thread" in ended.err) is not works
    got = tmp_path / "got"
    assert {
        "webhook": len(receiver.requests),
        "shell": len(got.read_text().split()) if got.exists() else 0,
        "archive": len([*tmp_path.glob("kept/a/*/*.gz")]),
    }[program] == (2 if works else 0)
    assert "Traceback" not in ended.err


# --- churn ----------------------------------------------------------------------------


def test_commits_are_added_up(tmp_path: Path) -> None:
    """Once each and after their parents, also when everything runs again."""
    site = Site(tmp_path, "churn")
    site.environment["CHURN_DB"] = str(tmp_path / "churn.db")
    for queue in ("a", "b"):
        known = {"repo": queue, "deletions": 1}
        numbers = [{"commit": str(n), "parents": [str(n - 1)], "insertions": n} for n in range(10)]
        site.send(queue, *(known | each for each in numbers))
    for _ in range(2):
        ended = site.work()
        assert ended.code == 0, ended.err
        with closing(TotalsFile(site.environment["CHURN_DB"])) as ledger:
            found = ledger.totals()
        assert [(each.queue, each.commits, each.insertions) for each in found] == [
            ("a", 10, 45),
            ("b", 10, 45),
        ]
        assert {each.before_parent for each in found} == {0}
        for queue in ("a", "b"):
            seek = ("seek", queue, "earliest", "--yes")
            assert command(*QDO, *seek, cwd=tmp_path, env=site.environment).code == 0


# --- archive --------------------------------------------------------------------------


def rows(data: bytes) -> list[tuple[str, Any]]:
    found = map(json.loads, gzip.decompress(data).splitlines())
    return [(row["queue"], row["body"]) for row in found]


def test_an_archive_in_a_folder(tmp_path: Path) -> None:
    """Every message of every queue, once and in order, also when everything runs again."""
    site = Site(tmp_path, "archive")
    site.environment["QDO_ARCHIVE_URL"] = "file:kept"
    for queue in ("a", "b"):
        site.send(queue, *range(10))
    for _ in range(2):
        ended = site.work()
        assert ended.code == 0, ended.err
        for queue in ("a", "b"):
            files = sorted((tmp_path / "kept" / queue).rglob("*.gz"))
            kept = [row for file in files for row in rows(file.read_bytes())]
            assert kept == [(queue, number) for number in range(10)]
            seek = ("seek", queue, "earliest", "--yes")
            assert command(*QDO, *seek, cwd=tmp_path, env=site.environment).code == 0


def test_an_archive_in_s3(tmp_path: Path) -> None:
    """Through boto3's own settings, as at a service that does as S3 does."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        amazon = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        s3 = boto3.client(
            "s3",
            endpoint_url=amazon["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        site = Site(tmp_path, "archive")
        site.environment |= {**amazon, "QDO_ARCHIVE_URL": "s3://kept/of/qdo"}
        site.send("a", *range(10))
        missing = site.work()
        assert missing.code == 2, missing.err
        assert "bucket 'kept'" in missing.err
        s3.create_bucket(Bucket="kept")
        ended = site.work()
        assert ended.code == 0, ended.err
        keys = [each["Key"] for each in s3.list_objects_v2(Bucket="kept")["Contents"]]
        assert all(key.startswith("of/qdo/a/") for key in keys)
        objects = [s3.get_object(Bucket="kept", Key=key)["Body"].read() for key in keys]
        kept = [row for data in objects for row in rows(data)]
        assert kept == [("a", number) for number in range(10)]
    finally:
        server.stop()
