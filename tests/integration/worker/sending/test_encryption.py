"""Encrypted bodies, from the sender to the job, in the broker's file and in dead letters."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qdo import App, Batch, Message
from qdo.brokers.base import Outgoing
from qdo.encoding import key_id_of
from qdo.encryption.key_ring import read_keys
from qdo.jobs.retry import Policy
from qdo.ops import dead_letters
from qdo.settings.vaults import vault_of
from tests.support.engine import EngineSetup, until
from tests.support.fakes.key_files import key, write_keys

K1, K2 = key("k1"), key("k2")
MARKER = "MARKER-4711"

Make = Callable[..., EngineSetup]


@pytest.fixture
def make(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make engines whose senders encrypt with the key K1, and end them with the test."""
    monkeypatch.setattr("qdo.worker.engine.queue_ends.KEY_SECONDS", 0.02)
    keys = write_keys(tmp_path / "keys", K1)

    def made(**settings: Any) -> EngineSetup:
        return make(**{"keys": keys, "encrypt": ("bodies",), **settings})

    return made


def stored(engine: EngineSetup, queue: str = "q") -> list[bytes]:
    """Return the bodies in the broker's file."""
    return [row[1] for row in engine.broker.reader(queue, 0).fetch(100)]


BODIES = (
    ({"n": 1}, None),
    ("text", {"trace": "x"}),
    (b"\x00\xff", None),
    (b"png", {"content-type": "image/png"}),
    (b"", None),
)


@pytest.mark.parametrize("order", ["queue", "key", "none"])
def test_a_job_gets_what_was_sent(engine: EngineSetup, order: Any) -> None:
    """In every order, with its headers; the file has ciphertext only."""
    seen: list[tuple[Any, Any]] = []

    @engine.app.job(order=order)
    def job(message: Message, context: Any) -> None:
        seen.append((message.body, dict(message.headers)))

    for body, headers in BODIES:
        engine.app.send("q", body, headers=headers)
    assert all(map(key_id_of, stored(engine)))
    engine.start("q")
    until(lambda: len(seen) == len(BODIES))
    raw = {"content-type": "application/octet-stream"}
    wanted: list[tuple[Any, Any]] = [
        ({"n": 1}, {}),
        ("text", {"trace": "x"}),
        (b"\x00\xff", raw),
        (b"png", {"content-type": "image/png"}),
        (b"", raw),
    ]
    assert sorted(seen, key=repr) == sorted(wanted, key=repr)
    if order == "queue":
        assert seen == wanted


def test_a_batch_gets_what_was_sent(engine: EngineSetup) -> None:
    """All messages of one call."""
    seen: list[Any] = []

    @engine.app.job(batch=3)
    def job(batch: Batch, context: Any) -> None:
        seen.extend(message.body for message in batch)

    engine.send("q", *range(7))
    engine.start("q")
    until(lambda: len(seen) == 7)
    assert seen == list(range(7))


def test_delayed_messages_are_encrypted(engine: EngineSetup) -> None:
    """They wait in another table of the file."""
    seen = engine.collect()
    engine.app.send("q", MARKER, delay_seconds=0.2)
    files = engine.settings.broker.removeprefix("sqlite:")
    assert MARKER.encode() not in Path(files).read_bytes() + Path(files + "-wal").read_bytes()
    engine.start("q")
    until(lambda: seen == [MARKER])


def test_a_dead_letter_keeps_the_ciphertext(make: Make) -> None:
    """Operators with the key see its body, and a retry runs it."""
    engine = make(attempts=1)
    seen: list[Any] = []

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            raise ValueError("no")

    engine.app.send("q", b"png", headers={"content-type": "image/png"})
    engine.start("q")
    until(lambda: engine.broker.dead_letters.records())
    (record,) = engine.broker.dead_letters.records()
    assert key_id_of(record.body) == "k1"
    (letter,) = dead_letters.find(engine.broker, dead_letters.Filter(), record.dead_at)
    shown = dead_letters.exported(letter, record, vault=vault_of(engine.settings, "test", str))
    assert (shown["body_base64"], shown["headers"]) == ("cG5n", {"content-type": "image/png"})
    assert "body_error" in dead_letters.exported(letter, record)
    assert "body" not in dead_letters.exported(letter, record)
    list(dead_letters.retry(engine.broker, [letter]))
    until(lambda: seen == [b"png", b"png"])


