"""Accounts and rights on a real ZooKeeper: each role does its work, and nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.exceptions import NoAuthError
from kazoo.protocol.states import KazooState
from kazoo.security import ACL, OPEN_ACL_UNSAFE, Id, Permissions

from qdo.coordination.client import Client, connect
from qdo.coordination.doorbell_notifier import DoorbellNotifier
from qdo.errors import CoordinatorAccountError, NodeRefusedError
from qdo.settings.coordinator_access import coordinator_access
from tests.support.coordinator_process import connected
from tests.support.processes import wait_until
from tests.support.security.fleet import LAYOUT, SecureFleet
from tests.support.security.zookeeper import PASSWORDS, SecureZooKeeper

ROLES = {
    "acl": "required",
    "acl_workers": ["sasl:worker"],
    "acl_operators": ["sasl:operator"],
    "acl_monitors": ["sasl:monitor"],
    "acl_senders": ["sasl:sender"],
}


class Accounts:
    """A fleet of an app with an account for each role.

    :ivar configs: the settings file of each account.
    """

    def __init__(self, fleet: SecureFleet, **settings: Any) -> None:
        self.fleet = fleet
        self.configs = {
            name: fleet.config(**{**ROLES, **settings}, **fleet.login(f"sasl:{name}", password))
            for name, password in PASSWORDS.items()
        }


@pytest.fixture
def plain(secure_zookeeper: SecureZooKeeper, chroot: str, tmp_path: Path) -> SecureFleet:
    """An app whose clients connect without TLS."""
    return SecureFleet(tmp_path / "app", coordinator=secure_zookeeper.plain_url(chroot))


@pytest.fixture
def accounts(plain: SecureFleet) -> Accounts:
    return Accounts(plain)


@pytest.fixture
def stranger(secure_zookeeper: SecureZooKeeper, chroot: str) -> Iterator[Client]:
    """A client without an account, at the root of the servers."""
    with connected(secure_zookeeper.plain_url("")) as client:
        yield client


@pytest.mark.slow
def test_each_role_does_its_work(accounts: Accounts) -> None:
    """Worker, operator and monitor work on one app at once, and another account gets nothing."""
    fleet, configs = accounts.fleet, accounts.configs
    with fleet.worker(configs["worker"]):
        fleet.process("a", 1, configs["sender"])
        seek = fleet.qdo("seek", "a", "earliest", "--yes", config=configs["operator"])
        assert seek.code == 0, seek.err
        wait_until(lambda: fleet.done() == ["a 1", "a 1"], "the message is processed again")
        assert_logged(accounts)
        for name, code in (("operator", 0), ("monitor", 0), ("worker", 0), ("other", 5)):
            for command in (("queues",), ("workers",), ("queues", "a")):
                ended = fleet.qdo(*command, config=configs[name])
                assert ended.code == code, (name, command, ended.err)
            # The last one asks the owner, which a monitor may not.
            assert ("cannot be asked" in ended.out) == (name == "monitor"), (name, ended.out)
        refused = fleet.qdo("seek", "a", "earliest", "--yes", config=configs["monitor"])
        assert refused.code == 5
        assert "account sasl:monitor" in refused.err
        assert fleet.qdo("admin acl check", config=configs["monitor"]).code == 0
        fleet.process("old", 1, configs["sender"])
        deleted = fleet.qdo("delete", "old", "--yes", config=configs["operator"])
        assert deleted.code == 0, deleted.err
        with fleet.client(configs["other"]) as other:
            assert_closed(other)


def assert_logged(accounts: Accounts) -> None:
    """Operators add to the action log, and can neither change nor delete an entry."""
    with accounts.fleet.client(accounts.configs["operator"]) as operator:
        [entry] = operator.get_children(LAYOUT.fleet.actionlog)
        path = LAYOUT.fleet.log_entry(entry)
        assert json.loads(operator.get(path)[0])["account"] == "sasl:operator"
        for use in (
            lambda: operator.set(path, b"{}"),
            lambda: operator.delete(path),
            lambda: operator.create(f"{path}/below", b""),
            lambda: operator.set_acls(path, OPEN_ACL_UNSAFE),
        ):
            with pytest.raises(NoAuthError):
                use()
    with accounts.fleet.client(accounts.configs["sender"]) as sender, pytest.raises(NoAuthError):
        sender.create(LAYOUT.fleet.log_entry("x"), b"")


def test_operators_ask_workers_and_nobody_else_does(accounts: Accounts) -> None:
    """An operator can neither change nor delete what it asked for."""
    fleet, configs = accounts.fleet, accounts.configs
    with fleet.worker(configs["worker"]):
        fleet.process("a", 1, configs["sender"])
        for name, code in (("operator", 0), ("monitor", 5), ("sender", 5), ("other", 5)):
            ended = fleet.qdo("action", "*", "stacks", "-o", "json", config=configs[name])
            assert ended.code == code, (name, ended.err)
            if code == 0:
                [item] = json.loads(ended.out)["items"]
                assert (item["outcome"], "thread" in item["output"]) == ("done", True)
    folder = LAYOUT.fleet.actions_of(item["worker"])
    with fleet.client(configs["operator"]) as operator:
        node = operator.create(f"{folder}/x", b"{}")
        for use in (
            lambda: operator.set(node, b"{}"),
            lambda: operator.delete(node),
            lambda: operator.delete(folder),
            lambda: operator.create(f"{LAYOUT.fleet.actionoutput}/x", b""),
        ):
            with pytest.raises(NoAuthError):
                use()
    with fleet.client(configs["sender"]) as sender, pytest.raises(NoAuthError):
        sender.create(f"{folder}/y", b"{}")


def assert_closed(client: Client) -> None:
    """Every node of the app refuses every use by this client."""
    paths = [LAYOUT.root, *LAYOUT.persistent, LAYOUT.queue("a"), LAYOUT.doorbells, LAYOUT.broker]
    for path in paths:
        assert client.exists(path), path
        for use in (
            lambda path: client.get(path),
            lambda path: client.get_children(path),
            lambda path: client.set(path, b"x"),
            lambda path: client.create(f"{path}/x", b""),
            lambda path: client.set_acls(path, OPEN_ACL_UNSAFE),
        ):
            with pytest.raises(NoAuthError):
                use(path)
    for path in paths[1:]:
        with pytest.raises(NoAuthError):
            client.delete(path)


def test_senders_ring_and_do_nothing_else(accounts: Accounts) -> None:
    fleet, configs = accounts.fleet, accounts.configs
    with fleet.worker(configs["worker"]), fleet.client(configs["worker"]) as worker:
        for name, rings in (("sender", True), ("other", False)):
            settings = fleet.settings(configs[name])
            access = coordinator_access(settings, LAYOUT)
            notifier = DoorbellNotifier(settings.coordinator, LAYOUT, access=access)
            notifier.ring([name])
            notifier.close()
            assert bool(worker.exists(LAYOUT.doorbell(name))) is rings
        with fleet.client(configs["sender"]) as sender, pytest.raises(NoAuthError):
            sender.get(LAYOUT.root)


def test_wrong_passwords_are_refused(plain: SecureFleet) -> None:
    """Exit code 2, and one line that names the account but not its password."""
    config = plain.config(**ROLES, **plain.login("sasl:worker", "marker-wrong"))
    for ended in (plain.worker_ends(config), plain.qdo("queues", config=config)):
        assert ended.code == CoordinatorAccountError.exit_code
        assert "account sasl:worker" in ended.err
        assert "marker" not in ended.err
        assert "Traceback" not in ended.err


def test_a_rejection_before_the_caller_runs_again(plain: SecureFleet) -> None:
    """kazoo connects, then logs in: the caller may wake up after both."""
    settings = plain.settings(plain.config(**ROLES, **plain.login("sasl:worker", "wrong")))
    client = connect(settings.coordinator, access=coordinator_access(settings, LAYOUT))
    start, states = client.start_async, []
    client.add_listener(states.append)

    def start_and_wait() -> Any:
        live = start()
        wait_until(lambda: KazooState.LOST in states, "the login has failed")
        return live

    client.start_async = start_and_wait
    with pytest.raises(CoordinatorAccountError):
        client.open(0.2)


def test_a_worker_without_rights_ends(accounts: Accounts) -> None:
    """Another app's account cannot run a worker of this app: exit code 5, no restarts."""
    fleet, configs = accounts.fleet, accounts.configs
    with fleet.worker(configs["worker"]):
        ended = fleet.worker_ends(configs["other"])
    assert ended.code == NodeRefusedError.exit_code
    assert "account sasl:other" in ended.err


