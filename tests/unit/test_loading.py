"""Finding apps and jobs by name, and the errors if they cannot be found."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qdo import App, Settings
from qdo.errors import JobImportError, JobModuleError, UsageError
from qdo.loading import choose_target, load_app, load_job, prepare

_numbers = itertools.count()
Maker = Callable[[str], str]

JOBS = """
import contextlib
import qdo

app = qdo.App("coded", fetch=5)
empty = qdo.App("empty")
number = 5

@app.job("a*")
def greet(message, context):
    pass

class Jobs:
    def run(message, context):
        pass

def no_context(message):
    pass

@contextlib.contextmanager
def resources():
    yield "resources"

def failed(message, context, error):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Returns a function that makes a module in the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])

    def make(source: str) -> str:
        name = f"jobs_for_test_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return make


def test_job_in_the_current_folder(module: Maker) -> None:
    """A console script finds modules in the current folder; functions of classes, too."""
    name = module(JOBS)
    assert load_job(f"{name}:greet").__name__ == "greet"
    assert load_job(f"{name}:Jobs.run").__name__ == "run"


def test_the_current_folder_replaces_no_module(module: Maker, tmp_path: Path) -> None:
    """The error names the module that comes first."""
    name = module(JOBS)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{name}.py").write_text("number = 1")
    sys.path.append(str(tmp_path / "elsewhere"))
    with pytest.raises(JobImportError, match=f"elsewhere/{name}.py.*rename"):
        load_job(f"{name}:greet")
    assert sys.path[-1] == str(tmp_path)


def test_an_app_around_a_job(module: Maker) -> None:
    """--app and --job make an app; hooks can be named in settings."""
    name = module(JOBS)
    settings = Settings(
        app="a",
        job=f"{name}:greet",
        job_context=f"{name}:resources",
        job_failure=f"{name}:failed",
    )
    app, used = prepare(settings)
    assert (app.name, used.app) == ("a", "a")
    job = app.job_for("b1")
    assert job is not None
    assert job.function.__name__ == "greet"
    # The worker's filter decides which queues it gets.
    assert [each.queues for each in app.jobs] == ["*"]
    with app.hooks.job_context() as context:
        assert context == "resources"
    assert app.hooks.job_failure.__name__ == "failed"


def test_an_app_with_its_settings(module: Maker) -> None:
    """MODULE:APP brings its name and its settings along."""
    app, used = prepare(Settings(), f"{module(JOBS)}:app")
    assert (app.name, used.app, used.fetch) == ("coded", "coded", 5)
    assert app.settings is used


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("gret", "did you mean 'greet'"),
        ("number", "5 of type int"),
        ("app", "qdo-worker jobs_for_test"),
    ],
)
def test_attributes_that_are_no_job(module: Maker, attribute: str, reason: str) -> None:
    """The error names the object that was found instead."""
    with pytest.raises(JobImportError, match=reason):
        load_job(f"{module(JOBS)}:{attribute}")


def test_a_job_of_the_wrong_signature(module: Maker) -> None:
    """It is rejected before the first message."""
    with pytest.raises(UsageError, match=r"write def no_context\(message, context\)"):
        load_job(f"{module(JOBS)}:no_context")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere", "':'"),
        (":f", "':'"),
        ("nowhere:", "':'"),
        ("no_such_module:f", "'no_such_module'"),
        ("no_such_module.jobs:f", "'no_such_module'"),
        ("os.no_such_part:f", "'os.no_such_part'"),
    ],
)
def test_targets_that_lead_nowhere(target: str, reason: str) -> None:
    """The reason and the remedy are in one line."""
    with pytest.raises(JobImportError) as caught:
        load_job(target)
    assert caught.value.details["target"] == target
    assert reason in caught.value.details["reason"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\nx / 0", r"ZeroDivisionError: division by zero \(jobs_for_test_\d+\.py line 2\)"),
        ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("from os import no_such_thing", "ImportError: cannot import name"),
        ("x = 1\ndef f()\n", r"SyntaxError: expected ':' \(jobs_for_test_\d+\.py line 2\);"),
        ("raise ValueError('a', 'b')", r"\(jobs_for_test_\d+\.py line 1\);"),
        ("import json\njson.loads('')", r"\(.*json/decoder\.py line \d+\);"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (
            "import qdo\napp = qdo.App('a', attempts='three')",
            r"SettingsError: setting attempts: .* \(jobs_for_test_\d+\.py line 2\)",
        ),
        (
            "import qdo\nqdo.Policy(backoff_seconds=600_000)",
            r"PolicyError: .* \(jobs_for_test_\d+\.py line 2\)",
        ),
        (
            "import qdo\napp = qdo.App('a', borker='x')",
            r"UnknownSettingError: unknown setting 'borker'.* \(jobs_for_test_\d+\.py line 2\)",
        ),
    ],
)
def test_modules_that_fail(module: Maker, source: str, reason: str) -> None:
    """An error inside the module differs from that of a missing module, and names its place."""
    with pytest.raises(JobModuleError, match=reason) as caught:
        load_job(f"{module(source)}:f")
    assert "\n" not in str(caught.value)


