"""Reload: which files count, when they have changed, and how the parent reacts."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from qdo.worker.parent_link import app_files, failure_files
from qdo.worker.supervisor import restarts
from qdo.worker.supervisor.restarts import (
    GiveUp,
    Kill,
    Restart,
    RestartPolicy,
    Spawn,
    Terminate,
    WaitForReload,
)
from qdo.worker.supervisor.supervisor import SourceWatcher

# --- files ----------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in an importable folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "reloaded_app.py"
    path.write_text("value = 1\n")
    monkeypatch.delitem(sys.modules, "reloaded_app", raising=False)
    return path


def test_watcher_reports_once_no_file_changes_any_more(tmp_path: Path) -> None:
    """So a checkout of many files restarts workers once."""
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("1")
    two.write_text("2")
    watch = SourceWatcher()
    watch.add([str(one), str(two)])
    assert watch.look() == []
    one.write_text("changed")
    assert watch.look() == []
    two.write_text("changed")
    assert watch.look() == []
    assert watch.look() == [str(one), str(two)]
    assert watch.look() == []


def test_created_and_deleted_files_count_as_changed(tmp_path: Path) -> None:
    """Creating the file fixes the import of a missing module."""
    path = tmp_path / "late.py"
    watch = SourceWatcher()
    watch.add([str(path)])
    assert (watch.look(), watch.look()) == ([], [])
    path.write_text("1")
    assert (watch.look(), watch.look()) == ([], [str(path)])
    path.unlink()
    assert (watch.look(), watch.look()) == ([], [str(path)])


def test_file_added_again_keeps_its_mark(tmp_path: Path) -> None:
    """A change between two calls of `add` is not lost."""
    path = tmp_path / "one.py"
    path.write_text("1")
    watch = SourceWatcher()
    watch.add([str(path)])
    path.write_text("changed")
    watch.add([str(path)])
    assert (watch.look(), watch.look()) == ([], [str(path)])


def test_app_files_exclude_python_packages_and_qdo(module: Path) -> None:
    """Only files that a developer edits count."""
    importlib.import_module("reloaded_app")
    files = app_files()
    assert str(module.resolve()) in files
    assert os.path.realpath(os.__file__) not in files
    assert os.path.realpath(pytest.__file__) not in files
    assert os.path.realpath(restarts.__file__) not in files


@pytest.mark.parametrize("text", ["def broken(:\n", "import nonsense_that_is_not\n", "1 / 0\n"])
def test_failure_files_include_a_module_with_an_error(module: Path, text: str) -> None:
    """Python forgets a module whose import failed; its file must be watched all the same."""
    module.write_text(text)
    importlib.invalidate_caches()
    with pytest.raises((SyntaxError, ImportError, ZeroDivisionError)) as caught:
        importlib.import_module("reloaded_app")
    assert str(module) in failure_files(caught.value, "")


def test_failure_files_include_a_missing_module(module: Path) -> None:
    """Its name implies its path."""
    files = failure_files(ImportError("none"), "shop.jobs:app")
    assert {str(module.parent / "shop" / "jobs.py")} < files


# --- reaction of the parent ---------------------------------------------------------------


def started(size: int = 1, *, watching: bool = True) -> RestartPolicy:
    policy = RestartPolicy(size, 30.0, watching)
    policy.start(0.0)
    for place in range(size):
        policy.registered(place, True)
    return policy


def test_reload_drains_and_replaces_every_worker() -> None:
    """Whatever its exit code: 0 does not end a place here."""
    policy = started(3)
    assert policy.reload(5.0) == [Terminate(0), Terminate(1), Terminate(2)]
    for place, code in enumerate((0, 1, -15)):
        assert policy.is_stopping(place)
        assert policy.exited(place, code, 6.0) == [Spawn(place)]
        assert not policy.is_stopping(place)
    assert not policy.done


def test_second_reload_sends_no_second_signal() -> None:
    """It would abort jobs. The next process loads the last change anyway."""
    policy = started()
    policy.reload(5.0)
    assert policy.reload(6.0) == []
    policy.exited(0, 0, 7.0)
    assert policy.reload(8.0) == [Terminate(0)]


def test_worker_that_outlasts_a_reload_is_killed_once() -> None:
    """Otherwise a hanging job would keep the old code forever."""
    policy = started()
    policy.reload(5.0)
    limit = 5.0 + 30.0 + restarts.DRAIN_MARGIN_SECONDS
    assert policy.next_at == limit
    assert policy.tick(limit - 1) == []
    assert [type(each) for each in policy.tick(limit)] == [Kill]
    assert policy.tick(limit + 100) == []
    assert policy.next_at is None
    assert policy.exited(0, -9, limit + 101) == [Spawn(0)]


@pytest.mark.parametrize("code", [1, 2])
def test_worker_that_cannot_start_waits_for_a_change(code: int) -> None:
    """Even if an earlier worker of its place could start."""
    policy = started()
    policy.reload(5.0)
    policy.exited(0, 0, 6.0)
    assert policy.exited(0, code, 7.0) == [WaitForReload(0)]
    assert policy.next_at is None
    assert policy.tick(1e9) == []
    assert policy.reload(10.0) == []
    assert policy.tick(10.0) == [Spawn(0)]


def test_worker_that_had_registered_restarts_with_backoff() -> None:
    """A crash is not a syntax error."""
    policy = started()
    assert policy.exited(0, 1, 7.0) == [Restart(0, 0.1)]


def test_unreachable_coordinator_ends_all_workers() -> None:
    """No change of a file fixes that."""
    policy = RestartPolicy(1, 30.0, True)
    policy.start(0.0)
    assert policy.exited(0, 3, 1.0) == [GiveUp(0, 3)]


def test_stop_takes_precedence_over_reload() -> None:
    """A draining worker gets no second signal, and no worker starts any more."""
    policy = started(2)
    policy.exited(1, 0, 1.0)
    policy.reload(5.0)
    assert policy.drain(6.0) == []
    assert policy.reload(7.0) == []
    assert policy.exited(0, 0, 8.0) == []
    assert policy.done


def test_place_waiting_for_a_change_ends_with_the_others() -> None:
    policy = started()
    policy.reload(5.0)
    policy.exited(0, 0, 6.0)
    policy.exited(0, 2, 7.0)
    policy.drain(8.0)
    assert policy.done
