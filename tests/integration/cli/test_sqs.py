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
from tests.support.cli import QDO, WORKER, Ended, command, run_in

REGION = "eu-west-1"

Send = Callable[..., Ended]


@pytest.fixture
def proxy(moto_proxy: Proxy) -> Proxy:
    return moto_proxy


@pytest.fixture
def sqs(moto_url: str) -> Any:
    """A client of moto itself."""
    return client("sqs", moto_url, region=REGION)


@pytest.fixture
def send(proxy: Proxy, aws_prefix: str, tmp_path: Path) -> Send:
    """Run `qdo send` to the queues of this test."""

    def call(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Ended:
        given = {"endpoint": proxy.url, **options}
        text = "&".join(f"{name}={value}" for name, value in given.items())
        url = f"sqs://{REGION}/{aws_prefix}?{text}"
        places = {"QDO_APP": "a", "QDO_BROKER": url, **(env or {})}
        if env:  # a process keeps the credentials that it found first
            return command(*QDO, "send", *arguments, cwd=tmp_path, env=places)
        ended = run_in(tmp_path, "send", *arguments, env=places)
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


def test_sending(send: Send, sqs: Any, made: Callable[[str], str]) -> None:
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
    send: Send, sqs: Any, made: Callable[[str], str], proxy: Proxy, tmp_path: Path
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


# --- credentials and permissions ----------------------------------------------------


def test_no_credentials(send: Send, made: Callable[[str], str]) -> None:
    """Rejected before any request; the error names the places to provide them."""
    without = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    line = send("a", "1", env=without).refusal(2)
    assert "eu-west-1" in line
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE" in line


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("unknown", 2, "InvalidClientTokenId"),
        ("expired", 2, "expired"),
    ],
)
def test_credentials_that_aws_refuses(
    send: Send, proxy: Proxy, fault: str, code: int, words: str
) -> None:
    """At the start."""
    proxy.spoil(fault, count=0)
    assert words in send("a", "1").refusal(code)


def test_no_permission(send: Send, proxy: Proxy, made: Callable[[str], str]) -> None:
    """The error names action and queue; a sender needs no permission to list queues."""
    made("a")
    proxy.spoil("denied", "ListQueues", count=0)
    assert send("a", "1").code == 0
    proxy.spoil("denied", "SendMessageBatch", count=0)
    line = send("a", "1").refusal(5)
    assert "sqs:SendMessage on queue 'test-" in line
    assert "no identity-based policy allows the sqs:sendmessagebatch action" in line


# --- out of reach -------------------------------------------------------------------


def test_an_unreachable_endpoint(send: Send) -> None:
    """The error names the endpoint."""
    line = send("a", "1", endpoint="http://127.0.0.1:1").refusal(3)
    assert "eu-west-1" in line
    assert "http://127.0.0.1:1" in line


def test_a_region_that_does_not_exist(tmp_path: Path) -> None:
    """The closest one is named; an unreachable proxy keeps the request from AWS."""
    url = "sqs://eu-wset-1/a-"
    env = {"QDO_APP": "a", "QDO_BROKER": url, "HTTPS_PROXY": "http://127.0.0.1:1"}
    line = run_in(tmp_path, "send", "a", "1", env=env).refusal(3)
    assert "'eu-wset-1'" in line
    assert "'eu-west-1'" in line


def test_faults_of_the_service(
    send: Send, proxy: Proxy, sqs: Any, made: Callable[[str], str]
) -> None:
    """A few are retried; a FIFO queue stores a message without a response only once."""
    url = made("a.fifo")
    for fault in ("throttle", "error", "unanswered"):
        proxy.spoil(fault, "SendMessageBatch")
    assert send("a.fifo", "1", "--key", "k").code == 0
    assert [each["Body"] for each in raw_messages(sqs, url)] == ["1"]
    assert len(proxy.log("SendMessageBatch")) == 4


@pytest.mark.slow
def test_throttling_without_end(send: Send, proxy: Proxy, made: Callable[[str], str]) -> None:
    """Sending is attempted for half a minute; the error names the reason."""
    made("a")
    proxy.spoil("throttle", "SendMessageBatch", count=0)
    line = send("a", "1").refusal(3)
    times = [entry.time for entry in proxy.log("SendMessageBatch")]
    assert times[-1] - times[0] > 29
    assert "sqs:SendMessage on queue" in line
    assert "RequestThrottled: Rate exceeded" in line


# --- missing queues, and impossible requests ----------------------------------------


