"""Reloading: which files count, when they have changed, and what the parent does then."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from qdo.worker import roster
from qdo.worker.reloading import FileWatch, app_files, failure_files
from qdo.worker.roster import Ask, Await, GiveUp, Kill, Restart, Roster, Spawn

# --- files ----------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import from, with a module in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "reloaded_app.py"
    path.write_text("value = 1\n")
    monkeypatch.delitem(sys.modules, "reloaded_app", raising=False)
    return path


def test_a_change_is_told_once_nothing_more_changes(tmp_path: Path) -> None:
    """So a checkout of many files restarts workers once."""
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("1")
    two.write_text("2")
    watch = FileWatch()
    watch.add([str(one), str(two)])
    assert watch.look() == []
    one.write_text("changed")
    assert watch.look() == []
    two.write_text("changed")
    assert watch.look() == []
    assert watch.look() == [str(one), str(two)]
    assert watch.look() == []


def test_files_that_come_and_go_have_changed(tmp_path: Path) -> None:
    """A module that was missing at the import is mended by making it."""
    path = tmp_path / "late.py"
    watch = FileWatch()
    watch.add([str(path)])
    assert (watch.look(), watch.look()) == ([], [])
    path.write_text("1")
    assert (watch.look(), watch.look()) == ([], [str(path)])
    path.unlink()
    assert (watch.look(), watch.look()) == ([], [str(path)])


def test_a_file_that_is_told_of_again_keeps_its_mark(tmp_path: Path) -> None:
    """A change between two tellings is not forgotten."""
    path = tmp_path / "one.py"
    path.write_text("1")
    watch = FileWatch()
    watch.add([str(path)])
    path.write_text("changed")
    watch.add([str(path)])
    assert (watch.look(), watch.look()) == ([], [str(path)])


def test_the_files_of_an_app_are_neither_pythons_nor_installed_nor_qdos(module: Path) -> None:
    """Only what a developer edits."""
    importlib.import_module("reloaded_app")
    files = app_files()
    assert str(module.resolve()) in files
    assert os.path.realpath(os.__file__) not in files
    assert os.path.realpath(pytest.__file__) not in files
    assert os.path.realpath(roster.__file__) not in files


@pytest.mark.parametrize("text", ["def broken(:\n", "import nonsense_that_is_not\n", "1 / 0\n"])
def test_a_module_that_cannot_be_imported_is_a_file_to_mend(module: Path, text: str) -> None:
    """Python forgets a module whose import failed; its file must be watched all the same."""
    module.write_text(text)
    importlib.invalidate_caches()
    with pytest.raises((SyntaxError, ImportError, ZeroDivisionError)) as caught:
        importlib.import_module("reloaded_app")
    assert str(module) in failure_files(caught.value, "")


def test_a_module_that_does_not_exist_yet_is_a_file_to_make(module: Path) -> None:
    """Where it would be is known from its name."""
    files = failure_files(ImportError("none"), "shop.jobs:app")
    assert {str(module.parent / "shop" / "jobs.py")} < files


# --- what the parent does ---------------------------------------------------------------


def begun(size: int = 1, *, watching: bool = True) -> Roster:
    places = Roster(size, 30.0, watching)
    places.begin(0.0)
    for place in range(size):
        places.registered(place, True)
    return places


def test_every_worker_drains_and_is_replaced_at_once() -> None:
    """Whatever its exit code: 0 is no end then."""
    places = begun(3)
    assert places.reload(5.0) == [Ask(0), Ask(1), Ask(2)]
    for place, code in enumerate((0, 1, -15)):
        assert places.asked(place)
        assert places.exited(place, code, 6.0) == [Spawn(place)]
        assert not places.asked(place)
    assert not places.done


def test_a_second_change_asks_nobody_twice() -> None:
    """A second signal would abort jobs; what starts next has the last change anyway."""
    places = begun()
    places.reload(5.0)
    assert places.reload(6.0) == []
    places.exited(0, 0, 7.0)
    assert places.reload(8.0) == [Ask(0)]


def test_a_worker_that_does_not_make_room_is_killed_once() -> None:
    """Else a hanging job would keep the old code for ever."""
    places = begun()
    places.reload(5.0)
    limit = 5.0 + 30.0 + roster.DRAIN_MARGIN_SECONDS
    assert places.next_at == limit
    assert places.tick(limit - 1) == []
    assert [type(each) for each in places.tick(limit)] == [Kill]
    assert places.tick(limit + 100) == []
    assert places.next_at is None
    assert places.exited(0, -9, limit + 101) == [Spawn(0)]


@pytest.mark.parametrize("code", [1, 2])
def test_a_worker_that_cannot_begin_waits_for_a_change(code: int) -> None:
    """Also when an earlier worker of its place could."""
    places = begun()
    places.reload(5.0)
    places.exited(0, 0, 6.0)
    assert places.exited(0, code, 7.0) == [Await(0)]
    assert places.next_at is None
    assert places.tick(1e9) == []
    assert places.reload(10.0) == []
    assert places.tick(10.0) == [Spawn(0)]


def test_one_that_had_begun_is_restarted_as_ever() -> None:
    """A crash is no syntax error."""
    places = begun()
    assert places.exited(0, 1, 7.0) == [Restart(0, 0.1)]


def test_a_coordinator_out_of_reach_ends_it_all() -> None:
    """No change of a file mends that."""
    places = Roster(1, 30.0, True)
    places.begin(0.0)
    assert places.exited(0, 3, 1.0) == [GiveUp(0, 3)]


def test_stopping_comes_before_reloading() -> None:
    """Whoever drains already is not asked again, and nobody is started any more."""
    places = begun(2)
    places.exited(1, 0, 1.0)
    places.reload(5.0)
    assert places.drain(6.0) == []
    assert places.reload(7.0) == []
    assert places.exited(0, 0, 8.0) == []
    assert places.done


def test_a_place_that_waits_for_a_change_ends_with_the_others() -> None:
    places = begun()
    places.reload(5.0)
    places.exited(0, 0, 6.0)
    places.exited(0, 2, 7.0)
    places.drain(8.0)
    assert places.done


def test_without_watching_a_wrong_usage_ends_it_all() -> None:
    """In production nobody mends files under a worker."""
    places = Roster(1, 30.0)
    places.begin(0.0)
    assert places.exited(0, 2, 1.0) == [GiveUp(0, 2)]
