"""What an installation contains, beside an app that has a package `workers` of its own."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.cli import QDO, WORKER, command
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel contains; the checkout is not on its path."""
    folder = tmp_path_factory.mktemp("installed")
    made = ("--build-base", str(folder / "build"), "--build-lib", str(folder / "lib"))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(folder), "build", *made],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folder / "lib"


def test_only_qdo_is_installed(installed: Path) -> None:
    """The programs are files within it, not a link to the checkout."""
    assert [each.name for each in installed.iterdir()] == ["qdo"]
    programs = installed / "qdo" / "programs"
    assert {each.name for each in programs.iterdir()} == {
        each.name for each in (ROOT / "workers").glob("*.py")
    }
    assert not any(each.is_symlink() for each in installed.rglob("*"))


def test_the_files_of_the_dashboard_are_installed(installed: Path) -> None:
    """Its templates, its style and its script."""
    for folder in ("templates", "static"):
        path = Path("qdo", "dashboard", folder)
        here = {each.name for each in (ROOT / path).iterdir()}
        assert {each.name for each in (installed / path).iterdir()} == here != set()


def test_an_editable_installation_is_a_path(tmp_path: Path) -> None:
    """Type checkers do not run import hooks; the path offers nothing but qdo."""
    made = ("editable_wheel", "--dist-dir", str(tmp_path))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), *made],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [each for each in archive.namelist() if ".dist-info/" not in each]
        folder = Path(archive.read(path).decode().strip())
    assert path.endswith(".pth")
    assert [each.name for each in folder.iterdir() if each.suffix != ".egg-info"] == ["qdo"]
    assert (folder / "qdo" / "py.typed").is_file()


def test_programs_run_beside_an_app_with_a_package_workers(installed: Path, tmp_path: Path) -> None:
    """Both are found, whichever comes first on the path."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "mail.py").write_text(
        "import qdo\napp = qdo.App('mail')\n@app.job()\ndef j(message, context):\n"
        "    print('mailed', message.body, flush=True)\n"
    )
    path = {"PYTHONPATH": str(installed)}
    for app, name, line in (
        ("workers.mail:app", "mail", "mailed 1"),
        ("qdo.programs.echo:app", "echo", " q - 1"),
    ):
        sent = command(*QDO, "send", "--app", name, "q", "1", cwd=tmp_path, env=path)
        assert sent.code == 0, sent.err
        worked = command(*WORKER, app, "--burst", cwd=tmp_path, env=path)
        assert worked.code == 0, worked.err
        assert worked.out.endswith(f"{line}\n")
