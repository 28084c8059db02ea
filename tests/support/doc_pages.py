"""Reading the documentation, its code blocks and tables, and running its commands."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli import QDO, WORKER, clean_environment
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.rst"
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Block:
    """A code block.

    :ivar options: such as ``{"caption": "welcome.py"}``.
    """

    language: str
    options: dict[str, str]
    text: str


def pages() -> list[Path]:
    """Return every page, README and changes included."""
    return [
        *sorted(DOCS.glob("*.rst")),
        *sorted(DOCS.glob("[!_]*/*.rst")),
        README,
        ROOT / "CHANGES.rst",
    ]


def read(name: str) -> str:
    """Return the text of a page of `docs`, or of README."""
    path = README if name == "README" else DOCS / f"{name}.rst"
    return path.read_text(encoding="utf-8")


def blocks(text: str) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = re.fullmatch(r"\.\. code-block:: (\S+)", line)
        if found is None:
            continue
        body = []
        for following in lines[number + 1 :]:
            if following and not following.startswith(" "):
                break
            body.append(following)
        head, _, code = "\n".join(body).partition("\n\n") if body[0] else ("", "", "\n".join(body))
        options = dict(re.findall(r":([\w-]+): *(.*)", head))
        yield Block(found.group(1), options, textwrap.dedent(code).strip("\n") + "\n")


def blocks_in(language: str) -> list[tuple[str, Block]]:
    """Return the code blocks of all pages in a language, each with a name for it."""
    return [
        (f"{page.stem}-{number}", block)
        for page in pages()
        for number, block in enumerate(blocks(page.read_text(encoding="utf-8")))
        if block.language == language
    ]


def table(page: str, kind: str) -> dict[str, list[str]]:
    """Return the rows of the list-table with this class, by their first cell."""
    text = read(page).split(f":class: {kind}\n\n", 1)[1].split("\n\n", 1)[0]
    rows = {}
    for row in re.split(r"^   \* - ", text, flags=re.MULTILINE)[2:]:
        cells = [cell.strip() for cell in re.split(r"^     -", row, flags=re.MULTILINE)]
        rows[cells[0].strip("`")] = cells
    return rows


def steps(block: Block) -> list[tuple[str, list[str]]]:
    """Return each command of a console block with the output that is shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line:
            found[-1][1].append(line)
    assert found, "the block shows no command"
    return found


def check_session(text: str, names: dict[str, object]) -> None:
    """Run a session of the interpreter, which must give what is shown."""
    test = doctest.DocTestParser().get_doctest(text, names, "example", None, None)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        result = doctest.DocTestRunner(verbose=False).run(test)
    assert result.attempted
    assert not result.failed, output.getvalue()


class Shell:
    """Runs commands as they are typed, with the commands of this checkout.

    :param programs: further ones, each with the command line that it stands for.
    :ivar folder: where they run.
    """

    def __init__(self, folder: Path, **programs: str) -> None:
        own = {"qdo": QDO, "qdo-worker": WORKER, "python": ()}
        lines = {name: f'{" ".join((sys.executable, *words))} "$@"' for name, words in own.items()}
        self.folder, scripts = folder / "work", folder / "bin"
        for each in (self.folder, scripts):
            each.mkdir()
        for name, line in {**lines, **programs}.items():
            (scripts / name).write_text(f"#!/bin/sh\nexec {line}\n")
            (scripts / name).chmod(0o755)
        self._environment = clean_environment({"PATH": f"{scripts}:{os.environ['PATH']}"})

    def run(self, command: str) -> str:
        """Return a command's output on both streams; raise an error unless it succeeds."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def write(self, name: str, text: str) -> None:
        """Make a file in the folder."""
        (self.folder / name).write_text(text, encoding="utf-8")
