"""The share of one process, against a node in memory. The simulation plays whole fleets."""

from __future__ import annotations

from dataclasses import replace

from qdo.coordination.protocol.lease import Lease
from qdo.coordination.protocol.machine import (
    Callback,
    Children,
    ChildrenRead,
    Commit,
    CommitError,
    Committed,
    CoordinatorRequest,
    Get,
    NodeMissing,
    NodeRead,
    Rejected,
    SetOp,
)
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.limit_node import MISSING, LimitNode, ShareHolder
from qdo.fleet.shares import REFUSED_SECONDS, WRITE_SECONDS, LimitShare

LAYOUT = Layout.of("test")
PATH = LAYOUT.fleet.limit("crm")
ME, OTHER = "worker-0000000001", "worker-0000000002"


class ShareSetup:
    """A share, its node, and the workers.

    :ivar refusing: the coordinator refuses every write.
    """

    def __init__(self, node: LimitNode | None = None) -> None:
        self.now = 100.0
        self.node, self.version = node, 0
        self.workers = {ME, OTHER}
        self.writes = self.requests = self.news = 0
        self.refusing = False
        self.lease = Lease(1e6, self.now)
        self.share = LimitShare(
            LAYOUT,
            "crm",
            ME,
            self.lease,
            clock=lambda: self.now,
            on_change=self._changed,
            chance=lambda: 0.0,
        )
        self.share.connected()

    def _changed(self) -> None:
        self.news += 1

    def step(self, seconds: float = 0.0) -> None:
        """Let time pass, then do what there is to do, answers and watches included."""
        self.now += seconds
        self.share.tick()
        self.share.flush()
        while self.share.outbox:
            self.answer(*self.share.outbox.popleft())

    def answer(self, request: CoordinatorRequest, then: Callback) -> None:
        self.requests += 1
        if isinstance(request, Get):
            read = None if self.node is None else self.node.encode()
            then(NodeMissing() if read is None else NodeRead(read, self.version))
        elif isinstance(request, Children):
            then(ChildrenRead(tuple(self.workers)))
        elif isinstance(request, Commit):
            self._commit(request, then)
        self.share.flush()

    def _commit(self, request, then) -> None:  # type: ignore[no-untyped-def]
        write = request.ops[1]
        assert isinstance(write, SetOp)
        assert request.ops[0].path == LAYOUT.worker(ME)
        if self.refusing:
            then(Rejected(1, CommitError.OTHER, "no right"))
        elif write.version != self.version:
            then(Rejected(1, CommitError.BAD_VERSION))
        else:
            self.writes += 1
            self.version += 1
            self.node = LimitNode.parse(write.data)
            then(Committed(1, (-1, self.version)))
            self.share.changed(PATH)

    def set(self, node: LimitNode | None) -> None:
        """Let another process write the node."""
        self.node, self.version = node, self.version + 1
        self.share.changed(PATH)
        self.step()

    def taken(self) -> int:
        """Take all permits that may be taken."""
        count = 0
        while self.share.has_free():
            self.share.take()
            count += 1
        return count


def _wanting(node: LimitNode, count: int) -> ShareSetup:
    setup = ShareSetup(node)
    setup.share.wait(count)
    setup.step()
    return setup


def test_a_process_without_demand_asks_nothing() -> None:
    """A limit costs nothing before the first message."""
    setup = ShareSetup(LimitNode(max=3))
    setup.step(60.0)
    assert setup.requests == 0


def test_a_share_grows_to_the_demand() -> None:
    """Alone, a process gets what it wants; its permits are there after one write."""
    setup = _wanting(LimitNode(max=10), 4)
    assert setup.node is not None
    assert setup.node.permits == (ShareHolder(ME, 4, 4),)
    assert setup.taken() == 4


def test_no_permit_is_taken_without_a_lease() -> None:
    """Others may have got the share by then."""
    setup = _wanting(LimitNode(max=4), 2)
    setup.lease.end()
    assert setup.taken() == 0


def test_a_missing_limit_waits_for_its_node() -> None:
    """The reason is known, and the node's creation is watched."""
    setup = _wanting(LimitNode(max=1), 1)
    setup.set(None)
    assert setup.share.fault == MISSING
    assert setup.taken() == 0
    setup.set(LimitNode(max=2))
    setup.step(WRITE_SECONDS)
    assert setup.share.fault is None
    assert setup.taken() == 1


