"""The servers `qdo dashboard` and `qdo ingest`."""

from __future__ import annotations

import logging
import os
import signal
import ssl
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import click

from qdo.cli.options import require_app, with_settings
from qdo.cli.output import print_message
from qdo.cli.readings import SHARED, verdict_options
from qdo.errors import QdoError, UsageError
from qdo.ops.verdicts import VerdictRules
from qdo.settings.settings import Settings
from qdo.system.files import private_text
from qdo.system.logs import configure
from qdo.text import describe, how_to_install

if TYPE_CHECKING:
    from qdo.app import App
    from qdo.system.web_server import WsgiApp

ADDRESS = "127.0.0.1:8520"
INGEST_ADDRESS = "127.0.0.1:8080"
REPORT_SECONDS = 60.0
_log = logging.getLogger(__name__)
VIEWER_VARIABLE = "QDO_DASHBOARD_TOKEN"
OPERATOR_VARIABLE = "QDO_DASHBOARD_OPERATOR_TOKEN"


def _listen_option(default: str, more: str = "") -> Callable[[Any], Any]:
    options: dict[str, Any] = {"metavar": "HOST:PORT", "default": default, "show_default": True}
    return click.option("--listen", **options, help=f"Where to listen.{more}")


@click.command()
@_listen_option(ADDRESS, " Addresses that other machines reach need a token.")
@click.option(
    "--host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="Name by which browsers address the dashboard; may be given more than once.",
)
@click.option(
    "--token-file", metavar="FILE", help=f"File with the viewers' token [{VIEWER_VARIABLE}]."
)
@click.option(
    "--operator-token-file",
    metavar="FILE",
    help=f"File with the operators' token [{OPERATOR_VARIABLE}].",
)
@click.option("--allow-actions", is_flag=True, help="Operators may pause, retry, skip, discard.")
@click.option("--show-bodies", is_flag=True, help="Show the bodies of dead letters.")
@click.option("--tls-cert", metavar="FILE", help="PEM file with a certificate: serve HTTPS.")
@click.option("--tls-key", metavar="FILE", help="PEM file with the key of --tls-cert.")
@click.option(
    "--https", is_flag=True, help="A proxy in front serves HTTPS: send cookies over it only."
)
@verdict_options
@with_settings(*SHARED, "history", "keys", "log_level")
def dashboard(
    listen: str,
    hosts: tuple[str, ...],
    token_file: str | None,
    operator_token_file: str | None,
    allow_actions: bool,
    show_bodies: bool,
    tls_cert: str | None,
    tls_key: str | None,
    https: bool,
    rules: VerdictRules,
    settings: Settings,
) -> None:
    """Serve pages that show the app: queues, workers, dead letters, pauses, audit, settings.

    It only reads, and only while a page is open. With --allow-actions, operators who log in with
    their token may act, too.
    """
    require_app(settings)
    address = _address_of(listen, ADDRESS)
    if (tls_cert is None) != (tls_key is None):
        raise UsageError(reason="--tls-cert and --tls-key must be given together")
    try:
        from werkzeug.middleware.proxy_fix import ProxyFix

        from qdo.dashboard import create_app
        from qdo.dashboard.board import is_loopback
    except ImportError as error:
        reason = f"the dashboard needs Flask ({error}); {how_to_install('dashboard')}"
        raise UsageError(reason=reason) from error

    configure(settings.log_level)
    app = create_app(
        settings,
        viewer_token=_token(token_file, VIEWER_VARIABLE),
        operator_token=_token(operator_token_file, OPERATOR_VARIABLE),
        anonymous=is_loopback(address[0]),
        allow_actions=allow_actions,
        show_bodies=show_bodies,
        hosts=hosts,
        https=https or tls_cert is not None,
        rules=rules,
    )
    prefixed = ProxyFix(app, x_for=0, x_proto=0, x_prefix=1)  # a proxy may remove a begin of paths
    _serve(
        "dashboard",
        prefixed,
        address,
        tls={} if tls_cert is None else _tls(tls_cert, tls_key or ""),
    )


@click.command()
@_listen_option(INGEST_ADDRESS)
@with_settings(*SHARED, "keys", "log_level", pass_app=True)
def ingest(listen: str, code: App | None, settings: Settings) -> None:
    """Receive the webhooks that an app declares: verify each, store it, and answer 202.

    Start any number behind a balancer; /healthz answers 200. Every minute the log has the number of
    answers for each path.
    """
    require_app(settings)
    if code is None:
        reason = f"--app must be MODULE:APP, whose code declares webhooks, got {settings.app!r}"
        raise UsageError(reason=reason)
    address = _address_of(listen, INGEST_ADDRESS)
    from qdo.ingest import wsgi

    configure(settings.log_level)
    endpoints = wsgi(code)
    can = code.broker.capabilities
    if not can.lasting_dedup:
        seconds = can.dedup_seconds or 0.0
        _log.warning("the broker recognizes repeated webhooks for %g s at most", seconds)

    def report() -> None:
        endpoints.log_counts()
        try:
            code.register()
        except QdoError as error:  # the receiver of webhooks needs only the broker
            _log.warning("not listed in `qdo workers --all`: %s; retrying in 60 s", error)

    with code:
        _serve("ingest", endpoints, address, report)
    endpoints.log_counts()


def _tls(cert: str, key: str) -> dict[str, str]:
    """Return the TLS options of a server; raise UsageError for unusable files."""
    try:
        # The password is empty, not a secret. Without a password, OpenSSL would ask at the
        # terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except OSError as error:
        reason = "--tls-cert and --tls-key must be a certificate and its key, without a password"
        raise UsageError(reason=f"{reason}, got {cert} and {key}: {describe(error)}") from error
    return {"certfile": cert, "keyfile": key}


def _serve(
    name: str,
    app: WsgiApp,
    address: tuple[str, int],
    report: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Serve an app until SIGINT or SIGTERM. Call `report` at the start and every minute."""
    from qdo.system.web_server import WebServer

    stopped: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.put(number))
    try:
        server = WebServer(app, address, **options)
    except OSError as error:
        reason = f"--listen must be a free address of this machine, got {_shown(*address)}"
        raise UsageError(reason=f"{reason}: {describe(error)}") from error
    scheme = "https" if options.get("tls") else "http"
    print_message(f"{name}: {scheme}://{_shown(*server.address)}/")
    ended = False
    while not ended:
        report()
        with suppress(Empty):
            ended = bool(stopped.get(timeout=REPORT_SECONDS))
    server.close()


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address_of(listen: str, example: str) -> tuple[str, int]:
    """Return host and port of --listen, or raise UsageError."""
    host, colon, port = listen.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not colon or not host or not is_number or int(port) > 65535:
        text = repr(listen[:120])
        raise UsageError(reason=f"--listen must be HOST:PORT such as {example}, got {text}")
    return host.strip("[]"), int(port)


def _token(path: str | None, variable: str) -> str:
    """Return the token from a file, without a path from an environment variable, or ""."""
    if path is None:
        return os.environ.get(variable, "").strip()
    token = private_text(path, "token file")
    if not token:
        raise UsageError(reason=f"the token file {path} must have a token, got nothing")
    return token
