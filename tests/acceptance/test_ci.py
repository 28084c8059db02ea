"""The example `ci` of the documentation as a fleet, while something goes wrong every 3 seconds."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.soak.broker_server import BrokerServer
from tests.soak.ci_fleet import CiFleet, play

SECONDS = 30.0


@pytest.mark.long("a minute of faults")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["embedded", "postgresql"])
def test_webhooks_are_built_and_reported_in_order(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of a sixth that is delivered twice, too, as `tests.soak.ci_rules` says."""
    with ExitStack() as stack:
        database, coordinator = None, "embedded"
        if kind == "postgresql":
            request.getfixturevalue("zookeeper_server")
            request.getfixturevalue("postgresql_server")
            database, coordinator = stack.enter_context(closing(BrokerServer())), "zookeeper"
        fleet = stack.enter_context(closing(CiFleet(tmp_path, coordinator, 1, database)))
        assert play(fleet, SECONDS) == []
