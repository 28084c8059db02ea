"""Filters of workers: which queues they take, and how they stand in a worker's node."""

from __future__ import annotations

import json
import logging

import pytest

from qdo.app import App
from qdo.coordination.znodes.worker_node import WorkerNode
from qdo.message import Message
from qdo.queues import EVERYTHING, MAX_GLOBS_CHARACTERS, POOL, QueueFilter, why_untaken
from qdo.settings.settings import Settings
from qdo.worker.worker import filter_of


@pytest.mark.parametrize(
    ("queues", "exclude", "taken", "left"),
    [
        (("*",), (), ["a", ""], []),
        (("mail-*",), (), ["mail-1"], ["sms-1", "xmail-1", "Mail-1"]),
        (("mail-*", "sms-?"), (), ["mail-1", "sms-1"], ["sms-10"]),
        (("*",), ("mail-*",), ["sms-1"], ["mail-1"]),
        (("mail-*", "sms-*"), ("*-vip", "sms-9"), ["mail-1", "sms-1"], ["mail-vip", "sms-9", "x"]),
    ],
)
def test_what_a_filter_takes(
    queues: tuple[str, ...], exclude: tuple[str, ...], taken: list[str], left: list[str]
) -> None:
    """One glob of `queues` must match the whole name, and none of `exclude`."""
    takes = QueueFilter(queues, exclude)
    assert [takes.takes(name) for name in taken] == [True] * len(taken)
    assert [takes.takes(name) for name in left] == [False] * len(left)


def test_a_filter_takes_only_queues_with_a_job() -> None:
    """A glob of each kind must match; without a star, it does not take everything."""
    takes = QueueFilter(("mail-*", "sms-*"), ("*-vip",), jobs=("mail-*", "fax-*"))
    names = ["mail-1", "mail-vip", "sms-1", "fax-1"]
    assert [name for name in names if takes.takes(name)] == ["mail-1"]
    assert not QueueFilter(jobs=("mail-*",)).everything
    assert QueueFilter(jobs=("mail-*", "*")).everything
    assert not QueueFilter(jobs=()).takes("mail-1")


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        ([], None),
        ([EVERYTHING], None),
        ([QueueFilter(jobs=("sms-*",)), QueueFilter(jobs=("mail-*",))], None),
        ([QueueFilter(jobs=("sms-*",))], "no job"),
        ([QueueFilter(("sms-*",), jobs=("sms-*",))], "no job"),
        ([QueueFilter(("sms-*",))], "excluded by all workers"),
        ([QueueFilter(exclude=("mail-1",), pools=("mail-1",))], POOL),
        (
            [QueueFilter(exclude=("mail-*",)), QueueFilter(jobs=("sms-*",))],
            "excluded by all workers",
        ),
    ],
)
def test_an_untaken_queue_has_a_reason(filters: list[QueueFilter], reason: str | None) -> None:
    """A missing job comes first: without it, another setting would not help."""
    assert why_untaken("mail-1", filters) == reason


def test_a_filter_is_shown_as_it_is_given() -> None:
    """Logs and listings can be copied to a command line."""
    assert str(EVERYTHING) == ""
    assert str(QueueFilter(("a*", "b"), ("c",))) == "--queues a* --queues b --exclude c"
    assert str(QueueFilter(exclude=("c",))) == "--exclude c"


def test_everything() -> None:
    """A star takes everything, whatever stands beside it, unless something is left out."""
    assert EVERYTHING.everything
    assert QueueFilter(("a", "*")).everything
    assert not QueueFilter(("a",)).everything
    assert not QueueFilter(("*",), ("a",)).everything


def test_a_worker_node_says_what_its_worker_takes() -> None:
    """Beside the published keys, and only where it is not everything."""
    node = WorkerNode(("mail-1",), filter=QueueFilter(("mail-*",), ("mail-vip",)))
    assert json.loads(node.encode()) == {
        "queues": ["mail-1"],
        "filter": {"queues": ["mail-*"], "exclude": ["mail-vip"]},
    }
    assert WorkerNode.parse(node.encode()) == node
    assert json.loads(WorkerNode(("a",)).encode()) == {"queues": ["a"]}
    jobs = WorkerNode((), filter=QueueFilter(jobs=("mail-*",)))
    assert json.loads(jobs.encode())["filter"] == {
        "queues": ["*"],
        "exclude": [],
        "jobs": ["mail-*"],
    }
    assert WorkerNode.parse(jobs.encode()) == jobs
    pools = WorkerNode((), filter=QueueFilter(exclude=("x", "build-*"), pools=("build-*",)))
    assert json.loads(pools.encode())["filter"]["pools"] == ["build-*"]
    assert WorkerNode.parse(pools.encode()) == pools


