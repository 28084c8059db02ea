"""Who may see what: tokens, sessions, forms, hosts and headers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from qdo.errors import DashboardUnsafeError
from tests.support.dashboard.shop import BASE, OPERATOR, VIEWER, FilledShop, Visitor

ADDRESSES = (
    *("/", "/queues", "/queue?name=fine", "/workers", "/dead-letters", "/holds", "/audit"),
    *("/timers", "/streams", "/limits"),
    *("/settings", "/events", "/reading", "/dead-letter?queue=dead&id=1", "/messages?queue=fine"),
    *("/requests", "/api/pools", "/api/requests"),
    *("/api/status", "/api/queues", "/api/queue?name=fine", "/api/dead-letters", "/api/config"),
)
ACTIONS = ("pause", "resume", "decide", "letters", "cancel-request")


@pytest.fixture
def guarded(local_shop: FilledShop) -> Visitor:
    """A stranger before a dashboard with tokens."""
    return local_shop.visitor(viewer_token=VIEWER, operator_token=OPERATOR, allow_actions=True)


def test_a_stranger_sees_nothing(guarded: Visitor) -> None:
    """Neither pages nor JSON nor events; whatever the token in the address."""
    for path in ADDRESSES:
        for address in (path, f"{path}{'&' if '?' in path else '?'}token={VIEWER}"):
            answer = guarded.get(address, headers={"Authorization": f"Bearer {VIEWER}"})
            assert answer.status_code in (302, 401), address
            assert "vase" not in answer.text, address
            assert answer.headers["Cache-Control"] == "no-store", address


def test_every_route_was_tried(guarded: Visitor) -> None:
    """A new page or action without a check would be found."""
    rules = [(each.rule, each.methods or ()) for each in guarded.flask.url_map.iter_rules()]
    reading = {rule for rule, methods in rules if "GET" in methods}
    known = {each.partition("?")[0] for each in ADDRESSES}
    known |= {f"/api/{each}" for each in ("workers", "components", "holds", "limits", "timers")}
    known |= {"/api/audit", "/api/events", "/api/settings", "/api/streams", "/login"}
    known.add("/static/<path:filename>")
    assert reading == known
    writing = {rule for rule, methods in rules if "POST" in methods}
    assert writing == {"/login", "/logout", "/ask/runs", *(f"/actions/{each}" for each in ACTIONS)}


def test_a_viewer_logs_in_and_out(guarded: Visitor) -> None:
    """The cookie is out of reach of scripts and of other sites."""
    answer = guarded.log_in(VIEWER)
    assert answer.status_code == 302
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert VIEWER not in cookie
    csrf = re.search('name="csrf" value="([^"]+)"', guarded.page("/"))
    assert csrf is not None
    assert guarded.post("/logout", csrf[1]).status_code == 302
    assert guarded.get("/").status_code == 302


def test_a_wrong_token_is_refused(guarded: Visitor) -> None:
    """It is not in the answer either."""
    for token in ("", "x", VIEWER[:-1], VIEWER + "x", VIEWER.upper(), "ä" * 30):
        answer = guarded.log_in(token)
        assert answer.status_code == 403, token
        assert len(token) < 5 or token not in answer.text
        assert guarded.get("/").status_code == 302, token


def test_a_session_survives_a_restart_and_ends_with_its_token(local_shop: FilledShop) -> None:
    """Its cookie is signed with a key that is derived from the tokens."""
    first = local_shop.visitor(viewer_token=VIEWER)
    first.log_in(VIEWER)
    cookie = first.http._cookies  # what a browser keeps
    again, changed = (
        local_shop.visitor(viewer_token=VIEWER),
        local_shop.visitor(viewer_token=VIEWER + "-new"),
    )
    again.http._cookies = changed.http._cookies = cookie
    assert again.get("/api/config").status_code == 200
    assert changed.get("/api/config").status_code == 401


def test_a_forged_session_is_refused(guarded: Visitor) -> None:
    """Also one that was changed after it was signed."""
    name = guarded.flask.config["SESSION_COOKIE_NAME"]
    for value in ("eyJyb2xlIjoib3BlcmF0b3IifQ.aSQ.AAAA", "operator", "", "x" * 5000):
        answer = guarded.get("/api/config", headers={"Cookie": f"{name}={value}"})
        assert answer.status_code == 401


FORGED: tuple[tuple[dict[str, str], str | None], ...] = (
    ({"Origin": BASE}, "forged"),
    ({"Origin": BASE}, ""),
    ({"Origin": "http://evil.example"}, None),
    ({"Origin": "null"}, None),
    ({"Origin": f"{BASE}.evil.example"}, None),
    ({}, None),
)
FORMS = ("/login", "/logout", "/ask/runs", *(f"/actions/{each}" for each in ACTIONS))


def test_forms_of_other_sites_are_refused(local_shop: FilledShop) -> None:
    """Without the origin, or without the token of the session."""
    operator = local_shop.operator()
    token = operator.csrf()
    for path in FORMS:
        for headers, csrf in FORGED:
            given = token if csrf is None else csrf
            fields = {"csrf": given, "token": OPERATOR, "queue": "blocked", "confirmed": "1"}
            answer = operator.http.post(path, base_url=BASE, data=fields, headers=headers)
            assert answer.status_code == 403, (path, headers)


def test_other_host_names_are_refused(local_shop: FilledShop) -> None:
    """A name that an attacker points at this machine shows nothing."""
    visitor = local_shop.visitor()
    hosts = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b", "x@y")
    for host in hosts:
        for path in ("/api/config", "/", "/static/dashboard.js"):
            answer = visitor.http.get(path, headers={"Host": host})
            assert answer.status_code in (400, 403), (host, path)


def test_own_host_names_are_served(local_shop: FilledShop) -> None:
    """Names that were given, localhost, and addresses."""
    visitor = local_shop.visitor(hosts=("ops.example",))
    names = ("localhost:8520", "127.0.0.1", "127.0.0.1:1", "[::1]:8520", "Ops.Example", "10.1.2.3")
    for host in names:
        answer = visitor.http.get("/api/config", headers={"Host": host})
        assert answer.status_code == 200, host


def test_every_answer_is_secured(local_shop: FilledShop) -> None:
    """Errors as well."""
    visitor = local_shop.visitor()
    for path in ("/", "/api/queues", "/login", "/nothing", "/queue?name=none"):
        headers = visitor.get(path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy, path
        assert "frame-ancestors 'none'" in policy, path
        assert "unsafe" not in policy, path
        assert headers["X-Content-Type-Options"] == "nosniff", path
        assert headers["Cache-Control"] == "no-store", path


def test_login_leads_to_pages_of_the_dashboard_only(guarded: Visitor) -> None:
    """Not to another site that a link names."""
    for target in ("//evil.example", "https://evil.example", "/\\evil.example", "\n/x", "x"):
        answer = guarded.post("/login", token=VIEWER, next=target)
        assert answer.headers["Location"] == "/"
    answer = guarded.post("/login", token=VIEWER, next="/queue?name=a%20b")
    assert answer.headers["Location"] == "/queue?name=a%20b"


def test_a_link_of_another_site_does_not_log_out(local_shop: FilledShop) -> None:
    """The browser keeps back the cookie of such a visit; the page asks again."""
    stranger = local_shop.visitor(viewer_token=VIEWER)
    answer = stranger.get("/queues", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert 'http-equiv="refresh"' in answer.text
    assert "Set-Cookie" not in answer.headers


TRICKS = (
    *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/%00"),
    *("/static//etc/passwd", "/api/../settings", "/queue?name=../../etc/passwd"),
)


def test_path_tricks_lead_nowhere(local_shop: FilledShop) -> None:
    """Files are those of the folder `static`, queues are names."""
    visitor = local_shop.visitor()
    for path in TRICKS:
        answer = visitor.get(path)
        assert answer.status_code in (301, 302, 308, 400, 404), path
        assert "create_app" not in answer.text, path
        assert "root:" not in answer.text, path


UNSAFE: tuple[dict[str, Any], ...] = (
    {},
    {"viewer_token": "short"},
    {"viewer_token": VIEWER, "operator_token": VIEWER},
    {"anonymous": True, "allow_actions": True},
    {"viewer_token": VIEWER, "allow_actions": True},
    {"authorize": lambda environ: None, "anonymous": True},
    {"authorize": lambda environ: None, "viewer_token": VIEWER},
    {"authorize": lambda environ: None, "allow_actions": True, "secret": "short"},
)


def test_unsafe_options_are_rejected(local_shop: FilledShop) -> None:
    """No dashboard that others reach is open by mistake."""
    for options in UNSAFE:
        with pytest.raises(DashboardUnsafeError):
            local_shop.dashboard(**{"anonymous": False, **options})


def test_a_large_form_is_refused(guarded: Visitor) -> None:
    """Before it is parsed."""
    assert guarded.post("/login", csrf="x" * 100_000).status_code in (403, 413)


ROLES: dict[str, Any] = {"ada": ("ada", "operator"), "bob": ("bob", "viewer"), "eve": ("eve", "x")}


def test_own_pages_decide_who_visits(local_shop: FilledShop) -> None:
    """By each request's environ, without a login page; the tests of Django have actions."""
    visitor = local_shop.visitor(
        anonymous=False,
        authorize=lambda environ: ROLES.get(environ.get("HTTP_X_USER")),
        secret=OPERATOR,
        allow_actions=True,
    )
    codes = {None: {403}, "mallory": {403}, "eve": {400, 409}, "bob": {200}, "ada": {200}}
    for name, code in codes.items():  # an unknown role is a mistake of `authorize`
        headers = {} if name is None else {"X-User": name}
        for path in ("/", "/queues", "/api/config", "/static/dashboard.css"):
            with visitor.get(path, headers=headers) as answer:
                assert answer.status_code in code, (name, path)
    assert "Log out" not in visitor.page("/", headers={"X-User": "ada"})


def test_a_mounting_app_may_check_the_host(local_shop: FilledShop) -> None:
    """With `*`, the dashboard has every name."""
    headers = {"Host": "ops.example"}
    for hosts, code in (((), 403), (("*",), 200)):
        answer = local_shop.visitor(hosts=hosts).http.get("/api/config", headers=headers)
        assert answer.status_code == code
