"""Commands use the settings that an app has in its code, as its workers do."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import QDO, WORKER, Ended, command
from tests.support.processes import Proc, children, wait_until

APP = """
import qdo

app = qdo.App(
    "inc",
    broker="sqlite:data/messages.db",
    coordinator="sqlite:data/coordination.db",
    attempts=1,
    backoff_seconds=0.5,
)


@app.job()
def increment(message, context):
    print(message.body + 1, flush=True)
"""
WAYS: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "option": (("--app", "inc:app"), {}),
    "settings file in the environment": ((), {"QDO_CONFIG": "qdo.toml"}),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an app and a settings file that names it."""
    (tmp_path / "inc.py").write_text(APP)
    (tmp_path / "qdo.toml").write_text('app = "inc:app"\n')
    (tmp_path / "data").mkdir()
    return tmp_path


def rows(ended: Ended) -> list[dict[str, Any]]:
    """Return the items that a command printed with -o jsonl."""
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_told_once_a_command_uses_what_the_app_uses(folder: Path, way: str) -> None:
    """A sent message is processed by the worker, and the list of queues shows it."""
    options, environ = WAYS[way]
    sent = command(*QDO, "send", *options, "q", "2", cwd=folder, env=environ)
    assert (sent.code, sent.err) == (0, "")
    worked = command(*WORKER, *options, "--burst", "--log-level", "error", cwd=folder, env=environ)
    assert (worked.code, worked.out, worked.err) == (0, "3\n", "")
    listed = command(*QDO, "queues", *options, "-o", "jsonl", cwd=folder, env=environ)
    assert [(each["queue"], each["backlog"]) for each in rows(listed)] == [("q", 0)]
    assert not (folder / "qdo-data").exists()


@pytest.mark.slow
def test_every_command_uses_what_the_app_uses(folder: Path) -> None:
    """A message that becomes a dead letter is found, sent again and moved behind."""
    app = ("--app", "inc:app")
    assert command(*QDO, "send", *app, "q", '"x"', cwd=folder).code == 0
    command(*WORKER, "inc:app", "--burst", "--log-level", "error", cwd=folder)
    letters = rows(command(*QDO, "dead-letters", *app, "-o", "jsonl", cwd=folder))
    assert [each["queue"] for each in letters] == ["q"]
    id = letters[0]["id"]
    for arguments, code in (
        (("dead-letters", "show", *app, "q", id), 0),
        (("dead-letters", "export", *app), 0),
        (("dead-letters", "retry", *app, "q", id), 0),
        (("dead-letters", "discard", *app, "q", id), 6),
        (("seek", *app, "q", "latest", "--yes"), 0),
        (("retry-now", *app, "q"), 5),
        (("workers", *app), 0),
        (("admin", "tree", *app), 0),
    ):
        ended = command(*QDO, *arguments, cwd=folder)
        assert ended.code == code, (arguments, ended.err)
        assert "qdo-data" not in ended.err
    assert not (folder / "qdo-data").exists()


@pytest.mark.slow
def test_the_parent_of_workers_uses_what_the_app_uses(folder: Path) -> None:
    """It never imports the app, and learns from its first worker how many others to start."""
    (folder / "inc.py").write_text(
        APP.replace("attempts=1", "processes=3, drain_seconds=50.0, log_level='warning'")
    )
    with Proc.python(*WORKER, "inc:app", cwd=folder) as proc:
        wait_until(lambda: len(children(proc.pid)) == 3, "three worker processes")
        listed = rows(command(*QDO, "config", "--app", "inc:app", "-o", "jsonl", cwd=folder))
        found = {each["setting"]: each["value"] for each in listed}
        assert (found["processes"], found["drain_seconds"]) == (3, 50.0)
        registered = (*QDO, "workers", "--app", "inc:app", "-o", "jsonl")
        wait_until(lambda: len(rows(command(*registered, cwd=folder))) == 3, "all registered")
        proc.send(signal.SIGTERM)
        assert proc.wait() == 0
        # Before the import of the app, the parent knows only the default level.
        assert [line for line in proc.output.splitlines() if "process 1 started" not in line] == []


# --- the environment differs from the code ---


def test_config_shows_the_code_and_what_overrides_it(folder: Path) -> None:
    """Code < file < environment < options, as for workers; each difference has its line."""
    (folder / "qdo.toml").write_text('app = "inc:app"\nattempts = 5\nbackoff_seconds = 0.5\n')
    ended = command(
        *(*QDO, "config", "-c", "qdo.toml", "--coordinator", "sqlite:c.db", "-o", "jsonl"),
        cwd=folder,
        env={"QDO_BROKER": "sqlite:env.db"},
    )
    found = {each["setting"]: each for each in rows(ended)}
    shown = {
        name: (found[name]["value"], found[name]["origin"], found[name]["code"])
        for name in ("app", "broker", "coordinator", "attempts", "backoff_seconds", "fetch")
    }
    assert shown == {
        "app": ("inc", "App('inc')", "inc"),
        "broker": ("sqlite:env.db", "QDO_BROKER", "sqlite:data/messages.db"),
        "coordinator": ("sqlite:c.db", "--coordinator", "sqlite:data/coordination.db"),
        "attempts": (5, "qdo.toml", 1),
        "backoff_seconds": (0.5, "qdo.toml", 0.5),
        "fetch": (1000, "default", None),
    }
    told = ended.err.splitlines()
    assert len(told) == 3
    for line, parts in zip(
        told,
        (
            ("broker", "sqlite:env.db", "QDO_BROKER", "sqlite:data/messages.db", "App('inc')"),
            ("coordinator", "sqlite:c.db", "--coordinator", "sqlite:data/coordination.db"),
            ("attempts", "5", "qdo.toml", "1"),
        ),
        strict=True,
    ):
        assert all(part in line for part in parts), line


