"""Reads the options of the programs in this folder from QDO_* environment variables.

The environment reaches every process of a worker, however an operator starts the worker. The
environment also keeps secrets out of files that many users can read. Each program declares its
options as fields of a frozen dataclass.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from gevent.monkey import is_module_patched

from qdo import Stop
from qdo.errors import SettingsError, UsageError
from qdo.settings.sources import is_service_variable
from qdo.settings.values import Check
from qdo.text import did_you_mean


class Declared(Protocol):
    """A dataclass of options. `PREFIX` is the prefix of its variables, such as "QDO_WEBHOOK_"."""

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
    """Declare an option. An option without a default is required."""
    metadata = {"help": help, "check": check}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def read(kind: type[_Options], environ: Mapping[str, str] | None = None) -> _Options:
    """Return the options of a program. Convert each text to the type of the default.

    :param environ: environment variables; None for `os.environ`.
    :raises UsageError: a variable with the prefix is not an option of the program.
    :raises SettingsError: an option is missing or invalid.
    """
    environ = os.environ if environ is None else environ
    fields = {kind.PREFIX + name.upper(): each for name, each in kind.__dataclass_fields__.items()}
    fields.pop(f"{kind.PREFIX}PREFIX", None)
    for name in sorted(environ):
        if (
            name.startswith(kind.PREFIX)
            and name not in fields
            and not is_service_variable(name, environ[name])
        ):
            hint, known = did_you_mean(name, fields), ", ".join(sorted(fields))
            raise UsageError(
                reason=f"unknown option {name!r} in the environment{hint}; the options of this "
                f"program are {known}",
                name=name,
            )
    return kind(**{each.name: _value(name, each, environ) for name, each in fields.items()})


def _value(name: str, field: dataclasses.Field[Any], environ: Mapping[str, str]) -> Any:
    text = environ.get(name)
    required = field.default is dataclasses.MISSING
    if not text:
        if required:
            raise SettingsError(name=name, reason=f"a value is required: {field.metadata['help']}")
        return field.default
    value: Any = text
    if isinstance(field.default, float):
        try:
            value = float(text)
        except ValueError as error:
            raise SettingsError(
                name=name, reason=f"must be a number of seconds, got {text!r}"
            ) from error
    check = field.metadata["check"]
    fault = check(value) if check is not None else None
    if fault:
        raise SettingsError(name=name, reason=fault)
    return value


_Context = TypeVar("_Context")


def expect(context: Any, kind: type[_Context], program: str) -> _Context:
    """Return the context of a job after checking that the program's own context created it.

    :raises Stop: the worker runs the job without its context. The message is not processed.
    """
    if isinstance(context, kind):
        return context
    raise Stop(
        f"qdo.programs.{program}:job runs without its context: start qdo-worker "
        f"qdo.programs.{program}:app, or also set job_context (QDO_JOB_CONTEXT) to "
        f"qdo.programs.{program}:job_context"
    )


def require_greenlet(program: str) -> None:
    """Check that a job that waits through gevent runs in the main thread.

    gevent watches child processes only in the main thread. The hub of another thread writes useless
    messages when the thread ends.

    :raises Stop: the job runs in a native thread. The message is not processed.
    """
    # On Linux the native id of the main thread is the process id.
    if is_module_patched("socket") and threading.get_native_id() != os.getpid():
        raise Stop(
            f"qdo.programs.{program}:job runs in a native thread, where it cannot wait: set "
            "executor to 'greenlet'"
        )
