"""Values of the node `settings`, also those that other programs write."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from qdo.fleet.settings_machine import (
    MAX_TEXT_BYTES,
    MAX_WHY_CHARACTERS,
    SettingsNode,
    SettingsReport,
    SettingsVersion,
)

VERSION = SettingsVersion("0123456789abcdef", 3, "attempts = 5\n", "ann@host", 1.5e9, "busy")


def test_node_keeps_its_versions() -> None:
    other = SettingsVersion("fedcba9876543210", 4, "attempts = 6  # größer\n")
    for node in (SettingsNode(), SettingsNode(VERSION), SettingsNode(VERSION, other)):
        assert SettingsNode.parse(node.encode()) == node
    assert SettingsNode.parse(b"") == SettingsNode()
    assert SettingsNode(VERSION).number == 3
    assert SettingsNode().text == ""


def test_the_largest_texts_fit_into_a_request() -> None:
    text = "\U0001f600" * (MAX_TEXT_BYTES // 4)
    full = SettingsVersion("0123456789abcdef", 1, text, "é" * 200, 1.0, "\n" * MAX_WHY_CHARACTERS)
    assert len(SettingsNode(full, full).encode()) < 512 * 1024
    quotes = SettingsVersion("0123456789abcdef", 1, '"' * MAX_TEXT_BYTES)
    assert len(SettingsNode(quotes, quotes).encode()) < 512 * 1024


@pytest.mark.parametrize(
    "change",
    [
        {"id": "x"},
        {"id": None},
        {"number": 0},
        {"number": True},
        {"number": 1.0},
        {"number": 2**70},
        {"text": None},
        {"text": "a" * (MAX_TEXT_BYTES + 1)},
    ],
)
@pytest.mark.parametrize("key", ["current", "proposal"])
def test_one_bad_version_makes_the_node_unreadable(key: str, change: dict[str, Any]) -> None:
    data = json.dumps({"current": asdict(VERSION), key: asdict(VERSION) | change}).encode()
    node = SettingsNode.parse(data)
    assert node.fault
    assert node.current is None
    assert node.proposal is None


@pytest.mark.parametrize("data", [b"null", b"[]", b"\xff", b'{"current": []}', b'{"current": NaN}'])
def test_foreign_nodes_are_unreadable(data: bytes) -> None:
    assert SettingsNode.parse(data).fault


@pytest.mark.parametrize("change", [{"who": 7}, {"why": []}, {"at": "now"}, {"at": -1}])
def test_other_values_of_wrong_types_are_missing(change: dict[str, Any]) -> None:
    version = SettingsVersion.parse(asdict(VERSION) | change)
    assert version.text == VERSION.text
    assert getattr(version, next(iter(change))) in ("", 0.0)


def test_reports_survive_their_node() -> None:
    for report in (
        SettingsReport(),
        SettingsReport(3, accepts="01234567"),
        SettingsReport(3, refuses="01234567", why="too new"),
    ):
        assert SettingsReport.parse(report.dump()) == report


@pytest.mark.parametrize("value", [None, 7, [], {}, {"uses": "3"}, {"uses": True}])
def test_a_process_without_a_report_has_none(value: Any) -> None:
    assert SettingsReport.parse(value) is None


def test_reports_of_wrong_types_accept_nothing() -> None:
    report = SettingsReport.parse({"uses": 1, "accepts": 7, "refuses": None, "why": []})
    assert report == SettingsReport(1)