def test_a_worker_takes_pools_beside_queues() -> None:
    """Only the settings restrict them; what it excludes itself is not one of its pools."""
    takes = QueueFilter(("b*",), ("build-us", "build-*"), ("*",), ("build-*",))
    assert str(takes) == "--queues b* --exclude build-us"
    pools = takes.of_pools()
    assert [name for name in ("build-eu", "build-us", "bill") if pools.takes(name)] == ["build-eu"]
    assert not takes.takes("build-eu")
    assert not EVERYTHING.of_pools().takes("build-eu")


@pytest.mark.parametrize(
    "takes", [None, 3, "mail-*", [], {}, {"queues": "mail-*"}, {"queues": []}, {"queues": [3]}]
)
def test_nodes_without_a_readable_filter_mean_everything(takes: object) -> None:
    """So are those of workers that know nothing of filters."""
    data = json.dumps({"queues": ["a"], "filter": takes}).encode()
    assert WorkerNode.parse(data) == WorkerNode(("a",))
    assert WorkerNode.parse(b'{"queues": ["a"]}').filter == EVERYTHING


def test_nodes_with_too_long_globs_mean_everything() -> None:
    """Compiling them would stop the event loop of the rebalancer for seconds."""
    globs = ("*q*",) * (MAX_GLOBS_CHARACTERS // 3)
    for takes in (QueueFilter(globs), QueueFilter(exclude=globs), QueueFilter(jobs=globs)):
        node = WorkerNode(filter=takes)
        assert WorkerNode.parse(node.encode()) == node
    for takes in (
        QueueFilter((*globs, "mail")),
        QueueFilter(exclude=(*globs, "mail")),
        QueueFilter(jobs=(*globs, "mail")),
    ):
        assert WorkerNode.parse(WorkerNode(filter=takes).encode()).filter == EVERYTHING


# --- of a worker's jobs --------------------------------------------------------------------


def app_with(*globs: str) -> App:
    app = App("a")

    def work(message: Message, context: object) -> None:
        """Do nothing."""

    for glob in globs:
        app.job(glob)(work)
    return app


def test_a_filter_has_the_settings_and_the_globs_of_the_jobs() -> None:
    """In an order of its own: equal apps have equal filters."""
    settings = Settings(queues=("m*",), exclude=("mx",))
    expected = QueueFilter(("m*",), ("mx",), ("mail-*", "sms-*"))
    assert filter_of(app_with("sms-*", "mail-*"), settings) == expected
    assert filter_of(app_with("mail-*", "sms-*"), settings) == expected


def test_a_job_for_every_queue_hides_the_others() -> None:
    """The node of such a worker stays as short as ever."""
    assert filter_of(app_with("mail-*", "*"), Settings()) == QueueFilter()


def test_too_many_globs_are_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    """The worker then takes every queue, and the log says so."""
    globs = [f"{n:050}-*" for n in range(400)]
    with caplog.at_level(logging.WARNING):
        assert filter_of(app_with(*globs[:300]), Settings()).jobs == tuple(globs[:300])
        assert not caplog.records
        assert filter_of(app_with(*globs), Settings()) == QueueFilter()
    [record] = caplog.records
    assert record.args == (400 * 52, MAX_GLOBS_CHARACTERS)


def test_pools_are_announced_and_are_no_queues() -> None:
    """A pool that the settings exclude is not one of the worker's."""
    app = app_with("mail-*")
    for glob in ("sms", "build-*"):
        app.job(glob, pool=True)(lambda request, context: None)
    expected = QueueFilter(("*",), ("sms", "build-*"), ("mail-*",), ("build-*",))
    assert filter_of(app, Settings(exclude=("sms",))) == expected
