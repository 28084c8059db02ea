"""A folder in which other users may put files, such as /tmp, as the current folder of a worker."""

from __future__ import annotations

import sys
from pathlib import Path

from qdo import App
from tests.support.processes import Proc

JOBS = """
import qdo

app = qdo.App("a")

@app.job(executor="process")
def run(message, context):
    import ujson, json, kazoo, secrets
    open("out", "a").write("ran\\n")
"""
CONSOLE_SCRIPT = "import sys; del sys.path[0]; from qdo.cli.worker import main; main()"
LIBRARIES = ("qdo", "ujson", "kazoo", "gevent", "click", "greenlet", "zope")


def test_a_folder_cannot_replace_modules(tmp_path: Path) -> None:
    """Neither in the worker process nor in that of a job; but the app itself is found there."""
    for name in (*sys.stdlib_module_names, *LIBRARIES):
        (tmp_path / f"{name}.py").write_text("open(__file__ + '.owned', 'w')")
    (tmp_path / "jobs.py").write_text(JOBS)
    places = {f"QDO_{name}": f"sqlite:{tmp_path}/{name}.db" for name in ("BROKER", "COORDINATOR")}
    with App("a", broker=places["QDO_BROKER"]) as app:
        app.send("q", 1)
    with Proc.python(
        "-c", CONSOLE_SCRIPT, "jobs:app", "--burst", env=places, cwd=tmp_path
    ) as worker:
        assert worker.wait(60) == 0, worker.output
    assert [each.name for each in tmp_path.glob("*.owned")] == []
    assert (tmp_path / "out").read_text() == "ran\n"
