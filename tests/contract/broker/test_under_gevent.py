"""The broker under gevent: the whole contract again, and the event loop is never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

_CONTRACT = """
import gevent.monkey
gevent.monkey.patch_all()
import sys, pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--basetemp", *sys.argv[1:]]))
"""

_WAITING = """
import gevent.monkey
gevent.monkey.patch_all()
import sqlite3, sys
import gevent
from qdo.brokers.registry import open_broker
from qdo.brokers.base import Outgoing

broker = open_broker("sqlite:" + sys.argv[1], "app")
other = sqlite3.connect(sys.argv[1], isolation_level=None)
other.execute("BEGIN IMMEDIATE")
sends = [gevent.spawn(broker.send, Outgoing("q", b"%d" % number)) for number in range(100)]
turns = 0
with gevent.Timeout(0.3, False):
    while True:
        gevent.sleep(0.001)
        turns += 1
print("turns", turns > 50, "sent", sum(each.ready() for each in sends))
before = broker.commits
sends[40].kill()
other.execute("COMMIT")
gevent.joinall(sends, timeout=20, raise_error=True)
print("sent", sum(each.successful() for each in sends), "shared", broker.commits - before <= 3)
print("stored", broker.catalog.backlog("q", 0).count)
broker.close()
"""

_OPENING = """
import gevent.monkey
gevent.monkey.patch_all()
import sys
import gevent
import qdo
from qdo.system.home_loop import home_loop
from qdo.system.native import start_thread

with home_loop(), gevent.Timeout(60):
    for _ in range(10):
        app, opened = qdo.App("app", broker="sqlite:" + sys.argv[1]), []
        for _ in range(4):
            start_thread(lambda: opened.append(app.broker))
            gevent.spawn(lambda: opened.append(app.broker))
        while len(opened) < 8:
            gevent.sleep(0.001)
        print(len({*map(id, opened)}))
        app.close()
"""

_PLAIN = """
import sys
from qdo.brokers.registry import open_broker
from qdo.brokers.base import Outgoing

broker = open_broker(sys.argv[1], "app")
broker.listen(print)()
broker.send(Outgoing("q", b"1"))
broker.close()
print("gevent" in sys.modules)
"""


def run(code: str, *arguments: str, timeout_seconds: float = 110.0) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long("contracts of brokers a second time")
@pytest.mark.slow
@pytest.mark.timeout(310)  # of a whole file: each of its tests has the usual limit
@pytest.mark.parametrize(
    ("part", "chosen"),
    [
        ("test_broker", "not memory"),
        ("test_send_options", "not memory"),
        ("test_dead_letters", "not memory"),
        ("test_consuming", "not memory"),
        ("test_sqs", "owner or forked or answer or poll or s3"),
        ("test_kinesis", "owner or subscription or proxy"),
    ],
)
def test_the_contract_holds_under_gevent(tmp_path: Path, part: str, chosen: str) -> None:
    """Tests of these files pass in a process that gevent has patched.

    Not those of the broker in memory, which does no I/O. With AWS, those with threads, sockets and
    subscriptions: the others make the same requests.
    """
    contract = Path(__file__).with_name(f"{part}.py")
    patched = str(tmp_path / "patched")
    done = run(_CONTRACT, patched, str(contract), "-k", chosen, timeout_seconds=300.0)
    assert " passed" in done


def test_waiting_for_the_write_lock_lets_other_greenlets_run(tmp_path: Path) -> None:
    """A hundred sends wait for another process while the loop keeps running; then they share
    commits. The message of a killed greenlet is stored too. Other greenlets are not affected."""
    said = run(_WAITING, str(tmp_path / "m.db")).splitlines()
    assert said == ["turns True sent 0", "sent 100 shared True", "stored 100"] or said == [
        "turns True sent 0",
        "sent 99 shared True",
        "stored 100",
    ]


def test_jobs_in_threads_open_the_broker_of_their_app_once(tmp_path: Path) -> None:
    """Jobs in threads and in greenlets need it at the same time, and each of them gets it."""
    assert run(_OPENING, str(tmp_path / "m.db")).split() == ["1"] * 10


def test_gevent_is_not_imported_where_it_is_not_used(tmp_path: Path) -> None:
    """A plain process that only sends does without it."""
    assert run(_PLAIN, f"sqlite:{tmp_path / 'm.db'}").strip() == "False"


def test_nor_by_who_sends_to_sqs(moto_url: str, aws_prefix: str) -> None:
    """boto3 does without it as well."""
    url = f"sqs://eu-west-1/{aws_prefix}?create=standard&endpoint={moto_url}"
    assert run(_PLAIN, url).strip() == "False"