@pytest.mark.parametrize("batch", [None, 5])
def test_a_missing_key_blocks_until_it_is_there(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: int | None
) -> None:
    """No attempt is counted, nothing is skipped, and other queues go on."""
    make().send("q", 1)
    engine = make(attempts=1, keys=write_keys(tmp_path / "other", K2))
    seen: list[Any] = []

    @engine.app.job(batch=batch)
    def job(message: Any, context: Any) -> None:
        seen.extend(each.body for each in message) if batch else seen.append(message.body)

    engine.send("q", 2)
    engine.send("p", 3)
    engine.start("q", "p")
    until(lambda: seen == [3])
    claim = engine.member.claims["q"]
    until(lambda: claim.failure is not None)
    failure = claim.failure
    assert (failure.blocked, failure.held, failure.attempts) == (True, False, 0)
    assert failure.error.startswith("KeyMissingError")
    lines = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(lines) == 1
    write_keys(tmp_path / "other", K2, K1)
    until(lambda: seen == [3, 1, 2])
    assert claim.failure is failure
    assert engine.broker.dead_letters.records() == []


def test_without_keys_encrypted_messages_wait(make: Make) -> None:
    """A worker without the setting blocks its queue, too; bytes never reach a job encrypted."""
    make().app.send("q", b"png", headers={"content-type": "image/png"})
    engine = make(keys="", encrypt=())
    seen = engine.collect()
    engine.start("q")
    until(lambda: engine.member.claims["q"].failure is not None)
    assert engine.member.claims["q"].failure.blocked
    assert seen == []


@pytest.mark.parametrize("order", ["queue", "key"])
def test_a_changed_body_is_a_dead_letter(make: Make, order: Any) -> None:
    """At once, like one that is not JSON, and so is one that was moved from another queue."""
    engine = make(attempts=5)
    seen = engine.collect(order=order)
    engine.send("other", "moved")
    (moved,) = stored(engine, "other")
    engine.broker.send(Outgoing("q", moved, "k"))
    engine.broker.send(Outgoing("q", moved[:-1] + b"\x00", "k"))
    engine.app.send("q", "mine", key="k")
    engine.start("q")
    until(lambda: seen == ["mine"])
    errors = [each.error for each in engine.broker.dead_letters.records()]
    assert [each.partition(":")[0] for each in errors] == ["BodyAuthenticationError"] * 2
    assert [each.attempts for each in engine.broker.dead_letters.records()] == [1, 1]


@pytest.mark.parametrize("required", [False, True])
def test_bodies_in_clear_are_accepted_or_refused(make: Make, required: bool) -> None:
    """Accepted while senders change over, refused by a setting."""
    engine = make(require_encryption=required)
    seen = engine.collect(policy=Policy(then="dead-letter"))
    engine.broker.send(Outgoing("q", b'"clear"'))
    engine.broker.send(Outgoing("q", b"raw", headers='{"content-type": "text/plain"}'))
    engine.app.send("q", "sealed")
    engine.start("q")
    until(lambda: "sealed" in seen)
    errors = [each.error.partition(":")[0] for each in engine.broker.dead_letters.records()]
    assert seen == (["sealed"] if required else ["clear", b"raw", "sealed"])
    assert errors == (["ClearBodyError"] * 2 if required else [])


