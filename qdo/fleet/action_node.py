"""What an operator asks of one worker: the value of a node below ``actions/<worker>``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qdo.coordination.znodes.values import encode, load, shown
from qdo.fleet.protocol.audit_entries import MAX_KEYS, MAX_TEXT, Values, cut

MAX_ACTION_BYTES = 16 * 1024
"""Longer values are not parsed."""
MAX_NAME = 50
"""Characters in the name of an action."""
MAX_EXPIRES = 1e11
"""Latest Unix time at which an action expires."""
MAX_OUTPUT_BYTES = 128 * 1024
"""Longer outputs are cut."""
AHEAD_SECONDS = 3600.0
"""Actions that may be begun later than this from now are rejected."""
RUNNING = "running"
WORKER, PARENT = "worker", "parent"
"""Who acts: the worker itself, or its parent process while a job blocks the worker."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action for one worker.

    :ivar name: such as "ping".
    :ivar expires: Unix time; the worker does not begin the action later.
    :ivar by: user and host.
    :ivar state: "" until somebody claims the action, then `RUNNING`.
    :ivar actor: who claimed it, `WORKER` or `PARENT`.
    :ivar fault: why the node cannot be read, None if it can.
    """

    name: str = ""
    args: Values = field(default_factory=dict)
    expires: float = 0.0
    by: str = ""
    reason: str = ""
    state: str = ""
    actor: str = ""
    fault: str | None = None

    def encode(self) -> bytes:
        """Return the value of the node."""
        value = {
            "action": self.name,
            "args": dict(self.args),
            "expires": self.expires,
            "by": cut(self.by),
            "why": cut(self.reason),
            "state": self.state,
            "actor": self.actor,
        }
        return encode(value)

    @classmethod
    def parse(cls, data: bytes) -> Action:
        """Return the action of a node; one that another program wrote may have a fault."""
        if len(data) > MAX_ACTION_BYTES:
            return cls(fault=f"the value must have at most {MAX_ACTION_BYTES} bytes")
        value, fault = load(data)
        fault = fault or _fault(value)
        if fault is not None:
            return cls(fault=fault)
        return cls(
            value["action"],
            value.get("args", {}),
            float(value["expires"]),
            cut(value.get("by", "")),
            cut(value.get("why", "")),
            value.get("state", ""),
            value.get("actor", ""),
        )


def cut_output(text: str) -> str:
    """Return a text that has at most `MAX_OUTPUT_BYTES`, and whole lines if it is cut."""
    data = text.encode(errors="replace")
    if len(data) <= MAX_OUTPUT_BYTES:
        return data.decode()
    kept = data[: MAX_OUTPUT_BYTES - 100].decode(errors="ignore").rpartition("\n")[0]
    return f"{kept}\n... {len(data) - len(kept.encode())} bytes omitted\n"


def _fault(value: Mapping[str, Any]) -> str | None:
    name, args, expires = value.get("action"), value.get("args", {}), value.get("expires")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return f"action must be a name, got {shown(name)}"
    if not isinstance(args, dict) or len(args) > MAX_KEYS or not all(map(_is_plain, args.values())):
        return f"args must be at most {MAX_KEYS} plain values, got {shown(args)}"
    if (
        not isinstance(expires, int | float)
        or isinstance(expires, bool)
        or not 0 <= expires <= MAX_EXPIRES
    ):
        return f"expires must be a Unix time, got {shown(expires)}"
    if value.get("state", "") not in ("", RUNNING):
        return f"state must be empty or {RUNNING}, got {shown(value['state'])}"
    if value.get("actor", "") not in ("", WORKER, PARENT):
        return f"actor must be {WORKER} or {PARENT}, got {shown(value['actor'])}"
    for key in ("by", "why"):
        if not isinstance(value.get(key, ""), str):
            return f"{key} must be a text, got {shown(value[key])}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or isinstance(value, bool | int | float)
