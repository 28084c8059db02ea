"""The output of a job's process is data: restored as far as it makes sense, not trusted further."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from qdo import outcomes
from qdo.brokers.kinesis.positions import POSITIONS, pack
from qdo.brokers.sqs.codec import SQS_POSITIONS
from qdo.jobs.retry import Rule
from qdo.message import Message, Origin
from qdo.positions import Positions, position_of_time
from qdo.system.processes import StopFlag
from qdo.text import describe, describe_traceback
from qdo.worker.executors import process_frames as remote
from qdo.worker.executors import process_frames as wire

SENT = 1_700_000_000.25


class Picky(ValueError):
    made = 0

    def __new__(cls, *args: Any) -> Picky:
        Picky.made += 1
        return super().__new__(cls)

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Later(outcomes.Retry):
    def __init__(self) -> None:
        super().__init__(after=3.0)
        self.more = object()


def carried(error: BaseException | None) -> BaseException | None:
    return remote.load(json.loads(json.dumps(remote.dump(error))))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - any
        return caught


def test_done_is_done() -> None:
    assert carried(None) is None


@pytest.mark.parametrize(
    "outcome",
    [
        outcomes.Retry(),
        outcomes.Retry(after=1.5),
        outcomes.Retry(after=1.5, counts=False),
        outcomes.DeadLetter("why"),
        outcomes.Skip("why"),
        outcomes.Stop("why"),
    ],
)
def test_outcomes_are_made_again(outcome: outcomes.Outcome) -> None:
    other = carried(outcome)
    assert type(other) is type(outcome)
    assert vars(other) == vars(outcome)
    assert str(other) == str(outcome)


def test_an_apps_outcome_counts_as_its_base_outcome() -> None:
    other = carried(Later())
    assert type(other) is outcomes.Retry
    assert other.after == 3.0


def test_an_error_keeps_type_text_and_traceback() -> None:
    """Rules by exception see its original type, and no code of the app created it."""
    error = raised(Picky(1, 2))
    before = Picky.made
    other = carried(error)
    assert Picky.made == before
    assert isinstance(other, Picky)
    assert describe(other) == "Picky: 1 and 2"
    assert Rule(ValueError, attempts=1).fits(other)
    assert not Rule(KeyError, attempts=1).fits(other)
    assert "raise error" in describe_traceback(other)


@pytest.mark.parametrize("error", [OSError(2, "no"), UnicodeError("x"), KeyError("k")])
def test_pythons_own_errors_keep_their_type(error: Exception) -> None:
    other = carried(error)
    assert isinstance(other, type(error))
    assert str(other) == str(error)


def test_a_type_that_is_not_known_here_keeps_its_name() -> None:
    other = remote.load({"error": "a.B", "module": "nowhere", "text": "t", "traceback": "trace"})
    assert other is not None
    assert describe(other) == "B: t"
    assert "trace" in describe_traceback(other)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_would_end_a_process_ends_no_worker(error: BaseException) -> None:
    other = carried(error)
    assert isinstance(other, Exception)
    assert type(other).__name__ == type(error).__name__


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"done": 1},
        {"outcome": "Outcome2"},
        {"outcome": "Retry", "state": {"after": "soon", "more": 1}},
        {"outcome": "Retry", "state": 5},
        {"outcome": "Retry"},
        {"outcome": ["Retry"]},
        {"error": "JobAborted", "module": "qdo.worker.engine.slot"},
        {"error": 5, "module": None, "text": [], "traceback": {}},
        {"error": "", "module": "", "text": ""},
        {"error": "x\0y", "module": "builtins"},
        {"error": "__class__", "module": "builtins"},
        {"error": "Retry", "module": "qdo.outcomes", "text": "forged"},
    ],
)
def test_nonsense_is_an_ordinary_failure(said: dict[str, Any]) -> None:
    other = remote.load(said)
    assert isinstance(other, remote.RemoteError)
    assert not isinstance(other, outcomes.Outcome)
    assert describe(other)
    assert describe_traceback(other)


def reader(data: bytes) -> Any:
    rest = [data]

    def receive(size: int) -> bytes:
        part, rest[0] = rest[0][: min(size, 3)], rest[0][min(size, 3) :]
        return part

    return receive


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\2\0\0\0\0[]",
        b"\0\0\0\2\0\0\0\0{]",
        b"\0\0\0\1\0\0\0\0\xff",
        b"\xff\xff\xff\xff\0\0\0\0{}",
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    """Also one that claims to be endless: it is neither awaited nor stored."""
    with pytest.raises(wire.WireError):
        wire.read(reader(data), limit=1000)


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\0\0\0\2\0\0\0\0{"])
def test_the_end_is_the_end_also_amidst_a_frame(data: bytes) -> None:
    assert wire.read(reader(data)) is None


@pytest.mark.parametrize(
    ("position", "naming", "stable"),
    [
        (position_of_time(SENT), 5, True),
        (pack(2**185, 3, position_of_time(SENT)), POSITIONS, True),
        (position_of_time(SENT) << 256 | 7, SQS_POSITIONS, False),
    ],
)
def test_a_message_is_the_same_in_the_job_s_process(
    position: int, naming: int | Positions, stable: bool
) -> None:
    """Id, time and position, whatever positions its broker has."""
    sent = Message("q", position, {"n": 1}, "k", {"a": "b"}, fence=3, attempt=2, id=naming)
    frame = wire.read(reader(wire.pack_message(sent, 9)))
    assert frame is not None
    found = wire.message_of(*frame)
    assert (found.id, found.position, found.stable) == (sent.id, position, stable)
    assert found.time == pytest.approx(SENT)
    assert (found.queue, found.body, found.key, found.headers) == ("q", {"n": 1}, "k", {"a": "b"})
    assert (found.fence, found.attempt) == (3, 2)


@pytest.mark.parametrize(
    "body", [b"\x00\xff" * 10, {"a": [1.5, None, True, "\ud800 \u00fc"]}, 2**80, ""]
)
def test_odd_bodies_and_origins_arrive_unchanged(body: Any) -> None:
    sent = Message("q", 5, body, "k", {"h": "v"}, 7, 3, Origin("shop", "s", "id-1"))
    read = reader(wire.pack_message(sent, 9))
    frame = wire.read(read)
    assert frame is not None
    found = wire.message_of(*frame)
    for name in ("body", "key", "headers", "attempt", "id", "app", "stream"):
        assert getattr(found, name) == getattr(sent, name)
    assert wire.read(read) is None


def test_the_sign_is_seen_where_it_is_shared() -> None:
    """Raised before it was shared or after, and lowered again."""
    sign, other = StopFlag(), StopFlag()
    assert not sign.raised()
    sign.show(True)
    other.adopt(os.dup(sign.share()))
    assert other.raised()
    sign.show(False)
    assert not other.raised()
    assert sign.share() == sign.share()


def test_a_message_without_a_deadline_stops_for_a_drain_only() -> None:
    message = Message("q", 1, None)
    assert message.deadline is None
    assert not message.stopping
    message.limit(1000)
    assert message.deadline is not None
    assert not message.stopping
    message.limit(0)
    assert message.stopping
