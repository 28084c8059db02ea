"""Jobs of each mode, in a process that dies at a point of `tests.apps.deaths`."""

from __future__ import annotations

import os
from typing import Any

import qdo
from qdo import Message
from qdo.brokers.embedded.dead_letters import EmbeddedDeadLetters
from qdo.brokers.embedded.reader import EmbeddedReader
from qdo.coordination.member import Member
from qdo.coordination.protocol.checkpoints import Checkpoints
from tests.apps.deaths import around, reach

out = os.open("out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


around(EmbeddedReader, "fetch", "fetch")
around(EmbeddedDeadLetters, "store", "dead-letter")
around(Checkpoints, "_send", "checkpoint")
around(Checkpoints, "_recorded", "answer")
around(Member, "finished", "release")

app = qdo.App("mortal", backoff_seconds=0.02, backoff_max_seconds=0.1)


def run(message: Message) -> None:
    reach("before-job")
    os.write(out, f"start {message.queue} {message.body} {message.fence}\n".encode())
    reach("within-job")
    if message.body == "bad":
        raise ValueError("no")
    os.write(out, f"done {message.queue} {message.body} {message.fence}\n".encode())
    reach("after-job")


mode: Any = os.environ["MODE"]
policy = qdo.Policy(attempts=2, backoff_seconds=0.02)
if mode == "batch":

    @app.job(batch=3, policy=policy)
    def job_of_batches(batch: list[Message], context: object) -> None:
        for index, message in enumerate(batch):
            try:
                run(message)
            except ValueError as error:
                raise qdo.FailedAt(index) from error

elif mode == "key":

    @app.job(order="key", policy=policy)
    def job(message: Message, context: object) -> None:
        run(message)

else:

    @app.job(checkpoint=mode, policy=policy)
    def job(message: Message, context: object) -> None:
        run(message)
