"""The programs of PostgreSQL and PgBouncer: where they are, and how root starts them."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.zookeeper import need

BINARIES = Path("/usr/lib/postgresql")
ACCOUNT = "postgres"
"""Account of Debian's package. Neither PostgreSQL nor PgBouncer runs as root."""
REQUIRED = "TESTS_REQUIRE_POSTGRESQL"
PACKAGES = "Debian: apt install postgresql pgbouncer"


def missing() -> str | None:
    """Return why no PostgreSQL can be started here, None when it can."""
    if newest() is None:
        return f"no {BINARIES}/*/bin/postgres ({PACKAGES})"
    if shutil.which("pgbouncer", path=_path()) is None:
        return f"no `pgbouncer` on the PATH ({PACKAGES})"
    if importlib.util.find_spec("psycopg") is None:
        return "no psycopg (pip install -e '.[postgresql]')"
    return None


def require() -> None:
    """Skip the test without PostgreSQL, or fail it if PostgreSQL is required."""
    need("PostgreSQL", missing(), REQUIRED)


def newest() -> Path | None:
    """Return the folder with the programs of the newest installed version."""
    found = [path for path in BINARIES.glob("*/bin") if (path / "postgres").exists()]
    return max(found, key=lambda path: int(path.parent.name), default=None)


def postgresql_program(name: str) -> str:
    """Return the path of a program such as ``initdb``."""
    folder = newest()
    if folder is None:
        raise FileNotFoundError(f"no {BINARIES}/*/bin/{name} ({PACKAGES})")
    return str(folder / name)


def pgbouncer_program() -> str:
    """Return the path of ``pgbouncer``."""
    found = shutil.which("pgbouncer", path=_path())
    if found is None:
        raise FileNotFoundError(f"no `pgbouncer` on the PATH ({PACKAGES})")
    return found


def _path() -> str:
    # Debian's users have no sbin on their PATH.
    return os.environ.get("PATH", "") + ":/usr/sbin"


def unprivileged(command: Sequence[str]) -> list[str]:
    """Return `command`, changed for root so that the account `postgres` runs it."""
    if os.getuid() != 0:
        return list(command)
    change = ("setpriv", f"--reuid={ACCOUNT}", f"--regid={ACCOUNT}", "--init-groups")
    return [*change, *command]


def new_folder() -> Path:
    """Create a folder that belongs to the account of the servers.

    It is not below pytest's folder: when root runs the tests, no other account may enter that. Also
    the path of a Unix socket has at most 107 bytes.
    """
    folder = Path(tempfile.mkdtemp(prefix="qdo-pg-"))
    hand_over(folder)
    return folder


def hand_over(path: Path) -> None:
    """Let the account of the servers own `path`, which root has created."""
    if os.getuid() == 0:
        entry = pwd.getpwnam(ACCOUNT)
        os.chown(path, entry.pw_uid, entry.pw_gid)


def run(command: Sequence[str], folder: Path) -> None:
    """Run a program to its end; raise RuntimeError with its output if it fails."""
    done = subprocess.run(
        unprivileged(command), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}\n{done.stdout}{done.stderr}")
