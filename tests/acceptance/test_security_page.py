"""The page about security sets up two apps that do not trust each other, as it is shown."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qdo.errors import CoordinatorAccountError
from tests.support import zookeeper
from tests.support.cli import QDO, command
from tests.support.doc_pages import Block, Shell, blocks, read, steps
from tests.support.zookeeper import CLASSPATH, SMALL, ZooKeeperServer, free_ports

ZK_CLI = "/usr/share/zookeeper/bin/zkCli.sh"


class Walk(Shell):
    """The hosts of the page in one folder: their paths, names and ports are replaced.

    :ivar folder: where an administrator works.
    """

    def __init__(self, folder: Path) -> None:
        zk_cli = f'java -cp {CLASSPATH} $CLIENT_JVMFLAGS org.apache.zookeeper.ZooKeeperMain "$@"'
        super().__init__(folder, **{"pip": "true", "zkCli.sh": zk_cli})
        self._etc = folder / "etc"
        for each in ("zookeeper", "qdo"):
            (self._etc / each).mkdir(parents=True)
        self.port, self.secure_port = free_ports(2)
        text = read("security").split(".. _two-apps:")[1].split("\nConnections to")[0]
        self._blocks = [*blocks(text)]

    def block(self, caption: str) -> str:
        (found,) = [each for each in self._blocks if each.options.get("caption") == caption]
        return self._own(found.text)

    def sessions(self) -> list[Block]:
        return [each for each in self._blocks if each.options.get("class") == "run"]

    def store(self, caption: str) -> None:
        """Write a file of the page."""
        path = Path(self._own(caption))
        (path if path.is_absolute() else self.folder / path).write_text(self.block(caption))

    def run(self, command: str) -> str:
        return super().run(self._own(command))

    def play(self, session: Block) -> list[tuple[str, list[str]]]:
        """Run the commands of a block in one shell each; return what they print and should print.

        Variables that a command exports apply to the commands after it.
        """
        found, exports = [], ""
        for line, shown in steps(session):
            if line.startswith("export "):
                exports += f"{line}; "
            else:
                found.append((self.run(exports + line), shown))
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

    def settings(self, app: str) -> str:
        """Return the text of an app's settings file."""
        return (self._etc / "qdo" / f"{app}.toml").read_text()

    def password_file(self, app: str) -> str:
        return str(self._etc / "qdo" / f"{app}.password")

    def server(self) -> ZooKeeperServer:
        """Return the server of the page, not started yet."""
        self.store("/etc/zookeeper/jaas.conf")
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
    walk.store("certificate.sh")
    certificates, chroots, _ = walk.sessions()
    walk.play(certificates)
    server = walk.server()
    server.start()
    try:
        server.wait_ready()
        walk.store("admin-jaas.conf")
        walk.store("chroots")
        ((output, _),) = walk.play(chroots)
        assert output.count("Created /") == 2, output
        for app in ("shop", "blog"):
            walk.copy(app)
        yield walk
    finally:
        server.kill()


@pytest.mark.slow
def test_two_apps_on_one_ensemble(walk: Walk) -> None:
    """Each works with its own account, and gets nothing with the other one."""
    played = [(output, shown) for output, shown in walk.play(walk.sessions()[2]) if shown]
    assert len(played) == 2
    for output, shown in played:
        assert output.splitlines() == shown


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
    walk.write(script.options["caption"], script.text)
    config = "-c /etc/qdo/shop.toml"
    lines = walk.settings("shop").splitlines()[:2]
    (walk.folder / "old.toml").write_text("\n".join([*lines, 'coordinator = "sqlite:old.db"']))
    walk.run(f"qdo send {config} greetings 1")
    work = "qdo-worker --job qdo.programs.echo:job --burst --log-level warning"
    assert "greetings" in walk.run(f"{work} -c old.toml")
    move = f"{sys.executable} move.py sqlite:old.db zookeeper://zk1:2281/shop shop"
    assert "greetings" in walk.run(f"QDO_CONFIG=/etc/qdo/shop.toml {move}")
    assert walk.run(f"{work} {config}") == ""
    assert "every node has" in walk.run(f"qdo admin acl check {config}")
