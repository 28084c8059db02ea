"""Sections over queues: no job of them runs meanwhile, whatever happens to their makers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo import App
from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.errors import HoldNotObeyedError, QueueNameError, SectionLostError, UsageError
from qdo.fleet.hold_machine import HoldNode
from qdo.fleet.holds import add_hold, end_holds, new_hold, resume_hold
from qdo.testing import TestKit
from tests.support.paths import ROOT
from tests.support.processes import Proc, freeze, wait_until, whole_lines

LAYOUT = Layout.of("shop")
JOBS = """
import os, time, qdo

app = qdo.App("shop")
said = os.open("said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.job("*", order="none", concurrency=2)
def job(message, context):
    os.write(said, f"begin {message.queue} {time.monotonic()}\\n".encode())
    time.sleep(message.body)
    os.write(said, f"end {message.queue} {time.monotonic()}\\n".encode())
"""
MAKER = """
import os, sys, time
from qdo import App

app = App("shop", coordinator=sys.argv[1], session_timeout_seconds=1)
said = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
with app.exclusive("tenant-*", reason="migration", timeout_seconds=30) as section:
    print("in", flush=True)
    time.sleep(float(sys.argv[3]))
"""


class SectionShop:
    """The app, its folder and its processes."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.broker = f"sqlite:{folder / 'messages.db'}"
        (folder / "shop.py").write_text(JOBS)
        self.app = App(
            "shop", broker=self.broker, coordinator=coordinator, session_timeout_seconds=1
        )

    def worker(self) -> Proc:
        return Proc.python(
            *("-m", "qdo.cli.worker", "shop:app", "--processes", "2"),
            *("--broker", self.broker, "--coordinator", self.coordinator),
            cwd=self.folder,
            env={"PYTHONPATH": str(ROOT)},
        )

    def maker(self, seconds: float) -> Proc:
        argv = ("-c", MAKER, self.coordinator, str(self.folder / "said"), str(seconds))
        return Proc.python(*argv, env={"PYTHONPATH": str(ROOT)})

    def said(self) -> list[tuple[str, str, float]]:
        lines = (line.split() for line in whole_lines(self.folder / "said"))
        return [(word, queue, float(at)) for word, queue, at in lines]

    def count(self, word: str, queue: str) -> int:
        return sum(line[:2] == (word, queue) for line in self.said())


@pytest.fixture
def shop(tmp_path: Path, coordinator_url: str) -> Iterator[SectionShop]:
    made = SectionShop(tmp_path, coordinator_url)
    (tmp_path / "said").touch()
    yield made
    made.app.close()


def test_nothing_runs_within_a_section(shop: SectionShop) -> None:
    """Jobs in flight end before it begins; other queues go on; all continue after it."""
    with shop.worker():
        shop.app.send_many([("tenant-1", 0.02), ("other", 0.02)] * 200)
        for number in range(3):
            wait_until(lambda: shop.count("begin", "tenant-1") > 0, "a job of the queue")
            with shop.app.exclusive("tenant-*", reason="migration") as section:
                began = time.monotonic()
                others = shop.count("end", "other")
                wait_until(
                    lambda others=others: shop.count("end", "other") >= others + 10,  # type: ignore[misc]
                    "other queues go on",
                )
                section.check()
                ended = time.monotonic()
            within = [
                line for line in shop.said() if line[1] == "tenant-1" and began < line[2] < ended
            ]
            assert within == [], number
            done = shop.count("end", "tenant-1")
            wait_until(
                lambda done=done: shop.count("end", "tenant-1") > done,  # type: ignore[misc]
                "the queue continues",
            )


def test_a_section_ends_with_its_maker(shop: SectionShop, outsider: Client) -> None:
    """Killed or frozen: the queues continue by themselves, and the hold is taken out."""
    with shop.worker():
        shop.app.send("tenant-1", 0)
        wait_until(lambda: shop.count("end", "tenant-1") == 1, "the fleet works")
        for number, frozen in enumerate((False, True)):
            with shop.maker(60) as maker:
                maker.wait_for_line("^in$")
                shop.app.send("tenant-1", 0)
                with contextlib.ExitStack() as stack:
                    if frozen:
                        freeze(maker.pid, shop.coordinator)
                        stack.callback(os.kill, maker.pid, signal.SIGCONT)
                    else:
                        maker.send(signal.SIGKILL)
                    wait_until(
                        lambda number=number: shop.count("end", "tenant-1") == number + 2,  # type: ignore[misc]
                        "the queue continues",
                    )
            wait_until(
                lambda: HoldNode.parse(outsider.get(LAYOUT.fleet.holds)[0]).holds == (),
                "the hold is taken out",
            )


def test_a_section_is_lost_when_an_operator_ends_it(shop: SectionShop, outsider: Client) -> None:
    """Also if other holds change before, and with its node."""
    for number in range(3):
        pause = new_hold(["other-*"])
        with shop.app.exclusive("tenant-*", timeout_seconds=30) as section:
            add_hold(outsider, LAYOUT, pause)
            end_holds(outsider, LAYOUT, [pause.id])
            (hold,) = HoldNode.parse(outsider.get(LAYOUT.fleet.holds)[0]).holds
            section.check()
            if number == 2:
                outsider.delete(LAYOUT.fleet.holds)
            else:
                resume_hold(outsider, LAYOUT, hold.id, "by mistake")
            wait_until(lambda lost=section: not lost.valid, "the section is lost")  # type: ignore[misc]
            with pytest.raises(SectionLostError) as caught:
                section.check()
            assert "operator" in caught.value.details["reason"]


def test_a_section_that_cannot_begin_is_lifted(shop: SectionShop) -> None:
    """It names the workers that it waits for; a later section waits for an earlier one."""
    with shop.worker(), App("shop", coordinator=shop.coordinator) as other:
        shop.app.send("tenant-1", 1.5)
        wait_until(lambda: shop.count("begin", "tenant-1") == 1, "a long job")
        with pytest.raises(HoldNotObeyedError) as caught:
            shop.app.exclusive("tenant-*", timeout_seconds=0.2).__enter__()
        assert "worker-" in caught.value.details["names"]
        shop.app.send("tenant-1", 0)
        wait_until(lambda: shop.count("end", "tenant-1") == 2, "the queue goes on")
        with shop.app.exclusive("tenant-*", timeout_seconds=30):
            with (
                pytest.raises(HoldNotObeyedError) as caught,
                other.exclusive("tenant-1", timeout_seconds=0.3),
            ):
                pass
            assert "section" in caught.value.details["names"]
            with other.exclusive("other", timeout_seconds=30):
                pass


def test_bad_calls(shop: SectionShop) -> None:
    with pytest.raises(UsageError), shop.app.exclusive():
        pass
    with pytest.raises(QueueNameError), shop.app.exclusive("a/b"):
        pass


def test_sections_in_the_kit() -> None:
    app = App("shop", coordinator="zookeeper://127.0.0.1:1")
    with TestKit(app):
        with app.exclusive("tenant-*") as section:
            section.check()
        with pytest.raises(SectionLostError):
            section.check()
