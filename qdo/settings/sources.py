"""Loads settings from the TOML file, the environment and flags."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from qdo.encoding import is_deeper
from qdo.errors import SettingsError, SettingsSyntaxError, UnknownSettingError
from qdo.settings.settings import Settings, check_names, declarations
from qdo.settings.values import CONFIG_VARIABLE, DEFAULT, ENVIRONMENT_PREFIX, PASSWORD_VARIABLE
from qdo.text import did_you_mean

# Variables with qdo's prefix that are not settings.
SPECIAL_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        PASSWORD_VARIABLE,
        "QDO_DASHBOARD_TOKEN",  # `qdo dashboard` admits viewers with this token
        "QDO_DASHBOARD_OPERATOR_TOKEN",  # `qdo dashboard` admits operators with this token
        "QDO_CHILD",  # contains the settings that a parent passes to a worker process
        "QDO_JOB_PROCESS",  # contains the settings that a worker passes to a job's process
    }
)
# Prefixes of further variables that are not settings.
SPECIAL_PREFIXES = (
    "QDO_MESSAGE_",  # describe the message to the commands of qdo.programs.shell
    "QDO_HOLD_",  # describe the section to the command of `qdo pause`
    "QDO_ARCHIVE_",  # options of qdo.programs.archive, which rejects unknown options
    "QDO_SHELL_",  # likewise
    "QDO_WEBHOOK_",  # likewise
)
# Variables that Kubernetes sets for a service in every pod, as NAME=VALUE.
_SERVICE_VARIABLE = re.compile(
    r"[A-Z0-9_]+_("
    r"SERVICE_HOST=|SERVICE_PORT(_[A-Z0-9_]+)?=\d|"
    r"PORT=(tcp|udp|sctp)://|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?="
    r")",
    re.ASCII,
)
# Maximum number of dots in a TOML line. Addresses of many servers contain dots.
MAX_DOTS = 200
MAX_DEPTH = 10


def is_service_variable(name: str, value: str) -> bool:
    """Return whether Kubernetes sets this variable for a service such as ``qdo-web``."""
    # `_PORT` alone could be a misspelled setting, so the value must also be an address.
    return _SERVICE_VARIABLE.match(f"{name}={value}") is not None


def load(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    defaults_origin: str = DEFAULT,
) -> Settings:
    """Return the settings of this process: TOML file < QDO_* environment < flags.

    :param flags: values from the command line, by setting name; None means "not given".
    :param environ: environment variables; None for `os.environ`.
    :param config: path of a TOML file. If None, the variable QDO_CONFIG may name a file.
    :param defaults: values for settings that none of these three sources sets.
    :raises UnknownSettingError: a name is unknown. The error suggests the closest known name.
    :raises SettingsError: a value is invalid, or the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = config or environ.get(CONFIG_VARIABLE)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    check_names(given, "flags")
    for name, value, origin in (
        *(_file_values(path) if path else ()),
        *_environment_values(environ),
        *((name, value, "--" + name.replace("_", "-")) for name, value in given.items()),
    ):
        values[name] = value
        origins[name] = origin
    return Settings(**values, origins=origins).underlaid(defaults or {}, defaults_origin)


def _file_values(path: str) -> list[tuple[str, Any, str]]:
    table = _read_toml(path)
    check_names(table, path)
    return [(name, value, path) for name, value in table.items()]


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise SettingsError(name="config", reason=f"{path}: {error.strerror}") from error
    return parse_toml(data, path)


def parse_toml(text: str | bytes, origin: str) -> dict[str, Any]:
    """Return the table in a TOML text. Errors name the text's origin."""
    # Limit the text, because operators and attackers can write the live settings. The parser's time
    # grows with the square of the number of parts in a key. Printing deeply nested values fails.
    try:
        text = text.decode() if isinstance(text, bytes) else text
        if max(line.count(".") for line in text.split("\n")) > MAX_DOTS:
            raise ValueError(f"a line must have at most {MAX_DOTS} dots")
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError
        raise SettingsSyntaxError(origin=origin, reason=error) from error
    if is_deeper(found, MAX_DEPTH):
        reason = f"values must be nested at most {MAX_DEPTH} deep"
        raise SettingsSyntaxError(origin=origin, reason=reason)
    return found


def _environment_values(environ: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    known = {each.variable: each.name for each in declarations()}
    found = []
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or _is_special(variable):
            continue
        if variable not in known:
            if is_service_variable(variable, environ[variable]):
                continue
            raise UnknownSettingError(
                name=variable,
                origin="the environment",
                hint=did_you_mean(variable.upper(), [*known, *SPECIAL_VARIABLES]),
            )
        found.append((known[variable], environ[variable], variable))
    return found


def _is_special(variable: str) -> bool:
    return variable in SPECIAL_VARIABLES or variable.startswith(SPECIAL_PREFIXES)
