"""Brokers between real processes that are forked and killed: order, durability, delays, keys."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from qdo.brokers.base import Broker, Outgoing, SendOptions
from qdo.brokers.registry import open_broker
from qdo.positions import message_id
from qdo.testing.contracts.fixtures import dead_letter
from tests.support.paths import ROOT
from tests.support.processes import child, said, wait_until

_OPEN = """
import os, signal, sys, threading, time
from qdo.brokers.base import Outgoing, SendOptions
from qdo.brokers.embedded import delayed
from qdo.brokers.registry import open_broker

url, *arguments = sys.argv[1:]
broker = open_broker(url, "app")
"""
"""How the programs that `running` starts begin."""

_SEND = """
def send(thread):
    for number in range(40):
        broker.send(Outgoing(f"q{number % 2}", f"{arguments[0]}.{thread} {number}".encode()))

threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
sys.stdin.readline()
for thread in threads: thread.start()
for thread in threads: thread.join()
broker.close()
print("done", broker.commits)
"""

_SEND_FOR_EVER = """
number = 0
while True:
    ids = [broker.send(Outgoing("q", b"single"))]
    print(*ids, flush=True)
    ids = broker.send_many([Outgoing("q", b"batch %d %d" % (number, n)) for n in range(20)])
    print(*ids, flush=True)
    number += 1
"""

_FORK = """
import os, sys, threading
from qdo.app import App

app = App("app", broker=sys.argv[1])
app.send("parent", 0)
stop = threading.Event()

def send():
    while not stop.is_set():
        app.send("parent", 0)

threads = [threading.Thread(target=send) for _ in range(2)]
for thread in threads: thread.start()
asked, told = os.pipe()
children = []
for child in range(6):
    pid = os.fork()
    if pid == 0:
        os.close(told)
        for number in range(10): app.send(f"child-{child}", number)
        os.read(asked, 1)  # until the parent has closed the broker
        for number in range(10, 20): app.send(f"child-{child}", number)
        if child % 2:
            app.close()
            os._exit(0)
        sys.exit(0)
    children.append(pid)
stop.set()
for thread in threads: thread.join()
app.close()
os.close(told)
print(*(os.waitpid(pid, 0)[1] for pid in children))
"""

_FORK_CLOSED = """
def fill():
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]

def untouched(files):
    null = os.stat(os.devnull)  # a number may be open and be another file by now
    return all(os.path.samestat(os.fstat(file), null) for file in files)

def fork(work):
    pid = os.fork()
    if pid == 0:
        try:
            well = work()
        except OSError:
            well = False
        os._exit(0 if well else 1)
    return os.waitpid(pid, 0)[1] == 0

def forks():
    files = fill()
    return fork(lambda: untouched(files))

broker.send(Outgoing("q", b"1"))
broker.close()
print("closed", forks(), flush=True)
opened = open_broker(url, "app")
opened.send(Outgoing("q", b"2"))
print("opened", fork(forks), flush=True)
opened.send(Outgoing("q", b"3"))
opened.close()
"""

_FORK_OPENING = """
import os, signal, sys, threading

def while_forking():
    opening.start()
    writing.wait(1)  # in vain, as the other thread waits for the end of the fork

os.register_at_fork(before=while_forking)  # called once qdo is ready for the fork

from qdo.brokers.registry import open_broker
from qdo.brokers.base import Outgoing
from qdo.brokers.embedded.broker import EmbeddedBroker
from qdo.positions import position_now

url = sys.argv[1]
first = open_broker(url, "app")
first.send(Outgoing("q", b"1"))
writing, forked = threading.Event(), threading.Event()

def slow_clock():
    writing.set()
    forked.wait(30)
    return position_now()

def open_and_send():
    second = EmbeddedBroker(url.removeprefix("sqlite:"), "app", clock=slow_clock)
    second.send(Outgoing("q", b"2"))
    second.close()

opening = threading.Thread(target=open_and_send)
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    own = open_broker(url, "app")
    own.send(Outgoing("q", b"3"))
    own.close()
    os._exit(0)
forked.set()
opening.join()
first.close()
print(os.waitpid(pid, 0)[1])
"""

_FORK_READING = """
broker.send(Outgoing("q", b"1"))
reads = {
    "queues": broker.catalog.names,
    "backlog": lambda: broker.catalog.backlog("q", 0),
    "fetch": lambda: broker.reader("q", 0).fetch(1),
    "dead letters": broker.dead_letters.records,
}
reading, forked = threading.Event(), threading.Event()

def within_sqlite(statement):
    reading.set()
    forked.wait(0.5)  # in vain, as the fork waits for the end of the reading

for name, read in reads.items():
    reading.clear()
    forked.clear()
    broker.tables.reading.set_trace_callback(within_sqlite)
    reader = threading.Thread(target=read)
    reader.start()
    reading.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        broker.close()
        own = open_broker(url, "app")
        own.send(Outgoing("q", b"2"))
        own.close()
        os._exit(0)
    forked.set()
    reader.join()
    print(name, os.waitpid(pid, 0)[1], flush=True)
