"""Znode paths and the JSON in them, garbage included."""

from __future__ import annotations

import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdo.coordination.session_setup import BrokerNode
from qdo.coordination.znodes.layout import Layout, is_worker_name
from qdo.coordination.znodes.queue_node import FailureRecord, OutOfOrderProgress, QueueNode
from qdo.coordination.znodes.values import (
    MAX_INFLATED_BYTES,
    MAX_LISTED,
    MAX_QUEUE_BYTES,
    MAX_VALUE_BYTES,
)
from qdo.coordination.znodes.worker_node import (
    WorkerNode,
    encode_queues,
    parse_assignment,
    with_moves,
)
from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.errors import QueueNameError, SettingsError
from qdo.fleet.components import AppLevel
from qdo.fleet.limit_node import LimitNode
from qdo.queues import check_queue_name, name_error


def test_published_paths() -> None:
    """Workers and queues are where other tools look for them."""
    layout = Layout.of("churn")
    root = "/mozilla/services/qdo/churn"
    assert layout.root == root
    assert layout.worker("worker-0000000101") == f"{root}/workers/worker-0000000101"
    assert layout.queue("a4bb") == f"{root}/queues/a4bb"
    assert layout.assignment("worker-0000000101") == f"{root}/assignments/worker-0000000101"
    assert layout.rebalancer == f"{root}/rebalancer"


def test_namespace() -> None:
    """The namespace replaces the default one."""
    assert Layout.of("a", "/x/y").root == "/x/y/a"


def test_persistent_nodes_are_all_below_the_root() -> None:
    """Whatever must stand before a worker registers belongs to the app."""
    layout = Layout.of("a")
    assert layout.persistent
    assert {path.rpartition("/")[0] for path in layout.persistent} == {layout.root}


@pytest.mark.parametrize(
    ("app", "namespace", "setting"),
    [
        ("", "/a", "app"),
        ("a/b", "/a", "app"),
        ("a", "a", "namespace"),
        ("a", "/a/../b", "namespace"),
    ],
)
def test_names_that_make_no_path(app: str, namespace: str, setting: str) -> None:
    """App and namespace are checked before any znode is touched."""
    with pytest.raises(SettingsError) as raised:
        Layout.of(app, namespace)
    assert raised.value.details["name"] == setting


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        (".", "relative"),
        ("..", "relative"),
        ("zookeeper", "ZooKeeper"),
        ("a/b", "'/'"),
        ("a\n", "U+000A"),
        ("a\x7f", "U+007F"),
        ("\ue000", "U+E000"),
        ("\ufff0", "U+FFF0"),
        ("x" * 201, "201"),
    ],
)
def test_names_that_no_znode_can_have(name: str, reason: str) -> None:
    """Each is refused with its reason."""
    with pytest.raises(QueueNameError) as caught:
        check_queue_name(name)
    assert caught.value.details["name"] == name
    assert reason in caught.value.details["reason"]


@pytest.mark.parametrize("name", ["a", "a4bb-9", "...", "a b", "Zoë", "日本", "x" * 200, "%2F"])
def test_names_that_will_do(name: str) -> None:
    """Any name valid in a path is allowed, not only uuid4 hex."""
    assert check_queue_name(name) == name


@pytest.mark.parametrize(
    ("data", "last"),
    [
        (b"", 0),
        (b"  ", 0),
        (b"{}", 0),
        (b'{"last": ""}', 0),
        (b'{"last": "135471512647131000"}', 135471512647131000),
        (b'{"last": "135471512647131000L"}', 135471512647131000),
        (b'{"last": " 135471512647131000 "}', 135471512647131000),
        (b' {"last": "135471512647131000 L "}\n', 135471512647131000),
        (b'{"last": 135471512647131000}', 135471512647131000),
    ],
)
def test_last_as_old_and_new_writers_leave_it(data: bytes, last: int) -> None:
    """A trailing L, spaces, nothing at all and a plain number are accepted on reading."""
    node = QueueNode.parse(data)
    assert (node.last, node.fault) == (last, None)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe",
        b"nonsense",
        b"[1]",
        b"5",
        b'{"last": "soon"}',
        b'{"last": "-5"}',
        b'{"last": "1.5"}',
        b'{"last": "L"}',
        b'{"last": true}',
        b'{"last": null}',
        b'{"last": ["1"]}',
        '{"last": "١٢"}'.encode(),
        b'{"last": "' + b"1" * 5000 + b'"}',
        b'{"last": ' + b"1" * 5000 + b"}",
        b'{"last": "9223372036854775808"}',
        b'{"last": 9223372036854775808}',
        b"[" * 100_000,
    ],
)
def test_garbage_is_a_fault_and_never_raises(data: bytes) -> None:
    """A queue whose `last` cannot be read must not be taken for one at its beginning."""
    assert QueueNode.parse(data).fault


