"""Sizes and names of the source: ``python -m tests.shape`` prints all values over a limit.

`tests/unit/test_shape.py` fails for each of them. Limits are for reading: a file has one
subject, whole: neither a drawer nor a fragment. A function fits a screen, a name means one thing.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

FILE_LINES = 600
FLOOR_LINES = 40
FUNCTION_LINES = 50
CONSTRUCTOR_PARAMETERS = 8
PUBLIC_METHODS = 15
FOLDER_FILES = 24
TEST_NAME_LENGTH = 60

LONG_FILES: dict[str, str] = {}
"""Files that may be longer, at most two, with the reason."""
MEASURED_LOOPS = {
    "qdo/worker/engine/row_runner.py RowRunner.run_rows": "runs each message of a serial turn",
}
"""Functions that may be longer: in bench/jobs.py a call for each message costs throughput."""
HOT_RECORDS = {"qdo/message.py Message": "one is built for each message, without keyword arguments"}
"""Classes whose constructors may be wider, with the reason."""
PRESCRIBED = "qdo/contrib/django/"
"""Files whose names Django prescribes may be short."""
CLASS_AT_THE_TOP = re.compile(r"^class ([A-Za-z]\w*)", re.MULTILINE)
TEST_FUNCTION = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
DOTTED = re.compile(r"\bqdo(?:\.\w+)+")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Attributes of a node that have statements."""
TOP_FOLDERS = ("qdo", "workers", "tests", "bench")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Finding:
    """Something over a limit.

    :ivar where: a file, or a file and the name within it.
    :ivar count: the counted value, to be compared with the limit.
    """

    where: str
    count: int

    def __str__(self) -> str:
        return f"{self.count:5} {self.where}"


@dataclass(frozen=True, slots=True)
class SourceText:
    """A Python file of the repository."""

    path: str
    text: str = field(repr=False)

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@cache
def tree_of(source: SourceText) -> ast.Module:
    """Return a parsed file. Parsing all tests takes 3 s: their names are found by patterns."""
    return ast.parse(source.text)


@cache
def sources(folder: str) -> tuple[SourceText, ...]:
    """Return the files of a top folder in the order of their paths."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            found.append(SourceText(name, text))
    return tuple(found)


@cache
def definitions(source: SourceText) -> tuple[tuple[str, ast.ClassDef | Function], ...]:
    """Return all classes and functions of a file, with their names such as ``Class.method``."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef | Function]]:
        for block in BLOCKS:  # a walk through all expressions takes ten times as long
            for child in getattr(node, block, ()):
                if isinstance(child, ast.ClassDef | Function):
                    name = f"{prefix}{child.name}"
                    yield name, child
                    yield from visit(child, f"{name}.")
                else:
                    yield from visit(child, prefix)

    return tuple(visit(tree_of(source), ""))


def functions(folder: str) -> Iterator[tuple[str, Function]]:
    """Yield all functions of a top folder with where they are."""
    for source in sources(folder):
        for name, node in definitions(source):
            if isinstance(node, Function):
                yield f"{source.path} {name}", node


def classes(folder: str) -> Iterator[tuple[SourceText, str, ast.ClassDef]]:
    """Yield all classes of a top folder with their files and names."""
    for source in sources(folder):
        for name, node in definitions(source):
            if isinstance(node, ast.ClassDef):
                yield source, name, node


def long_files() -> list[Finding]:
    """Return files of qdo/ with more lines than `FILE_LINES`."""
    return [
        Finding(source.path, source.lines)
        for source in sources("qdo")
        if source.lines > FILE_LINES and source.path not in LONG_FILES
    ]


