"""Runs an installed qdo on every supported Python: ``make smoke``.

``python -m tests.smoke [VERSION ...]`` builds an sdist, and one wheel from it. It installs the
wheel with its libraries into a virtual environment for each Python below ``.smoke/``. There, from
an empty folder, it imports all modules, runs a job on each executor, and runs a small demo. A
Python that is not installed is named and passed over, unless it was asked for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.paths import ROOT

_SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
VERSIONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', _SETUP)
FOLDER = ROOT / ".smoke"
SOURCES = (
    "src",
    "qdo",
    "workers",
    "config",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.rst",
    "CHANGES.rst",
    "LICENSE",
    "SECURITY.md",
)

IMPORTS = """
import importlib.util, pkgutil, warnings
warnings.simplefilter("error")
import qdo
names = [each.name for each in pkgutil.walk_packages(qdo.__path__, "qdo.")]
for name in names:
    # The modules for a framework import it, and Django needs the settings of a project.
    if not name.endswith("__main__") and ".contrib." not in name:
        importlib.import_module(name)
assert len(names) > 250, names
assert "qdo.programs.webhook" in names, names
assert importlib.util.find_spec("workers") is None
"""
APP = """
import os
import qdo

app = qdo.App("smoke")


def report(message):
    # One write: the executors' threads share the standard output.
    os.write(1, f"done {message.queue} {message.body}\\n".encode())


@app.job("greenlet")
def in_greenlet(message, context):
    if message.attempt == 1:
        raise qdo.Retry(after=0.01)
    report(message)


@app.job("thread", executor="thread", timeout_seconds=30)
def in_thread(message, context):
    report(message)


@app.job("process", executor="process", timeout_seconds=30)
def in_process(message, context):
    report(message)


@app.job("coroutine", timeout_seconds=30)
async def in_coroutine(message, context):
    report(message)


@app.job("batch", batch=2)
def in_batch(messages, context):
    for message in messages:
        report(message)


if __name__ == "__main__":
    for queue in ("greenlet", "thread", "process", "coroutine", "batch"):
        app.send(queue, {"n": 1})
"""
QUEUES = ("greenlet", "thread", "process", "coroutine", "batch")


def interpreter(version: str) -> str | None:
    """Return the Python of this version: from the PATH, or pyenv's newest."""
    candidates = [shutil.which(f"python{version}")]
    found = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    candidates += sorted(map(str, found), key=lambda each: [*map(int, re.findall(r"\d+", each))])
    for each in reversed([each for each in candidates if each]):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([each, "-c", code], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:  # a shim of pyenv may exist without its Python
            return each
    return None


def _run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its output; if it fails, show all of it and exit."""
    ended = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    if ended.returncode != 0:
        print(ended.stdout)
        sys.exit(f"exit code {ended.returncode}: {' '.join(map(str, command))}")
    return ended.stdout


def build(folder: Path) -> Path:
    """Return a wheel, built from an sdist of a copy: ``build/`` may hold files long deleted."""
    copy = folder / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=caches)
        else:
            shutil.copy(ROOT / name, copy / name)
    _run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder, cwd=copy)
    (sdist,) = folder.glob("qdo_queues-*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder)
    _run(*pip, sdist, cwd=folder)
    (wheel,) = folder.glob("qdo_queues-*.whl")
    return wheel


def install(python: str, version: str, wheel: Path) -> Path:
    """Return the folder of the programs of an environment that has this wheel."""
    home = FOLDER / version
    programs = home / "bin"
    if not (programs / "pip").exists():
        _run(python, "-m", "venv", "--clear", home, cwd=ROOT)
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, f"{wheel}[all]", "pytest", cwd=ROOT)
    _run(*pip, "--force-reinstall", "--no-deps", wheel, cwd=ROOT)
    return programs


def check(programs: Path, folder: Path) -> None:
    """Import every module, run a job on each executor, and run a small demo."""
    python = programs / "python"
    _run(python, "-c", IMPORTS, cwd=folder)
    (folder / "smoke_app.py").write_text(APP, encoding="utf-8")
    _run(python, "smoke_app.py", cwd=folder)
    _run(programs / "qdo", "send", "--app", "smoke", "batch", "2", cwd=folder)
    output = _run(programs / "qdo-worker", "smoke_app:app", "--burst", cwd=folder)
    done = sorted(line for line in output.splitlines() if line.startswith("done "))
    expected = sorted([f"done {queue} {{'n': 1}}" for queue in QUEUES] + ["done batch 2"])
    if done != expected:
        sys.exit(f"{output}\nthe jobs printed {done}, not {expected}")
    _run(programs / "qdo", "queues", "--app", "smoke", cwd=folder)
    _run(programs / "qdo", "demo", "--queues", "60", "--messages", "6000", cwd=folder)


def main(versions: list[str]) -> None:
    """Check these versions, or all that are installed."""
    with tempfile.TemporaryDirectory(prefix="qdo-smoke-") as name:
        wheel = build(Path(name))
        for version in versions or VERSIONS:
            python = interpreter(version)
            if python is None:
                if versions:
                    sys.exit(f"Python {version} is not installed")
                print(f"Python {version}: not installed, not checked")
                continue
            began = time.monotonic()
            work = Path(name) / version
            work.mkdir()
            check(install(python, version, wheel), work)
            print(f"Python {version}: {time.monotonic() - began:.0f} s, {python}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
