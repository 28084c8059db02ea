"""Records of somebody who may write to the stream, and means no good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.aws.kinesis_server import KinesisStub
from tests.support.cli import QDO, WORKER, command
from tests.support.kinesis import kinesis_url
from tests.unit.brokers.kinesis.test_deaggregation import field, one, sealed, varint

SHARD = "shardId-000000000000"
APP = """
import qdo

app = qdo.App("a")

@app.job(policy=qdo.Policy(then="skip"))
def job(message, context):
    print(message.body, flush=True)
"""


HOSTILE = (
    sealed(field(1, b"k") + one(2**63)),
    # 980 KB that were 34 GB.
    sealed(field(1, b"k" * 500_000) + 68_561 * field(3, b"\x08\x00\x1a\x00")),
    b'{"qdo-headers":' + 5000 * b"[" + 5000 * b"]",
    # An index without an end.
    sealed(field(3, b"\x08" + varint(2**64 - 1))),
)


@pytest.mark.slow
def test_hostile_records_stop_no_shard(
    kinesis: KinesisStub, aws_stream: str, tmp_path: Path
) -> None:
    """The messages before and behind them run, and commands work."""
    kinesis.make(aws_stream, 1)
    data = [each for number, hostile in enumerate(HOSTILE) for each in (b"%d" % number, hostile)]
    for each in (*data, b"%d" % len(HOSTILE)):
        kinesis.client.put_record(StreamName=aws_stream, Data=each, PartitionKey="k")
    (tmp_path / "hostile.py").write_text(APP)
    options = ("--broker", kinesis_url(kinesis.url, aws_stream))
    ended = command(*WORKER, "hostile:app", "--burst", *options, cwd=tmp_path)
    assert ended.code == 0, ended.err
    found = ended.out.splitlines()
    assert [each for each in found if each.isdigit()] == [str(n) for n in range(len(HOSTILE) + 1)]
    env = {"QDO_APP": "a", "QDO_BROKER": kinesis_url(kinesis.url, aws_stream)}
    for arguments in (
        ("queues", "-o", "json"),
        ("seek", SHARD, "earliest", "--dry-run", "-o", "json"),
    ):
        ended = command(*QDO, *arguments, cwd=tmp_path, env=env)
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["items"]
