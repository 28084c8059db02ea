"""How an attempt ended, carried from a job's process to its worker process and raised there.

An outcome is made again. Any other error is carried as its type's name, its text and its
traceback. Where the worker process knows the type, what it raises is an instance of that type too,
so that rules by exception work; no code of the app runs to make it.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from qdo import outcomes
from qdo.describe import describe_traceback, text_of
from qdo.outcomes import Outcome

TEXT_LIMIT = 16_384
TRACEBACK_LIMIT = 262_144


class RemoteError(Exception):
    """An error that a job raised in its process, as its worker process raises it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RemoteTraceback(Exception):
    """The traceback of an error in the process where it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def dump(error: BaseException | None) -> dict[str, Any]:
    """Return how an attempt ended as values of JSON; in the job's process."""
    if error is None:
        return {"done": True}
    if isinstance(error, Outcome):
        return _dump_outcome(error)
    return {
        "error": type(error).__qualname__[:200],
        "module": str(type(error).__module__)[:200],
        "text": text_of(error)[:TEXT_LIMIT],
        "traceback": describe_traceback(error)[-TRACEBACK_LIMIT:],
    }


def _dump_outcome(error: Outcome) -> dict[str, Any]:
    """Return an outcome; one of the app's own counts as the one of qdo that it derives from."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == outcomes.__name__)
    names = list(inspect.signature(kind).parameters)
    state = {name: getattr(error, name, None) for name in names}
    return {"outcome": kind.__name__, "state": {n: v for n, v in state.items() if _is_plain(v)}}


def load(said: dict[str, Any]) -> BaseException | None:
    """Return what `dump` said as the error to raise, None for done; in the worker process.

    Never fails: what makes no sense is returned as an error that shows it.
    """
    if said.get("done") is True:
        return None
    kind = getattr(outcomes, str(said.get("outcome")), None)
    if isinstance(kind, type) and issubclass(kind, Outcome):
        try:
            return kind(**said["state"])
        except Exception as error:  # noqa: BLE001 - whatever another process wrote there
            return RemoteError(f"an outcome that cannot be made again: {error}")
    name, module = str(said.get("error", "RemoteError")), str(said.get("module"))
    remote = _instance(name, module, str(said.get("text", "")))
    remote.__cause__ = RemoteTraceback(str(said.get("traceback", "")))
    return remote


def _instance(name: str, module: str, text: str) -> RemoteError:
    known = _known(name, module)
    if known is not None:
        try:
            kind = type(known.__name__, (RemoteError, known), {"__module__": module})
            # The first type of Python itself makes the instance: no code of the app does.
            maker: Any = next(base for base in known.__mro__ if base.__module__ == "builtins")
            made: RemoteError = maker.__new__(kind, text)
            made.args = (text,)
            return made
        except Exception:  # noqa: BLE001 - types may forbid any of this; then by name only
            known = None
    last = name.rpartition(".")[2]
    shown = last if last.isidentifier() else RemoteError.__name__
    by_name = type(shown, (RemoteError,), {"__module__": module})
    unknown: RemoteError = by_name(text)
    return unknown


def _known(name: str, module: str) -> type[Exception] | None:
    """Return the type if this process has it, and it is an ordinary error of the app's."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    return None if module.partition(".")[0] == "qdo" or issubclass(found, Outcome) else found


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
