"""The packages of qdo/ form layers: imports point in one direction, without circles.

Imports within functions and those for type checkers count like all others. There is no list of
exceptions: a new file belongs to a layer, or a new layer is added here and in docs/developing.rst.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests import shape
from tests.support.paths import ROOT, tree_of

QDO = ROOT / "qdo"
LAYERS = (
    {"__init__", "_version", "errors", "outcomes", "positions", "text"},
    {"backoff", "broker_errors", "callables"},
    {"encoding", "queues", "system"},
    {"bodies", "refusals"},
    {"postgresql"},
    {"coordination", "encryption", "message", "webhook_signatures"},
    {"fleet"},
    {"jobs", "idempotency", "webhooks"},
    {"brokers", "state"},
    {"history"},
    {"settings", "ops"},
    {"connections"},
    {"sending", "demo"},
    {"ingest", "operators", "requests"},
    {"app"},
    {"loading", "outbox", "tracing"},
    {"worker"},
    {"dashboard"},
    {"cli", "testing"},
    {"__main__", "contrib"},
)
"""A file or folder of qdo/ imports only from the layers before its own, or from its own folder."""
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}

FACADES = {
    *("__init__.py", "settings/__init__.py", "testing/__init__.py", "dashboard/__init__.py"),
    "brokers/__init__.py",
    "contrib/django/__init__.py",
}
"""The packages that users import from. The `__init__.py` of every other package is empty."""
ALLOWED = {
    "kazoo": ("coordination/",),
    "cryptography": ("encryption/",),
    "boto3": ("brokers/aws/",),
    "botocore": ("brokers/aws/",),
    "click": ("cli/",),
    "django": ("contrib/django/",),
    "flask": ("dashboard/",),
    "rich": ("cli/", "demo/"),
    "prometheus_client": ("worker/metrics/",),
    "starlette": ("contrib/",),
}
"""A library, and the folders that may import it."""
PURE = (
    "coordination/protocol/",
    "fleet/action_machine.py",
    "fleet/audit_entries.py",
    "fleet/folder_view.py",
    "fleet/pause_machine.py",
    "fleet/lock_contender.py",
    "fleet/permit_counts.py",
    "fleet/settings_machine.py",
    "fleet/shares.py",
)
"""The state machines, and the values that they write."""
IO_MODULES = {
    *("asyncio", "gevent", "http", "io", "kazoo", "multiprocessing", "os", "pathlib", "select"),
    *("shutil", "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "urllib"),
    "urllib3",
}
"""Modules that the state machines must not import: their caller does all I/O."""
EXTRAS = {
    *("boto3", "botocore", "cryptography", "django", "flask", "google", "opentelemetry"),
    *("prometheus_client", "psycopg", "sqlalchemy", "urllib3"),
}
"""Libraries that are not installed with qdo alone."""
LIGHT = {
    "app.py": EXTRAS | {"gevent", "kazoo"},
    "brokers/registry.py": EXTRAS | {"gevent", "kazoo"},
    "brokers/embedded/broker.py": EXTRAS | {"gevent", "kazoo"},
    "brokers/embedded/kind.py": EXTRAS | {"gevent", "kazoo"},
    "brokers/kinesis/broker.py": {"gevent", "kazoo"},
    "brokers/kinesis/kind.py": EXTRAS | {"gevent", "kazoo"},
    "brokers/postgresql/broker.py": {"gevent", "kazoo"},
    "brokers/postgresql/kind.py": EXTRAS | {"gevent", "kazoo"},
    "brokers/sqs/broker.py": {"gevent", "kazoo"},
    "brokers/sqs/kind.py": EXTRAS | {"gevent", "kazoo"},
    "cli/main.py": EXTRAS | {"gevent", "kazoo", "rich"},
    "cli/commands/send.py": EXTRAS | {"gevent", "kazoo", "rich"},
    "worker/executors/process_main.py": EXTRAS | {"gevent", "kazoo"},
    "worker/main.py": EXTRAS | {"gevent", "kazoo"},
    "worker/supervisor/supervisor.py": EXTRAS | {"gevent"},
}
"""Files, and libraries that their import does not load: their processes start fast and stay small.

