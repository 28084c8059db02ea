"""The parent of a blocked worker, while the coordinator does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qdo.errors import CoordinatorUnreachableError
from qdo.worker.shared_memory import LoopReport
from qdo.worker.supervisor import blocked

REPORT = LoopReport(beat=1.0, contact=1.0, limit_seconds=60.0)
NEXT = LoopReport(beat=2.0, contact=2.0, limit_seconds=60.0)


def test_it_connects_again_until_the_loop_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One connection that fails must not leave operators without an answer, nor fill the log."""
    session = SimpleNamespace(url="zookeeper://127.0.0.1:1/", access=None, timeout_seconds=3.0)
    child: Any = SimpleNamespace(name="process 1", sessions=[session], loop=lambda: REPORT)
    attempts = []

    class Unreachable:
        def open(self, seconds: float) -> None:
            attempts.append(seconds)
            if len(attempts) == 3:
                child.loop = lambda: NEXT
            raise CoordinatorUnreachableError(url="127.0.0.1:1", reason="refused")

    monkeypatch.setattr(blocked, "connect", lambda *args, **options: Unreachable())
    monkeypatch.setattr(blocked, "RETRY_SECONDS", 0.0)
    blocked.BlockedActions(child, REPORT, lambda: None).run()
    assert attempts == [1.0, 1.0, 1.0]
    assert len(caplog.records) == 1
