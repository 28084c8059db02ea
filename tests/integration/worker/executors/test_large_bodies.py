"""Large bodies: what a worker decodes, and how."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ujson

from qdo.brokers.base import Outgoing
from qdo.brokers.registry import open_broker
from qdo.message import Batch
from qdo.worker.large_bodies import LARGE_BYTES, load_large
from tests.support.cli import WORKER, command
from tests.support.engine import EngineSetup, until

LIMIT = 2 * LARGE_BYTES
JOBS: dict[str, dict[str, Any]] = {
    "single": {},
    "lanes": {"order": "key"},
    "batch": {"batch": 10},
    "recorded": {"checkpoint": "message"},
}


def text(size: int) -> bytes:
    """Return a JSON text of `size` bytes."""
    return b'"' + b"x" * (size - 2) + b'"'


def test_a_worker_leaves_larger_bodies_on_the_server(postgresql_url: str, tmp_path: Path) -> None:
    """The memory that they take there is not the worker's, also for bytes."""
    env = {
        "QDO_APP": "app",
        "QDO_BROKER": postgresql_url,
        "QDO_COORDINATOR": f"sqlite:{tmp_path / 'coordination.db'}",
        "QDO_MAX_BODY_BYTES": "100",
    }
    worker = (*WORKER, "--job", "builtins:print", "--burst")
    raw = '{"content-type": "application/octet-stream"}'
    sent = {"json": text(101), "bytes": b"x" * 101}
    with contextlib.closing(open_broker(env["QDO_BROKER"], "app")) as broker:
        broker.send_many([Outgoing("q", b"1"), Outgoing("q", sent["json"], "json")])
        broker.send_many([Outgoing("q", sent["bytes"], "bytes", raw), Outgoing("q", b"2")])
        assert command(*worker, cwd=tmp_path, env=env).code == 0
        letters = broker.dead_letters.records()
        assert {each.key: each.body for each in letters} == sent
        assert all(each.error.startswith("LargeBodyError: ") for each in letters)
        env["QDO_MAX_BODY_BYTES"] = "101"
        broker.dead_letters.retry([(each.queue, each.position) for each in letters])
        assert command(*worker, cwd=tmp_path, env=env).code == 0
        assert broker.dead_letters.records() == []


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineSetup]:
    engine = EngineSetup(tmp_path, max_body_bytes=LIMIT, attempts=3)
    yield engine
    engine.close()


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_a_body_over_the_limit_ends_by_its_policy(
    options: dict[str, Any], engine: EngineSetup
) -> None:
    """However another program stored it; bytes need no decoding, so they have no limit here."""
    seen: list[int] = []

    @engine.app.job(**options)
    def job(message: Any, context: Any) -> None:
        each = message if isinstance(message, Batch) else [message]
        seen.extend(len(one.body) for one in each)

    sizes = (10, LARGE_BYTES - 1, LARGE_BYTES, LIMIT, LIMIT + 1, 20)
    for size in sizes:
        engine.broker.send(Outgoing("q", text(size), key=str(size)))
    raw = '{"content-type": "application/octet-stream"}'
    engine.broker.send(Outgoing("q", b"x" * (LIMIT + 1), headers=raw))
    engine.start("q")
    until(lambda: len(seen) == len(sizes))
    assert sorted(seen) == sorted([*(n - 2 for n in sizes if n <= LIMIT), LIMIT + 1])
    (letter,) = engine.broker.dead_letters.records()
    assert letter.error.startswith("LargeBodyError: ")
    assert (letter.attempts, letter.body) == (1, text(LIMIT + 1))


def test_the_garbage_collector_rests_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = []
    decode = ujson.loads

    def loads(body: bytes) -> Any:
        states.append(gc.isenabled())
        return decode(body)

    monkeypatch.setattr(ujson, "loads", loads)
    assert load_large(b"[1]") == [1]
    with pytest.raises(ValueError, match="Expected object or value"):
        load_large(b"]")
    assert gc.isenabled()
    gc.disable()
    try:
        load_large(b"{}")
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert states == [False, False, False]
