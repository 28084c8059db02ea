"""The example `ci` of the documentation in the testing kit: from a webhook to its report."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from qdo.loading import load_app
from qdo.testing import TestKit
from tests.support.paths import ROOT

PUSH = {"x-github-event": "push"}


@pytest.fixture
def ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with a command that fails for the commit `bad`."""
    (tmp_path / "acme/shop").mkdir(parents=True)
    monkeypatch.setenv("CI_CHECKOUTS", str(tmp_path))
    monkeypatch.setenv("CI_COMMAND", 'test "$CI_COMMIT" != bad')
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    monkeypatch.delitem(sys.modules, "ci", raising=False)
    with load_app("ci:app"):
        yield sys.modules["ci"]


def _use_database(ci: Any, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Use a new one: the first message of each kit would be a repetition in an old one."""
    monkeypatch.setattr(ci, "DATABASE", f"sqlite:///{path}")
    with create_engine(ci.DATABASE).begin() as connection:
        ci.states.create(connection)


def _push(kit: TestKit, commit: str) -> None:
    body = {"repository": {"full_name": "acme/shop"}, "after": commit}
    assert kit.deliver("/github", body, PUSH) == 202


def _reported(kit: TestKit) -> list[tuple[Any, ...]]:
    """Return the reports; after a crash the job of a report may get it again."""
    names = ("number", "pipeline", "commit")
    done = kit.done("reports")
    found = [(*(each[name] for name in names), each["result"]["exit"]) for each in done]
    return list(dict.fromkeys(found))


def test_a_crash_at_any_step_changes_no_report(
    ci: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard of the project is divided between two of its webhooks."""
    for step in itertools.count(1, 3):
        _use_database(ci, monkeypatch, tmp_path / f"{step}.db")
        with TestKit(ci.app) as kit:
            ci.tenants.put("pipelines", {"gate": ["push"]})
            _push(kit, "good")
            kit.crash_at(nth=step)
            kit.run_until_settled()
            kit.streams.split(ci.projects.queue("acme/shop"))
            _push(kit, "good")
            _push(kit, "bad")
            kit.run_until_settled()
            assert _reported(kit) == [(1, "gate", "good", 0), (2, "gate", "bad", 1)]
            assert not kit.dead_letters()
            if kit.faults_left:
                break
    assert step > 20


def test_pipelines_are_changed_by_a_message(
    ci: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use_database(ci, monkeypatch, tmp_path / "ci.db")
    with TestKit(ci.app) as kit:
        kit.send("manage", {"gate": ["push"], "docs": ["push"], "other": ["issues"]})
        kit.run_until_settled()
        _push(kit, "good")
        kit.run_until_settled()
        assert _reported(kit) == [(1, "gate", "good", 0), (2, "docs", "good", 0)]
