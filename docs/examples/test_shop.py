import itertools

import pytest
import shop

from qdo.testing import TestKit


class Bank:
    """Stands in for the bank and records the charges."""

    def __init__(self):
        self.down = False
        self.calls = []
        self.charged = {}

    def charge(self, account, amount, reference):
        self.calls.append(amount)
        if self.down:
            raise ConnectionError("the bank is unreachable")
        self.charged.setdefault(reference, (account, amount))


@pytest.fixture
def bank(monkeypatch):
    bank = Bank()
    monkeypatch.setattr(shop, "charge", bank.charge)
    return bank


@pytest.fixture
def kit(qdo_kit):
    return qdo_kit(shop.app)


# begin: retry
def test_payment_waits_for_the_bank(bank, kit):
    kit.send("account-1", {"amount": 10})
    kit.send("account-1", {"amount": 20})
    bank.down = True
    kit.run_until_idle()
    assert bank.calls == [10]
    assert kit.failing()["account-1"].attempts == 1

    bank.down = False
    kit.advance(9)
    assert bank.calls == [10]
    kit.advance(1)
    assert bank.calls == [10, 10, 20]  # the second payment has not overtaken the first
    assert kit.done("account-1") == [{"amount": 10}, {"amount": 20}]
    # end: retry


# begin: dead-letter
def test_payment_that_keeps_failing_is_dead_lettered(bank, kit):
    kit.send("account-1", {"amount": 10})
    bank.down = True
    assert kit.run_until_settled() == 10 + 20

    (letter,) = kit.dead_letters("account-1")
    assert letter.attempts == 3
    assert letter.error == "ConnectionError: the bank is unreachable"
    assert kit.done("receipts") == []
    # end: dead-letter


# begin: crash
def test_crash_after_the_charge_charges_once(bank, kit):
    payment = kit.send("account-1", {"amount": 10})
    kit.send("account-1", {"amount": 20})
    kit.crash_at("after-job")
    kit.run_until_settled()

    assert bank.calls == [10, 10, 20]  # called twice: nothing was recorded
    assert len(bank.charged) == 2  # charged once
    assert kit.done("receipts")[0] == {"payment": payment}
    assert len(kit.done("receipts")) == 2
    # end: crash


# begin: every
def test_crash_at_any_step_loses_nothing(monkeypatch):
    for step in itertools.count(1):
        bank = Bank()
        monkeypatch.setattr(shop, "charge", bank.charge)
        with TestKit(shop.app) as kit:
            kit.send("account-1", {"amount": 10})
            kit.send("account-1", {"amount": 20})
            kit.crash_at(nth=step)
            kit.run_until_settled()

            assert list(bank.charged.values()) == [("account-1", 10), ("account-1", 20)]
            assert len({receipt["payment"] for receipt in kit.done("receipts")}) == 2
            if kit.faults_left:
                break  # the run has fewer steps
    assert step > 20
    # end: every


# begin: lease
def test_worker_without_lease_does_not_charge_twice(bank, kit):
    kit.send("account-1", {"amount": 10})
    kit.lose_lease_at("before-job")
    kit.run_until_settled()

    late = kit.attempts("account-1")[-1]
    assert late.fence < kit.attempts("account-1")[0].fence
    assert bank.calls == [10, 10]
    assert len(bank.charged) == 1
    # end: lease
