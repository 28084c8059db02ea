"""The options of the dashboard, and the common parts of its pages."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from flask import current_app

from qdo.connections.opened import Connections
from qdo.coordination.client import Client
from qdo.dashboard.reading import Actions, DirectReads, FleetReader, Reading
from qdo.errors import DashboardUnsafeError, NotFoundError, UsageError
from qdo.ops.verdicts import RULES, VerdictRules
from qdo.settings.settings import Settings

LEAST_TOKEN = 16
VIEWER = "viewer"
OPERATOR = "operator"
EXTENSION = "qdo"
# Maximum time for which a page waits for a reading. A page appears within a second, even without a
# reading.
PAGE_WAIT_SECONDS = 0.5
# Maximum time for which JSON waits for a reading. Programs prefer waiting to asking again.
ANSWER_WAIT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DashboardOptions:
    """Options of the dashboard.

    :ivar viewer_token: token for read access, or "".
    :ivar operator_token: token for read access, and for actions if `allow_actions` is True.
    :ivar anonymous: every visitor has read access if there are no tokens.
    :ivar allow_actions: operators may make changes. Requires the operator token, or `authorize`.
    :ivar authorize: called with the WSGI environ of each request. Returns the name and the role
        ("viewer" or "operator") of a visitor whom your own pages have authenticated, or None to
        refuse the request. Replaces tokens.
    :ivar secret: signs the cookies of forms, with `authorize`. All processes need the same text.
    :ivar show_bodies: show the bodies of messages.
    :ivar hosts: names of the dashboard in browsers, in addition to localhost and IP addresses. "*"
        if your own pages check the name.
    :ivar https: browsers send the session's cookie only over HTTPS.
    :ivar pause_seconds: the minimum pause between two readings.
    """

    viewer_token: str = ""
    operator_token: str = ""
    anonymous: bool = False
    allow_actions: bool = False
    authorize: Callable[[dict[str, Any]], tuple[str, str] | None] | None = None
    secret: str = ""
    show_bodies: bool = False
    hosts: tuple[str, ...] = ()
    https: bool = False
    pause_seconds: float = 5.0
    rules: VerdictRules = RULES

    def check(self) -> None:
        """Raise DashboardUnsafeError for options that would admit visitors without a token."""
        if self.authorize is not None:
            self._check_authorize()
            return
        for role, token in ((VIEWER, self.viewer_token), (OPERATOR, self.operator_token)):
            if token and len(token) < LEAST_TOKEN:
                raise DashboardUnsafeError(
                    rule=f"have a {role} token of at least {LEAST_TOKEN} characters",
                    remedy="make one with: openssl rand -hex 32",
                )
        if self.viewer_token and self.viewer_token == self.operator_token:
            raise DashboardUnsafeError(
                rule="have different tokens for viewers and operators",
                remedy="make another one with: openssl rand -hex 32",
            )
        if not self.anonymous and not self.has_login:
            raise DashboardUnsafeError(
                rule="have a token when others can reach it",
                remedy="give --token-file FILE or QDO_DASHBOARD_TOKEN, or listen on 127.0.0.1",
            )
        if self.allow_actions and not self.operator_token:
            raise DashboardUnsafeError(
                rule="have an operator token to allow actions",
                remedy="give --operator-token-file FILE or QDO_DASHBOARD_OPERATOR_TOKEN",
            )

    def _check_authorize(self) -> None:
        if self.has_login or self.anonymous:
            raise DashboardUnsafeError(
                rule="have one way to admit visitors, got authorize and tokens or anonymous=True",
                remedy="leave out the others",
            )
        if self.allow_actions and len(self.secret) < LEAST_TOKEN:
            raise DashboardUnsafeError(
                rule=f"have a secret of at least {LEAST_TOKEN} characters to allow actions",
                remedy="give secret=, the same text in all processes",
            )

    def visitor(self, environ: dict[str, Any]) -> tuple[str, str] | None:
        """Return the name and the role that `authorize` gives, None if it refuses."""
        found: Any = None if self.authorize is None else self.authorize(environ)
        if found is None:
            return None
        if not isinstance(found, tuple) or found[1:] not in ((VIEWER,), (OPERATOR,)):
            raise UsageError(
                reason="authorize must return a name and the role 'viewer' or 'operator', or None,"
                f" got {found!r:.100}"
            )
        return str(found[0]), str(found[1])

    @property
    def has_login(self) -> bool:
        return bool(self.viewer_token or self.operator_token)

    def serves(self, host: str) -> bool:
        """Return whether browsers may use this Host header."""
        # An attacker may point another name at this machine to read pages through a browser that
        # can reach the machine. An attacker cannot redirect an IP address.
        name = host_name(host)
        if "*" in self.hosts or name in ("localhost", *(each.lower() for each in self.hosts)):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".").lower()


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Board:
    """The common parts of all pages."""

    # The settings in force, with the name of the app.
    settings: Settings
    options: DashboardOptions
    reader: FleetReader
    # Reads additional data for some pages.
    direct: DirectReads
    # Asks workers. Other pages do not wait for these questions, which take longer.
    asking: DirectReads
    # Runs actions of operators. Reads do not delay them.
    acting: Actions

    @property
    def app(self) -> str:
        return self.settings.app

    def reading(self, wait_seconds: float = PAGE_WAIT_SECONDS) -> Reading | None:
        return self.reader.look(wait_seconds)

    @property
    def reading_id(self) -> str:
        """The id of the current content of pages, with a time that restarts change."""
        reading = self.reader.look()
        at = 0.0 if reading is None else reading.at
        return f"{at:.3f}{'-fault' if self.reader.fault else ''}"

    def coordinator(self, connections: Connections) -> Client:
        """Return the coordinator's client; raise NotFoundError if its file is missing."""
        if connections.client is None:
            raise NotFoundError(what="coordinator", name=self.settings.coordinator)
        return connections.client

    def close(self) -> None:
        self.reader.close()
        self.direct.close()
        self.asking.close()
        self.acting.close()


def board() -> Board:
    """Return the dashboard that answers the current request."""
    return cast(Board, current_app.extensions[EXTENSION])
