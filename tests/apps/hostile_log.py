"""Jobs and hooks whose errors have hostile texts."""

from __future__ import annotations

import qdo
from qdo import Message
from tests.support.fakes.hostile_text import HOSTILE, TEXT

app = qdo.App("a", attempts=2, backoff_seconds=0.01, log_level="debug")
Odd = type(TEXT.replace("\0", ""), (Exception,), {})


class Worse(Exception):
    def __str__(self) -> str:
        raise ValueError(HOSTILE)


@app.observer
def observe(event: object) -> None:
    raise ValueError(HOSTILE)


@app.failure
def failed(message: Message, context: object, error: BaseException) -> None:
    raise Odd(HOSTILE)


@app.job("batch-*", batch=5)
def batch(messages: list[Message], context: object) -> None:
    raise ValueError(HOSTILE)


@app.job("process-*", executor="process")
def process(message: Message, context: object) -> None:
    raise ValueError(HOSTILE)


@app.job("*")
def job(message: Message, context: object) -> None:
    kinds = [qdo.Skip, qdo.DeadLetter, ValueError, Odd, qdo.Stop]
    if message.body == "wait" and message.attempt == 1:
        raise qdo.Retry(0.01)
    if message.body == "worse":
        raise Worse()
    if isinstance(message.body, int):
        raise kinds[message.body](HOSTILE)
