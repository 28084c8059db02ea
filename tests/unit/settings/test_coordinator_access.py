"""The settings of the coordinator's clients: half of a configuration is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qdo.coordination.access import Access, acl_text
from qdo.coordination.znodes.layout import Layout
from qdo.errors import SettingsError, UnknownSettingError
from qdo.settings.coordinator_access import coordinator_access
from qdo.settings.settings import Settings
from qdo.settings.sources import load
from tests.support.security.certificates import Authority

LAYOUT = Layout.of("shop")
SERVERS = "zookeeper://zk1"
PASSWORD = "marker-5c9d"
HASH = "digest:ops:" + "A" * 27 + "="


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QDO_COORDINATOR_PASSWORD", raising=False)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Names of settings for files, with files that exist."""
    authority = Authority(tmp_path)
    own = authority.issue("client")
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text(f"{PASSWORD}\n")
    return {
        "ca": str(authority.path),
        "cert": str(own.cert),
        "key": str(own.key),
        "other_key": str(authority.issue("other").key),
        "password": str(password),
        "missing": str(tmp_path / "missing"),
        "empty": "/dev/null",
    }


def access(files: dict[str, str], **values: Any) -> Access:
    """Return the access of settings, whose values may name `files` as <name>."""
    named = {
        name: files[value[1:-1]] if isinstance(value, str) and value[:1] == "<" else value
        for name, value in values.items()
    }
    return coordinator_access(Settings(**{"coordinator": SERVERS, **named}), LAYOUT)


FILE = "sqlite:c.db"
LOGIN = {"coordinator_auth": "digest:app", "coordinator_password_file": "<password>"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("coordinator_cert", {"coordinator_ca": "<ca>", "coordinator_cert": "<cert>"}),
        ("coordinator_key", {"coordinator_ca": "<ca>", "coordinator_key": "<key>"}),
        ("coordinator_cert", {"coordinator_cert": "<cert>", "coordinator_key": "<key>"}),
        ("coordinator_verify", {"coordinator_verify": "ca"}),
        ("coordinator_ca", {"coordinator_ca": "<missing>"}),
        ("coordinator_ca", {"coordinator_ca": "<password>"}),
        ("coordinator_ca", {"coordinator_ca": "<ca>", "coordinator": FILE}),
        (
            "coordinator_ca",
            {
                "coordinator_ca": "<ca>",
                "coordinator_cert": "<cert>",
                "coordinator_key": "<other_key>",
            },
        ),
        ("coordinator_auth", {"coordinator_auth": "digest:app"}),
        ("coordinator_auth", {**LOGIN, "coordinator_auth": "sasl:app", "coordinator": FILE}),
        ("coordinator_password_file", {"coordinator_password_file": "<password>"}),
        ("coordinator_password_file", {**LOGIN, "coordinator_password_file": "<missing>"}),
        ("coordinator_password_file", {**LOGIN, "coordinator_password_file": "<empty>"}),
        ("acl", {"acl": "account"}),
        ("acl_operators", {"acl_operators": ["sasl:ops"]}),
        (
            "acl_monitors",
            {**LOGIN, "acl": "account", "acl_monitors": ["sasl:m"], "coordinator": FILE},
        ),
    ],
)
def test_half_of_a_configuration(files: dict[str, str], name: str, values: dict[str, Any]) -> None:
    """The error names the setting, and its exit code is 2."""
    with pytest.raises(SettingsError) as raised:
        access(files, **values)
    assert raised.value.details["name"] == name
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("name", ["coordinator_password_file", "coordinator_key"])
def test_secret_files_of_all_users(files: dict[str, str], name: str) -> None:
    """A file that every user can read is refused; one of a group is not."""
    values = {**LOGIN, "coordinator_ca": "<ca>", "coordinator_cert": "<cert>"}
    path = Path(files[{"coordinator_key": "key"}.get(name, "password")])
    path.chmod(0o640)
    access(files, **values, coordinator_key="<key>")
    path.chmod(0o644)
    with pytest.raises(SettingsError) as raised:
        access(files, **values, coordinator_key="<key>")
    assert raised.value.details["name"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("coordinator_auth", f"digest:app:{PASSWORD}"),
        ("coordinator_auth", f"app:{PASSWORD}"),
        ("coordinator_auth", PASSWORD),
        ("acl_workers", [f"digest:app:{PASSWORD}"]),
        ("acl_workers", ["app"]),
        ("acl", "closed"),
        ("coordinator_verify", "none"),
    ],
)
def test_bad_values_of_accounts(name: str, value: Any) -> None:
    """The errors do not show a password in the wrong place."""
    with pytest.raises(SettingsError) as raised:
        Settings(**{name: value})
    assert raised.value.details["name"] == name
    assert PASSWORD not in str(raised.value)


def test_a_password_is_not_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "qdo.toml"
    path.write_text(f'coordinator_password = "{PASSWORD}"\n')
    with pytest.raises(UnknownSettingError) as raised:
        load(config=str(path), environ={})
    assert PASSWORD not in str(raised.value)
    load(environ={"QDO_COORDINATOR_PASSWORD": PASSWORD})


def test_the_variable_overrides_the_file(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = access(files, **LOGIN)
    assert made.account is not None
    assert made.account.password == PASSWORD
    monkeypatch.setenv("QDO_COORDINATOR_PASSWORD", "another")
    made = access(files, **LOGIN)
    assert made.account is not None
    assert made.account.password == "another"
    assert "another" not in repr(made)


def test_rights_of_each_role(files: dict[str, str]) -> None:
    """The access control lists of every kind of node."""
    made = access(
        files,
        **LOGIN,
        acl="account",
        acl_operators=[HASH],
        acl_monitors=["sasl:m"],
        acl_senders=["x509:CN=web, O=shop"],
    )
    lists = {
        path: acl_text(made.acl_of(path))
        for path in (
            "/",
            LAYOUT.root,
            LAYOUT.queues,
            LAYOUT.queue("q"),
            LAYOUT.worker("worker-1"),
            LAYOUT.doorbells,
            LAYOUT.doorbell("q"),
            LAYOUT.fleet.documents,
            f"{LAYOUT.fleet.document_set('plans')}/acme",
            f"{LAYOUT.root}er",
        )
    }
    own, readers = "digest:app:cdrwa", "sasl:m:r"
    assert list(lists.values()) == [
        f"{own},world:anyone:cr",
        f"{own},digest:ops:dr,{readers}",
        f"{own},digest:ops:drw,{readers}",
        f"{own},digest:ops:rw,{readers}",
        f"{own},digest:ops:rw,{readers}",
        f"{own},digest:ops:r,{readers},x509:CN=web, O=shop:c",
        f"{own},digest:ops:r,{readers},x509:CN=web, O=shop:w",
        f"{own},digest:ops:cdrw,{readers},x509:CN=web, O=shop:r",
        f"{own},digest:ops:cdrw,{readers},x509:CN=web, O=shop:r",
        f"{own},world:anyone:cr",
    ]
