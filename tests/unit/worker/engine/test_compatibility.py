"""Jobs that require more than the broker offers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from qdo.app import App
from qdo.brokers.base import Capabilities
from qdo.brokers.sqs.codec import SqsPositions
from qdo.errors import UsageError
from qdo.jobs.options import Order
from qdo.jobs.retry import PolicyInForce
from qdo.settings.settings import Settings
from qdo.worker import worker as worker_module
from qdo.worker.engine.jobs import check_jobs, check_pools
from qdo.worker.engine.slot import TurnResult
from qdo.worker.worker import Worker
from tests.support.fakes.member import FakeRegistrar
from tests.support.fakes.scripted_broker import ScriptedBroker, ScriptedCatalog
from tests.support.policies import in_force
from tests.support.turnstile import Turnstile


class MixedBroker(ScriptedBroker):
    """A broker whose queues are in order only where their names end in ".fifo"."""

    capabilities = Capabilities(
        ordered=True,
        seekable=False,
        countable=True,
        delay=False,
        peek=False,
        max_body_bytes=10**6,
        hold_seconds=43_200.0,
        mixed_order=True,
        checks_config=True,
    )

    def __init__(self) -> None:
        super().__init__()
        self.catalog = MixedCatalog(self)


class MixedCatalog(ScriptedCatalog):
    def order(self, queue: str) -> Order:
        self._broker.fail()
        return "queue" if queue.endswith(".fifo") else "none"


def app_of(order: Order, **options: Any) -> App:
    app = App("test")
    app.job(order=order, **options)(lambda message, context: None)
    return app


def policy(queue: str) -> PolicyInForce:
    return in_force(attempts=3)


@pytest.fixture
def broker() -> MixedBroker:
    made = MixedBroker()
    made.put("plain", b"1")
    made.put("strict.fifo", b"1")
    return made


@pytest.mark.parametrize("order", ["queue", "key"])
def test_a_worker_refuses_queues_without_the_order_of_their_job(
    broker: MixedBroker, order: Order
) -> None:
    """One line names the queues, the job and the remedy."""
    with pytest.raises(UsageError) as caught:
        check_jobs(app_of(order), broker, lambda queue: True, policy)
    text = str(caught.value)
    assert "plain" in text
    assert "strict.fifo" not in text
    assert '@app.job(order="none")' in text
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_priorities_need_stable_positions(broker: MixedBroker) -> None:
    """Which SQS does not have, whatever its queues are called."""
    broker.positions = SqsPositions()
    with pytest.raises(UsageError) as caught:
        check_jobs(app_of("priority"), broker, lambda queue: False, policy)
    assert "give urgent messages queues of their own" in caught.value.details["reason"]


@pytest.mark.parametrize("address", ["sqs://eu-west-1/x-", "kinesis://eu-west-1/x"])
def test_pools_need_a_broker_that_stores_requests(address: str) -> None:
    """Known from the address, whether the service can be reached or not."""
    app = App("a")
    app.job("invoice", pool=True)(lambda request, context: None)
    check_pools(app.jobs, "sqlite:x.db")
    with pytest.raises(UsageError) as caught:
        check_pools(app.jobs, address)
    assert "give requests an app with a PostgreSQL" in caught.value.details["reason"]
    assert caught.value.exit_code == 2


def test_config_warnings_of_the_broker_are_logged(
    broker: MixedBroker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About the queues that this worker takes, with their policies."""
    monkeypatch.setattr(broker.catalog, "config_warnings", lambda policies: [f"mind {policies!r}"])
    takes = {"plain"}.__contains__
    check_jobs(app_of("none"), broker, takes, policy)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"mind { ({'plain': policy('plain')})!r}"


def test_a_broker_with_one_order_may_warn_too(caplog: pytest.LogCaptureFixture) -> None:
    """Its queues are not asked for their order."""

    class Advising(ScriptedCatalog):
        def config_warnings(self, policies: Mapping[str, PolicyInForce]) -> list[str]:
            return [f"mind {', '.join(policies)}"]

        def connection_warnings(self, concurrency: Sequence[int]) -> list[str]:
            return [f"mind {concurrency}"]

    broker = ScriptedBroker()
    broker.capabilities = replace(broker.capabilities, checks_config=True)
    broker.catalog = Advising(broker)
    broker.put("q", b"1")
    check_jobs(app_of("queue"), broker, lambda queue: True, policy, concurrency=[7, 7])
    assert [record.getMessage() for record in caplog.records] == ["mind q", "mind [7, 7]"]


