"""Texts about the messages that run now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdo.ops.runs import RunsRead
from qdo.text import one_line, printable_lines


def blocked_texts(found: RunsRead) -> list[str]:
    """Return of which workers the messages are unknown, and why."""
    return [
        f"{worker}: {one_line(why)}; its other messages are unknown; see `qdo action {worker}"
        " stacks`"
        for worker, why in found.blocked.items()
    ]


def stack_text(item: Mapping[str, Any]) -> str:
    """Return the stack of a message in flight."""
    return printable_lines("\n".join(item["stack"]) or "its executor does not tell where it stands")