gevent patches a worker process before it imports anything else; its parent loads gevent only to
serve HTTP.
"""
REGISTRY = "brokers/registry.py"
SHARED_BROKER_FOLDER = "brokers/aws/"
AWS_BROKERS = ("brokers/sqs/", "brokers/kinesis/")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of qdo/ with its imports.

    :ivar path: below qdo/, such as ``brokers/base.py``.
    :ivar imports: full names, such as ``kazoo.client`` or ``qdo.errors.QdoError``.
    """

    path: str
    imports: frozenset[str]

    @property
    def part(self) -> str:
        """The file or folder directly below qdo/."""
        return self.path.split("/")[0].removesuffix(".py")

    @property
    def broker_folder(self) -> str | None:
        """The broker's folder that contains the file, such as ``brokers/sqs/``."""
        folders = self.path.split("/")[:-1]
        if len(folders) < 2 or folders[0] != "brokers":
            return None
        return f"brokers/{folders[1]}/"


def names_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the full name of everything that some statements import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:  # ruff forbids relative imports
            yield from (f"{node.module}.{each.name}" for each in node.names)


def loaded_names(path: Path) -> Iterator[str]:
    """Yield the full name of everything that an import of the file loads itself.

    Imports within functions and those for type checkers do not count.
    """
    return names_in(tree_of(path).body)


def loaded_libraries(path: str) -> set[str]:
    """Return the libraries that an import of the file loads, through any number of files."""
    libraries: set[str] = set()
    seen, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        packages = (f"{each}/__init__.py" for each in Path(current).parents if each.name)
        waiting += [each for each in packages if each in files()]
        for name in loaded_names(QDO / current):
            found = modules().get(name) or modules().get(name.rpartition(".")[0])
            if found is not None:
                waiting.append(found)
            else:
                libraries.add(name.split(".")[0])
    return libraries


def module_name(path: str) -> str:
    """Return the name under which a file of qdo/ is imported."""
    return f"qdo/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def files() -> dict[str, SourceFile]:
    """Return all files of qdo/ by their paths. Parsing them takes 1.5 s."""
    paths = sorted(each.relative_to(QDO).as_posix() for each in QDO.rglob("*.py"))
    return {
        path: SourceFile(path, frozenset(names_in(ast.walk(tree_of(QDO / path))))) for path in paths
    }


@cache
def modules() -> dict[str, str]:
    """Return the path of each module by its name."""
    return {module_name(path): path for path in files()}


def imported_files(file: SourceFile) -> set[str]:
    """Return the files of qdo/ that a file imports."""
    found = (modules().get(name) or modules().get(name.rpartition(".")[0]) for name in file.imports)
    return {path for path in found if path is not None and path != file.path}


@cache
def arrows() -> dict[str, set[str]]:
    """Return the files that each file imports.

    Facades do not count: they re-export names from above them.
    """
    return {path: imported_files(file) for path, file in files().items() if path not in FACADES}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the circles of a graph as text, each as found from its first file."""
    found: list[str] = []
    finished: set[str] = set()

    def visit(path: str, trail: list[str]) -> None:
        if path in trail:
            found.append(" -> ".join([*trail[trail.index(path) :], path]))
        elif path not in finished:
            for imported in sorted(graph.get(path, ())):
                visit(imported, [*trail, path])
            finished.add(path)

    for path in sorted(graph):
        visit(path, [])
    return found


def test_every_file_belongs_to_one_layer() -> None:
    """No part of qdo/ is missing from the layers, and no layer names a part that is gone."""
    assert sum(map(len, LAYERS)) == len(LEVELS)
    assert {file.part for file in files().values()} == LEVELS.keys()


def test_imports_point_to_lower_layers() -> None:
    """A part imports from the layers below it, never from its own layer or from above."""
    assert [
        f"{path} imports {imported}"
        for path, found in arrows().items()
        for imported in sorted(found)
        if files()[path].part != files()[imported].part
        and LEVELS[files()[imported].part] >= LEVELS[files()[path].part]
    ] == []


def test_one_function_reads_the_path_of_an_sqlite_address() -> None:
    """Options of such an address then have one place."""
    found = [path for path in files() if 'removeprefix("sqlite:")' in (QDO / path).read_text()]
    assert found == ["system/files.py"]


def test_imports_form_no_circle() -> None:
    """Within one part as well: each file can be understood after those it imports."""
    assert circles(arrows()) == []


def test_the_check_for_circles_finds_one() -> None:
    """The check itself is sound, through any number of files."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a -> b -> c -> a"]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("library", ALLOWED)
def test_a_library_is_imported_in_its_folder_only(library: str) -> None:
    """Another client library, or another command line, then touches one folder."""
    importers = [
        path
        for path, file in files().items()
        if any(name.split(".")[0] == library for name in file.imports)
    ]
    assert importers != []
    assert [path for path in importers if not path.startswith(ALLOWED[library])] == []


