"""The limits of a job, and those of operators: what is refused, and with which remedy."""

from __future__ import annotations

from typing import Any

import pytest

import qdo
from qdo.errors import SharedNameError, UsageError
from qdo.fleet.limit_node import LimitNode, ShareHolder
from qdo.fleet.limits import LimitWish
from qdo.fleet.names import checked_name


def _job(**options: Any) -> None:
    @qdo.App("shop").job("q", **options)
    def job(message: qdo.Message, context: object) -> None:
        """Do nothing."""


@pytest.mark.parametrize("limits", ["crm", [1], ["a/b"], ["x" * 300], ["\U0001f600"], [""], 5])
def test_a_job_names_its_limits_in_a_list(limits: Any) -> None:
    with pytest.raises(UsageError, match="limits must be"):
        _job(limits=limits)


@pytest.mark.parametrize("rate", ["50/x", "0/s", "1/week", "", 5, "-1/s"])
def test_a_queue_rate_has_a_unit(rate: Any) -> None:
    with pytest.raises(UsageError, match="per_queue_rate must be"):
        _job(per_queue_rate=rate)


@pytest.mark.parametrize(
    ("names", "terms"),
    [
        *((("crm",), each) for each in ({"max": -1}, {"max": "5"}, {"rate": "5"}, {"rate": 5})),
        (("crm", "gpu"), {"max": 1}),
        (("api",), {"max": 6}),
    ],
)
def test_an_app_declares_a_limit_once(names: tuple[str, ...], terms: dict[str, Any]) -> None:
    """The same terms again are no error: a function may be called often."""
    app = qdo.App("shop")
    for _ in range(2):
        app.limit("api", max=5, rate="20/s")
    with pytest.raises(UsageError):
        app.limit(*names, **terms)
    assert list(app.limits) == ["api"]


@pytest.mark.parametrize("name", ["", "a/b", "x" * 300, "\U0001f600", "a\nb", ".."])
def test_a_limit_name_is_a_znode_name(name: str) -> None:
    with pytest.raises(SharedNameError):
        checked_name("limit", name)


@pytest.mark.parametrize(
    "wish",
    [
        *(LimitWish(max="-1"), LimitWish(max="1000000000"), LimitWish(max="ten")),
        *(LimitWish(max="\u0665"), LimitWish(max="9" * 5000), LimitWish(rate="50/x")),
        *(LimitWish(rate="0/s"), LimitWish(rate="1/week"), LimitWish(rate="1/s", burst="0")),
    ],
)
def test_an_impossible_limit_is_refused(wish: LimitWish) -> None:
    with pytest.raises(UsageError):
        wish.applied("crm", LimitNode())


@pytest.mark.parametrize(
    ("wish", "needs"),
    [
        (LimitWish(max="none"), "max or rate"),
        (LimitWish(rate="none"), "max or rate"),
        (LimitWish(reason="x"), "max or rate"),
        (LimitWish(max="1", burst="2"), "a rate"),
    ],
)
def test_values_that_belong_together_are_named(wish: LimitWish, needs: str) -> None:
    with pytest.raises(UsageError) as caught:
        wish.applied("crm", LimitNode())
    assert needs in caught.value.details["reason"]


def test_a_change_keeps_the_rest_and_the_holders() -> None:
    """Also of a node that cannot be read: it is repaired."""
    holders = (ShareHolder("worker-0000000001", 1, 1),)
    node = LimitNode(3, 50.0, 20, "old", holders, holders, {"note": 1})
    after = LimitWish(max="0", reason="CRM is down").applied("crm", node)
    assert after == LimitNode(0, 50.0, 20, "CRM is down", holders, holders, {"note": 1})
    assert LimitWish(rate="100/s").applied("crm", node).burst == 100
    assert LimitWish(rate="none").applied("crm", node).rate is None
    assert LimitWish(max="1").applied("crm", LimitNode.parse(b"{")).fault is None
