"""Options of the programs in this folder, from QDO_* variables of the environment.

They reach every process of a worker, however it is started, and secrets stay out of files that
many can read. Each program declares its options as fields of a frozen dataclass.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from gevent.monkey import is_module_patched

from qdo import Stop
from qdo.checks import Check
from qdo.errors import SettingsError, UnknownSettingError


class Declared(Protocol):
    """A dataclass of options; `PREFIX` begins its variables, such as "QDO_WEBHOOK_"."""

    PREFIX: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_Options = TypeVar("_Options", bound=Declared)


def option(
    help: str,
    default: Any = dataclasses.MISSING,
    check: Check | None = None,
    *,
    secret: bool = False,
) -> Any:
    """Declare an option; without a default it has to be set."""
    metadata = {"help": help, "check": check}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def read(kind: type[_Options], environ: Mapping[str, str] | None = None) -> _Options:
    """Return the options of a program; text is turned into the type of the default.

    :param environ: `os.environ` when None.
    :raises UnknownSettingError: a variable with the prefix is none of them.
    :raises SettingsError: one is missing or will not do.
    """
    environ = os.environ if environ is None else environ
    fields = {kind.PREFIX + name.upper(): each for name, each in kind.__dataclass_fields__.items()}
    fields.pop(f"{kind.PREFIX}PREFIX", None)
    for name in sorted(environ):
        if name.startswith(kind.PREFIX) and name not in fields:
            near = difflib.get_close_matches(name, list(fields), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UnknownSettingError(name=name, origin="the environment", hint=hint)
    return kind(**{each.name: _value(name, each, environ) for name, each in fields.items()})


def _value(name: str, field: dataclasses.Field[Any], environ: Mapping[str, str]) -> Any:
    text = environ.get(name)
    required = field.default is dataclasses.MISSING
    if not text:
        if required:
            raise SettingsError(name=name, reason=f"it has to be set: {field.metadata['help']}")
        return field.default
    value: Any = text
    if isinstance(field.default, float):
        try:
            value = float(text)
        except ValueError as error:
            raise SettingsError(name=name, reason=f"{text!r} is no number of seconds") from error
    check = field.metadata["check"]
    fault = check(value) if check is not None else None
    if fault:
        raise SettingsError(name=name, reason=fault)
    return value


_Context = TypeVar("_Context")


def expect(context: Any, kind: type[_Context], program: str) -> _Context:
    """Return the context of a job, made sure that the program's own context made it.

    :raises Stop: the job was named without its context; the message is not touched.
    """
    if isinstance(context, kind):
        return context
    raise Stop(
        f"workers.{program}:job runs without its context: start qdo-worker workers.{program}:app, "
        f"or set job_context (QDO_JOB_CONTEXT) to workers.{program}:job_context as well"
    )


def require_greenlet(program: str) -> None:
    """Make sure that a job which waits by gevent's means runs where they work.

    gevent watches processes only for the main thread, and what is left of a hub in another one
    makes noise when that ends.

    :raises Stop: it runs in a native thread; the message is not touched.
    """
    # On Linux the main thread has the number of its process.
    if is_module_patched("socket") and threading.get_native_id() != os.getpid():
        raise Stop(
            f"workers.{program}:job runs in a native thread, where it cannot wait: set executor "
            "to 'greenlet'"
        )