def test_many_unfit_queues_are_counted(broker: MixedBroker) -> None:
    """An error does not list thousands of names."""
    for number in range(100):
        broker.put(f"q{number:03}", b"1")
    app = app_of("queue")
    with pytest.raises(UsageError, match=r"plain, q000, q001, q002, q003 and 96 more"):
        check_jobs(app, broker, lambda queue: True, policy)


def test_queues_of_other_workers_are_not_checked(broker: MixedBroker) -> None:
    """Queues that it does not take, that have no job, or whose job needs no order."""
    app = app_of("queue")
    check_jobs(app, broker, lambda queue: queue.endswith(".fifo"), policy)
    check_jobs(app_of("queue", queues="*.fifo"), broker, lambda queue: True, policy)
    check_jobs(app_of("none"), broker, lambda queue: True, policy)


def test_a_broker_with_one_order_need_not_list_its_queues() -> None:
    """There may be a million of them."""
    broker = ScriptedBroker()
    broker.faults = [OSError("listed")]
    check_jobs(app_of("queue"), broker, lambda queue: True, policy)
    assert broker.faults


def test_an_unreachable_broker_prevents_the_start(broker: MixedBroker) -> None:
    """Whatever the order of the jobs: missing permissions appear at the start."""
    broker.faults = [OSError("no rights")]
    with pytest.raises(OSError, match="no rights"):
        check_jobs(app_of("none"), broker, lambda queue: True, policy)


def test_a_timeout_must_not_exceed_the_hold_time(broker: MixedBroker) -> None:
    """Another worker would get its message while it runs."""
    check_jobs(app_of("none", timeout_seconds=43_200), broker, lambda queue: True, policy)
    with pytest.raises(UsageError, match=r"timeout_seconds\b.*43200\b.*43201"):
        check_jobs(app_of("none", timeout_seconds=43_201), broker, lambda queue: True, policy)


def test_a_queue_found_later_is_not_processed_and_named_once(
    broker: MixedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its messages wait; those of other queues run."""
    caplog.set_level(logging.ERROR)
    stiles = [Turnstile(broker, name) for name in ("plain", "strict.fifo")]
    for stile, seen in zip(stiles, ([], [1]), strict=True):
        ends = [stile.turn() for _ in range(3)]
        assert ends[-1] is TurnResult.TIP
        assert (stile.seen, stile.claim.done) == (seen, len(seen))
    assert [queue for queue, _ in broker.fetches] == ["strict.fifo"] * 3
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.args[0] == "plain"
    assert 'order="none"' in record.args[1]


def test_an_order_that_is_unreachable_is_read_again(
    broker: MixedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """No message starts before the broker reports it."""
    stile = Turnstile(broker, "strict.fifo")
    broker.faults = [OSError("away")]
    assert stile.turn() is TurnResult.WAIT
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "UnreachableError" in record.args[-1]
    assert "strict.fifo" in record.args[-1]
    assert stile.seen == []
    assert stile.turn() is TurnResult.MORE
    assert stile.seen == [1]


def test_the_worker_ends_before_it_registers(
    broker: MixedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error of the check, whose exit code is 2."""
    monkeypatch.setattr(worker_module, "open_broker", lambda *args: broker)
    app, settings = app_of("queue"), Settings(app="test")
    app.use(settings)
    registrar = FakeRegistrar(settings)
    with pytest.raises(UsageError, match="no order in queue plain"):
        Worker(app, settings, members=registrar).run()
    assert registrar.members == []


def test_a_replacement_process_starts_with_unfit_queues(
    broker: MixedBroker,
) -> None:
    """A queue does not stop a running fleet: each is checked when it is processed."""
    app = app_of("queue")
    with pytest.raises(UsageError):
        check_jobs(app, broker, lambda queue: True, policy)
    check_jobs(app, broker, lambda queue: True, policy, refuse=False)
