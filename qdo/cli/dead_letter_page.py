"""One dead letter as a page of text."""

from __future__ import annotations

import json
from typing import Any

from qdo.text import printable_lines


def dead_letter_page(item: dict[str, Any], body_bytes: int) -> str:
    """Return the exported fields of a dead letter, one per line, and its traceback."""
    if "body" in item:
        body = _json(item["body"])
    else:
        reason = item.get("body_error", "not JSON; `export` writes them in base64")
        body = f"{body_bytes} bytes, {reason}"
    lines = {
        "queue": item["queue"],
        "id": item["id"],
        "position": item["position"],
        "sent": item["time"],
        **({"due": item["due_time"]} if item["due_time"] else {}),
        "dead since": item["dead_time"],
        "attempts": item["attempts"],
        "worker": item["worker"],
        "fence": item["fence"],
        "key": item["key"],
        "headers": _json(item["headers"]) if item["headers"] else None,
        "error": item["error"],
        "body": body,
    }
    width = max(map(len, lines)) + 2
    margin = " " * width
    shown = [
        f"{name:{width}}{printable_lines(_text(value), margin)}" for name, value in lines.items()
    ]
    return "\n".join([*shown, "", printable_lines(_text(item["traceback"]).rstrip())])


def _text(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
