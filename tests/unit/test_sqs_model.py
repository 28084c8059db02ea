"""Random stories of workers on one queue of SQS in virtual time; see `tests.support.sqs_model`."""

from __future__ import annotations

import pytest

from qdo.ordering import Order
from tests.support.sqs_model.world import world


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "order", "batch"),
    [
        ("fifo", "key", None),
        ("fifo", "queue", None),
        ("fifo", "queue", 7),
        ("standard", "none", None),
    ],
)
def test_nothing_is_lost_or_out_of_order(
    seed: int, kind: str, order: Order, batch: int | None
) -> None:
    """Whatever befalls workers and network, all is done, in order, and once if it can be."""
    with world(seed, kind, order, batch) as stage:
        stage.tell(30)
