"""Limits as nodes hold them, and as jobs, apps and operators write them."""

from __future__ import annotations

from typing import Any

import pytest

import qdo
from qdo.errors import SharedNameError, UsageError
from qdo.fleet.limit_node import LimitNode, ShareHolder, default_burst, rate_of, rate_text
from qdo.fleet.limits import LimitWish
from qdo.fleet.names import checked_name


def test_a_node_is_read_as_it_was_written() -> None:
    """Unknown keys are kept, and the order of the holders."""
    holders = (ShareHolder("worker-0000000002", 3, 4), ShareHolder("worker-0000000001", 1, 9))
    node = LimitNode(10, 0.5, 3, "CRM is slow", holders, holders[:1], {"note": [1]})
    assert LimitNode.parse(node.encode()) == node


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"null", b"[]", b"{}", b"{", b'{"max":-1}', b'{"max":true}', b'{"max":"ten"}'),
        *(b'{"max":1000000000}', b'{"max":9223372036854775808}', b'{"max":1.5}', b'{"rate":0}'),
        *(b'{"rate":NaN}', b'{"rate":-1}', b'{"rate":1e999}', b'{"max":1,"burst":0,"rate":1}'),
        b'{"max":' + b"[" * 90_000,
        b'{"rate":1' + b"0" * 400 + b"}",
    ],
)
def test_a_forged_node_has_a_fault(data: bytes) -> None:
    """Nothing is allowed by a limit that cannot be read."""
    node = LimitNode.parse(data)
    assert node.fault
    assert (node.max, node.rate) == (None, None)


@pytest.mark.parametrize(
    "entry",
    ["null", '["w"]', '["w",-1,1]', '["w",1,"1"]', '[["w"],1,1]', '["w",1e9,1]', '{"w":1}'],
)
def test_forged_holders_are_left_out(entry: str) -> None:
    """They hide no other holder."""
    node = LimitNode.parse(f'{{"max":2,"permits":[{entry},["v",1,1],["v",2,2]]}}'.encode())
    assert node.fault is None
    assert node.permits == (ShareHolder("v", 1, 1),)


def test_a_lone_surrogate_is_written_again() -> None:
    """ujson reads it; UTF-8 has no bytes for it."""
    node = LimitNode.parse(b'{"max":1,"reason":"\\ud800","permits":[["\\ud800",1,1]]}')
    assert LimitNode.parse(node.encode()) == node


@pytest.mark.parametrize(
    ("text", "rate", "again"),
    [
        ("50/s", 50, "50/s"),
        ("5/m", 1 / 12, "5/m"),
        ("90/m", 1.5, "1.5/s"),
        ("1/h", 1 / 3600, "1/h"),
    ],
)
def test_a_rate_has_a_unit(text: str, rate: float, again: str) -> None:
    """It is shown in the unit in which it is at least one."""
    assert rate_of(text) == pytest.approx(rate)
    assert rate_text(rate_of(text)) == again
    assert default_burst(rate) == max(1, round(rate + 0.4))


@pytest.mark.parametrize(
    "text",
    ["", "50", "50/x", "0/s", "1/week", "-1/s", "1e9/s", "9999999/s", "\u0665/s", "1/s ", None, 5],
)
def test_anything_else_is_not_a_rate(text: object) -> None:
    """Half understood rates would limit something else."""
    with pytest.raises(ValueError, match="starts a second"):
        rate_of(text)


# --- limits of jobs and apps ---------------------------------------------------------------


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
