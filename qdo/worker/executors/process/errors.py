"""Carries the end of an attempt from a job's process to its worker process, which raises it.

An outcome is recreated. Any other error is carried as its type's name, its text and its
traceback. If the worker process knows the type, it raises an instance of that type too:
rules by exception then work. No code of the app runs to create it.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from qdo import outcomes
from qdo.outcomes import Outcome
from qdo.text import describe_traceback, one_line


class RemoteError(Exception):
    """An error that a job raised in its process, as the worker process raises it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RemoteTraceback(Exception):
    """The traceback of an error from the process that raised it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def dump(error: BaseException | None) -> dict[str, Any]:
    """Return how an attempt ended as JSON values; called in the job's process."""
    if error is None:
        return {"done": True}
    if isinstance(error, Outcome):
        return _dump_outcome(error)
    return {
        "error": type(error).__qualname__[:200],
        "module": str(type(error).__module__)[:200],
        "text": one_line(error),
        "traceback": describe_traceback(error),
    }


def _dump_outcome(error: Outcome) -> dict[str, Any]:
    """Return an outcome; a subclass of the app counts as the outcome of qdo it derives from."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == outcomes.__name__)
    names = list(inspect.signature(kind).parameters)
    state = {name: getattr(error, name, None) for name in names}
    return {"outcome": kind.__name__, "state": {n: v for n, v in state.items() if _is_plain(v)}}


def load(answer: dict[str, Any]) -> BaseException | None:
    """Return the error to raise, None for done; called in the worker process.

    Never fails: an invalid answer is returned as an error that shows it.

    :param answer: values from `dump`.
    """
    if answer.get("done") is True:
        return None
    kind = getattr(outcomes, str(answer.get("outcome")), None)
    if isinstance(kind, type) and issubclass(kind, Outcome):
        try:
            return kind(**answer["state"])
        except Exception as error:  # noqa: BLE001 - another process may have written anything
            return RemoteError(f"cannot recreate the outcome {kind.__name__}: {error}")
    name, module = str(answer.get("error", "RemoteError")), str(answer.get("module"))
    remote = _instance(name, module, str(answer.get("text", "")))
    remote.__cause__ = RemoteTraceback(str(answer.get("traceback", "")))
    return remote


def _instance(name: str, module: str, text: str) -> RemoteError:
    known = _known(name, module)
    if known is not None:
        try:
            kind = type(known.__name__, (RemoteError, known), {"__module__": module})
            # The first built-in type creates the instance, without code of the app.
            maker: Any = next(base for base in known.__mro__ if base.__module__ == "builtins")
            made: RemoteError = maker.__new__(kind, text)
            made.args = (text,)
            return made
        except Exception:  # noqa: BLE001 - types may forbid any of this; then use the name only
            known = None
    last = name.rpartition(".")[2]
    shown = last if last.isidentifier() else RemoteError.__name__
    by_name = type(shown, (RemoteError,), {"__module__": module})
    unknown: RemoteError = by_name(text)
    return unknown


def _known(name: str, module: str) -> type[Exception] | None:
    """Return the type if this process has it, and it is an ordinary error of the app."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    return None if module.partition(".")[0] == "qdo" or issubclass(found, Outcome) else found


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))
