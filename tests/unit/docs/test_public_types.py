"""Every class in a public signature is public, so that users can write it in annotations."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import qdo
from tests.support.doc_pages import DOCS
from tests.support.paths import tree_of

USED = (qdo.__doc__ or "").partition("Public")[2].partition("for tools")[0]
PAGES = "".join(each.read_text(encoding="utf-8") for each in DOCS.glob("*.rst"))
SHOWN = {
    found[1]: found[2]
    for found in re.finditer(r"autoclass:: qdo\.(?:\w+\.)*(\w+)\n(?:   :members:(.*)\n)?", PAGES)
}
"""By class, the names of its documented members; "" for all, None for none."""
MADE = frozenset(["Documents", "Message", "PermitAsk", "Request"])
"""Classes that only qdo constructs, with parameters that are private."""
HELD = {
    "Broker": "`Outbox.relay` gets that of an app",
    "Kinds": "workers call the functions of a job through it",
    "MemberFactory": "tests of qdo give another one to a worker",
    "ProcessContext": "the parent process gives it to a worker",
    "QueuePolicy": "code gives dicts",
    "Sender": "an app is one",
}
"""Classes that public signatures name and apps do not, with the reason."""


@cache
def names_of(module: str) -> dict[str, Any]:
    """Return the names of a module, with those that only type checkers import."""
    names = {**vars(sys.modules[module])}
    for node in ast.walk(tree_of(Path(names["__file__"]))):
        if isinstance(node, ast.ImportFrom) and node.module:
            source = importlib.import_module(node.module)
            for each in node.names:
                names.setdefault(each.asname or each.name, getattr(source, each.name, None))
    return names


def public_objects() -> dict[str, Any]:
    """Return the objects of public modules by their full names."""
    found = {}
    for name in set(re.findall(r"`(qdo[\w.]*)`", USED)) - {"qdo.contrib.django"}:  # an app only
        module = importlib.import_module(name)
        own = [key for key, each in vars(module).items() if getattr(each, "__module__", 0) == name]
        public = [each for each in getattr(module, "__all__", own) if each[0] != "_"]
        found |= {f"{name}.{each}": getattr(module, each) for each in public}
    return found


def annotations(public: Any) -> Iterator[Any]:
    """Yield the types in the signature of a function, or of a class's documented members."""
    parts = [public]
    if inspect.isclass(public):
        shown = SHOWN.get(public.__name__)
        parts = [each for each in public.__mro__ if each.__module__.startswith("qdo.")]
        parts += [] if public.__name__ in MADE else [public.__init__]
        for name, each in inspect.getmembers_static(public):
            if name[0] != "_" and (shown == "" or name in (shown or "").strip().split(", ")):
                parts.append(getattr(each, "fget", getattr(each, "__func__", each)))
    for part in filter(lambda each: inspect.isfunction(each) or inspect.isclass(each), parts):
        given = vars(part).get("__annotations__", part.__annotations__)
        public_ones = [kind for name, kind in given.items() if name[0] != "_"]
        names = names_of(part.__module__)
        yield from (eval(each, names) if isinstance(each, str) else each for each in public_ones)


def classes(kind: Any) -> Iterator[type]:
    """Yield the classes of qdo within a type."""
    if isinstance(kind, typing.TypeVar):
        yield from classes(kind.__bound__)
    elif isinstance(kind, list | tuple) or typing.get_origin(kind) is not None:
        parts = kind if isinstance(kind, list | tuple) else typing.get_args(kind)
        for each in (*parts, typing.get_origin(kind)):
            yield from classes(each)
    elif inspect.isclass(kind) and kind.__module__.partition(".")[0] == "qdo":
        yield kind


def test_classes_in_public_signatures_are_public() -> None:
    """Otherwise an app cannot annotate a variable with the class that it gets."""
    public = public_objects()
    assert len(public) > 80
    found = {
        (kind.__name__, name)
        for name, each in public.items()
        for annotation in annotations(each)
        for kind in classes(annotation)
        if all(kind is not known for known in public.values())
    }
    assert sorted(each for each in found if each[0] not in HELD) == []
    assert {name for name, _ in found} >= HELD.keys()
