"""Documents, locks and sections in the testing kit: kept in memory, without a coordinator."""

from __future__ import annotations

from typing import Any

import pytest

import qdo
from qdo import App
from qdo.errors import (
    DocumentConflictError,
    LockLostError,
    LockTimeoutError,
    SectionLostError,
    UsageError,
)
from qdo.testing import TestKit


@pytest.mark.parametrize("after", [-1, 1.5, "1", True, 1 << 63])
def test_a_time_that_no_document_has(after: Any) -> None:
    with pytest.raises(UsageError):
        qdo.App("shop").send("q", 1, after=after)


def test_the_kit_keeps_documents_in_memory() -> None:
    """It needs no coordinator; the app's own documents are back when it is closed."""
    app = qdo.App("shop", coordinator="zookeeper://127.0.0.1:1")
    plans = app.documents("plans")
    seen: list[Any] = []
    changed: list[tuple[str, Any]] = []
    plans.on_change(lambda name, value: changed.append((name, value)))

    @app.job()
    def job(message: qdo.Message, context: Any) -> None:
        seen.append((message.body, plans["acme"]["quota"]))

    with TestKit(app) as kit:
        assert dict(plans) == {}
        stamp = plans.put("acme", {"quota": 1})
        kit.send("q", "first", after=stamp)
        kit.run_until_idle()
        plans.change("acme", lambda plan: {**plan, "quota": plan["quota"] + 1})
        kit.send("q", "second")
        kit.run_until_idle()
        with pytest.raises(DocumentConflictError):
            plans.put("acme", 0, if_version=None)
        plans.delete("acme")
        assert dict(plans) == {}
    assert seen == [("first", 1), ("second", 2)]
    assert changed == [("acme", {"quota": 1}), ("acme", {"quota": 2}), ("acme", None)]
    with TestKit(app):
        assert dict(plans) == {}


def test_the_kit_keeps_locks_in_memory() -> None:
    """No other process could release a held lock, so the kit does not wait for it."""
    app = App("shop", coordinator="zookeeper://127.0.0.1:1")
    with TestKit(app):
        with app.lock("export", shared=True) as one, app.lock("export", shared=True) as two:
            assert two.fence > one.fence
            with pytest.raises(LockTimeoutError), app.lock("export"):
                pass
        with app.lock("export") as held:
            held.check()
        with pytest.raises(LockLostError):
            held.check()


def test_sections_in_the_kit() -> None:
    app = App("shop", coordinator="zookeeper://127.0.0.1:1")
    with TestKit(app):
        with app.exclusive("tenant-*") as section:
            section.check()
        with pytest.raises(SectionLostError):
            section.check()
