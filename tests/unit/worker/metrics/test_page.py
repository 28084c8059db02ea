"""Metrics in shared memory, also of processes that die while they write."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator

import pytest

from qdo.worker.metrics.monitor import HALF_BYTES, ChildMetrics, MetricsPage


@pytest.fixture
def child() -> Iterator[ChildMetrics]:
    made = ChildMetrics()
    yield made
    if made.fd >= 0:
        made.close()


def test_the_parent_reads_what_was_written_last(child: ChildMetrics) -> None:
    page = MetricsPage(child.fd)
    assert child.read() is None
    for number in range(5):
        page.write({"n": number})
        assert child.read() == {"n": number}


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * HALF_BYTES])
def test_a_torn_write_leaves_the_one_before(child: ChildMetrics, content: bytes) -> None:
    """Also for a parent that has not read that one."""
    page = MetricsPage(child.fd)
    page.write({"n": 1})
    page.write({"n": 2})
    os.pwrite(child.fd, content[:64], 3 % 2 * HALF_BYTES)
    assert child.read() == {"n": 2}
    os.pwrite(child.fd, b"\xff" * 64, 0)
    os.pwrite(child.fd, b"\xff" * 64, HALF_BYTES)
    assert child.read() == {"n": 2}


def test_json_that_no_reader_bears_leaves_the_one_before(child: ChildMetrics) -> None:
    """A job may write anything, with the right checksum."""
    MetricsPage(child.fd).write({"n": 1})
    content = b"[" * 200_000
    header = struct.pack("<QII", 9, len(content), zlib.crc32(content))
    os.pwrite(child.fd, header + content, 0)
    assert child.read() == {"n": 1}


def test_a_truncated_memory_is_no_error(child: ChildMetrics) -> None:
    MetricsPage(child.fd).write({"n": 1})
    assert child.read() == {"n": 1}
    os.ftruncate(child.fd, 0)
    assert child.read() == {"n": 1}


def test_too_much_is_refused(child: ChildMetrics) -> None:
    page = MetricsPage(child.fd)
    page.write({"n": 1})
    with pytest.raises(ValueError, match="more than"):
        page.write("x" * HALF_BYTES)
    assert child.read() == {"n": 1}


def test_the_last_values_outlive_the_memory(child: ChildMetrics) -> None:
    """The counts of a dead process are read once more."""
    MetricsPage(child.fd).write({"n": 1})
    child.close()
    assert child.read() == {"n": 1}


def test_without_a_parent_nothing_is_written() -> None:
    MetricsPage().write("x" * HALF_BYTES)
