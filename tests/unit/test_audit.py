"""`make audit` never passes without having looked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import audit

Program = Callable[[str, int], None]
PACKAGES = {"urllib3": "2.6.0", "pure_sasl": "0.6.2"}


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Write a pip-audit that prints a text and exits with a code."""

    def write(text: str, code: int) -> None:
        (tmp_path / "answer").write_text(text)
        path = tmp_path / "pip-audit"
        path.write_text(f"#!/bin/sh\ncat {tmp_path / 'answer'}; exit {code}\n")
        path.chmod(0o755)

    return write


def answer(**more: Mapping[str, Any]) -> str:
    names = {"urllib3": {"version": "2.6.0"}, "pure-sasl": {"version": "0.6.2"}}
    each = [{"name": name, **names[name], "vulns": [], **more.get(name, {})} for name in names]
    return json.dumps({"dependencies": each, "fixes": []})


def test_known_vulnerabilities_are_named(program: Program, tmp_path: Path) -> None:
    hole = {"id": "CVE-2026-21441", "fix_versions": ["2.6.3"]}
    program(answer(urllib3={"vulns": [hole]}), 1)
    found = audit.look_up(str(tmp_path / "pip-audit"), PACKAGES)
    assert found.found == ("urllib3 2.6.0: CVE-2026-21441, corrected in 2.6.3",)
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        (answer(), []),
        (answer(urllib3={"skip_reason": "not found on PyPI"}), ["urllib3: not found on PyPI"]),
        ('{"dependencies": []}', ["pure_sasl: no answer", "urllib3: no answer"]),
        ("", ["urllib3: no output", "pure_sasl: no output"]),
    ],
)
def test_packages_without_data_are_named(
    program: Program, tmp_path: Path, text: str, unknown: list[str]
) -> None:
    """pip-audit exits with 0 although it could not look a package up."""
    program(text, 0)
    found = audit.look_up(str(tmp_path / "pip-audit"), PACKAGES).unknown
    assert sorted(each.replace("pure-sasl", "pure_sasl") for each in found) == sorted(unknown)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (answer(urllib3={"vulns": [{"id": "CVE-1", "fix_versions": []}]}), audit.FOUND),
        ("", audit.NO_DATA),
        (answer(), 0),
    ],
)
def test_the_exit_code_tells_what_was_found(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    monkeypatch.setattr(audit, "installed", lambda: PACKAGES)
    monkeypatch.setattr(audit, "lowest", lambda requirements: PACKAGES)
    program(text, 0)
    assert audit.main(str(tmp_path / "pip-audit")) == code


def test_the_lowest_versions_are_those_that_users_get() -> None:
    """Extras for the development of qdo do not count, and every other bound does."""
    lines = [
        "click<9,>=8.5",
        'tomli<3,>=2.2; python_version < "3.11"',
        'urllib3<3,>=2.6.3; extra == "http"',
        'pytest<10,>=9.2; extra == "test"',
    ]
    assert audit.lowest(lines) == {"click": "8.5", "tomli": "2.2", "urllib3": "2.6.3"}
    with pytest.raises(SystemExit):
        audit.lowest(["kazoo"])
