"""Rolling deploys: a queue goes to a worker whose version of the app has a job for it."""

from __future__ import annotations

import signal
from typing import Any

from tests.support.app_runs import OperatorDesk, jobs
from tests.support.processes import wait_until

OLD = jobs("mail-*")
NEW = OLD + 'app.job("sms-*")(job)\n'
MAILS = ("mail-1", "mail-2")


def queues(desk: OperatorDesk) -> dict[str, dict[str, Any]]:
    return {each["queue"]: each for each in desk.items("queues")}


def test_a_queue_goes_to_the_version_that_has_its_job(local: OperatorDesk) -> None:
    """Until then it is without owner and says so; the other queues stay where they are."""
    local.app.send_many([(queue, 1) for queue in (*MAILS, "sms-1", "fax-1")])
    old = local.start(OLD)
    old.wait_for_line(r"rebalancer: no worker takes 2 queues .*: fax-1, sms-1$")
    before = {queue: local.wait_done(queue).owner for queue in MAILS}
    found = queues(local)
    assert {name: each["untaken"] for name, each in found.items()} == {
        **dict.fromkeys(MAILS, None),
        **dict.fromkeys(("sms-1", "fax-1"), "no job"),
    }
    assert (found["sms-1"]["owner"], found["sms-1"]["backlog"]) == (None, 1)
    table = local.qdo("queues").out.splitlines()
    assert [line.split()[:4] for line in table if "sms" in line] == [
        ["sms-1", "no-job", "no", "job"]
    ]
    versions = {queue: local.client.get(local.layout.queue(queue))[1].version for queue in MAILS}
    local.start(NEW)
    local.wait_for(1, queue="sms-1")
    found = queues(local)
    assert {queue: found[queue]["owner"] for queue in MAILS} == before
    assert found["sms-1"]["owner"] not in (None, *before.values())
    assert found["fax-1"]["untaken"] == "no job"
    for queue, version in versions.items():
        assert local.client.get(local.layout.queue(queue))[1].version == version
    workers = local.items("workers")
    assert [each["filter"]["jobs"] for each in workers] == [["mail-*"], ["mail-*", "sms-*"]]
    assert "mail-*, sms-*" in local.qdo("workers").out
    old.send(signal.SIGTERM)
    assert old.wait() == 0, old.output
    local.app.send("mail-1", 2)
    wait_until(lambda: local.bodies("mail-1") == ["1", "2"], "the new version takes the rest")


def test_a_queue_whose_job_is_excluded_says_so(local: OperatorDesk) -> None:
    """The remedy is then another setting, not another job."""
    local.app.send_many([("mail-1", 1), ("sms-1", 1)])
    worker = local.start(NEW, "--exclude", "sms-*")
    worker.wait_for_line(r"rebalancer: no worker takes 1 queue .*: sms-1$")
    assert queues(local)["sms-1"]["untaken"] == "excluded by all workers"
