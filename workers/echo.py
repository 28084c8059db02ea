"""Prints every message. This is a minimal job, and a way to check that messages arrive.

qdo-worker --app hello --job qdo.programs.echo:job
qdo send --app hello greetings '{"name": "Ada"}'
"""

from __future__ import annotations

from typing import Any

from qdo import App, Message
from qdo.programs._json import json_bytes

app = App("echo")


@app.job()
def job(message: Message, context: Any) -> None:
    """Print the id, queue, key and body of a message as one line."""
    body = json_bytes(message.body).decode()
    print(message.id, message.queue, message.key or "-", body, flush=True)