def test_keys_rotate_under_load(engine: EngineSetup, tmp_path: Path) -> None:
    """New key, distribution, use, deletion of the old one: every message is processed, once."""
    seen = engine.collect()
    engine.start("q")
    sent = 0

    def send_until(condition: Callable[[], bool]) -> None:
        nonlocal sent

        def step() -> bool:
            nonlocal sent
            engine.send("q", *range(sent, sent + 20))
            sent += 20
            return condition() and len(seen) > sent - 500

        until(step)

    def newest() -> str | None:
        return key_id_of(engine.broker.reader("q", 0).fetch(100_000)[-1][1])

    path = tmp_path / "keys"
    for keys, used in (((K1, K2), "k1"), ((K2, K1), "k2"), ((K2,), "k2")):
        if K1 not in keys:  # the operator waits for the messages of the old key
            until(lambda: len(seen) == sent)
        write_keys(path, *keys)
        assert read_keys(str(path)) == keys
        send_until(lambda used=used: newest() == used)  # type: ignore[misc]
    until(lambda: len(seen) == sent)
    assert seen == list(range(sent))
    assert engine.broker.dead_letters.records() == []


def test_the_outbox_stores_ciphertext(engine: EngineSetup, tmp_path: Path) -> None:
    """The table of the app's database has it, and the relay does not encrypt it again."""
    from sqlalchemy import create_engine, select
    from sqlalchemy.orm import Session

    from qdo.outbox import Outbox

    seen = engine.collect("id", "body")
    database = create_engine(f"sqlite:///{tmp_path / 'app.db'}")
    outbox = Outbox(engine.app, database)
    with Session(database) as session:
        outbox.create(session)
        id = outbox.send(session, "q", {"text": MARKER})
        session.commit()
    with database.connect() as connection:
        (row,) = connection.execute(select(outbox.table)).all()
    assert key_id_of(row.body) == "k1"
    assert outbox.relay(engine.broker) == 1
    engine.start("q")
    until(lambda: seen)
    assert seen == [(id, {"text": MARKER})]
    database.dispose()


def test_the_testing_kit_encrypts_as_well(tmp_path: Path) -> None:
    """Tests of an app see the bodies that its jobs will see."""
    from qdo.testing import TestKit

    app = App("a")
    seen: list[Any] = []

    @app.job()
    def job(message: Message, context: Any) -> None:
        seen.append(message.body)

    keys = write_keys(tmp_path / "keys", K1)
    with TestKit(app, keys=keys, encrypt=("bodies",), require_encryption=True) as kit:
        kit.send("q", {"n": 1})
        assert kit.waiting("q") == [{"n": 1}]
        kit.run_until_idle()
        assert kit.done("q") == [{"n": 1}]
    assert seen == [{"n": 1}]


@pytest.mark.parametrize("hide", [(), ("errors", "hosts")])
def test_errors_and_hosts_stay_out_of_znodes(make: Make, hide: tuple[str, ...]) -> None:
    """The log and the dead letter keep the whole error."""
    engine = make(hide=hide, attempts=2, backoff_seconds=0.2, backoff_max_seconds=0.2)

    @engine.app.job()
    def job(message: Message, context: Any) -> None:
        raise ValueError(f"cannot use {message.body}")

    engine.send("q", MARKER)
    engine.start("q")
    until(lambda: engine.member.claims["q"].failure is not None)
    host = engine.member.components[-1]["host"]
    assert engine.member.claims["q"].failure.error == (
        "ValueError" if hide else f"ValueError: cannot use {MARKER}"
    )
    assert host == ("hidden" if hide else socket.gethostname())
    until(lambda: engine.broker.dead_letters.records())
    assert MARKER in engine.broker.dead_letters.records()[0].error


def test_in_the_testing_kit_a_missing_key_blocks(tmp_path: Path) -> None:
    """The kit does not wait for the key: a run settles."""
    from qdo.testing import TestKit

    app = App("a")

    @app.job()
    def job(message: Message, context: Any) -> None:
        raise AssertionError("it cannot be decrypted")

    keys = write_keys(tmp_path / "keys", K1)
    with TestKit(app, keys=keys, encrypt=("bodies",)) as kit:
        kit.send("q", 1)
        write_keys(tmp_path / "keys", K2)
        vault = vault_of(app.settings, "a", str)
        assert vault is not None
        vault._ring._check()
        assert kit.run_until_settled() == 0.0
        assert kit.blocked().keys() == {"q"}
