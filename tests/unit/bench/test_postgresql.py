"""The counts, tables and goals of `bench.postgresql`."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest

from bench.peers import common as tally
from bench.peers.catalog import Rival
from bench.support import postgresql_loads as loads
from bench.support import postgresql_tables as tables
from bench.support.postgresql_runs import QDO, WorkerLoad, qdo_rival
from bench.support.postgresql_sends import send_entries
from bench.support.postgresql_tables import Sizes, TableSizes


def entry(name: str, rate: float, disordered: int = 0, mode: str = "tally") -> loads.LoadResult:
    """Return a program that ran once, for ten seconds."""
    run = WorkerLoad(int(10 * rate), 10.0, 5.0, 2.0, disordered)
    return loads.LoadResult(Rival(name, (), (), "how"), mode=mode, runs=[run])


def test_processes_add_their_jobs(tmp_path: Path) -> None:
    """Another process has its own file; one that is just being created does not count."""
    job = tally.tallying(tmp_path)
    for number in range(3):
        job(tally.body(number))
    (tmp_path / "other").write_bytes((4).to_bytes(8, "little") + (1).to_bytes(8, "little"))
    (tmp_path / "new").write_bytes(b"")
    assert tally.tallies(tmp_path) == (7, 1)


def test_a_job_after_a_later_one_of_its_key_is_counted(tmp_path: Path) -> None:
    """Other keys may overtake."""
    job = tally.tallying(tmp_path, ordered=True)
    for number in (0, tally.KEYS, 1, 5 * tally.KEYS, 2 * tally.KEYS, 2):
        job(tally.body(number))
    assert tally.tallies(tmp_path) == (6, 1)


def test_senders_report_what_they_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("sys.stdin", io.StringIO("0.01\n"))
    tally.send_for(lambda values: sizes.append(len(values)), 7, threads=2)
    ready, found = capsys.readouterr().out.splitlines()
    assert ready == "ready"
    assert json.loads(found)["rate"] > 0
    assert set(sizes) == {7}


def test_batches_end_with_what_is_left() -> None:
    sizes = [len(values) for values in tally.batches(25, 10)]
    assert sizes == [10, 10, 5]


def test_goals_compare_with_the_fastest_other_program() -> None:
    """Neither the bare loop nor qdo with two processes is one of them."""
    entries = [
        entry(loads.BARE, 100_000), entry(QDO, 60_000), entry(loads.QDO_TWO, 90_000),
        entry("slow", 100), entry("fast", 4_000),
    ]  # fmt: skip
    half, twenty = loads.load_goals(entries)
    assert (half.found, half.reached) == ("0.60", True)
    assert (twenty.found, twenty.reached) == ("15.00", False)
    assert loads.load_goals(entries[:1]) == []


def test_qdo_must_keep_the_order_of_keys() -> None:
    entries = [entry(loads.KEYED, 10, 1, "order"), entry("Procrastinate, lock", 10, 2, "order")]
    (goal,) = loads.key_goals(entries)
    assert not goal.reached


def test_lines_have_a_cell_for_each_column() -> None:
    failed = loads.LoadResult(Rival("failed", (), (), "how"))
    rows = loads.load_rows([entry(QDO, 1_000), entry("other", 100), failed], QDO)
    assert {len(row) for row in rows} == {len(loads.LOAD_HEADER)}
    assert rows[1][5:8] == ("2,000.0", "", "10.00x")
    sizes = Sizes("before", TableSizes(2**20, 0, 3, 4), TableSizes(0, 2**21, 5, 6))
    assert sizes.row() == ("before", "1.0", "0.0", "3", "4", "2.0", "5")
    assert len(sizes.row()) == len(tables.SIZE_HEADER)


def test_programs_without_batches_send_single_messages() -> None:
    class Wanted:
        peers = (Rival("single", (), (), ""), Rival("silent", (), (), "", sends=False))
        given = argparse.Namespace()

        def wanted(self, name: str) -> bool:
            return name != QDO

    found: Any = list(send_entries(Wanted()))  # type: ignore[arg-type]
    assert [(rival.name, senders, size) for rival, senders, size in found] == [
        ("single", 1, 1), ("single", 4, 1), ("single", 16, 1),
    ]  # fmt: skip


def test_options_are_those_of_the_worker() -> None:
    rival = qdo_rival(QDO, "", 1, ("--processes", "2"), {}, "sqs:fifo")
    assert rival.worker[-3:] == ("bench.apps.sqs:fifo", "--processes", "2")
