"""The AWS servers that other tests use, and their environment."""

from __future__ import annotations

import os

import pytest

from tests.support.aws import clients
from tests.support.aws.kinesis_stream import StubStream
from tests.support.aws.server_process import ServerProcess
from tests.support.processes import alive


def test_credentials_of_the_machine_are_put_aside() -> None:
    """Whatever an environment contains, the remaining variables give no access."""
    environment = {"AWS_PROFILE": "work", "AWS_SESSION_TOKEN": "x", "AWS_ACCESS_KEY_ID": "real"}
    clients.stand_in(environment)
    assert environment["AWS_ACCESS_KEY_ID"] == "testing"
    assert environment["AWS_CONFIG_FILE"] == os.devnull
    assert not {"AWS_PROFILE", "AWS_SESSION_TOKEN"} & set(environment)


def test_processes_get_an_environment_of_their_own() -> None:
    """Servers never see credentials, whatever this process has."""
    assert clients.surroundings()["AWS_SECRET_ACCESS_KEY"] == "testing"
    assert clients.surroundings()["PATH"] == os.environ["PATH"]


def test_moto_answers_for_every_service(
    moto_url: str, aws_prefix: str, aws_stream: str, aws_bucket: str
) -> None:
    """SQS, Kinesis and S3 are there, each with names of the test's own."""
    sqs = clients.client("sqs", moto_url)
    url = sqs.create_queue(QueueName=f"{aws_prefix}one")["QueueUrl"]
    assert sqs.list_queues(QueueNamePrefix=aws_prefix)["QueueUrls"] == [url]
    kinesis = clients.client("kinesis", moto_url)
    kinesis.create_stream(StreamName=aws_stream, ShardCount=1)
    found = kinesis.describe_stream_summary(StreamName=aws_stream)["StreamDescriptionSummary"]
    assert found["StreamName"] == aws_stream
    s3 = clients.client("s3", moto_url)
    s3.create_bucket(Bucket=aws_bucket)
    s3.put_object(Bucket=aws_bucket, Key="key", Body=b"body")
    assert s3.get_object(Bucket=aws_bucket, Key="key")["Body"].read() == b"body"


def test_a_server_that_ends_at_start_says_why() -> None:
    """Its own words are in the error."""
    server = ServerProcess(["-c", "raise SystemExit('no such thing')"])
    try:
        with pytest.raises(RuntimeError, match="no such thing"):
            server.wait_ready()
    finally:
        server.close()
    assert not alive(server.pid)


def test_shards_of_the_kinesis_stub_have_unique_names() -> None:
    """Not even once those before it are gone: it would take their place."""
    stream = StubStream("s", 2, 0.0)
    first, second = stream.shards.values()
    stream.split(first.name, first.first_key + 1, 1.0)
    stream.trim(2.0 + stream.retention_hours * 3600)
    before = set(stream.shards)
    assert first.name not in before
    stream.split(second.name, second.first_key + 1, 3.0)
    assert before < set(stream.shards)
    assert len(stream.shards) == len(before) + 2