def test_last_is_written_as_a_decimal_string() -> None:
    """Never with an L, and "" before the first message."""
    assert json.loads(QueueNode(last=135471512647131000).encode()) == {"last": "135471512647131000"}
    assert json.loads(QueueNode().encode()) == {"last": ""}


def test_keys_of_others_are_kept() -> None:
    """Rewriting a node keeps the data of other tools."""
    node = QueueNode.parse(b'{"last": "5", "seek": 2, "owner": "worker-1", "note": {"a": [1]}}')
    again = json.loads(node.owned_by("").moved_to(7).encode())
    assert again == {"last": "7", "seek": 2, "note": {"a": [1]}}


@given(
    st.builds(
        QueueNode,
        last=st.integers(0, 2**60 - 1),
        owner=st.sampled_from(["", "worker-0000000101"]),
        seek=st.integers(0, 9),
        position=st.none() | st.text(max_size=5),
        deleted=st.booleans(),
    )
)
def test_queue_nodes_survive_writing_and_reading(node: QueueNode) -> None:
    """The read value equals the written one."""
    assert QueueNode.parse(node.encode()) == node


@pytest.mark.parametrize("name", ["", "..", "a/b", "x\\u0000", "\\ud800", "\\ud83d\\ude00"])
def test_names_that_break_a_path_are_passed_over(name: str) -> None:
    """kazoo's connection would end for good over some of them."""
    assert parse_assignment(f'{{"queues": ["{name}", "fine"]}}'.encode()) == {"fine"}
    assert QueueNode.parse(f'{{"owner": "{name}"}}'.encode()).owner == ""


def test_only_numbered_workers_are_workers() -> None:
    """All other nodes below `workers` are ignored: they belong to other programs."""
    assert is_worker_name("worker-0000000101")
    for name in ("worker-", "worker-x", "monitor", "worker-١٢٣٤٥٦٧٨٩٠", "worker-0000000101.bak"):
        assert not is_worker_name(name)


def test_worker_nodes() -> None:
    """The published key is `queues`; `reread` appears only after a seek."""
    assert json.loads(WorkerNode(("b", "a")).encode()) == {"queues": ["b", "a"]}
    node = WorkerNode(("a",), ("a",))
    assert WorkerNode.parse(node.encode()) == node


def test_assignments() -> None:
    """Written sorted, so that equal shares are equal bytes."""
    data = encode_queues({"b", "a"})
    assert json.loads(data) == {"queues": ["a", "b"]}
    assert parse_assignment(data) == {"a", "b"}


def test_long_lists_are_compressed() -> None:
    """A node holds many times the names of its 512 KiB; shorter ones are plain JSON."""
    names = {f"tenant-é-{number:08d}" for number in range(100_000)}
    data = encode_queues(names)
    assert len(data) < MAX_VALUE_BYTES
    assert parse_assignment(data) == names
    assert WorkerNode.parse(WorkerNode(tuple(names)).encode()).queues == tuple(names)
    assert encode_queues(["é"]) == '{"queues":["é"]}'.encode()


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_broken_compressed_lists_are_no_assignments(cut: int) -> None:
    """Neither those cut off, nor those that are too large, nor other bytes."""
    data = encode_queues(f"tenant-{number:08d}" for number in range(50_000))
    assert parse_assignment(data[:-cut]) is None
    assert parse_assignment(b"x" + data) is None
    bomb = zlib.compress(b'{"queues": [' + b" " * MAX_INFLATED_BYTES + b"]}")
    assert parse_assignment(bomb) is None
    assert QueueNode.parse(data).fault is not None


