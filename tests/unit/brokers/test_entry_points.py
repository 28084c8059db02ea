"""Brokers of installed packages, found by their entry points, and how their faults are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.brokers import registry
from qdo.brokers.registry import kind_of, open_broker
from qdo.errors import SettingsError
from tests.support.paths import ROOT

POINTS = """[qdo.brokers]
list = lists:KIND
gone = missing_module:KIND
broken = lists:missing
number = lists:NUMBER
sqlite = lists:KIND
"""
MODULE = """
from qdo.brokers import BrokerKind
from tests.support.fakes.scripted_broker import ScriptedBroker

NUMBER = 1
KIND = BrokerKind(
    open=lambda url, app: ScriptedBroker(),
    address_error=lambda url: None if url.startswith("list:/") else "no path",
    form="list:/PATH",
)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with kinds of brokers, some of which are broken."""
    metadata = tmp_path / "lists-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lists\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(POINTS)
    (tmp_path / "lists.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    caches = (registry._installed, registry._load, registry.kind_of)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_an_installed_broker_opens_by_its_address() -> None:
    open_broker("list:/orders", "shop").close()
    assert kind_of("sqlite:orders.db").form == "sqlite:PATH"  # a package cannot replace one of qdo


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("list:orders", ["no path"]),
        ("gone:x", ["ModuleNotFoundError", "package that offers gone"]),
        ("broken:x", ["AttributeError", "package that offers broken"]),
        ("number:x", ["must be a BrokerKind, got 1", "package that offers number"]),
        ("lisst:/x", ["sqlite:PATH", "kinesis://", "list:/PATH", "gone://", "write list:/x"]),
        ("orders.db", ["list:/PATH", "install its package"]),
    ],
)
def test_an_address_that_no_broker_takes(url: str, parts: list[str]) -> None:
    """The settings refuse it with the reason with which it cannot be opened."""
    with pytest.raises(SettingsError) as raised:
        open_broker(url, "shop")
    assert raised.value.details["reason"] == kind_of(url).address_error(url)
    assert [part for part in parts if part not in str(raised.value)] == []


def test_every_broker_of_qdo_is_published() -> None:
    """A folder with a module `kind` has an entry point."""
    folders = {path.parent.name for path in (ROOT / "qdo" / "brokers").glob("*/kind.py")}
    assert {value.split(".")[2] for value in registry._own().values()} == folders
    assert {kind_of(f"{scheme}:").address_error("x") is not None for scheme in registry._own()}
