"""`qdo dashboard`: the state of the app in a browser."""

from __future__ import annotations

import os
import signal
import ssl
import stat
from queue import SimpleQueue
from typing import TYPE_CHECKING

import click

from qdo.cli.options import require_app, with_settings
from qdo.cli.output import print_message
from qdo.cli.readings import SHARED, verdict_options
from qdo.errors import UsageError
from qdo.ops.verdicts import VerdictRules
from qdo.settings.settings import Settings
from qdo.system.logs import configure
from qdo.text import describe, how_to_install

if TYPE_CHECKING:
    from qdo.system.web_server import WsgiApp


ADDRESS = "127.0.0.1:8520"
VIEWER_VARIABLE = "QDO_DASHBOARD_TOKEN"
OPERATOR_VARIABLE = "QDO_DASHBOARD_OPERATOR_TOKEN"


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=ADDRESS,
    show_default=True,
    help="Where to listen. Addresses that other machines reach need a token.",
)
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
    """Serve pages that show the app: queues, workers, dead letters, holds, audit, settings.

    It only reads, and only while a page is open. With --allow-actions, operators who log in with
    their token may act, too.
    """
    require_app(settings)
    address = _address(listen)
    if (tls_cert is None) != (tls_key is None):
        raise UsageError(reason="--tls-cert and --tls-key must be given together")
    try:
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
    _serve(app, address, {} if tls_cert is None else _tls(tls_cert, tls_key or ""))


def _tls(cert: str, key: str) -> dict[str, str]:
    """Return the options of a server with TLS; raise UsageError if it cannot use the files."""
    try:
        # The password is empty, not a secret: without it OpenSSL would ask at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")  # nosec B106
    except OSError as error:
        reason = "--tls-cert and --tls-key must be a certificate and its key, without a password"
        raise UsageError(reason=f"{reason}, got {cert} and {key}: {describe(error)}") from error
    return {"certfile": cert, "keyfile": key}


def _serve(app: WsgiApp, address: tuple[str, int], tls: dict[str, str]) -> None:
    from qdo.system.web_server import WebServer

    stopped: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.put(number))
    try:
        server = WebServer(app, address, tls=tls)
    except OSError as error:
        reason = f"--listen must be a free address of this machine, got {_shown(*address)}"
        raise UsageError(reason=f"{reason}: {describe(error)}") from error
    shown = _shown(*server.address)
    print_message(f"dashboard: {'https' if tls else 'http'}://{shown}/")
    stopped.get()
    server.close()


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not colon or not host or not is_number or int(port) > 65535:
        shown = repr(listen[:120])
        raise UsageError(reason=f"--listen must be HOST:PORT such as {ADDRESS}, got {shown}")
    return host.strip("[]"), int(port)


def _token(path: str | None, variable: str) -> str:
    """Return the token in a file, or else in a variable; "" without both."""
    if path is None:
        return os.environ.get(variable, "").strip()
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(
                    reason=f"only its owner may read the token file {path}: chmod 600 {path}"
                )
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(reason=f"cannot read the token file {path}: {error}") from error
    if not token:
        raise UsageError(reason=f"the token file {path} must have a token, got nothing")
    return token
