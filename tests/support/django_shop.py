"""The shop of the page about Django, in a folder and a database of a test."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.support.cli import Ended, clean_environment, command
from tests.support.paths import ROOT
from tests.support.postgresql.server import SUPERUSER, PostgresqlDatabase

EXAMPLE = ROOT / "docs" / "examples" / "django_shop"
MORE = ROOT / "tests" / "apps" / "django_checks"


class DjangoShop:
    """A copy of the shop, with the jobs and tests of ``tests/apps/django_checks``.

    :param database: None for SQLite.
    """

    def __init__(self, folder: Path, database: PostgresqlDatabase | None = None) -> None:
        self.folder = folder / "project"
        shutil.copytree(EXAMPLE, self.folder)
        shutil.copytree(MORE, self.folder / "checks")
        self.environment = {"DJANGO_SETTINGS_MODULE": "checks.settings"}
        if database is not None:
            places = {"DB": database.name, "USER": SUPERUSER, "HOST": "127.0.0.1"}
            places["PORT"] = str(database.server.port)
            self.environment |= {f"SHOP_{name}": text for name, text in places.items()}

    def manage(self, *arguments: str, **environment: str) -> Ended:
        """Run ``manage.py`` to its end."""
        more = {**self.environment, **environment}
        return command("manage.py", *arguments, cwd=self.folder, env=more)

    def line(self, *arguments: str) -> list[str]:
        """Return the command line of a server."""
        return [sys.executable, *arguments]

    def whole_environment(self) -> dict[str, str]:
        return clean_environment(self.environment)