def test_a_command_says_what_overrides_the_code(folder: Path) -> None:
    """Only for settings that it uses, and not for its own options."""
    environ = {"QDO_BROKER": "sqlite:env.db", "QDO_ATTEMPTS": "7"}
    app = ("--app", "inc:app")
    ended = command(*QDO, "send", *app, "q", "2", cwd=folder, env=environ)
    assert ended.code == 0
    assert (folder / "env.db").exists()
    assert ended.err.count("\n") == 1
    assert "QDO_BROKER" in ended.err
    assert "sqlite:data/messages.db" in ended.err
    ended = command(*QDO, "send", *app, "--broker", "sqlite:x.db", "q", "2", cwd=folder)
    assert (ended.code, ended.err) == (0, "")
    assert (folder / "x.db").exists()


# --- an app of which only the name is known ---


def test_config_without_an_app_says_what_it_cannot_know(folder: Path) -> None:
    """Defaults are not called settings in force while code may set others."""
    for arguments in ((), ("--app", "inc")):
        ended = command(*QDO, "config", *arguments, cwd=folder)
        assert ended.code == 0
        assert ended.err.count("\n") == 1
        assert "qdo config MODULE:APP" in ended.err


def test_a_default_place_without_data_points_to_the_code(folder: Path) -> None:
    """With the name only, a command cannot know whether a worker looks there."""
    name = ("--app", "inc")
    for command_name in ("queues", "workers", "dead-letters"):
        ended = command(*QDO, command_name, *name, cwd=folder)
        assert (ended.code, "--app MODULE:APP" in ended.err) == (0, True), command_name
    ended = command(*QDO, "send", *name, "q", "2", cwd=folder)
    assert ended.code == 0
    assert "qdo-data/messages.db" in ended.err
    assert "--app MODULE:APP" in ended.err
    assert command(*QDO, "send", *name, "q", "2", cwd=folder).err == ""


# --- apps that cannot be imported ---


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere:app", "'nowhere'"),
        ("inc:ap", "'app'"),
        ("inc:increment", "qdo.App"),
        ("broken:app", "ZeroDivisionError"),
    ],
)
def test_an_app_that_cannot_be_imported(folder: Path, target: str, reason: str) -> None:
    """One line with the reason, the origin and the remedy; exit code 2; nothing is created."""
    (folder / "broken.py").write_text("1 / 0\n")
    for arguments in (("send", "q", "1"), ("queues",), ("config",)):
        ended = command(*QDO, *arguments, cwd=folder, env={"QDO_APP": target})
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert all(part in ended.err for part in (target, reason, "QDO_APP", "--app NAME"))
    assert not (folder / "qdo-data").exists()


def test_what_a_module_prints_is_not_data(folder: Path) -> None:
    """It goes to stderr: stdout can be parsed."""
    (folder / "inc.py").write_text(APP + "print('imported')\n")
    ended = command(*QDO, "config", "--app", "inc:app", "-o", "jsonl", cwd=folder)
    assert {each["setting"] for each in rows(ended)} > {"app", "broker"}
    assert "imported" in ended.err


def test_a_queue_without_a_job_gets_a_hint(folder: Path) -> None:
    """The message is stored, and would wait forever."""
    source = APP.replace("@app.job()", '@app.job("inc-*")')
    (folder / "inc.py").write_text(source)
    (folder / "lines").write_text('{"q": "incc"}\n{"q": "inc-2"}\n{"q": "incc"}\n')
    for options in (("incc", "1"), ("--file", "lines", "--queue-field", "q")):
        sent = command(*QDO, "send", "--app", "inc:app", *options, cwd=folder)
        assert sent.code == 0
        assert "1 queue ('incc'); its jobs are for inc-*" in sent.err
    sent = command(*QDO, "send", "--app", "inc:app", "inc-1", "1", cwd=folder)
    assert "hint: no job" not in sent.err
    (folder / "inc.py").write_text(APP.partition("@app")[0])
    sent = command(*QDO, "send", "--app", "inc:app", "incc", "1", cwd=folder)
    assert "hint: no job" not in sent.err, "an app that only sends"


def test_an_app_that_exists_nowhere_gets_a_hint(folder: Path) -> None:
    """Also where a command fails, but not for an app that a sender alone has used."""
    assert command(*WORKER, "inc:app", "--burst", cwd=folder).code == 0
    environ = {
        "QDO_BROKER": "sqlite:data/messages.db",
        "QDO_COORDINATOR": "sqlite:data/coordination.db",
    }
    for words in (("status",), ("queues", "q"), ("locks",), ("limits", "set", "x", "--max", "1")):
        for app, hinted in (("inx", True), ("inc", False)):
            err = command(*QDO, *words, "--app", app, cwd=folder, env=environ).err
            assert ("did you mean 'inc'" in err) is hinted, err
    (folder / "ind.py").write_text(APP.replace('"inc"', '"ind"'))
    own = command(*QDO, "queues", "--app", "ind:app", cwd=folder)
    assert "no process" not in own.err, "its code has its name"
    command(*QDO, "send", "--app", "ink", "q", "1", cwd=folder, env=environ)
    assert "hint: no" not in command(*QDO, "queues", "--app", "ink", cwd=folder, env=environ).err


def test_a_name_that_may_be_a_module_gets_a_hint(folder: Path) -> None:
    sent = command(*QDO, "send", "--app", "inc.app", "q", "1", cwd=folder)
    assert sent.code == 0
    assert "write inc:app" in sent.err
    assert "write" not in command(*QDO, "queues", "--app", "shop.eu", cwd=folder).err
