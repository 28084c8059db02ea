"""``manage.py qdo``: the commands of qdo for the app of the project."""

from __future__ import annotations

import os
import sys

from django.core.management.base import BaseCommand, CommandParser

from qdo.cli.framework import run
from qdo.cli.main import qdo
from qdo.cli.worker import worker

PROGRAM = "manage.py qdo"
TARGET = "qdo.contrib.django.project:app"


class Command(BaseCommand):
    """Passes its arguments to `qdo`, or to `qdo-worker` after the word worker.

    The exit codes are those of the two programs.
    """

    help = "Run workers (manage.py qdo worker), or any command of qdo (manage.py qdo status)."

    def run_from_argv(self, argv: list[str]) -> None:
        # Django has applied these options, which belong to every command, but leaves them in place.
        own = CommandParser(add_help=False, allow_abbrev=False)
        own.add_argument("--settings")
        own.add_argument("--pythonpath")
        _, arguments = own.parse_known_args(argv[2:])
        # Processes of workers and jobs import the project again.
        paths = (sys.path[0], os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ.setdefault("QDO_APP", TARGET)
        if arguments[:1] == ["worker"]:
            sys.exit(run(worker, f"{PROGRAM} worker", arguments[1:]))
        sys.exit(run(qdo, PROGRAM, arguments))