broker.close()
"""

_LISTEN = """
reader = broker.reader("q", 0)
end = threading.Event()

def wake(names):
    for position, body, key, headers in reader.fetch(100) if "q" in names else ():
        print(body.decode(), flush=True)
        if body == b"end":
            end.set()

stop = broker.listen(wake)
print("listening", flush=True)
end.wait(60)
stop()
broker.close()
"""


@pytest.fixture
def broker(url: str) -> Iterator[Broker]:
    broker = open_broker(url, "app")
    yield broker
    broker.close()


def running(
    code: str, url: str, *arguments: str, kill: bool = False
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run a program with a broker."""
    return child(_OPEN + code, url, *arguments, kill=kill)


def kill(process: subprocess.Popen[str]) -> str:
    """Kill a process with kill -9; return the complete lines that it had printed."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    rest = process.stdout.read() if process.stdout else ""
    return rest.rpartition("\n")[0]


def go(*processes: subprocess.Popen[str]) -> None:
    """Let processes begin at once."""
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()


def test_senders_of_several_processes_each_keep_their_order(url: str, broker: Broker) -> None:
    """Three processes with four threads each: nothing lost, positions grow, orders kept."""
    with (
        running(_SEND, url, "0") as one,
        running(_SEND, url, "1") as two,
        running(_SEND, url, "2") as x,
    ):
        go(one, two, x)
        assert [said(process).split()[0] for process in (one, two, x)] == ["done"] * 3
    seen: set[int] = set()
    for parity in range(2):
        rows = broker.reader(f"q{parity}", 0).fetch(10_000)
        positions = [row[0] for row in rows]
        assert positions == sorted(set(positions))
        seen.update(positions)
        for sender in (f"{process}.{thread}" for process in range(3) for thread in range(4)):
            mine = [row[1].decode().split() for row in rows]
            numbers = [int(number) for name, number in mine if name == sender]
            assert numbers == list(range(parity, 40, 2))
    assert len(seen) == 3 * 4 * 40


def test_what_a_killed_sender_was_told_is_stored(url: str, broker: Broker) -> None:
    """kill -9 at random moments: every acknowledged id is there, in order, batches whole."""
    chance = random.Random(20120129)
    acknowledged: list[str] = []
    for _ in range(6):
        with running(_SEND_FOR_EVER, url) as sender:
            for _ in range(chance.randrange(1, 60)):
                acknowledged.extend(said(sender).split())
            acknowledged.extend(kill(sender).split())
    rows = broker.reader("q", 0).fetch(1_000_000)
    stored = [message_id(row[0], broker.id_node) for row in rows]
    known = set(acknowledged)
    assert len(acknowledged) == len(known) > 20
    assert [each for each in stored if each in known] == acknowledged
    # Of each killed sender at most its last call may be stored without having been reported.
    assert len(stored) - len(acknowledged) <= 6 * 21
    batches = [row[1] for row in rows if row[1].startswith(b"batch")]
    assert len(batches) % 20 == 0
    assert all(batches[n].endswith(b" %d" % (n % 20)) for n in range(len(batches)))
    assert broker.catalog.backlog("q", 0).count == len(rows)


def test_a_listener_in_another_process_is_woken(url: str, broker: Broker) -> None:
    """It waits without polling, and is notified of a new queue and of each message."""
    with running(_LISTEN, url) as listener:
        assert said(listener) == "listening"
        for body in ("one", "two", "end"):
            broker.send(Outgoing("q", body.encode()))
            assert said(listener) == body


def test_a_dead_listener_does_not_disturb(url: str, broker: Broker) -> None:
    """kill -9 leaves its wakeup pipe behind; senders continue, and others are still woken."""
    with running(_LISTEN, url) as dead, running(_LISTEN, url) as living:
        assert (said(dead), said(living)) == ("listening", "listening")
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        broker.send(Outgoing("q", b"end"))
        assert said(living) == "end"


def forking(code: str, url: str) -> tuple[str, str]:
    """Return the output and the errors of a process that forks."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout, done.stderr


def test_forked_processes_send_as_their_parent_does(url: str, broker: Broker) -> None:
    """Forked amid its commits, and still sending after it has closed the broker."""
    assert forking(_FORK, url) == ("0 0 0 0 0 0\n", "")
    for each in range(6):
        rows = broker.reader(f"child-{each}", 0).fetch(100)
        assert [row[1] for row in rows] == [b"%d" % number for number in range(20)]


def test_forks_close_nobody_elses_files(url: str, broker: Broker) -> None:
    """Not after the broker was closed, and not in the children of a child."""
    assert forking(_OPEN + _FORK_CLOSED, url) == ("closed True\nopened True\n", "")
    assert broker.catalog.backlog("q", 0).count == 3


