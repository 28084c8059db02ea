"""Controls access to the dashboard with tokens, sessions, and checks of every request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from datetime import timedelta
from urllib.parse import urlsplit

from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    g,
    jsonify,
    redirect,
    render_template,
    request,
    session,
    url_for,
)
from flask.sessions import SecureCookieSessionInterface
from werkzeug.wrappers import Response as BaseResponse

from qdo.dashboard.board import OPERATOR, VIEWER, DashboardOptions, board
from qdo.text import printable

SESSION_HOURS = 12
NAME_CHARACTERS = 60
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With no-referrer, browsers would send "Origin: null" with forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
# Endpoints that visitors without a session may use.
_OPEN = ("access.login", "access.enter", "static")

_log = logging.getLogger(__name__)
access = Blueprint("access", __name__)


class _Sessions(SecureCookieSessionInterface):
    def get_cookie_path(self, app: Flask) -> str:
        """Return the path of the mounted dashboard: another one of the host has other logins."""
        return request.script_root or "/"


def guard(flask: Flask, options: DashboardOptions, app: str) -> None:
    """Check every request, and add security headers to every response."""
    tokens = f"{options.viewer_token}\n{options.operator_token}"
    # Sessions survive a restart, but end when a token changes.
    derived = hmac.new(tokens.encode(), b"qdo dashboard sessions", hashlib.sha256).digest()
    own = options.secret.encode() or secrets.token_bytes(32)
    flask.secret_key = derived if options.has_login else own
    flask.session_interface = _Sessions()
    flask.permanent_session_lifetime = timedelta(hours=SESSION_HOURS)
    flask.config.update(
        # Cookies ignore ports. Therefore two dashboards on one host need different cookie names.
        SESSION_COOKIE_NAME=f"qdo-{hashlib.sha256(app.encode()).hexdigest()[:8]}",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
        SESSION_COOKIE_SECURE=options.https,
        SESSION_REFRESH_EACH_REQUEST=False,
        MAX_CONTENT_LENGTH=64 * 1024,
        MAX_FORM_PARTS=1000,
    )
    flask.before_request(_check)
    flask.after_request(_secured)
    flask.register_blueprint(access)


def csrf_token() -> str:
    """Return the token that every form of this session must contain."""
    if "csrf" not in session:
        session["csrf"] = secrets.token_urlsafe(24)
    return str(session["csrf"])


def operator_name() -> str:
    """Return the name from the login, or from `authorize`, and the address of the operator."""
    name = g.get("name") or session.get("name") or OPERATOR
    return f"{name} (dashboard, {request.remote_addr})"


def may_act() -> bool:
    return board().options.allow_actions and g.get("role") == OPERATOR


def _check() -> BaseResponse | str | tuple[Response, int] | None:
    options = board().options
    if not options.serves(request.host):
        abort(403, f"this dashboard is not called {printable(request.host)}; see --host")
    if options.authorize is None:
        g.role = _role(options)
    else:
        visitor = options.visitor(request.environ)
        if visitor is None:
            abort(403, "your login does not give access to this dashboard")
        g.name = printable(visitor[0])[:NAME_CHARACTERS]
        g.role = visitor[1]
    if request.method == "POST":
        _check_origin()
        _check_csrf()
    if g.role or request.endpoint in _OPEN:
        return None
    if request.path.startswith(("/api/", "/reading")):
        return jsonify(error="log in first"), 401
    if request.headers.get("Sec-Fetch-Site") == "cross-site" and request.method == "GET":
        # If a visitor follows a link from another site, the browser does not send the cookie.
        return render_template("again.html")
    return redirect(url_for("access.login", next=request.full_path.rstrip("?")))


def _role(options: DashboardOptions) -> str | None:
    if not options.has_login:
        return VIEWER
    role = session.get("role")
    return role if role in (VIEWER, OPERATOR) else None


def _check_origin() -> None:
    """Refuse forms from other sites. Compare only the host, because a proxy may use HTTPS."""
    if urlsplit(request.headers.get("Origin", "")).netloc != request.host:
        abort(403, "the request must come from a page of this dashboard")


def _check_csrf() -> None:
    token = request.form.get("csrf", "")
    expected = session.get("csrf", "")
    if not expected or not hmac.compare_digest(token.encode(), str(expected).encode()):
        abort(403, "the form is too old; load the page again")


def _secured(response: Response) -> Response:
    response.headers.update(HEADERS)
    if request.endpoint != "static":
        response.headers["Cache-Control"] = "no-store"
    return response


@access.get("/login")
def login() -> str:
    return _login_page()


@access.post("/login")
def enter() -> BaseResponse | tuple[str, int]:
    """Begin a session if the token is correct."""
    role = _role_of(board().options, request.form.get("token", ""))
    if role is None:
        _log.warning("dashboard: login from %s refused: wrong token", request.remote_addr)
        return _login_page("This token is not valid."), 403
    name = " ".join(request.form.get("name", "").split())[:NAME_CHARACTERS]
    session.clear()
    session.permanent = True
    session.update(role=role, name=printable(name))
    csrf_token()
    _log.info("dashboard: %s %s logged in from %s", role, printable(name), request.remote_addr)
    return redirect(_safe_target(request.form.get("next", "")))


@access.post("/logout")
def leave() -> BaseResponse:
    """End the session of this browser. A copy of the cookie works until it expires."""
    session.clear()
    return redirect(url_for("access.login"))


def _login_page(fault: str = "") -> str:
    target = request.form.get("next", "") or request.args.get("next", "")
    return render_template("login.html", wrong=fault, next=target)


def _role_of(options: DashboardOptions, token: str) -> str | None:
    """Return the role of a token. Compare both tokens in constant time."""
    matching = None
    for role, expected in ((VIEWER, options.viewer_token), (OPERATOR, options.operator_token)):
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        same = hmac.compare_digest(digest, hashlib.sha256(expected.encode()).digest())
        if expected and same:
            matching = role
    return matching


def _safe_target(path: str) -> str:
    """Return the address of a page of this dashboard, never of another site."""
    plain = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return request.script_root + path if plain else url_for("pages.overview")