def test_an_app_must_be_one(module: Maker) -> None:
    """The error shows what it is instead."""
    name = module(JOBS)
    with pytest.raises(JobImportError, match="of type function"):
        load_app(f"{name}:greet")
    with pytest.raises(JobImportError, match=r"qdo\.App\(NAME\).* 5 of type int"):
        load_app(f"{name}:number")


def test_an_app_needs_a_job(module: Maker) -> None:
    """A worker without a job would own queues and process nothing."""
    with pytest.raises(UsageError, match="'empty'"):
        prepare(Settings(), f"{module(JOBS)}:empty")


def test_an_app_of_another_name(module: Maker) -> None:
    """--app and the app's own name must agree."""
    with pytest.raises(UsageError, match="'coded'"):
        prepare(Settings(app="other", origins={"app": "--app"}), f"{module(JOBS)}:app")


@pytest.mark.parametrize("settings", [Settings(), Settings(app="a"), Settings(job="m:f")])
def test_too_little_is_named(settings: Settings) -> None:
    """The error shows both ways to name an app."""
    with pytest.raises(UsageError, match="MODULE:APP"):
        choose_target(settings, None)


def test_the_setting_app_is_a_target() -> None:
    """An argument overrides it, and it does not contradict the name of the imported app."""
    named = Settings(app="m:one")
    assert choose_target(named, None) == "m:one"
    assert choose_target(named, "m:two") == "m:two"
    assert App("two").use(named).app == "two"


def test_too_much_is_named() -> None:
    """An app and a job contradict each other; the error names the source of the job."""
    with pytest.raises(UsageError, match=r"m:app.*m:f.*QDO_JOB"):
        choose_target(Settings(job="m:f", origins={"job": "QDO_JOB"}), "m:app")
    with pytest.raises(UsageError, match=r"m:app.*m:f.*QDO_JOB"):
        choose_target(Settings(app="m:app", job="m:f", origins={"job": "QDO_JOB"}), None)


DICT_CONFIG = 'logging.config.dictConfig({"version": 1})'
FILE_CONFIG = """logging.config.fileConfig(io.StringIO(
    "[loggers]\\nkeys=root\\n[handlers]\\nkeys=\\n[formatters]\\nkeys=\\n"
    "[logger_root]\\nlevel=WARNING\\nhandlers=\\n"
))"""


@pytest.mark.parametrize("code", [DICT_CONFIG, FILE_CONFIG], ids=["dictConfig", "fileConfig"])
@pytest.mark.parametrize("end", ["", "\nraise ValueError"], ids=["imported", "broken"])
def test_an_app_that_configures_logging_does_not_silence_qdo(
    module: Maker, code: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python disables the loggers that exist, unless it is told not to."""
    outcomes = logging.getLogger("qdo.worker.engine.outcomes")
    said: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("qdo.system.logs"), "warning", lambda *args: said.append(args[1])
    )
    name = module(f"import io, logging.config\nimport qdo\napp = qdo.App('a')\n{code}{end}")
    with contextlib.suppress(JobModuleError):
        load_app(f"{name}:app")
    assert not outcomes.disabled
    assert said == [f"module {name}"]