def test_a_queue_that_does_not_exist(send: Send, sqs: Any, aws_prefix: str) -> None:
    """Unless the address has the option to create it."""
    line = send("a", "1").refusal(6)
    assert f"SQS queue '{aws_prefix}a'" in line
    assert "eu-west-1" in line
    assert "create=standard" in line
    assert send("a", "1", create="standard").code == 0
    assert "'.fifo'" in send("b", "1", create="fifo").refusal(2)
    assert send("b.fifo", "1", create="fifo").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["x" * 79, "1"], 2, "80"),
        (["dead-letters", "1"], 2, "dead-letters"),
        (["ä", "1"], 2, "'ä'"),
        (["a.fifo", "1", "--delay", "5"], 5, "FIFO"),
        (["a", "1", "--delay", "16m"], 5, "900 s"),
        (["a", "1", "--dedup-key", "x"], 5, "deduplicate"),
        (["a.fifo", "1", "--dedup-key", "x", "--dedup-seconds", "1h"], 5, "3600 s"),
        (["a", "1", "--key", "\udcff"], 2, "UTF-8"),
        (["a", '"' + "x" * 262143 + '"'], 2, "262144"),
        (["a", "1", "--header", "h=" + "x" * 65536], 2, "65536"),
    ],
)
def test_what_cannot_be_sent(send: Send, arguments: list[str], code: int, words: str) -> None:
    """Rejected before anything is sent: bodies by the limit of the address, headers by qdo's."""
    assert words in send(*arguments, create="standard").refusal(code)


def test_a_line_that_is_too_large(send: Send, made: Callable[[str], str], tmp_path: Path) -> None:
    """The remedy is that of the broker."""
    made("a")
    (tmp_path / "lines").write_text('"' + "x" * 262143 + '"\n')
    line = send("--file", "lines", "a").refusal(2)
    assert all(each in line for each in ("262145", "262144", "max_body", "1048576", "bucket=NAME"))


def test_lines_that_were_not_sent_are_named(
    send: Send, made: Callable[[str], str], tmp_path: Path
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
    ("url", "words"),
    [
        ("sqs://eu-west-1/a-?wait_second=3", "'wait_seconds'"),
        ("sqs://Frankfurt/a-", "'Frankfurt'"),
        ("sqs://eu-west-1", "setting broker"),
    ],
)
def test_an_impossible_address(tmp_path: Path, url: str, words: str) -> None:
    """As any other setting."""
    ended = run_in(tmp_path, "send", "a", "1", env={"QDO_APP": "a", "QDO_BROKER": url})
    assert words in ended.refusal(2)


@pytest.mark.parametrize(
    ("fault", "options", "code", "words"),
    [
        ("unknown", "", 2, "InvalidClientTokenId"),
        ("expired", "", 2, "expired"),
        ("denied", "", 5, "sqs:ListQueues on prefix 'test-"),
        ("", "&bucket=nobody-made-this", 6, "S3 bucket 'nobody-made-this'"),
        ("", "&idle_second=3", 2, "'idle_seconds'"),
    ],
)
def test_a_worker_that_cannot_begin(
    proxy: Proxy, aws_prefix: str, tmp_path: Path, fault: str, options: str, code: int, words: str
) -> None:
    """The same error and the same exit code."""
    if fault:
        proxy.spoil(fault, "ListQueues", count=0)
    url = f"sqs://{REGION}/{aws_prefix}?endpoint={proxy.url}{options}"
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
    for options, words in (("", "pip install -e '.[aws]'"), ("?x=1", "'x'")):
        arguments = ("send", "--app", "a", "--broker", url + options, "s", "1")
        assert words in command("-c", code, *arguments, cwd=tmp_path).refusal(2)


# --- one queue that cannot be read --------------------------------------------------


@pytest.mark.parametrize("fault", ["denied", "throttle", "unavailable"])
def test_one_unreadable_queue_hides_no_other(
    proxy: Proxy, made: Callable[[str], str], aws_prefix: str, tmp_path: Path, fault: str
) -> None:
    """Its row has the reason, and the exit code tells that something is missing."""
    made("a")
    made("b")
    env = {"QDO_APP": "a", "QDO_BROKER": f"sqs://{REGION}/{aws_prefix}?endpoint={proxy.url}"}
    proxy.spoil(fault, "GetQueueAttributes", name=f"{aws_prefix}a", count=0)
    ended = run_in(tmp_path, "queues", "-o", "json", env=env)
    assert ended.code == 4, ended.err
    items = {each["queue"]: each for each in json.loads(ended.out)["items"]}
    assert (items["a"]["backlog"], items["b"]["backlog"]) == (None, 0)
    assert "sqs:GetQueueAttributes" in items["a"]["error"] or "region" in items["a"]["error"]
    assert items["b"]["error"] is None
    assert items["b"]["retention_seconds"] > 86_400
    assert ended.err.splitlines()[-1].endswith("not: a, see ERROR")
    table = run_in(tmp_path, "queues", env=env)
    assert (table.code, "ERROR" in table.out.splitlines()[0]) == (4, True)
    proxy.clear()
    ended = run_in(tmp_path, "queues", env=env)
    assert (ended.code, "ERROR" in ended.out) == (0, False)


def test_unknown_dead_letters_hide_no_queue(
    proxy: Proxy, made: Callable[[str], str], aws_prefix: str, tmp_path: Path
) -> None:
    """They are in a queue of their own, which may have other permissions."""
    made("a")
    made("dead-letters")
    env = {"QDO_APP": "a", "QDO_BROKER": f"sqs://{REGION}/{aws_prefix}?endpoint={proxy.url}"}
    proxy.spoil("denied", "GetQueueAttributes", name=f"{aws_prefix}dead-letters", count=0)
    (item,) = run_in(tmp_path, "queues", "-o", "json", env=env).items(4)
    assert (item["queue"], item["backlog"], item["dead_letters"]) == ("a", 0, None)
