"""The shop of the page about Django, in a folder and a database of a test."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.cli import Ended, command
from tests.support.paths import ROOT
from tests.support.postgresql.server import SUPERUSER, PostgresqlDatabase

if TYPE_CHECKING:
    import psycopg

EXAMPLE = ROOT / "docs" / "examples" / "django_shop"
CHECKS = ROOT / "tests" / "integration" / "django" / "checks"


class DjangoShop:
    """A copy of the shop, with the jobs and tests of ``tests/integration/django/checks``.

    :param database: None for SQLite.
    """

    def __init__(self, folder: Path, database: PostgresqlDatabase | None = None) -> None:
        self.folder = folder / "project"
        self._database = database
        shutil.copytree(EXAMPLE, self.folder)
        shutil.copytree(CHECKS, self.folder / "checks")
        self.environment = {"DJANGO_SETTINGS_MODULE": "checks.settings"}
        if database is not None:
            self.environment |= {"SHOP_DB": database.name, "SHOP_USER": SUPERUSER}
            self.environment |= {"SHOP_HOST": "127.0.0.1", "SHOP_PORT": str(database.server.port)}

    def manage(self, *arguments: str) -> Ended:
        """Run ``manage.py`` to its end."""
        return command("manage.py", *arguments, cwd=self.folder, env=self.environment)

    def connect(self) -> psycopg.Connection[Any]:
        """Connect to its database as superuser, with autocommit."""
        assert self._database is not None
        return self._database.connect()
