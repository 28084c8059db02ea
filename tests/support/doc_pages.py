"""Reading the documentation: its code blocks and tables."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.rst"


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