def test_open_nodes_are_refused_if_required(plain: SecureFleet) -> None:
    """`qdo admin acl apply` closes a tree that workers without ACLs made; then workers start."""
    open_config = plain.config()
    with plain.worker(open_config):
        plain.process("a", 1, open_config)
    config = Accounts(plain).configs["worker"]
    refused = plain.worker_ends(config)
    assert refused.code == 5
    assert LAYOUT.root in refused.err
    checked = plain.qdo("admin acl check", "-o", "json", config=config)
    assert checked.code == 1
    found = {each["path"]: each["found"] for each in json.loads(checked.out)["items"]}
    assert found[LAYOUT.queue("a")] == "world:anyone:cdrwa"
    assert plain.qdo("admin acl apply", "--yes", config=config).code == 0
    assert plain.qdo("admin acl check", config=config).code == 0
    with plain.worker(config):
        plain.process("a", 2, config)
    assert plain.done() == ["a 1", "a 2"]


def test_prepared_nodes_are_refused_if_required(
    accounts: Accounts, chroot: str, stranger: Client
) -> None:
    """Another app cannot make the app's node first and keep its rights on it."""
    fleet, configs = accounts.fleet, accounts.configs
    rights = [ACL(Permissions.ALL, Id("sasl", name)) for name in ("worker", "other")]
    stranger.ensure_path(f"{chroot}{LAYOUT.root.rpartition('/')[0]}")
    stranger.create(f"{chroot}{LAYOUT.root}", b"", acl=rights)
    refused = fleet.worker_ends(configs["worker"])
    assert refused.code == 5
    assert "sasl:other:cdrwa" in refused.err
    assert fleet.qdo("admin acl apply", config=configs["worker"]).code == 0
    with fleet.worker(configs["worker"]):
        pass


