"""Benchmarks connect with TLS, an account and rights only where they say so."""

from __future__ import annotations

from pathlib import Path

from bench.support.access import access_of, secured
from qdo.coordination.access import ANYBODY
from qdo.coordination.znodes.layout import Layout

LAYOUT = Layout.of("bench")


def test_access_holds_until_the_end_of_the_block(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text("secret")
    settings = {
        "coordinator": "zookeeper://zk1:2181",
        "coordinator_auth": "sasl:bench",
        "coordinator_password_file": str(password),
        "acl": "required",
    }
    with secured(tmp_path / "settings.toml", settings):
        access = access_of(LAYOUT)
    assert str(access.account) == "sasl:bench"
    assert access.rights is not None
    assert access.rights.required
    assert access_of(LAYOUT) is ANYBODY