@pytest.mark.parametrize("item", [b"{}", b"[]", b"1.5", b"0", b'{"a":0}', b'[""]', b'"a"'])
def test_long_values_hold_some_names_only(item: bytes) -> None:
    """Parsing anything else, or more names, would stop the event loop for seconds."""
    items = b",".join([item] * (MAX_INFLATED_BYTES // 8))
    value = b'{"queues":[],"x":[' + items + b"]}"
    for data in (value, zlib.compress(value)):
        assert parse_assignment(data) is None
        assert WorkerNode.parse(data) == WorkerNode()
    node = QueueNode.parse(b'{"last":"5","owner":"worker-0000000001",' + value[1:])
    assert node == QueueNode(fault=node.fault)
    assert node.fault is not None


def test_too_many_names_are_counted_not_copied() -> None:
    """To copy each would take longer than a busy worker's connection lasts, at every attempt."""
    value = b'{"queues":[],"x":[' + b'"ab",' * (MAX_INFLATED_BYTES // 6) + b"0]}"
    data = zlib.compress(value)
    tracemalloc.start()
    try:
        assert parse_assignment(data) is None
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4 * MAX_INFLATED_BYTES


def test_too_many_names_stay_too_long() -> None:
    """No worker writes a value that the others cannot read."""
    node = WorkerNode(tuple(f"{number:x}" for number in range(MAX_LISTED + 2)))
    assert len(node.encode()) > MAX_VALUE_BYTES
    most = WorkerNode(node.queues[:MAX_LISTED])
    assert len(most.encode()) > MAX_VALUE_BYTES or WorkerNode.parse(most.encode()) == most


def test_long_lists_hold_quotes_and_backslashes() -> None:
    """Escapes in names are no structure."""
    names = {f'["a\\",{{"\\\\": {number:08d}' for number in range(50_000)}
    assert parse_assignment(encode_queues(names)) == names


def test_lone_surrogates_do_not_break_a_node() -> None:
    """UTF-8 cannot hold them."""
    node = QueueNode(failure=FailureRecord(10, 1, "broken \ud800 text"))
    assert QueueNode.parse(node.encode()).failure == FailureRecord(10, 1, "broken \ufffd text")


@given(st.text(max_size=5))
def test_every_name_is_either_refused_or_one_part_of_a_path(name: str) -> None:
    """No accepted name leads out of its folder."""
    if name_error(name) is None:
        path = Layout.of("a").queue(name)
        assert path.split("/")[-1] == name
        assert name not in (".", "..")


# --- marks of a failing message -------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "key"),
    [
        (FailureRecord(50, 2, "ValueError: no", retry_at=1700000000.5, retry_delay=1.5), "failing"),
        (FailureRecord(50, 2, "it died", crashed=True), "failing"),
        (FailureRecord(50, 3, "no", decision="skip"), "failing"),
        (FailureRecord(50, 3, "no", blocked_since=1700000000.5), "blocked"),
    ],
)
def test_marks_are_kept_in_the_queue_node(marks: FailureRecord, key: str) -> None:
    """As one key, which shows whether the queue waits for an operator."""
    node = QueueNode(last=40, owner="worker-1", failure=marks)
    value = json.loads(node.encode())
    assert value[key]["position"] == "50"
    assert len({"failing", "blocked"} & value.keys()) == 1
    assert QueueNode.parse(node.encode()) == node


def test_marks_go_when_their_message_is_passed() -> None:
    """By progress, and when reading a node that another process wrote."""
    node = QueueNode(last=40, failure=FailureRecord(50, 2))
    assert node.moved_to(49).failure == FailureRecord(50, 2)
    assert node.moved_to(50).failure is None
    assert node.with_failure(None).failure is None
    assert QueueNode(last=50).with_failure(FailureRecord(50, 2)).failure is None
    assert QueueNode.parse(b'{"last": "60", "failing": {"position": "50", "attempts": 2}}') == (
        QueueNode(last=60)
    )


@pytest.mark.parametrize(
    "value",
    ["3", "null", "[]", "{}", '{"position": "x", "attempts": 1}', '{"position": "50"}',
     '{"position": "50", "attempts": true}', '{"position": "50", "attempts": "2"}'],
)  # fmt: skip
def test_marks_that_cannot_be_read_are_none(value: str) -> None:
    """The message counts from 1 again, and the queue continues."""
    node = QueueNode.parse(f'{{"last": "40", "failing": {value}}}'.encode())
    assert (node.last, node.failure, node.fault) == (40, None, None)


def test_odd_times_of_marks_are_none() -> None:
    """An impossible time neither blocks a queue nor lets it wait forever."""
    text = (
        '{"last": "40", "blocked": {"position": "50", "attempts": 2, "blocked_since": -1,'
        ' "retry_at": 1e99}}'
    )
    marks = QueueNode.parse(text.encode()).failure
    assert marks == FailureRecord(50, 2)


def test_a_long_error_is_cut() -> None:
    """Nodes of thousands of queues stay small."""
    assert len(QueueNode(last=1, failure=FailureRecord(50, 2, "x" * 10_000)).encode()) < 500


# --- messages done beyond `last` ------------------------------------------------------


@st.composite
def nodes_with_runs(draw: st.DrawFn) -> QueueNode:
    """Queue nodes with runs and marks of messages beyond `last`."""
    last = draw(st.integers(0, 2**60 - 1))
    steps = draw(st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, 2**40)), max_size=20))
    runs, before = [], last
    for gap, length in steps:
        runs.append((before + gap, before + gap + length))
        before = runs[-1][1]
    marks = tuple(
        FailureRecord(last + each, 2, "no") for each in draw(st.lists(st.integers(1, 99)))
    )
    above = OutOfOrderProgress(tuple(runs), marks)
    return QueueNode(last=last, owner="worker-1", out_of_order=above if runs or marks else None)


