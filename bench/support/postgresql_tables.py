"""qdo's tables under a load with retention, and many queues."""

from __future__ import annotations

import json
import select
import time
from dataclasses import dataclass, replace
from typing import Any

from bench.support.postgresql_runs import (
    INIT,
    QDO,
    SENDER,
    Bench,
    StagedDatabase,
    qdo_rival,
    staged,
)
from bench.support.processes import Program
from bench.support.statistics import Goal

QUEUES = 16
RETENTION_SECONDS = 60
PARTITION_SECONDS = 10
SAMPLE_SECONDS = 1.0
SETTLE_SECONDS = 3.0 * RETENTION_SECONDS
LIST_SECONDS = 600.0

_SIZES = """
SELECT coalesce(sum(pg_table_size(pg_class.oid)), 0)::bigint,
    coalesce(sum(pg_indexes_size(pg_class.oid)), 0)::bigint,
    coalesce(sum(n_dead_tup), 0)::bigint, count(*)
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
LEFT JOIN pg_stat_all_tables ON relid = pg_class.oid
WHERE relkind = 'r' AND nspname = %s
"""

SIZE_HEADER = (
    "when", "tables MiB", "indexes MiB", "dead tuples", "tables", "catalog MiB", "its dead tuples",
)  # fmt: skip
LIST_HEADER = ("queues", "first list s", "next list s")


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Bytes and dead tuples of a schema."""

    tables: int
    indexes: int
    dead: int
    count: int

    @classmethod
    def of(cls, connection: Any, schema: str) -> TableSizes:
        """Read them; dead tuples are those that the server has counted so far."""
        return cls(*connection.execute(_SIZES, (schema,)).fetchone())

    @property
    def whole(self) -> int:
        return self.tables + self.indexes


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of qdo's schema and of the system catalog at a moment."""

    when: str
    own: TableSizes
    catalog: TableSizes

    @classmethod
    def now(cls, connection: Any, when: str) -> Sizes:
        return cls(when, TableSizes.of(connection, "qdo"), TableSizes.of(connection, "pg_catalog"))

    def row(self) -> tuple[str, ...]:
        """Return a line of the table."""
        return (
            self.when,
            f"{self.own.tables / 2**20:,.1f}",
            f"{self.own.indexes / 2**20:,.1f}",
            f"{self.own.dead:,}",
            f"{self.own.count:,}",
            f"{self.catalog.whole / 2**20:,.1f}",
            f"{self.catalog.dead:,}",
        )


def run_retention(bench: Bench) -> list[Sizes]:
    """Send and process many messages, each kept for a minute; return the sizes of the tables."""
    given = bench.given
    environment = {
        "BENCH_QUEUES": str(QUEUES),
        "BENCH_PACE": str(given.pace),
        "QDO_RETENTION_SECONDS": str(RETENTION_SECONDS),
    }
    schema = (*INIT, "--partition-seconds", str(PARTITION_SECONDS))
    rival = replace(qdo_rival(QDO, "", given.messages, (), environment), schema=schema)
    with staged(bench.server, rival, bench.python) as stage:
        tallies = stage.folder / "tallies"
        tallies.mkdir()
        counting = {"BENCH_MODE": "tally", "BENCH_TALLIES": str(tallies)}
        command = rival.worker_command(bench.python)
        with (
            stage.server.address.connect(stage.database) as connection,
            Program(command, environment={**stage.environment, **counting}) as worker,
        ):
            before = Sizes.now(connection, "before")
            peak = _peak(stage, rival.feed_command(bench.python, "stream", given.messages), before)
            sent = Sizes.now(connection, "all sent")
            return [before, peak, sent, _settled(connection, worker, before)]


def _peak(stage: StagedDatabase, command: list[str], peak: Sizes) -> Sizes:
    """Return the largest sizes while a sender runs."""
    with (
        stage.server.address.connect(stage.database) as connection,
        Program(command, environment=stage.environment) as sender,
    ):
        while sender.process.poll() is None:
            found = Sizes.now(connection, "largest")
            peak = max(peak, found, key=lambda sizes: sizes.own.whole)
            select.select([], [], [], SAMPLE_SECONDS)
        sender.wait(0)
    return replace(peak, when="largest")


def _settled(connection: Any, worker: Program, before: Sizes) -> Sizes:
    """Wait until all messages are trimmed; return the sizes then, or after the patience."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = Sizes.now(connection, "all trimmed")
        if found.own.whole <= 2 * before.own.whole:
            return found
        if worker.process.poll() is not None:
            raise worker.failure("ended")
        if time.monotonic() > deadline:
            return replace(found, when=f"{SETTLE_SECONDS:g} s later")
        select.select([], [], [], SAMPLE_SECONDS)


def run_lists(bench: Bench) -> dict[str, float]:
    """Create many queues, and list them twice: all, and then only those that are new."""
    queues = bench.given.queues
    rival = qdo_rival(QDO, "", 0, (), {"QDO_MAX_QUEUES": str(2 * queues)})
    with (
        staged(bench.server, rival, bench.python) as stage,
        Program([*SENDER, "list", str(queues)], environment=stage.environment, talk=True) as lister,
    ):
        found: dict[str, float] = json.loads(lister.read_line(LIST_SECONDS))
        return found


def list_row(found: dict[str, float]) -> tuple[str, ...]:
    """Return the line of the table."""
    return (f"{found['queues']:,}", f"{found['first']:.2f}", f"{found['next']:.3f}")


def goals(sizes: list[Sizes]) -> list[Goal]:
    """Return the goals of the tables."""
    dead = max(each.own.dead for each in sizes)
    return [Goal.at_most("dead tuples of qdo's tables", 1000, dead, ",.0f")]