def test_max_zero_stops_and_more_resumes() -> None:
    """An operator can stop everything with one write."""
    setup = _wanting(LimitNode(max=2), 2)
    setup.set(LimitNode(max=0, permits=(ShareHolder(ME, 2, 2),)))
    assert setup.taken() == 0
    setup.set(LimitNode(max=2, permits=(ShareHolder(ME, 0, 0),)))
    setup.step(WRITE_SECONDS)
    assert setup.taken() == 2


def test_a_refused_write_is_repeated_later() -> None:
    """A protected node costs one request in five seconds, and its reason is shown."""
    setup = ShareSetup(LimitNode(max=2))
    setup.refusing = True
    setup.share.wait(1)
    setup.step()
    requests = setup.requests
    assert "no right" in (setup.share.fault or "")
    setup.step(REFUSED_SECONDS / 2)
    assert setup.requests == requests
    setup.refusing = False
    setup.step(REFUSED_SECONDS)
    assert setup.taken() == 1


def test_demand_that_changes_all_the_time_writes_seldom() -> None:
    """In two seconds far fewer than 20 a second, and none while the share is large enough."""
    setup = _wanting(LimitNode(max=50), 1)
    for turn in range(400):
        setup.share.wait(turn % 7)
        taken = setup.taken()
        setup.step(0.005)
        for _ in range(taken):
            setup.share.give_back()
    assert setup.writes < 20


def test_an_idle_process_leaves_the_node() -> None:
    """After a while it holds nothing, and asks nothing."""
    setup = _wanting(LimitNode(max=4), 2)
    assert setup.taken() == 2
    setup.share.wait(0)
    for _ in range(2):
        setup.share.give_back()
    for _ in range(60):
        setup.step(0.1)
    assert setup.node is not None
    assert setup.node.permits == ()
    assert setup.share.due() == float("inf")
    assert setup.news


def test_an_unlimited_number_is_never_counted() -> None:
    """A limit with a rate only has no permits."""
    setup = _wanting(LimitNode(rate=100.0, burst=10), 3)
    assert setup.node is not None
    assert setup.node.permits == ()
    setup.step(WRITE_SECONDS)
    setup.taken()
    for _ in range(2):
        setup.step(WRITE_SECONDS)
        setup.taken()
    news, due = setup.news, setup.share.due()
    assert due - setup.now < 0.1
    setup.now = due
    assert setup.share.due() <= due
    setup.step()
    assert setup.share.has_free()
    assert setup.news > news


def test_a_process_that_wants_nothing_more_tells_it() -> None:
    """Also if the node changes at that time; the others get its permits in the same write."""
    setup = _wanting(LimitNode(max=1, permits=(ShareHolder(OTHER, 1, 1),)), 1)
    assert setup.node is not None
    assert ShareHolder(ME, 0, 1) in setup.node.permits
    setup.share.wait(0)
    setup.set(LimitNode(max=1, permits=(ShareHolder(ME, 0, 1), ShareHolder(OTHER, 0, 1))))
    for _ in range(30):
        setup.step(0.1)
    assert setup.node.permits == (ShareHolder(OTHER, 1, 1),)


def test_a_share_that_another_process_dealt_is_used_at_once() -> None:
    """It needs no write of its own."""
    setup = _wanting(LimitNode(max=1, permits=(ShareHolder(OTHER, 1, 1),)), 1)
    writes = setup.writes
    setup.set(LimitNode(max=1, permits=(ShareHolder(ME, 1, 1), ShareHolder(OTHER, 0, 1))))
    assert setup.taken() == 1
    assert setup.writes == writes


def test_so_does_a_process_that_was_cut_off() -> None:
    setup = _wanting(LimitNode(max=1, permits=(ShareHolder(OTHER, 1, 1),)), 1)
    setup.share.suspended()
    setup.share.wait(0)
    setup.share.connected()
    for _ in range(30):
        setup.step(0.1)
    assert setup.node is not None
    assert setup.node.permits == (ShareHolder(OTHER, 1, 1),)


def test_a_removed_max_is_reported_beside_a_rate() -> None:
    """Those who wait for permits are served, though the rate has not changed."""
    node = LimitNode(max=0, rate=5.0, burst=5)
    setup = _wanting(node, 1)
    setup.step(10.0)
    assert setup.node is not None
    assert not setup.share.has_free()
    assert setup.node.starts, "the starts have a share already"
    free: list[bool] = []
    setup.share._on_change = lambda: free.append(setup.share.has_free())
    setup.set(replace(setup.node, max=None))
    setup.step()
    assert True in free
