"""Containers without a container engine: processes in namespaces of Linux.

Each container has an address on a network of the test's own, its own process ids, host name and
file system. The files of this machine stand in for those of base images. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.processes import Proc, children, wait_until

PROGRAMS = ("unshare", "nsenter", "setpriv", "ip")
NETWORK = "10.88.0"
LIBRARIES = sysconfig.get_paths()["purelib"]
PYTHON = Path(os.path.realpath(sys.executable))
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

ATTEMPT = """
ip link add switch type bridge
ip link add one type veth peer name other
mount -t tmpfs tmpfs "$1"
cd "$1"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
"""
"""Some machines refuse these steps even to root, such as those that are containers themselves."""

SWITCH = """
ip link add switch type bridge
ip link set switch up
mount -t tmpfs tmpfs "$1"
echo ready
exec cat
"""
"""The namespaces that outlive single containers: a network, and a place for their files."""

INSIDE = """
scratch() {
    mkdir -p "$1"
    mount -t tmpfs -o mode=1777 scratch "$1"
}
show() {
    if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "$(dirname "$2")"; touch "$2"; fi
    mount --bind "$1" "$2"
}
hostname "$NAME"
ip link set lo up
ip link add eth0 type veth peer name "$CABLE" netns "$SWITCH"
nsenter --net="$SWITCH" ip link set "$CABLE" master switch up
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
mkdir "$FILES/upper" "$FILES/work" "$FILES/root"
mount -t overlay overlay \
    -o "lowerdir=$LAYERS,upperdir=$FILES/upper,workdir=$FILES/work" "$FILES/root"
cd "$FILES/root"
printf '%b' "$HOSTS" > etc/hosts
mount -t proc proc proc
mount --rbind /dev dev
show "$LIBRARIES" ./libraries
for folder in $PYTHON; do chmod a+x ".$folder"; done
"""
"""The set-up of a container, in its new namespaces. The libraries may be on another file system
than `/`, and Python may be in a folder that is only for root."""


def require(folder: Path) -> None:
    """Skip the test if this machine allows no containers, such as without root.

    Programs must be there: `make test` installs them.
    """
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    if missing:
        pytest.fail(f"missing: {missing} (Debian: apt install util-linux iproute2)")
    argv = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-ec", ATTEMPT)
    tried = subprocess.run([*argv, "sh", str(folder)], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"no containers within this one: {tried.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Image:
    """The result of a Containerfile.

    :ivar layer: folder with the files that it adds to its base.
    """

    layer: Path
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    folder: str = "/"
    user: str = "0:0"
    entrypoint: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Spec:
    """A container that is to run.

    :ivar files: paths in the container, each with the file or folder of this machine to show there.
    :ivar restricted: no capabilities, and no way to gain privileges.
    :ivar scratch: paths of empty folders that it may write to.
    """

    name: str
    image: Image
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    read_only: bool = False
    restricted: bool = False
    scratch: Sequence[str] = ()

    def mounts(self) -> str:
        """Return the script that mounts its files."""
        lines = [f"scratch .{path}" for path in self.scratch]
        lines += [f"show {shlex.quote(str(source))} .{path}" for path, source in self.files.items()]
        # After the others, which create folders.
        return "\n".join([*lines, *(["mount -o remount,bind,ro ."] * self.read_only)])

    def entering(self, command: Sequence[str]) -> list[str]:
        """Return `command` with its user, rights, folder and environment."""
        user, group = self.image.user.split(":")
        rights = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        env = {**self.image.env, "HOSTNAME": self.name, "PYTHONPATH": "/libraries", **self.env}
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"),
            *(rights if self.restricted else ()),
            *("env", "-i", f"--chdir={self.image.folder}"),
            *(f"{name}={value}" for name, value in env.items()),
            *command,
        ]


class Container:
    """A running container.

    :ivar proc: a process outside, which ends with the container and has its output.
    :ivar written: folder with the files that it has written to its own file system.
    """

    def __init__(self, spec: Spec, proc: Proc, written: Path) -> None:
        self.spec = spec
        self.proc = proc
        self.written = written

    @property
    def pid(self) -> int:
        """The number, outside, of the process that is number 1 inside."""
        found: list[int] = []

        def set_up() -> bool:
            found[:] = children(self.proc.pid)
            return bool(found) and os.readlink(f"/proc/{found[0]}/root") != "/"

        try:
            wait_until(set_up, f"{self.spec.name} runs")
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.proc.output}") from None
        return found[0]

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command inside to its end, as a probe does; return its exit code and output."""
        pid = self.pid
        done = subprocess.run(
            [
                *("nsenter", f"--target={pid}", "--net", "--uts", "--pid", "--mount", "--root"),
                *self.spec.entering(command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    def stop(self, grace_seconds: float) -> int:
        """Send SIGTERM; return the exit code. Fail the test if that takes too long."""
        os.kill(self.pid, signal.SIGTERM)
        return self.proc.wait(grace_seconds)


class ContainerEngine:
    """Starts containers on one network; `close` ends them all.

    :param names: host names, which get the first addresses.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._procs: list[Proc] = []
        argv = ("unshare", "--net", "--mount", "sh", "-ec", SWITCH, "sh", str(folder))
        self._switch = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._switch.stdout is None or self._switch.stdout.readline() != "ready\n":
            raise RuntimeError("cannot create a network")

    def folder(self, name: str, owner: str = "0:0") -> Path:
        """Return a folder on the file system of the containers; create it if missing."""
        path = self._folder / name
        self.shell(f"mkdir -p {path}; chown {owner} {path}")
        return path

    def shell(self, script: str) -> None:
        """Run a script outside of containers that sees their file system."""
        enter = ("nsenter", f"--target={self._switch.pid}", "--net", "--mount")
        subprocess.run([*enter, "sh", "-ec", script], cwd="/", check=True, timeout=60)

    def start(self, spec: Spec) -> Container:
        """Start a container, and return at once."""
        number = len(self._procs) + 1
        address = self._addresses.get(spec.name, f"{NETWORK}.{100 + number}")
        hosts = {"localhost": "127.0.0.1", **self._addresses, spec.name: address}
        files = self.folder(f"container-{number}")
        script = (
            f"{INSIDE}\n{spec.mounts()}\nexec chroot . {shlex.join(spec.entering(spec.command))}"
        )
        proc = Proc(
            [
                *("nsenter", f"--target={self._switch.pid}", "--net", "--mount"),
                *("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"),
                *("sh", "-ec", script),
            ],
            env={
                "NAME": spec.name,
                "CABLE": f"cable{number}",
                "SWITCH": f"/proc/{self._switch.pid}/ns/net",
                "ADDRESS": address,
                "FILES": str(files),
                "LAYERS": f"{spec.image.layer}:/",
                "HOSTS": "".join(f"{where} {name}\\n" for name, where in hosts.items()),
                "LIBRARIES": LIBRARIES,
                "PYTHON": " ".join(map(str, PYTHON.parents)),
            },
            cwd="/",
        )
        self._procs.append(proc)
        return Container(spec, proc, files / "upper")

    def close(self) -> None:
        for proc in self._procs:
            proc.__exit__(None, None, None)
        self._switch.communicate()