def module_of(source: SourceText) -> str:
    """Return the name under which a file is imported."""
    return source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def named_modules(source: SourceText) -> frozenset[str]:
    """Return the dotted names that a file imports, or has in a string, such as a table of modules.

    Docstrings do not count.
    """
    names: set[str] = set()
    texts = {id(each.value) for each in ast.walk(tree_of(source)) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and id(node) not in texts:
            names.update(DOTTED.findall(str(node.value)))
    return frozenset(names)


def fragments(files: Sequence[SourceText]) -> list[Finding]:
    """Return short files that no file outside of their folder imports: parts of a neighbor.

    Packages and programs (``__init__.py``, ``__main__.py``) do not count.
    """
    return [
        Finding(source.path, source.lines)
        for source in files
        if source.lines < FLOOR_LINES
        and not Path(source.path).name.startswith("__")
        and not source.path.startswith(PRESCRIBED)
        and not any(
            Path(source.path).stem in other.text and module_of(source) in named_modules(other)
            for other in files
            if Path(other.path).parent != Path(source.path).parent
        )
    ]


def short_files() -> list[Finding]:
    """Return the `fragments` of qdo/, beside what entry points name."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    brokers = (ROOT / "qdo/brokers/entry_points.txt").read_text(encoding="utf-8")
    return fragments([*sources("qdo"), SourceText("setup.py", f"{setup}\nBROKERS = {brokers!r}")])


def long_functions() -> list[Finding]:
    """Return functions of qdo/ with more lines than `FUNCTION_LINES`, decorators excluded."""
    return [
        Finding(where, length)
        for where, node in functions("qdo")
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
        and where not in MEASURED_LOOPS
    ]


def wide_constructors() -> list[Finding]:
    """Return constructors of qdo/ with too many parameters.

    Keyword-only parameters of public classes do not count: the caller names each of them. Neither
    do fields of dataclasses, which are data.
    """
    found = []
    for source, name, node in classes("qdo"):
        for each in node.body:
            if isinstance(each, Function) and each.name == "__init__":
                arguments = each.args
                count = len(arguments.posonlyargs) + len(arguments.args) - 1
                if node.name.startswith("_") or name not in _public_names():
                    count += len(arguments.kwonlyargs)
                where = f"{source.path} {name}"
                if count > CONSTRUCTOR_PARAMETERS and where not in HOT_RECORDS:
                    found.append(Finding(where, count))
    return found


@cache
def _public_names() -> frozenset[str]:
    """Return the names of classes that the page of the Python API lists."""
    words = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8").replace("`", " ").split()
    return frozenset(word.rpartition(".")[2].partition("(")[0] for word in words)


def wide_classes() -> list[Finding]:
    """Return classes of qdo/ with more public methods than `PUBLIC_METHODS`.

    Properties count as methods, a property and its setter once.
    """
    found = []
    for source, name, node in classes("qdo"):
        methods = {
            each.name
            for each in node.body
            if isinstance(each, Function) and not each.name.startswith("_")
        }
        if len(methods) > PUBLIC_METHODS:
            found.append(Finding(f"{source.path} {name}", len(methods)))
    return found


def repeated_class_names() -> list[Finding]:
    """Return names that more than one class at the top of a module has, with their files.

    Names with an underscore are private to their module.
    """
    places: dict[str, list[SourceText]] = defaultdict(list)
    for folder in TOP_FOLDERS:
        for source in sources(folder):
            for name in CLASS_AT_THE_TOP.findall(source.text):
                places[name].append(source)
    found = []
    for name, files in sorted(places.items()):
        if len(files) > 1:  # some may be in a text within a file
            paths = [each.path for each in files if name in dict(definitions(each))]
            if len(paths) > 1:
                found.append(Finding(f"{name}: {', '.join(paths)}", len(paths)))
    return found


def full_folders() -> list[Finding]:
    """Return folders of the repository with more Python files than `FOLDER_FILES`.

    An empty ``__init__.py`` does not count.
    """
    counts: dict[Path, int] = defaultdict(int)
    for folder in TOP_FOLDERS:
        for source in sources(folder):
            path = Path(source.path)
            counts[path.parent] += path.name != "__init__.py"
    return [
        Finding(path.as_posix(), count) for path, count in counts.items() if count > FOLDER_FILES
    ]


def long_test_names() -> list[Finding]:
    """Return tests with names longer than `TEST_NAME_LENGTH`."""
    return [
        Finding(f"{source.path} {name}", len(name))
        for source in sources("tests")
        for name in TEST_FUNCTION.findall(source.text)
        if len(name) > TEST_NAME_LENGTH
    ]


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    f"files over {FILE_LINES} lines": long_files,
    f"files under {FLOOR_LINES} lines that only their folder imports": short_files,
    f"functions over {FUNCTION_LINES} lines": long_functions,
    f"constructors over {CONSTRUCTOR_PARAMETERS} parameters": wide_constructors,
    f"classes over {PUBLIC_METHODS} public methods": wide_classes,
    f"folders over {FOLDER_FILES} files": full_folders,
    "class names used more than once": repeated_class_names,
    f"test names over {TEST_NAME_LENGTH} characters": long_test_names,
}


def main() -> None:
    """Print every finding, the largest first."""
    for title, check in CHECKS.items():
        found = sorted(check(), key=lambda each: -each.count)
        print(f"{title}: {len(found)}")
        for each in found:
            print(each)


if __name__ == "__main__":
    main()
