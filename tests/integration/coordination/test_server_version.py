"""The warning of servers that may lose what they have acknowledged."""

from __future__ import annotations

import re

import pytest

from qdo.coordination import session_setup
from qdo.coordination.session_setup import SAFE, is_safe, warn_of_server
from tests.support.coordinator_process import connected


def test_an_ensemble_of_an_unsafe_version_is_named(
    ensemble_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the installed servers are safe decides; the answer is theirs."""
    with connected(ensemble_url) as client:
        found = re.search(r"version: (\d+)\.(\d+)\.(\d+)", client.command(b"srvr"))
        assert found is not None
        version = int(found[1]), int(found[2]), int(found[3])
        warn_of_server(client)
    expected = [] if is_safe(version) else [(".".join(map(str, version)), SAFE)]
    assert _warnings(caplog) == expected


@pytest.mark.parametrize("url", ["zookeeper_url", "embedded_url"])
def test_a_single_server_needs_no_warning(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """No election can undo what it has acknowledged."""
    with connected(request.getfixturevalue(url)) as client:
        warn_of_server(client)
    assert _warnings(caplog) == []


def _warnings(caplog: pytest.LogCaptureFixture) -> list[object]:
    """Without those of connections: another test may have stopped a server of the ensemble."""
    records = [each for each in caplog.records if each.levelname == "WARNING"]
    return [each.args for each in records if each.name == session_setup.__name__]
