"""Shells complete commands and options: bash itself, with the script that qdo prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import QDO, Run, clean_environment, command


def completed(words: str, folder: Path) -> set[str]:
    """Return what bash offers for the last word of a line."""
    script = command(*QDO, "admin", "completion", "bash", cwd=folder).out
    program = folder / words.split()[0]
    module = "qdo" if program.name == "qdo" else "qdo.cli.worker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
    program.chmod(0o755)
    line = f"""{script}
COMP_WORDS=({words}) COMP_CWORD={len(words.split()) - 1}
_{program.name.replace("-", "_")}_completion {program.name}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-c", line],
        env={**clean_environment(), **path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("qdo admin k", {"keys"}),
        ("qdo queues --sort a", {"age"}),
        ("qdo-worker --proc", {"--processes"}),
        ("qdo nothing-like-it", set()),
    ],
)
def test_bash_completes(tmp_path: Path, words: str, offered: set[str]) -> None:
    assert completed(words, tmp_path) == offered


def test_each_shell_has_a_script(cli: Run) -> None:
    cli("admin", "completion").refusal(2)
    for shell in ("bash", "zsh", "fish"):
        ended = cli("admin", "completion", shell)
        assert (ended.code, ended.err) == (0, "")
        assert "_QDO_COMPLETE" in ended.out
        assert "_QDO_WORKER_COMPLETE" in ended.out
