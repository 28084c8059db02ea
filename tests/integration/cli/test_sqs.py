"""`qdo send` to SQS, and its errors: one line, and a documented exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.aws.clients import client
from tests.support.aws.fault_proxy import Proxy
from tests.support.aws.messages import raw_messages
from tests.support.cli import WORKER, Ended, Run, command, run_in

REGION = "eu-west-1"


@pytest.fixture
def proxy(moto_proxy: Proxy) -> Proxy:
    return moto_proxy


@pytest.fixture
def sqs(moto_url: str) -> Any:
    """A client of moto itself."""
    return client("sqs", moto_url, region=REGION)


@pytest.fixture
def qdo(proxy: Proxy, aws_prefix: str, tmp_path: Path) -> Run:
    """Run `qdo` on the queues of this test."""

    def call(*arguments: str, **options: Any) -> Ended:
        given = {"endpoint": proxy.url, **options}
        text = "&".join(f"{name}={value}" for name, value in given.items())
        url = f"sqs://{REGION}/{aws_prefix}?{text}"
        return run_in(tmp_path, *arguments, env={"QDO_APP": "a", "QDO_BROKER": url})

    return call


@pytest.fixture
def send(qdo: Run) -> Run:
    """Run `qdo send` to the queues of this test."""

    def call(*arguments: str, **options: Any) -> Ended:
        ended = qdo("send", *arguments, **options)
        assert ended.err.count("\n") <= 2, ended.err  # a file adds how much was sent
        return ended

    return call


@pytest.fixture
def made(sqs: Any, aws_prefix: str) -> Callable[[str], str]:
    def make(name: str) -> str:
        attributes = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
        url = sqs.create_queue(QueueName=aws_prefix + name, Attributes=attributes)
        return str(url["QueueUrl"])

    return make


def test_sending(send: Run, sqs: Any, made: Callable[[str], str]) -> None:
    """With key, headers and delay; bytes too; the id that is printed is the one of SQS."""
    url = made("a")
    done = send("a", '{"n": 1}', "--key", "k", "--header", "x=y")
    assert (done.code, done.err) == (0, "")
    raw_done = send("a", "--raw", "\udcff")
    (first, second) = sorted(raw_messages(sqs, url), key=lambda each: len(each["Body"]))[::-1]
    assert [first["MessageId"], second["MessageId"]] == [done.out.strip(), raw_done.out.strip()]
    assert json.loads(first["Body"]) == {"n": 1}
    assert first["MessageAttributes"]["qdo-key"]["StringValue"] == "k"
    assert second["Body"] == "/w=="


def test_a_file_is_sent_by_ten(
    send: Run, sqs: Any, made: Callable[[str], str], proxy: Proxy, tmp_path: Path
) -> None:
    """One queue for each value of a field; the order within a queue is that of the file."""
    urls = {name: made(f"{name}.fifo") for name in "ab"}
    lines = [{"queue": f"{'ab'[n % 2]}.fifo", "who": "x", "n": n} for n in range(60)]
    (tmp_path / "lines").write_text("".join(json.dumps(each) + "\n" for each in lines))
    ended = send("--file", "lines", "--queue-field", "queue", "--key-field", "who")
    assert (ended.code, ended.err) == (0, "sent 60 messages\n")
    for name, url in urls.items():
        raw = raw_messages(sqs, url)
        numbers = [json.loads(each["Body"])["n"] for each in raw]
        assert numbers == list(range("ab".index(name), 60, 2))
        assert {each["Attributes"]["MessageGroupId"] for each in raw} == {"x"}
    assert len(proxy.log("SendMessageBatch")) == 6


# --- errors -------------------------------------------------------------------------


def test_no_permission(send: Run, proxy: Proxy, made: Callable[[str], str]) -> None:
    """The error names action and queue; a sender needs no permission to list queues."""
    made("a")
    proxy.spoil("denied", "ListQueues", count=0)
    assert send("a", "1").code == 0
    proxy.spoil("denied", "SendMessageBatch", count=0)
    line = send("a", "1").refusal(5)
    assert "sqs:SendMessage on queue 'test-" in line
    assert "no identity-based policy allows the sqs:sendmessagebatch action" in line


@pytest.mark.parametrize(
    ("arguments", "options", "code", "words"),
    [
        (["a", "1"], {}, 6, "create=standard"),
        (["a", "1"], {"endpoint": "http://127.0.0.1:1"}, 3, "http://127.0.0.1:1"),
        (["dead-letters", "1"], {"create": "standard"}, 2, "dead-letters"),
        (["a.fifo", "1", "--delay", "5"], {"create": "standard"}, 5, "FIFO"),
    ],
)
def test_what_cannot_be_sent(
    send: Run, arguments: list[str], options: dict[str, str], code: int, words: str
) -> None:
    """An error of the broker is one line, and has the exit code of its class."""
    assert words in send(*arguments, **options).refusal(code)


def test_lines_that_were_not_sent_are_named(
    send: Run, made: Callable[[str], str], tmp_path: Path
) -> None:
    """Those of a queue that does not exist; the others are sent."""
    made("a")
    lines = [json.dumps({"queue": "ab"[n % 2]}) + "\n" for n in range(20)]
    (tmp_path / "lines").write_text("\n".join(lines))
    ended = send("--file", "lines", "--queue-field", "queue")
    assert ended.code == 4
    count, line = ended.err.splitlines()
    assert count == "sent 10 messages, up to line 0 of lines"
    assert "10 of 20 " in line
    assert "lines 3, 7, 11, 15, 19 and 5 more of lines" in line


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [("unknown", 2, "InvalidClientTokenId"), ("denied", 5, "sqs:ListQueues on prefix 'test-")],
)
def test_a_worker_that_cannot_begin(
    proxy: Proxy, aws_prefix: str, tmp_path: Path, fault: str, code: int, words: str
) -> None:
    """The same error and the same exit code."""
    proxy.spoil(fault, "ListQueues", count=0)
    url = f"sqs://{REGION}/{aws_prefix}?endpoint={proxy.url}"
    arguments = ("--app", "a", "--job", "qdo.programs.echo:job", "--broker", url)
    ended = command(*WORKER, *arguments, cwd=tmp_path)
    assert ended.code == code, ended.err
    assert len([line for line in ended.err.splitlines() if words in line]) == 1
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("url", "module"),
    [
        ("sqs://eu-west-1/a-", "boto3"),
        ("sqs://eu-west-1/a-", "botocore"),
        ("kinesis://eu-west-1/s", "google.protobuf"),
    ],
)
def test_without_what_it_needs(tmp_path: Path, url: str, module: str) -> None:
    """The error names the package to install; an invalid address is reported first."""
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv[0] = 'qdo'; "
        "from qdo.cli.main import main; main()"
    )
    for options, words in (("", "'qdo-queues[aws]'"), ("?x=1", "'x'")):
        arguments = ("send", "--app", "a", "--broker", url + options, "s", "1")
        assert words in command("-c", code, *arguments, cwd=tmp_path).refusal(2)


# --- one queue that cannot be read --------------------------------------------------


@pytest.mark.parametrize("fault", ["denied", "unavailable"])
def test_one_unreadable_queue_hides_no_other(
    proxy: Proxy, made: Callable[[str], str], aws_prefix: str, qdo: Run, fault: str
) -> None:
    """Its row has the reason, and the exit code tells that something is missing."""
    made("a")
    made("b")
    proxy.spoil(fault, "GetQueueAttributes", name=f"{aws_prefix}a", count=0)
    ended = qdo("queues", "-o", "json")
    items = {each["queue"]: each for each in ended.items(4)}
    assert (items["a"]["backlog"], items["b"]["backlog"]) == (None, 0)
    assert "sqs:GetQueueAttributes" in items["a"]["error"] or "region" in items["a"]["error"]
    assert items["b"]["error"] is None
    assert items["b"]["retention_seconds"] > 86_400
    assert ended.err.splitlines()[-1].endswith("not: a, see ERROR")
    table = qdo("queues")
    assert (table.code, "ERROR" in table.out.splitlines()[0]) == (4, True)
    proxy.clear()
    ended = qdo("queues")
    assert (ended.code, "ERROR" in ended.out) == (0, False)


def test_unknown_dead_letters_hide_no_queue(
    proxy: Proxy, made: Callable[[str], str], aws_prefix: str, qdo: Run
) -> None:
    """They are in a queue of their own, which may have other permissions."""
    made("a")
    made("dead-letters")
    proxy.spoil("denied", "GetQueueAttributes", name=f"{aws_prefix}dead-letters", count=0)
    (item,) = qdo("queues", "-o", "json").items(4)
    assert (item["queue"], item["backlog"], item["dead_letters"]) == ("a", 0, None)
