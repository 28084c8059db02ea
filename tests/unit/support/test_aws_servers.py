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