@given(nodes_with_runs())
def test_runs_beyond_last_are_read_as_they_were_written(node: QueueNode) -> None:
    """As small numbers, each counted from the one before: no reader of JSON rounds them."""
    assert QueueNode.parse(node.encode()) == node
    pairs = json.loads(node.encode()).get("done_ranges", [])
    assert all(number < 2**53 for pair in pairs for number in pair)


@pytest.mark.parametrize(
    ("value", "runs"),
    [
        ("3", ()),
        ("[[1]]", ()),
        ("[[1, 2, 3]]", ()),
        ('[["1", 2]]', ()),
        ("[[true, 2]]", ()),
        ("[[0, 2]]", ()),
        ("[[1, -1]]", ()),
        ("[[1, 1e3]]", ()),
        (f"[[{10**100}, 1]]", ()),
        ("[[1, 2], [5, 0], null, [1, 1]]", ((41, 43), (48, 48))),
    ],
)
def test_runs_that_cannot_be_read_are_left_out(
    value: str, runs: tuple[tuple[int, int], ...]
) -> None:
    """From the first bad one on, messages that are recorded as done run again."""
    node = QueueNode.parse(f'{{"last": "40", "done_ranges": {value}}}'.encode())
    assert (node.last, node.fault) == (40, None)
    assert (node.out_of_order.done_ranges if node.out_of_order else ()) == runs


@pytest.mark.parametrize("value", ["3", '[3, null, {"position": "x"}]', '[{"position": "7"}]'])
def test_further_marks_that_cannot_be_read_are_left_out(value: str) -> None:
    node = QueueNode.parse(f'{{"last": "40", "other_failures": {value}}}'.encode())
    assert node == QueueNode(last=40)


@pytest.mark.parametrize(
    ("value", "cancelled"),
    [
        ("3", ()),
        ('["3"]', ()),
        ("[true]", ()),
        ("[0]", ()),
        ("[2, 3]", (42, 45)),
        ("[2, -1]", (42,)),
    ],
)
def test_cancelled_messages_that_cannot_be_read(value: str, cancelled: tuple[int, ...]) -> None:
    """From the first bad one on, messages run."""
    node = QueueNode.parse(f'{{"last": "40", "cancelled": {value}}}'.encode())
    assert (node.last, node.fault) == (40, None)
    assert (node.out_of_order.cancelled if node.out_of_order else ()) == cancelled
    assert QueueNode.parse(node.encode()) == node