@pytest.mark.parametrize("path", LIGHT)
def test_a_light_file_loads_no_heavy_library(path: str) -> None:
    """Neither itself nor through the files that it imports."""
    assert loaded_libraries(path) & LIGHT[path] == set()


@pytest.mark.parametrize(
    ("path", "library"),
    [("encryption/bodies.py", "cryptography"), ("worker/worker.py", "gevent"), ("app.py", "json")],
)
def test_the_check_for_libraries_finds_them(path: str, library: str) -> None:
    """The check itself is sound: at once, and through other files."""
    assert library in loaded_libraries(path)


def test_nothing_imports_the_programs() -> None:
    """They are apps on top of qdo. Their folder is a link, which no other check here follows."""
    assert (QDO / "programs").resolve() == ROOT / "workers"
    assert [
        f"{path} imports {name}"
        for path, file in files().items()
        for name in sorted(file.imports)
        if name.startswith(("qdo.programs", "workers"))
    ] == []


def io_imports(file: SourceFile) -> list[str]:
    """Return what a file imports for I/O."""
    return [name for name in sorted(file.imports) if name.split(".")[0] in IO_MODULES]


def test_the_protocol_does_no_io() -> None:
    """The simulation plays the state machines without a clock, a network or a disk."""
    protocol = [file for path, file in files().items() if path.startswith(PURE)]
    assert [each for each in PURE if not any(file.path.startswith(each) for file in protocol)] == []
    assert [f"{file.path} imports {name}" for file in protocol for name in io_imports(file)] == []


def test_the_check_for_io_finds_it() -> None:
    """At the top of a file or in a function, as a module or a name of it."""
    found = SourceFile("fleet/shares.py", frozenset({"kazoo.client.KazooClient", "time", "os"}))
    assert io_imports(found) == ["kazoo.client.KazooClient", "os"]


def test_only_the_registry_imports_the_folder_of_a_broker() -> None:
    """A new broker is one folder and one entry point.

    The brokers at AWS share `brokers/aws/`, which commands and settings may not import either. The
    testing kit runs the statements of the embedded broker.
    """
    assert [
        f"{path} imports {imported}"
        for path, found in arrows().items()
        if path not in (REGISTRY, "testing/memory_broker.py")
        for imported in sorted(found)
        if (folder := files()[imported].broker_folder) is not None
        and folder != files()[path].broker_folder
        and not (folder == SHARED_BROKER_FOLDER and path.startswith(AWS_BROKERS))
    ] == []


def test_system_knows_nothing_of_queues() -> None:
    """It wraps the operating system, and imports nothing of qdo but the lowest layer."""
    lowest = {f"{part}.py" for part in LAYERS[0]}
    assert [
        f"{path} imports {imported}"
        for path, found in arrows().items()
        if path.startswith("system/")
        for imported in sorted(found)
        if not imported.startswith("system/") and imported not in lowest - {"outcomes.py"}
    ] == []


def test_package_files_are_empty_except_the_facades() -> None:
    """An import of one module then loads no other; a docstring may describe the folder."""

    def statements(path: str) -> list[ast.stmt]:
        body = tree_of(QDO / path).body
        return [each for each in body if not _is_text(each)]

    packages = [path for path in files() if path.endswith("__init__.py") and path not in FACADES]
    assert [path for path in packages if statements(path)] == []


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# --- names ---------------------------------------------------------------------------------


def late_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of qdo's own imports that run, those for type checkers left out."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qdo"):
            yield from ((str(node.module), each.name) for each in node.names)
        waiting += ast.iter_child_nodes(node)


def exists(module: str, name: str) -> bool:
    """Return whether a module has a name, or a package a module of that name."""
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_imported_names_exist() -> None:
    """A name that a module imports for type checkers only passes mypy, and fails when used."""
    missing = {
        f"{source.path}: {module}.{name}"
        for folder in ("qdo", "workers")
        for source in shape.sources(folder)
        if "django" not in source.path  # Django imports them with the settings of a project
        for module, name in late_imports(tree_of(ROOT / source.path))
        if not exists(module, name)
    }
    assert missing == set()


def test_imports_for_type_checkers_do_not_count() -> None:
    """Those in functions do."""
    text = """
if TYPE_CHECKING:
    from qdo.a import b
def f():
    from qdo.c import d
"""
    assert [*late_imports(ast.parse(text))] == [("qdo.c", "d")]