def test_apply_names_what_it_may_not_change(accounts: Accounts) -> None:
    fleet, configs = accounts.fleet, accounts.configs
    with fleet.worker(configs["worker"]):
        pass
    with fleet.client(configs["worker"]) as client:
        client.set_acls(LAYOUT.queues, [ACL(Permissions.ALL, Id("sasl", "admin"))])
    assert fleet.qdo("admin acl check", config=configs["worker"]).code == 1
    ended = fleet.qdo("admin acl apply", config=configs["worker"])
    assert ended.code == 4
    assert LAYOUT.queues in ended.err


def test_below_a_protected_chroot(
    accounts: Accounts, chroot: str, secure_zookeeper: SecureZooKeeper
) -> None:
    """An administrator made the chroot, and the worker has rights on it but not above it."""
    fleet = accounts.fleet
    top = f"/protected{chroot[1:]}"
    rights = [ACL(Permissions.ALL, Id("sasl", name)) for name in ("admin", "worker")]
    fleet.shared["coordinator"] = secure_zookeeper.plain_url("/")
    with fleet.client(Accounts(fleet).configs["admin"]) as admin:
        admin.create(top, b"", acl=rights[:1])
        admin.create(f"{top}/shop", b"", acl=rights)
    fleet.shared["coordinator"] = secure_zookeeper.plain_url(f"{top}/shop")
    config = Accounts(fleet).configs["worker"]
    with fleet.worker(config):
        fleet.process("a", 1, config)
    fleet.shared["coordinator"] = secure_zookeeper.plain_url(f"{top}/missing")
    for ended in (
        fleet.worker_ends(Accounts(fleet).configs["worker"]),
        fleet.qdo("queues", config=Accounts(fleet).configs["worker"]),
    ):
        assert ended.code == 5
        assert f"{top}/missing" in ended.err


def test_other_apps_may_start_beside(accounts: Accounts, stranger: Client, chroot: str) -> None:
    """The nodes above the app belong to all: everybody may create an app, and no more."""
    with accounts.fleet.worker(accounts.configs["worker"]):
        pass
    namespace = f"{chroot}{LAYOUT.root.rpartition('/')[0]}"
    stranger.create(f"{namespace}/another")
    for use in (
        lambda: stranger.set(namespace, b"x"),
        lambda: stranger.delete(f"{namespace}/another"),
        lambda: stranger.set_acls(namespace, OPEN_ACL_UNSAFE),
    ):
        with pytest.raises(NoAuthError):
            use()


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["digest:worker", "sasl:worker"])
def test_secrets_appear_nowhere(fleet: SecureFleet, auth: str) -> None:
    """Not in logs of any level, command lines, settings, or nodes."""
    secret = PASSWORDS["worker"]
    login, env = fleet.login(auth, secret), {}
    if auth == "sasl:worker":
        del login["coordinator_password_file"]
        env = {"QDO_COORDINATOR_PASSWORD": secret}
    logging, log = fleet.folder / "logging.json", fleet.folder / "all.log"
    handlers = {
        "file": {"class": "logging.FileHandler", "filename": str(log)},
        "console": {"class": "logging.StreamHandler", "level": "INFO"},
    }
    root = {"level": 1, "handlers": list(handlers)}
    logging.write_text(json.dumps({"version": 1, "handlers": handlers, "root": root}))
    config = fleet.config(**login, acl="required")
    noisy = fleet.config(**login, acl="required", log_config=str(logging), log_level="debug")
    arguments = {"config": config, "env": env}
    with fleet.worker(noisy, env) as worker:
        shown = [
            fleet.qdo("config", "-o", "json", **arguments),
            fleet.qdo("admin tree", **arguments),
            fleet.qdo("admin acl account", **arguments),
        ]
        assert "Sending request" in log.read_text()
        lines = _command_lines()
    texts = [worker.output, log.read_text()]
    texts += [each.out + each.err for each in shown]
    assert all(each.code == 0 for each in shown), shown
    assert not [text for text in texts if secret in text]
    assert not [line for line in lines if secret.encode() in line]


def _command_lines() -> list[bytes]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # that process has ended
            lines.append(path.read_bytes())
    return lines
