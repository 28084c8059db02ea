"""The services of ``config/compose.yaml`` as containers of `ContainerEngine`.

qdo's own image is built. ZooKeeper and PostgreSQL of this machine stand in for their images, and do
what the entry points of these do with their environment and their volumes.
"""

from __future__ import annotations

import pwd
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.support.containers.engine import Container, ContainerEngine, Image, Spec
from tests.support.containers.images import build
from tests.support.postgresql.commands import ACCOUNT, postgresql_program
from tests.support.processes import wait_until
from tests.support.zookeeper import CLASSPATH, MAIN, SMALL

KNOWN = {
    *("image", "build", "environment", "volumes", "entrypoint", "depends_on", "restart"),
    *("stop_grace_period", "read_only", "tmpfs", "cap_drop", "security_opt", "deploy"),
    "healthcheck",
}
POSTGRESQL = """
umask 077
printf %s "$POSTGRES_PASSWORD" > /tmp/password
{initdb} --username="$POSTGRES_USER" --pwfile=/tmp/password \
    --auth=scram-sha-256 --encoding=UTF8 --locale=C "$PGDATA"
echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
echo "CREATE DATABASE $POSTGRES_DB" | {postgres} --single -D "$PGDATA" postgres
exec {postgres} -D "$PGDATA" -c listen_addresses='*' -k /tmp
"""


def load_services(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the services of a compose file; raise an error for keys that this does not know."""
    text = re.sub(r"\$\{(\w+):\?\}", lambda found: variables[found[1]], path.read_text())
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    unknown = {key for service in services.values() for key in service} - KNOWN
    if unknown or "$" in str(services):
        raise NotImplementedError(f"{path}: {unknown or '$'}")
    return services


def seconds(text: str) -> float:
    """Return a duration such as ``60s``."""
    return float(text.removesuffix("s"))


class ComposeFleet:
    """The containers of a compose file.

    :ivar image: qdo's own.
    """

    def __init__(self, path: Path, folder: Path, variables: Mapping[str, str]) -> None:
        self.services = load_services(path, variables)
        self.engine = ContainerEngine(folder, [*self.services])
        self._path = path
        try:
            self._nothing = Image(self.engine.folder("nothing"))
            self.image = build(self.engine, path.parent / "Containerfile")
        except BaseException:
            self.engine.close()
            raise

    def start(
        self,
        service: str,
        name: str = "",
        command: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> Container:
        """Start a container of a service.

        :param name: the name of its host; without, that of the service.
        :param command: instead of that of the service, as with ``docker compose run``.
        :param env: variables in addition to those of the service.
        """
        given = self.services[service]
        image, argv = self._standing_in(given)
        spec = Spec(
            name or service,
            image,
            command or argv or given.get("entrypoint") or image.entrypoint,
            {**{key: str(value) for key, value in given["environment"].items()}, **(env or {})},
            self._files(service, image),
            given.get("read_only", False),
            given.get("cap_drop") == ["ALL"] and "no-new-privileges:true" in given["security_opt"],
            given.get("tmpfs", ()),
        )
        return self.engine.start(spec)

    def wait_healthy(self, container: Container) -> None:
        """Wait until the health check of a service succeeds."""
        kind, *command = self.services[container.spec.name]["healthcheck"]["test"]
        if kind != "CMD":
            raise NotImplementedError(kind)
        wait_until(lambda: container.run(*command)[0] == 0, f"{container.spec.name} is healthy", 60)

    def close(self) -> None:
        self.engine.close()

    def _standing_in(self, service: Mapping[str, Any]) -> tuple[Image, tuple[str, ...]]:
        name = service["image"].rpartition("/")[2].partition(":")[0]
        if "build" in service:
            return self.image, ()
        if name == "zookeeper":
            java = ("java", *SMALL, "-cp", CLASSPATH, MAIN, "/conf/zoo.cfg")
            script = 'echo "$ZOO_MY_ID" > "$ZOO_DATA_DIR/myid"; exec "$@"'
            return self._nothing, ("sh", "-ec", script, "sh", *java)
        entry = pwd.getpwnam(ACCOUNT)
        image = replace(
            self._nothing,
            user=f"{entry.pw_uid}:{entry.pw_gid}",
            env={**self._nothing.env, "PGDATA": "/var/lib/postgresql/data"},
        )
        programs = {name: postgresql_program(name) for name in ("initdb", "postgres")}
        return image, ("sh", "-ec", POSTGRESQL.format(**programs))

    def _files(self, service: str, image: Image) -> dict[str, Path]:
        found = {}
        for text in self.services[service].get("volumes", ()):
            source, target = text.split(":")[:2]
            if source.startswith("."):
                found[target] = (self._path.parent / source).resolve(strict=True)
            else:
                found[target] = self.engine.folder(f"volume-{source}", image.user)
        return found