def test_only_changes_that_go_on_let_an_owner_go_on() -> None:
    """A change that moved the queue back may lie among them."""
    before = QueueNode(last=40, seek=3, onward=1)
    assert QueueNode(last=50, seek=5, onward=3).continues(before)
    assert not QueueNode(last=50, seek=5, onward=2).continues(before)
    assert QueueNode.parse(before.encode()) == before
    assert before.moved_to(45).onward == 1


def test_a_seek_forgets_what_was_done_beyond_last() -> None:
    """The record is relative to `last`: a change of `last` by progress has to state it again."""
    above = OutOfOrderProgress(((50, 60),), ())
    assert QueueNode(last=40, out_of_order=above).moved_to(45).out_of_order is None


HOSTILE = (
    None,
    b"",
    b"null",
    b"\xff",
    b"NaN",
    b"[" * 100_000,
    b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"last": "1", "seek": ' + b"9" * 4000 + b"}",
    b'{"last": "1", "failing": {"position": "2", "attempts": ' + b"9" * 4000 + b"}}",
    b'{"last": "1", "failing": {"position": "2", "attempts": 1, "error": "\\ud800"}}',
    b'{"last": "1", "\\ud800": "\\udfff", "unconfirmed": ["\\ud800"]}',
    b'{"last": "1152921504606846976"}',
    b'{"last": ' + b"[" * 90 + b"]" * 90 + b"}",
    b'{"queues": {"a": 1}, "filter": [1], "reread": 5, "draining": "no"}',
    b'{"x": "' + b"x" * 900_000 + b'"}',
    b'{"x": "' + "é".encode() * 100_000 + b'"}',
)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_values_become_a_value_or_a_fault(number: int) -> None:
    """What is read can be written, encoded for any output, and fits into a transaction."""
    data = HOSTILE[number]
    node = QueueNode.parse(data)
    written = node.encode()
    assert len(written) <= MAX_QUEUE_BYTES
    assert len(node.fault or "") < 200
    assert json.loads(written, parse_constant=pytest.fail)
    assert "\\ud8" not in written.decode()
    repr(node).encode()
    again = QueueNode.parse(written)
    assert again.fault is None
    assert (again.last, again.seek, again.failure) == (node.last, node.seek, node.failure)
    worker = WorkerNode.parse(data)
    assert worker.queues == worker.reread == ()
    worker.encode()
    assert parse_assignment(data) is None
    BrokerNode.parse(data).encode()
    WorkerReport.parse(data)


def test_keys_of_other_programs_never_make_a_value_too_long() -> None:
    """A server closes the connection on such a request; they are dropped then."""
    grows = b'"x": [' + b"1e15," * 60_000 + b"0]"
    for data in (
        LimitNode.parse(b'{"max": 3, %b}' % grows).encode(),
        AppLevel.parse(b'{"level": 3, %b}' % grows).encode(),
        with_moves(b'{"moves": {}, %b}' % grows, {"q": "worker-0000000001"}),
    ):
        assert len(data) <= MAX_VALUE_BYTES
        assert len(json.loads(data)) == 1
    kept = LimitNode.parse(b'{"max": 3, "x": [1]}').encode()
    assert json.loads(kept) == {"max": 3, "x": [1]}


def test_a_giant_value_keeps_what_qdo_wrote() -> None:
    """The owner of such a node knows that it is its own; keys of others are dropped."""
    node = QueueNode(last=5, owner="worker-0000000001", extra=(("x", "x" * 300_000),))
    read = QueueNode.parse(node.encode())
    assert read.fault is not None
    assert (read.last, read.owner, read.extra) == (5, "worker-0000000001", ())


def test_a_refused_node_has_the_reason_as_its_fault() -> None:
    """It looks like an unreadable one to everything that reads nodes."""
    assert QueueNode.parse(b"", "not allowed").fault == "not allowed"
