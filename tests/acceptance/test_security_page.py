"""The page about security sets up two apps that do not trust each other, as it is shown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.errors import CoordinatorAccountError
from tests.support import zookeeper
from tests.support.cli import QDO, WORKER, clean_environment, command
from tests.support.doc_pages import Block, blocks, read, steps
from tests.support.zookeeper import CLASSPATH, SMALL, ZooKeeperServer, free_ports

PATIENCE_SECONDS = 60.0
ZK_CLI = "/usr/share/zookeeper/bin/zkCli.sh"


class Walk:
    """The hosts of the page in one folder: their paths, names and ports are replaced.

    :ivar folder: where an administrator works.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "admin"
        self._etc = folder / "etc"
        for each in (self.folder, self._etc / "zookeeper", self._etc / "qdo"):
            each.mkdir(parents=True)
        self.port, self.secure_port = free_ports(2)
        text = read("security").split(".. _two-apps:")[1].split("\nConnections to")[0]
        self._blocks = [*blocks(text)]
        self._environment = clean_environment() | {"PATH": f"{folder}:{os.environ['PATH']}"}
        zk_cli = f'java -cp {CLASSPATH} $CLIENT_JVMFLAGS org.apache.zookeeper.ZooKeeperMain "$@"'
        for name, line in (
            ("qdo", f'{sys.executable} {" ".join(QDO)} "$@"'),
            ("qdo-worker", f'{sys.executable} {" ".join(WORKER)} "$@"'),
            ("pip", "true"),
            ("zkCli.sh", zk_cli),
        ):
            (folder / name).write_text(f"#!/bin/sh\nexec {line}\n")
            (folder / name).chmod(0o755)

    def block(self, caption: str) -> str:
        (found,) = [each for each in self._blocks if each.options.get("caption") == caption]
        return self._own(found.text)

    def sessions(self) -> list[Block]:
        return [each for each in self._blocks if each.options.get("class") == "run"]

    def write(self, caption: str) -> None:
        """Write a file of the page."""
        path = Path(self._own(caption))
        (path if path.is_absolute() else self.folder / path).write_text(self.block(caption))

    def run(self, session: Block) -> list[tuple[str, list[str], list[str]]]:
        """Run the commands of a block in one shell each; return what they print and should print.

        Variables that a command exports apply to the commands after it.
        """
        found, exports = [], ""
        for line, shown in steps(session):
            if line.startswith("export "):
                exports += f"{self._own(line)}; "
                continue
            done = subprocess.run(
                ["/bin/sh", "-c", exports + self._own(line)],
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
            assert done.returncode == 0, f"{line}: {done.stdout}"
            found.append((done.stdout, done.stdout.splitlines(), shown))
        return found

    def copy(self, app: str) -> None:
        """Copy the certificates of an app to its host, and write its settings and password."""
        target = self._etc / "qdo"
        for name in ("ca.pem", f"{app}.crt", f"{app}.key"):
            shutil.copy(self.folder / name, target)
        settings = self.block("/etc/qdo/shop.toml").replace("shop", app)
        (target / f"{app}.toml").write_text(settings)
        (target / f"{app}.password").write_text(f"the-password-of-{app}\n")
        (target / f"{app}.password").chmod(0o600)

    def shell(self, line: str) -> str:
        """Run one command and return its output."""
        block = Block("console", {}, f"$ {line}\n")
        return self.run(block)[0][0]

    def settings(self, app: str) -> str:
        """Return the text of an app's settings file."""
        return (self._etc / "qdo" / f"{app}.toml").read_text()

    def password_file(self, app: str) -> str:
        return str(self._etc / "qdo" / f"{app}.password")

    def server(self) -> ZooKeeperServer:
        """Return the server of the page, not started yet."""
        self.write("/etc/zookeeper/jaas.conf")
        for name in ("ca.pem", "zookeeper.pem"):
            shutil.copy(self.folder / name, self._etc / "zookeeper")
        options = (
            *SMALL,
            f"-Djava.security.auth.login.config={self._etc / 'zookeeper' / 'jaas.conf'}",
        )
        return ZooKeeperServer(
            self.folder / "server", self.port, self.block("zoo.cfg"), options=options
        )

    def _own(self, text: str) -> str:
        text = text.replace(ZK_CLI, "zkCli.sh").replace("/etc/", f"{self._etc}/")
        text = text.replace("zk1:2281", f"localhost:{self.secure_port}")
        text = text.replace("=2281", f"={self.secure_port}")
        return text.replace("certificate.sh zookeeper zk1", "certificate.sh zookeeper localhost")


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    """The page, up to its chroots."""
    zookeeper.require()
    walk = Walk(tmp_path)
    walk.write("certificate.sh")
    certificates, chroots, _ = walk.sessions()
    walk.run(certificates)
    server = walk.server()
    server.start()
    try:
        server.wait_ready()
        walk.write("admin-jaas.conf")
        walk.write("chroots")
        ((output, *_),) = walk.run(chroots)
        assert output.count("Created /") == 2, output
        for app in ("shop", "blog"):
            walk.copy(app)
        yield walk
    finally:
        server.kill()


@pytest.mark.slow
def test_two_apps_on_one_ensemble(walk: Walk) -> None:
    """Each works with its own account, and gets nothing with the other one."""
    shown = [(found, shown) for _, found, shown in walk.run(walk.sessions()[2]) if shown]
    assert len(shown) == 2
    for found, expected in shown:
        assert found == expected


@pytest.mark.slow
def test_servers_refuse_unknown_accounts(walk: Walk) -> None:
    """With `enforce.auth.enabled`, a wrong password and no account end with exit code 2."""
    settings = walk.settings("shop")
    wrong = walk.folder / "wrong.password"
    wrong.write_text("marker\n")
    wrong.chmod(0o600)
    lines = [
        each
        for each in settings.splitlines()
        if not each.startswith(("coordinator_auth", "coordinator_password", "acl"))
    ]
    none = "\n".join(lines)
    for text in (
        settings.replace(walk.password_file("shop"), str(wrong)),
        none,
        none.replace('/shop"', '"'),
    ):
        config = walk.folder / "other.toml"
        config.write_text(text)
        ended = command(*QDO, "queues", "-c", str(config), cwd=walk.folder)
        assert ended.code == CoordinatorAccountError.exit_code, (text, ended.err)
        assert "Traceback" not in ended.err
        assert "marker" not in ended.err


@pytest.mark.slow
def test_positions_move_to_a_secure_coordinator(walk: Walk) -> None:
    """The script of the operations page uses the TLS, account and rights of the settings file."""
    (script,) = [each for each in blocks(read("operations")) if each.language == "python"]
    (walk.folder / script.options["caption"]).write_text(script.text)
    config = "-c /etc/qdo/shop.toml"
    lines = walk.settings("shop").splitlines()[:2]
    (walk.folder / "old.toml").write_text("\n".join([*lines, 'coordinator = "sqlite:old.db"']))
    walk.shell(f"qdo send {config} greetings 1")
    work = "qdo-worker --job qdo.programs.echo:job --burst --log-level warning"
    assert "greetings" in walk.shell(f"{work} -c old.toml")
    move = f"{sys.executable} move.py sqlite:old.db zookeeper://zk1:2281/shop shop"
    assert "greetings" in walk.shell(f"QDO_CONFIG=/etc/qdo/shop.toml {move}")
    assert walk.shell(f"{work} {config}") == ""
    assert "every node has" in walk.shell(f"qdo admin acl check {config}")
