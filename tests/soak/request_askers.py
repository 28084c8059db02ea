"""A process that asks: ``python -m tests.soak.request_askers SEED COUNT LEDGER``.

It asks in batches, cancels, asks again with the same ids, and lets cancelled requests run after
all. A line of the ledger is JSON: ``wish`` has ids before they are asked for, ``asked`` those that
the broker has stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qdo.errors import QdoError, RequestStateError
from qdo.ops.requests import retry
from tests.soak.broker_server import REPEAT_SECONDS
from tests.soak.request_app import QUEUES, app
from tests.support.processes import whole_lines

WEIGHTS = {"green": 450, "co": 250, "thread": 200, "process": 97, "rated": 3}
KINDS = {"quick": 940, "long": 10, "fail": 35, "skip": 5, "letter": 5, "pause": 3, "die": 1}
SHORT_LIVED_SECONDS = 1.0
MOST_WAITING = 3000
"""Beyond it, askers wait."""


def choose(dice: random.Random, weights: dict[str, int]) -> str:
    """Return a name as often as its weight says."""
    return dice.choices([*weights], [*weights.values()])[0]


class Asker:
    """Asks until it has asked for `count` requests."""

    def __init__(self, seed: int, count: int, ledger: Path) -> None:
        self._seed = seed
        self._left = count
        self._dice = random.Random(seed)
        self._number = 0
        self._file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def run(self) -> None:
        """Ask for all."""
        while self._left > 0:
            with contextlib.suppress(QdoError):  # the broker is away; only `_ask` must succeed
                while sum(each.waiting for each in app.broker.requests.counts().values()) > (
                    MOST_WAITING
                ):
                    time.sleep(REPEAT_SECONDS)
                self._change(self._ask(self._batch()))
            time.sleep(self._dice.uniform(0.0, 0.2))

    def _batch(self) -> list[dict[str, Any]]:
        dice, fixed = self._dice, self._dice.random() < 0.7
        size = min(self._left, dice.randint(1, 60))
        self._left -= size
        return [self._terms(fixed) for _ in range(size)]

    def _terms(self, fixed: bool) -> dict[str, Any]:
        dice, kind = self._dice, choose(self._dice, KINDS)
        pool = choose(dice, WEIGHTS)
        seconds = dice.uniform(2.0, 4.0) if kind == "long" else dice.uniform(0.0, 0.05)
        kind = "quick" if kind == "pause" and pool == "co" else kind
        terms: dict[str, Any] = {"pool": pool, "body": {"kind": kind, "seconds": seconds}}
        if fixed:
            self._number += 1
            terms["id"] = f"{self._seed}-{self._number}"
        if dice.random() < 0.5:
            tag = {"more": dice.random() < 0.05}
            events = dice.random() < 0.05
            terms |= {"then": dice.choice(QUEUES), "tag": tag, "events": events}
        if dice.random() < 0.1:
            terms["delay_seconds"] = dice.uniform(0.1, 3.0)
        if dice.random() < 0.1:
            terms["keep_seconds"] = SHORT_LIVED_SECONDS
        return {**terms, "priority": dice.randrange(10)}

    def _ask(self, batch: list[dict[str, Any]]) -> list[str]:
        """Ask until all are stored; only requests with ids can be asked for again."""
        ids = [each["id"] for each in batch if "id" in each]
        if ids:
            self._write(wish=ids)
        while True:
            try:
                stored = [each.id for each in app.request_many(batch)]
            except QdoError:
                if not ids:
                    raise
                time.sleep(REPEAT_SECONDS)
            else:
                self._write(asked=stored)
                break
        again = [each for each in batch if each.get("keep_seconds") != SHORT_LIVED_SECONDS]
        if ids and again and self._dice.random() < 0.2:
            app.request_many(again)
        return [each["id"] for each in again] if ids else stored

    def _change(self, ids: list[str]) -> None:
        for id in ids:
            if self._dice.random() < 0.04:
                time.sleep(self._dice.choice((0.0, 0.05)))
                app.handle(id).cancel("not needed")
                if self._dice.random() < 0.3:
                    with contextlib.suppress(RequestStateError):
                        retry(app.broker.requests, id)

    def _write(self, **line: list[str]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_asked(ledgers: Iterable[Path]) -> Iterator[tuple[str, list[str]]]:
    """Return the ids of each line, with the word "wish" or "asked"."""
    for ledger in ledgers:
        for line in whole_lines(ledger):
            yield from json.loads(line).items()


if __name__ == "__main__":
    with app:
        Asker(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])).run()
