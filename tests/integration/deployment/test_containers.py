"""The files for containers, as they are: a fleet on a network of its own.

The Containerfile is built. The services of the compose file and a pod of the Kubernetes manifests
run with their commands, environments, users and rights; `config/zoo.cfg` sets up the ensemble.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import zookeeper
from tests.support.containers import engine
from tests.support.containers.compose import ComposeFleet, seconds
from tests.support.containers.engine import Container, Spec
from tests.support.containers.pods import load_manifests, pod_spec, worker_of
from tests.support.paths import ROOT
from tests.support.postgresql import commands
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.together("containers")]

CONFIG = ROOT / "config"
PASSWORD = "a secret"
QUEUES = 8
EACH = 25
MODE = "exec 3<>/dev/tcp/localhost/2181; echo srvr >&3; cat <&3"
START_SECONDS = 60.0


class ContainerFleet:
    """All services of the compose file.

    :ivar running: containers by their host names.
    """

    def __init__(self, folder: Path) -> None:
        self.compose = ComposeFleet(
            CONFIG / "compose.yaml", folder, {"POSTGRES_PASSWORD": PASSWORD}
        )
        self.running: dict[str, Container] = {}
        self._sent = 0

    def start(self) -> None:
        """Start the services in the order in which they depend on each other."""
        for name in ("zk1", "zk2", "zk3", "postgres"):
            self.running[name] = self.compose.start(name)
        self.compose.wait_healthy(self.running["postgres"])
        for server in self.servers():
            wait_until(lambda each=server: bool(mode(each)), "the server serves", START_SECONDS)
        assert self.compose.start("init").proc.wait(START_SECONDS) == 0
        for number in range(self.compose.services["worker"]["deploy"]["replicas"]):
            self.running[f"worker-{number}"] = self.compose.start("worker", f"worker-{number}")
        for worker in self.workers():
            worker.proc.wait_for_line(": registered", timeout_seconds=START_SECONDS)

    def servers(self) -> list[Container]:
        return [each for name, each in self.running.items() if name.startswith("zk")]

    def workers(self) -> list[Container]:
        return [each for name, each in self.running.items() if name.startswith("worker")]

    def send(self) -> list[dict[str, int | str]]:
        """Send messages from a container of the same image; return their bodies."""
        count = QUEUES * EACH
        bodies = [{"q": f"q{n % QUEUES}", "n": self._sent + n} for n in range(count)]
        self._sent += count
        lines = "\n".join(map(json.dumps, bodies))
        script = f"echo '{lines}' | qdo send --file - --queue-field q"
        sender = self.compose.start("worker", "sender", ("sh", "-c", script))
        assert sender.proc.wait(START_SECONDS) == 0, sender.proc.output
        return bodies

    def processed(self, queue: str) -> list[int]:
        """Return the numbers of a queue's messages that workers have printed."""
        pattern = re.compile(rf" {queue} - (\{{.*\}})$", re.MULTILINE)
        found = [pattern.findall(each.proc.output) for each in self.workers()]
        return [json.loads(body)["n"] for bodies in found for body in bodies]

    def wait_processed(self, bodies: list[dict[str, int | str]]) -> Counter[int]:
        """Wait until workers have processed messages; return how often they did each."""
        expected = {int(body["n"]) for body in bodies}
        counts: Counter[int] = Counter()

        def all_done() -> bool:
            found = Counter(n for q in range(QUEUES) for n in self.processed(f"q{q}"))
            counts.clear()
            counts.update({n: found[n] for n in expected & found.keys()})
            return counts.keys() == expected

        wait_until(all_done, "everything is processed", START_SECONDS)
        return counts


def mode(server: Container) -> str:
    """Return "leader" or "follower"; "" while it does not serve."""
    found = re.search(r"^Mode: (\w+)$", server.run("bash", "-c", MODE)[1], re.MULTILINE)
    return found[1] if found else ""


def probe(pod: Container, path: str) -> int:
    """Return 0 if a probe of the kubelet succeeds."""
    script = f"import urllib.request as u; u.urlopen('http://127.0.0.1:9180{path}', timeout=5)"
    return pod.run("python", "-c", script)[0]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerFleet]:
    engine.require(tmp_path_factory.mktemp("attempt"))
    zookeeper.require()
    commands.require()
    made = ContainerFleet(tmp_path_factory.mktemp("fleet"))
    try:
        made.start()
        yield made
    finally:
        made.compose.close()


def test_the_compose_fleet_processes_messages(fleet: ContainerFleet) -> None:
    """Each message once, on both workers, whose processes are those of no root user."""
    assert set(fleet.wait_processed(fleet.send()).values()) == {1}
    for worker in fleet.workers():
        assert worker.run("sh", "-c", "id -u; touch /srv/qdo/x")[1].startswith("10001\ntouch: ")
        assert any(re.search(r" q\d - ", line) for line in worker.proc.output.splitlines())
        check = fleet.compose.services["worker"]["healthcheck"]["test"]
        assert worker.run(*check[1:]) == (0, "")