def test_no_fork_breaks_the_transaction_of_an_opening_broker(url: str, broker: Broker) -> None:
    """Opening waits for a fork that is under way: the child could never write otherwise."""
    assert forking(_FORK_OPENING, url) == ("0\n", "")
    assert sorted(row[1] for row in broker.reader("q", 0).fetch(9)) == [b"1", b"2", b"3"]


def test_no_fork_happens_while_a_thread_reads(url: str) -> None:
    """The child would wait forever for a mutex that the thread held."""
    well = "queues 0\nbacklog 0\nfetch 0\ndead letters 0\n"
    assert forking(_OPEN + _FORK_READING, url) == (well, "")


# --- delays, keys and retried dead letters -------------------------------------------------


_MOVE = """
delayed.MOVE_MESSAGES = 7
broker.listen(lambda names: None)
sys.stdin.read()
"""

_DELAY_FOR_EVER = """
number = 0
while True:
    due = time.time() + 0.02 * (number % 5)
    body = f"{arguments[0]}.{number}".encode()
    print(broker.send(Outgoing("q", body, terms=SendOptions(due))), flush=True)
    number += 1
"""

_RETRY_FOR_EVER = """
while letters := broker.dead_letters.find()[:2]:
    broker.dead_letters.retry([(each.queue, each.position) for each in letters])
    print("retried", flush=True)
"""

_ONCE = """
sys.stdin.readline()
for number in range(100):
    print(broker.send(Outgoing("q", b"%d" % number, terms=SendOptions(None, f"key-{number}"))))
broker.close()
"""


def stored(broker: Broker, name: str) -> list[bytes]:
    return [row[1] for row in broker.reader(name, 0).fetch(1_000_000)]


def test_whoever_moves_may_be_killed_at_any_moment(url: str, broker: Broker) -> None:
    """While two processes move and are killed again and again, every message arrives once, and
    in the order of the due times."""
    chance = random.Random(20120129)
    now = time.time()
    total = 600
    batch = [
        Outgoing("q", b"%d" % number, terms=SendOptions(now + 1.0 + 0.005 * number))
        for number in range(total)
    ]
    chance.shuffle(batch)
    broker.send_many(batch)
    kills = 0
    while left := broker.catalog.backlog("q", 0).delayed:
        enough = max(0, left - chance.randrange(1, 80))
        with running(_MOVE, url, kill=True) as one, running(_MOVE, url, kill=True) as two:
            wait_until(lambda: broker.catalog.backlog("q", 0).delayed <= enough, "some have moved")  # noqa: B023
            kill(one)
            kill(two)
            kills += 1
    assert kills > 3
    found = [int(body) for body in stored(broker, "q")]
    assert Counter(found) == Counter(range(total))
    assert found == sorted(found)
    assert broker.catalog.backlog("q", 0).count == total


def test_what_a_killed_sender_was_told_will_arrive(url: str, broker: Broker) -> None:
    """kill -9 between storing and moving: acknowledged messages arrive, once."""
    acknowledged: list[str] = []
    for process in range(4):
        with running(_DELAY_FOR_EVER, url, str(process), kill=True) as sender:
            acknowledged.extend(said(sender) for _ in range(40))
            acknowledged.extend(kill(sender).split())
    stop = broker.listen(lambda names: None)
    wait_until(lambda: broker.catalog.backlog("q", 0).delayed == 0, "all have moved")
    stop()
    bodies = stored(broker, "q")
    assert len(bodies) == len(set(bodies))
    for process in range(4):
        mine = {int(body.split(b".")[1]) for body in bodies if body.startswith(b"%d." % process)}
        assert mine == set(range(len(mine)))
    assert len(acknowledged) <= len(bodies) <= len(acknowledged) + 4


def test_a_letter_is_always_a_letter_or_a_message(url: str, broker: Broker) -> None:
    """A process that retries dead letters may be killed at any time: none is lost or doubled."""
    for number in range(600):
        body = b"%d" % number
        broker.dead_letters.store(
            dead_letter(position=number + 1, body=body, dead_at=float(number))
        )
    everything = Counter(b"%d" % number for number in range(600))
    chance = random.Random(20120129)
    for _ in range(8):
        with running(_RETRY_FOR_EVER, url, kill=True) as operator:
            for _ in range(chance.randrange(1, 6)):
                said(operator)
            kill(operator)
        letters = [letter.body for letter in broker.dead_letters.records("q")]
        assert Counter(stored(broker, "q") + letters) == everything
    assert stored(broker, "q")


def test_senders_of_several_processes_share_keys(url: str, broker: Broker) -> None:
    """Each key is stored once, whichever sender is first, and all senders get the same id."""
    with running(_ONCE, url) as one, running(_ONCE, url) as two, running(_ONCE, url) as three:
        go(one, two, three)
        told = [[said(each) for _ in range(100)] for each in (one, two, three)]
    assert told[0] == told[1] == told[2]
    assert len(set(told[0])) == 100
    assert sorted(map(int, stored(broker, "q"))) == list(range(100))
