"""Who may see what: tokens, sessions, forms, hosts and headers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from qdo.errors import DashboardUnsafeError
from tests.support.dashboard.shop import BASE, OPERATOR, VIEWER, FilledShop, Visitor

ADDRESSES = (
    *("/", "/queues", "/queue?name=fine", "/workers", "/dead-letters", "/holds", "/audit"),
    *("/settings", "/events", "/reading", "/dead-letter?queue=dead&id=1", "/messages?queue=fine"),
    *("/requests", "/api/pools", "/api/requests"),
    *("/api/status", "/api/queues", "/api/queue?name=fine", "/api/dead-letters", "/api/config"),
)
ACTIONS = ("pause", "resume", "decide", "letters", "cancel-request")


@pytest.fixture
def guarded(local_shop: FilledShop) -> Visitor:
    """A stranger before a dashboard with tokens."""
    return local_shop.visitor(viewer_token=VIEWER, operator_token=OPERATOR, allow_actions=True)


@pytest.mark.parametrize("path", ADDRESSES)
def test_a_stranger_sees_nothing(guarded: Visitor, path: str) -> None:
    """Neither pages nor JSON nor events; whatever the token in the address."""
    for address in (path, f"{path}{'&' if '?' in path else '?'}token={VIEWER}"):
        answer = guarded.get(address, headers={"Authorization": f"Bearer {VIEWER}"})
        assert answer.status_code in (302, 401)
        assert "vase" not in answer.text
        assert answer.headers["Cache-Control"] == "no-store"


def test_every_route_was_tried(guarded: Visitor) -> None:
    """A new page or action without a check would be found."""
    rules = [(each.rule, each.methods or ()) for each in guarded.flask.url_map.iter_rules()]
    reading = {rule for rule, methods in rules if "GET" in methods}
    known = {each.partition("?")[0] for each in ADDRESSES}
    known |= {f"/api/{each}" for each in ("workers", "components", "holds", "limits", "timers")}
    known |= {"/api/audit", "/api/events", "/api/settings", "/login", "/static/<path:filename>"}
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


@pytest.mark.parametrize("token", ["", "x", VIEWER[:-1], VIEWER + "x", VIEWER.upper(), "ä" * 30])
def test_a_wrong_token_is_refused(guarded: Visitor, token: str) -> None:
    """It is not in the answer either."""
    answer = guarded.log_in(token)
    assert answer.status_code == 403
    assert len(token) < 5 or token not in answer.text
    assert guarded.get("/").status_code == 302


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


@pytest.mark.parametrize(
    ("headers", "csrf"),
    [
        ({"Origin": BASE}, "forged"),
        ({"Origin": BASE}, ""),
        ({"Origin": "http://evil.example"}, None),
        ({"Origin": "null"}, None),
        ({"Origin": f"{BASE}.evil.example"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize(
    "path", ["/login", "/logout", "/ask/runs", *(f"/actions/{each}" for each in ACTIONS)]
)
def test_forms_of_other_sites_are_refused(
    local_shop: FilledShop, path: str, headers: dict[str, str], csrf: str | None
) -> None:
    """Without the origin, or without the token of the session."""
    operator = local_shop.operator()
    given = operator.csrf() if csrf is None else csrf
    fields = {"csrf": given, "token": OPERATOR, "queue": "blocked", "confirmed": "1"}
    answer = operator.http.post(path, base_url=BASE, data=fields, headers=headers)
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b", "x@y"]
)
def test_other_host_names_are_refused(local_shop: FilledShop, host: str) -> None:
    """A name that an attacker points at this machine shows nothing."""
    visitor = local_shop.visitor()
    for path in ("/api/config", "/", "/static/dashboard.js"):
        answer = visitor.http.get(path, headers={"Host": host})
        assert answer.status_code in (400, 403)


@pytest.mark.parametrize(
    "host", ["localhost:8520", "127.0.0.1", "127.0.0.1:1", "[::1]:8520", "Ops.Example", "10.1.2.3"]
)
def test_own_host_names_are_served(local_shop: FilledShop, host: str) -> None:
    """Names that were given, localhost, and addresses."""
    visitor = local_shop.visitor(hosts=("ops.example",))
    assert visitor.http.get("/api/config", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/queues", "/login", "/nothing", "/queue?name=none"])
def test_every_answer_is_secured(local_shop: FilledShop, path: str) -> None:
    """Errors as well."""
    headers = local_shop.visitor().get(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"


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


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"),
        *("/static//etc/passwd", "/static/%00", "/api/../settings"),
        "/queue?name=../../etc/passwd",
    ],
)
def test_path_tricks_lead_nowhere(local_shop: FilledShop, path: str) -> None:
    """Files are those of the folder `static`, queues are names."""
    answer = local_shop.visitor().get(path)
    assert answer.status_code in (301, 302, 308, 400, 404)
    assert "create_app" not in answer.text
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"viewer_token": "short"},
        {"viewer_token": VIEWER, "operator_token": VIEWER},
        {"anonymous": True, "allow_actions": True},
        {"viewer_token": VIEWER, "allow_actions": True},
    ],
)
def test_unsafe_options_are_rejected(local_shop: FilledShop, options: dict[str, Any]) -> None:
    """No dashboard that others reach is open by mistake."""
    with pytest.raises(DashboardUnsafeError):
        local_shop.dashboard(**{"anonymous": False, **options})


def test_a_large_form_is_refused(guarded: Visitor) -> None:
    """Before it is parsed."""
    assert guarded.post("/login", csrf="x" * 100_000).status_code in (403, 413)
