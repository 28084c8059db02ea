"""The value of a limit's node, whatever it contains; rates as people write them."""

from __future__ import annotations

import pytest

from qdo.fleet.limit_node import LimitNode, ShareHolder, default_burst, rate_of, rate_text


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
