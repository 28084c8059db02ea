"""Prints every message: a minimal job, and a way to check that messages arrive.

qdo-worker --app hello --job qdo.programs.echo:job
qdo send --app hello greetings '{"name": "Ada"}'
"""

from __future__ import annotations

from typing import Any

import ujson

from qdo import App, Message

app = App("echo")


@app.job()
def job(message: Message, context: Any) -> None:
    """Print the id, queue, key and body of a message as one line."""
    body = ujson.dumps(message.body, ensure_ascii=False, escape_forward_slashes=False)
    print(message.id, message.queue, message.key or "-", body, flush=True)