def test_the_fleet_survives_the_leader_of_the_ensemble(fleet: ContainerFleet) -> None:
    """No worker exits, and messages are processed; the server joins again with its files."""
    assert sorted(map(mode, fleet.servers())) == ["follower", "follower", "leader"]
    (leader,) = [each for each in fleet.servers() if mode(each) == "leader"]
    os.kill(leader.pid, signal.SIGKILL)
    assert leader.proc.wait() != 0
    del fleet.running[leader.spec.name]
    fleet.wait_processed(fleet.send())
    assert all(worker.pid for worker in fleet.workers())
    again = fleet.running[leader.spec.name] = fleet.compose.start(leader.spec.name)
    wait_until(lambda: mode(again) == "follower", "it is a follower", START_SECONDS)


def test_sigterm_drains_a_container_within_its_grace(fleet: ContainerFleet) -> None:
    """The message in flight ends, and no other container repeats it.

    The command leaves an orphan, which the parent process reaps as process 1.
    """
    orphan = "(sh -c 'sleep 0.1; touch /tmp/orphan' &)"
    wait = "until [ -e /tmp/go-on ]; do sleep 0.05; done"
    env = {
        "QDO_APP": "qdo.programs.shell:app",
        "QDO_SHELL_COMMAND": f"{orphan}; echo begun; {wait}; echo ended",
    }
    both = [fleet.compose.start("worker", f"shell-{number}", env=env) for number in range(2)]
    for each in both:
        each.proc.wait_for_line(": registered", timeout_seconds=START_SECONDS)
    assert both[0].run("qdo", "send", "q", "1")[0] == 0
    wait_until(lambda: any("begun" in each.proc.output for each in both), "it has begun")
    worker, other = sorted(both, key=lambda each: "begun" in each.proc.output, reverse=True)
    wait_until(lambda: worker.run("ls", "/tmp/orphan")[0] == 0, "the orphan ends")
    states = ("sh", "-c", "cat /proc/[0-9]*/stat")
    wait_until(lambda: ") Z " not in worker.run(*states)[1], "the orphan is reaped")
    os.kill(worker.pid, signal.SIGTERM)
    worker.proc.wait_for_line("step 2: .* 1 message")
    assert worker.run("touch", "/tmp/go-on")[0] == 0
    grace = seconds(fleet.compose.services["worker"]["stop_grace_period"])
    assert worker.proc.wait(grace) == 0, worker.proc.output
    assert worker.proc.output.count("ended") == 1
    listed = other.run("qdo", "queues", "-o", "jsonl")[1]
    assert json.loads(listed)["backlog"] == 0, listed
    assert "begun" not in other.proc.output
    assert other.stop(grace) == 0


def test_a_pod_of_the_manifests_starts_and_drains(fleet: ContainerFleet, tmp_path: Path) -> None:
    """Its probes succeed once it is registered; it shares the queues, and drains at SIGTERM."""
    manifests = load_manifests(CONFIG / "kubernetes.yaml")
    name = "qdo-worker-7d9f8b6c5d-x2x4z"
    spec = pod_spec(
        manifests,
        name,
        fleet.compose.image,
        {("qdo-postgresql", "password"): PASSWORD},
        tmp_path / "settings",
    )
    worker = worker_of(manifests)
    paths = [worker[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness")]
    pod = fleet.running["worker-pod"] = fleet.compose.engine.start(spec)
    assert probe(pod, "/readyz") == 1
    wait_until(lambda: {probe(pod, path) for path in paths} == {0}, "they succeed", START_SECONDS)
    pod.proc.wait_for_line(": registered", count=2)
    assert set(fleet.wait_processed(fleet.send()).values()) == {1}
    assert re.search(r" q\d - ", pod.proc.output)
    grace = manifests["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert pod.stop(grace) == 0, pod.proc.output


def test_the_command_of_the_systemd_unit_runs_as_confined(
    fleet: ContainerFleet, tmp_path: Path
) -> None:
    """With the sample of settings, and rights to write to the folders of the unit only."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(CONFIG / "qdo-worker.service")
    service = unit["Service"]
    app = tmp_path / "welcome.py"
    app.write_text(
        "import qdo\napp = qdo.App('welcome')\n"
        "@app.job()\ndef greet(message, context): print('hello', message.body, flush=True)\n"
    )
    image = replace(fleet.compose.image, folder=service["WorkingDirectory"])
    data = fleet.compose.engine.folder("unit", image.user)
    spec = Spec(
        "unit",
        image,
        service["ExecStart"].split(),
        files={
            "/etc/qdo/qdo.toml": CONFIG / "qdo.toml",
            "/srv/qdo/welcome.py": app,
            service["ReadWritePaths"]: data,
        },
        read_only=service["ProtectSystem"] == "strict",
        restricted=service["NoNewPrivileges"] == "yes" and service["CapabilityBoundingSet"] == "",
        scratch=["/tmp"] if service["PrivateTmp"] == "yes" else [],
    )
    worker = fleet.compose.engine.start(spec)
    worker.proc.wait_for_line(": registered", timeout_seconds=START_SECONDS)
    assert worker.run("qdo", "send", "--app", "welcome:app", "q", "1")[0] == 0
    worker.proc.wait_for_line("^hello 1$")
    assert worker.stop(service.getfloat("TimeoutStopSec")) == 0, worker.proc.output
