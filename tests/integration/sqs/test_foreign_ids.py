"""Ids, pointers and dead letters of programs that may send to SQS queues, and mean no good."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qdo.brokers.aws.address import BodyPointer
from qdo.brokers.aws.s3 import Objects
from qdo.brokers.sqs.url import sqs_address
from qdo.connections.broker import open_broker_with_doorbell
from qdo.ops import dead_letters
from qdo.settings.settings import Settings
from tests.support.aws.clients import client
from tests.support.cli import QDO, WORKER, Ended, command
from tests.support.fakes.key_files import key, write_keys

REGION = "eu-west-1"
APP = """
import qdo

app = qdo.App("a", attempts=1)


@app.job(order="none")
def note(message, context):
    print(message.id, message.body, flush=True)
    if message.body == "fail" and "qdo-retried" not in message.headers:
        raise ValueError("as asked for")
"""


@pytest.fixture
def settings(sqs_url: str, aws_prefix: str, tmp_path: Path) -> Settings:
    options = "create=standard&wait_seconds=0&idle_seconds=0.1"
    broker = f"sqs://{REGION}/{aws_prefix}?endpoint={sqs_url}&{options}"
    keys = write_keys(tmp_path / "keys", key("s1", "sign"))
    return Settings(app="a", broker=broker, keys=keys)


@pytest.fixture
def run(settings: Settings, tmp_path: Path) -> Callable[..., Ended]:
    """Run a command on the queues of this test, with the key to sign or without."""
    (tmp_path / "noting.py").write_text(APP)

    def run(*arguments: str, proof: bool = True) -> Ended:
        env = {"QDO_BROKER": settings.broker, "QDO_APP": "a"}
        env |= {"QDO_KEYS": settings.keys} if proof else {}
        ended = command(*arguments, cwd=tmp_path, env=env)
        assert ended.code == 0, ended.err
        return ended

    return run


def foreign(settings: Settings, queue: str, body: str, **attributes: str) -> str:
    """Send as another program does; return the MessageId."""
    address = sqs_address(settings.broker)
    sqs: Any = client("sqs", str(address.endpoint), region=REGION)
    url = sqs.create_queue(QueueName=address.prefix + queue)["QueueUrl"]
    given = {
        name.replace("_", "-"): {"DataType": "String", "StringValue": text}
        for name, text in attributes.items()
    }
    answer = sqs.send_message(QueueUrl=url, MessageBody=body, MessageAttributes=given)
    return str(answer["MessageId"])


@pytest.mark.parametrize("proof", [True, False])
def test_a_foreign_sender_cannot_choose_an_id(
    settings: Settings, run: Callable[..., Ended], proof: bool
) -> None:
    """With a key to sign; without one, its word is taken."""
    own = foreign(settings, "q", '"x"', qdo_headers=json.dumps({"qdo-id": "victim"}))
    ended = run(*WORKER, "noting:app", "--burst", proof=proof)
    assert ended.out == f"{own if proof else 'victim'} x\n"


def test_a_retried_message_keeps_its_id(run: Callable[..., Ended]) -> None:
    """The command marks it, and the worker accepts the mark."""
    id = run(*QDO, "send", "q", '"fail"').out.strip()
    run(*WORKER, "noting:app", "--burst")
    run(*QDO, "dead-letters", "retry", "q", "--all", "--yes")
    assert run(*WORKER, "noting:app", "--burst").out == f"{id} fail\n"


def test_forged_dead_letters_are_counted_aloud(
    settings: Settings, run: Callable[..., Ended], caplog: pytest.LogCaptureFixture
) -> None:
    """They are not listed; the real one is."""
    run(*QDO, "send", "q", '"fail"')
    run(*WORKER, "noting:app", "--burst")
    letter = {"queue": "a/b", "position": "1", "error": "", "attempts": 1, "worker": "w"}
    forged = json.dumps({**letter, "fence": 1, "dead_at": 0})
    foreign(settings, "dead-letters", "1", qdo_dead_letter=forged)
    foreign(settings, "dead-letters", "1")
    with open_broker_with_doorbell(settings, "a") as broker:
        (found,) = dead_letters.find(broker, dead_letters.Filter(), 0.0)
    assert found.entry.queue == "q"
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert isinstance(record.args, tuple)
    assert record.args[0] == 2


def test_objects_without_the_prefix_are_not_ours(moto_url: str, aws_bucket: str) -> None:
    """A sender cannot make a worker read or delete others' objects in the bucket."""
    s3: Any = client("s3", moto_url, region="us-east-1")
    s3.create_bucket(Bucket=aws_bucket)
    s3.put_object(Bucket=aws_bucket, Key="backups/1", Body=b"secret")
    place = sqs_address(f"sqs://us-east-1/a?endpoint={moto_url}").place
    objects = Objects(place, f"{aws_bucket}/qdo")
    mine = objects.put("q", b"1")
    assert mine.key.startswith("qdo/q/")
    assert objects.is_ours(mine)
    others = [BodyPointer(aws_bucket, name) for name in ("backups/1", "qdo", "qdox/1")]
    assert not any(map(objects.is_ours, others))
    objects.delete([mine, *others])
    left = s3.list_objects_v2(Bucket=aws_bucket)["Contents"]
    assert [each["Key"] for each in left] == ["backups/1"]
    objects.close()
