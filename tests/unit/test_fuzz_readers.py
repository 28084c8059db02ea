"""Readers of nodes, addresses, settings and key files: nothing but documented errors.

2,000 inputs each; ``pytest --fuzz 100000 tests/unit/test_fuzz_readers.py`` tries more. Readers of
messages are in ``tests/unit/brokers/test_fuzz.py``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from qdo.brokers.registry import kind_of
from qdo.cli.output import parse_duration, parse_time
from qdo.coordination.client import Address
from qdo.coordination.session_setup import BrokerNode
from qdo.coordination.znodes.queue_node import QueueNode
from qdo.coordination.znodes.values import MAX_QUEUE_BYTES
from qdo.coordination.znodes.worker_node import WorkerNode, encode_queues, parse_assignment
from qdo.coordination.znodes.worker_report import WorkerReport
from qdo.encryption.bodies import BodyVault
from qdo.encryption.key_ring import KEY_BYTES, KeyRing, new_key, parse_keys
from qdo.errors import QdoError, UsageError
from qdo.queues import QueueFilter, is_path_part
from qdo.settings.settings import Settings, declarations
from qdo.settings.sources import load
from qdo.text import printable
from tests.unit.brokers.test_fuzz import DEEP, TEXTS, VALUES, Fuzz

pytestmark = pytest.mark.slow

QUEUE_KEYS = st.sampled_from([
    "last", "owner", "seek", "position", "deleted", "failing", "blocked", "done_ranges",
    "other_failures", "cancelled", "onward", "unconfirmed", "retired", "x",
])  # fmt: skip
WORKER_KEYS = st.sampled_from(["queues", "reread", "draining", "filter", "id", "address", "host"])
ADDRESS_PARTS = st.sampled_from([
    "sqlite:", "zookeeper://", "sqs://", "kinesis://", "s3://", "eu-west-1", "host:2181", "::1",
    "127.0.0.1", "/", "//", "?", "&", "=", ":", "@", "[", "]", "%2F", "%ff", "#", ".", "..", ",",
    "a", "b.fifo", "start=", "wait_seconds=", "bucket=", "dead_letters=", "//user:secret@",
])  # fmt: skip


def nodes(keys: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    """Values of nodes: nearly right, valid JSON of any form, and bytes."""
    return (
        st.dictionaries(keys, VALUES, max_size=6).map(lambda value: json.dumps(value).encode())
        | VALUES.map(lambda value: json.dumps(value).encode())
        | DEEP.map(str.encode)
        | st.binary(max_size=60)
    )


def test_queue_nodes_are_read_and_written_again(fuzz: Fuzz) -> None:
    """Whatever stands there: a fault, or a node that can be written."""

    def check(data: bytes) -> None:
        node = QueueNode.parse(data)
        again = node.encode()
        assert len(again) <= MAX_QUEUE_BYTES
        assert QueueNode.parse(again).last == node.last
        assert is_path_part(node.owner) or not node.owner

    fuzz(nodes(QUEUE_KEYS), check)


def test_lists_of_queues_are_read(fuzz: Fuzz) -> None:
    """Nodes of workers and assignments, compressed or not, cut anywhere."""
    plain = nodes(WORKER_KEYS)
    packed = plain.map(lambda data: zlib.compress(data)) | st.just(
        encode_queues(f"tenant-{number:07d}" for number in range(40_000))
    )
    cut = st.tuples(packed, st.integers(0, 200)).map(lambda pair: pair[0][: len(pair[0]) - pair[1]])

    def check(data: bytes) -> None:
        node = WorkerNode.parse(data)
        assert WorkerNode.parse(node.encode()).queues == node.queues
        assert all(map(is_path_part, parse_assignment(data) or ()))
        report = WorkerReport.parse(data)
        assert WorkerReport.parse(json.dumps(report.dump()).encode()) == report
        BrokerNode.parse(data)

    fuzz(plain | packed | cut | packed.map(lambda data: b"x" + data), check)


def test_addresses_are_right_or_refused(fuzz: Fuzz) -> None:
    """Of brokers and coordinators; a password in one is never repeated."""

    def check(parts: list[str]) -> None:
        url = "".join(parts)
        reason = kind_of(url).address_error(url)
        for said in (reason or "", _refusal(Address.parse, url)):
            assert "secret" not in said

    fuzz(st.lists(ADDRESS_PARTS | TEXTS, max_size=7), check)


def _refusal(read: Callable[[str], object], text: str) -> str:
    try:
        read(text)
    except QdoError as error:
        return str(error)
    return ""


def test_times_durations_and_globs(fuzz: Fuzz) -> None:
    """As command-line arguments bring them."""
    times = st.datetimes().map(str) | st.sampled_from(["P1D", "1d", "-1", "1e9s", "nan", "inf h"])

    def check(text: str) -> None:
        for read in (parse_duration, parse_time):
            with contextlib.suppress(UsageError):
                read(text, "--flag")
        QueueFilter((text,), (text[::-1],)).matcher()("tenant-1")
        assert printable(text).isprintable() or "\n" in printable(text)

    fuzz(TEXTS | times | st.text(alphabet="*?[]!-a\\", max_size=12), check)


def test_settings_are_taken_or_refused(fuzz: Fuzz, tmp_path: Path) -> None:
    """From the environment, as text, and from code, as any value."""
    names = st.sampled_from([each.name for each in declarations()])

    def check(values: dict[str, Any]) -> None:
        with contextlib.suppress(UsageError):
            Settings(**values)
        environ = {f"QDO_{name.upper()}": str(value) for name, value in values.items()}
        with contextlib.suppress(UsageError):
            load(environ=environ)

    fuzz(st.dictionaries(names, VALUES, max_size=3), check)


def test_key_files_are_read_or_refused(fuzz: Fuzz) -> None:
    """No error has the bytes of a key."""
    secret = base64.b64encode(b"k" * 32).decode()
    words = st.sampled_from(["a", "encrypt", "sign", secret, secret[:-2], "#", "é", "\x00"])
    lines = st.lists(st.lists(words | TEXTS, max_size=4).map(" ".join), max_size=4)

    def read(text: str) -> None:
        assert all(len(each.secret) == KEY_BYTES for each in parse_keys(text, "keys"))

    def check(text: str) -> None:
        assert secret not in _refusal(read, text)

    fuzz(lines.map("\n".join), check)


def test_sealed_bodies_are_opened_or_refused(fuzz: Fuzz, tmp_path: Path) -> None:
    """Changed anywhere, cut, or made up; only the true one is opened."""
    path = tmp_path / "keys"
    key = new_key("encrypt")
    path.write_text(f"{key.id} encrypt {base64.b64encode(key.secret).decode()}\n")
    path.chmod(0o600)
    vault = BodyVault(KeyRing(str(path)), lambda queue: f"app|{queue}")
    sealed, headers = vault.seal("q", b'{"n": 1}', None)

    def change(data: tuple[int, int, bytes]) -> bytes:
        at, flip, tail = data
        changed = bytearray(sealed)
        changed[at % len(sealed)] ^= flip
        return bytes(changed[: len(sealed) - len(tail)]) + tail

    def check(body: bytes) -> None:
        try:
            opened, _ = vault.open("q", body, headers)
        except QdoError:
            assert body != sealed
        else:
            assert opened == (b'{"n": 1}' if body == sealed else body)

    changes = st.tuples(st.integers(0, 10**6), st.integers(0, 255), st.binary(max_size=6))
    fuzz(changes.map(change) | st.binary(max_size=80).map(lambda data: b"q1." + data), check)
