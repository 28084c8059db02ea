"""Shards are split and merged while their workers, leaders, senders and servers are killed.

``python -m tests.soak --app streams`` plays it for as long as you like.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from tests.soak.broker_server import BrokerServer
from tests.soak.stream_app import SIZE
from tests.soak.stream_fleet import StreamFleet, play
from tests.support.postgresql.commands import require

SECONDS, LEAST, RESHARDS = 15.0, 500, 2
STALLS = ("repeated", "heirs", "fence")
"""Rules that a machine violates if it stalls for longer than the session timeout."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long("a soak of streams")
@pytest.mark.parametrize("kind", ["embedded", "postgresql"])
def test_messages_of_a_key_keep_their_order(kind: str, tmp_path: Path) -> None:
    """None is lost, each total is that of its messages, and in the end no shard waits."""
    wanted = Namespace(messages=1_000_000, seconds=SECONDS, reshards=1000, pause=1.0)
    if kind == "postgresql":
        require()
    with closing(BrokerServer()) if kind == "postgresql" else nullcontext() as database:
        coordinator = f"sqlite:{tmp_path}/coordination.db"
        with closing(StreamFleet(tmp_path, coordinator, 26, database=database)) as fleet:
            found = play(fleet, wanted)
            assert [each for each in found if not each.startswith(STALLS)] == []
            assert len(fleet.stored()) * SIZE >= LEAST
            assert fleet.reshards >= RESHARDS
