"""`qdo peek`: what waits, is delayed, fails or blocks, in the order in which it will run."""

from __future__ import annotations

import base64

import qdo
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from tests.support.app_runs import OperatorDesk
from tests.support.fakes.hostile_text import TEXT, unsafe


def put(desk: OperatorDesk, node: QueueNode) -> None:
    desk.known()
    desk.client.set(desk.layout.queue("q"), node.encode())


def test_shows_every_kind_in_order(desk: OperatorDesk) -> None:
    """Done and cancelled messages are left out, delayed ones come last."""
    desk.send(9, delay_seconds=7200.0)
    delayed = desk.send(8, delay_seconds=3600.0)
    ids = desk.send(*range(1, 8), headers={"x": "y"})
    rows = desk.broker.reader("q", 0).fetch(10)
    at = [row[0] for row in rows]
    blocking = FailureRecord(at[3], 3, "ValueError: no", blocked_since=1.7e9)
    failing = FailureRecord(at[4], 1, "KeyError", retry_at=1.7e9)
    above = OutOfOrderProgress(((at[1], at[2]),), (failing,), (at[5],))
    put(desk, QueueNode(at[0], failure=blocking, out_of_order=above))
    items = desk.items("peek", "q")
    assert [each["kind"] for each in items] == [
        *("blocking", "failing", "waiting", "delayed", "delayed")
    ]
    assert [each["id"] for each in items[:4]] == [ids[3], ids[4], ids[6], delayed[0]]
    assert items[0]["position"] == str(at[3])
    assert (items[0]["attempts"], items[0]["error"]) == (3, "ValueError: no")
    assert items[1]["next_attempt"] == "2023-11-14T22:13:20Z"
    assert (items[2]["key"], items[2]["headers"]["x"], items[2]["body_bytes"]) == ("k7", "y", 1)
    assert items[3]["due"] < items[4]["due"]
    assert not any("body" in each for each in items)
    for kind, count in (("waiting", 1), ("delayed", 2), ("failing", 1), ("blocking", 1)):
        assert {each["kind"] for each in desk.items("peek", "q", "--kind", kind)} == {kind}
        assert len(desk.items("peek", "q", "--kind", kind)) == count
    assert [each["id"] for each in desk.items("peek", "q", "-n", "2")] == ids[3:5]
    (named,) = desk.items("peek", "q", "--id", ids[6], "--body")
    assert (named["id"], named["body"]) == (ids[6], 7)
    assert desk.items("peek", "q", "--id", delayed[0])[0]["due"] == items[3]["due"]
    for gone in (ids[0], ids[1], ids[5]):
        assert desk.qdo("peek", "q", "--id", gone).code == 6


def test_a_running_queue_is_not_touched(desk: OperatorDesk) -> None:
    """Neither node nor messages change; the message in flight still waits."""
    _, held, _ = desk.begin_first(1, 2)
    path = desk.layout.queue("q")
    before = desk.client.get(path)
    assert [each["body"] for each in desk.items("peek", "q", "--body")] == [1, 2]
    assert desk.client.get(path) == before
    held.unlink()
    desk.wait_done()
    assert desk.bodies() == ["1", "2"]
    assert desk.items("peek", "q") == []


def test_bodies_are_shown_harmlessly(local: OperatorDesk) -> None:
    """Whole in JSON, bytes in base64; on a terminal cut, and without control characters."""
    hostile = {"text": TEXT + "\x1b[2J\u202e" + "x" * 100}
    raw = bytes(range(256))
    local.app.send("q", hostile, key=TEXT[:50], headers={"h": TEXT[:50]})
    local.app.send("q", raw)
    local.broker.send(qdo.brokers.base.Outgoing("q", b"not json", headers="{"))
    items = local.items("peek", "q", "--body")
    assert items[0]["body"] == hostile
    assert base64.b64decode(items[1]["body_base64"]) == raw
    assert (items[2]["headers"], base64.b64decode(items[2]["body_base64"])) == ("{", b"not json")
    ended = local.qdo("peek", "q", "--body")
    assert not unsafe(ended.out)
    assert "…" in ended.out
    assert "x" * 100 not in ended.out


def test_encrypted_bodies_need_the_keys(local: OperatorDesk) -> None:
    """Without them the error is shown in place of the body."""
    assert local.qdo("admin", "keys", "new", "--keys", "keys.json").code == 0
    keys = local.folder / "keys.json"
    with qdo.App("desk", broker=local.broker_url, keys=str(keys), encrypt=["bodies"]) as app:
        app.send("q", "secret")
    (item,) = local.items("peek", "q", "--body", "--keys", str(keys))
    assert item["body"] == "secret"
    (item,) = local.items("peek", "q", "--body")
    assert "body_error" in item
    assert "body" not in item


def test_a_long_queue_is_read_in_part(local: OperatorDesk) -> None:
    """Not more than asked for, behind any number of messages that are done out of order."""
    local.app.send_many(("q", each) for each in range(5000))
    at = [row[0] for row in local.broker.reader("q", 0).fetch(5000)]
    put(local, QueueNode(at[0], out_of_order=OutOfOrderProgress(((at[2], at[-3]),))))
    found = [each["body"] for each in local.items("peek", "q", "--body")]
    assert found == [1, 4998, 4999]
    assert local.qdo("peek", "q", "-n", "0").code == 2
    assert local.qdo("peek", "q", "-n", "1001").code == 2


def test_an_unknown_queue_is_not_found(local: OperatorDesk) -> None:
    """Without a broker file, and with one; a node that cannot be read is an error."""
    assert local.qdo("peek", "nowhere").code == 6
    local.send(1)
    assert [each["kind"] for each in local.items("peek", "q")] == ["waiting"]
    local.known()
    local.client.set(local.layout.queue("q"), b"garbage")
    assert local.qdo("peek", "q").code not in (0, 6)
    assert local.qdo("peek", "q", "--id", "x").code == 2
