"""The dashboard below a path: mounted in an ASGI app, and behind a proxy."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from a2wsgi import WSGIMiddleware
from fastapi import FastAPI
from fastapi.testclient import TestClient
from werkzeug.test import Client

from qdo.cli.commands import servers
from qdo.fleet.pauses import read_pauses
from tests.support.cli import run_in
from tests.support.dashboard.shop import LAYOUT, OPERATOR, VIEWER, FilledShop
from tests.support.processes import wait_until

BELOW = "/shop/queues"
ADDRESS = re.compile('(?:href|src|action|data-poll)="([^"#]+)"')


def fastapi(flask: Any) -> Callable[..., Awaitable[None]]:
    """Return an app below the path of ``uvicorn --root-path /shop``."""
    web = FastAPI()
    web.mount("/queues", WSGIMiddleware(flask))
    return web


def test_every_address_stays_below_the_path(local_shop: FilledShop) -> None:
    """Links, redirects, files, the cookie and a confirmed action."""
    tokens = {"viewer_token": VIEWER, "operator_token": OPERATOR}
    flask = local_shop.dashboard(**tokens, allow_actions=True)
    wait_until(lambda: flask.extensions["qdo"].reading(1.0) is not None, "the app is read")
    origin = {"origin": "http://localhost"}
    with TestClient(fastapi(flask), "http://localhost", root_path="/shop") as client:
        page = client.get(f"{BELOW}/").text
        fields = {"csrf": csrf_of(page), "token": OPERATOR, "next": "/limits"}
        entered = client.post(
            form_of(page, "token"), data=fields, headers=origin, follow_redirects=False
        )
        assert entered.headers["location"] == f"{BELOW}/limits"
        assert f"Path={BELOW};" in f"{entered.headers['set-cookie']};"
        overview = client.get(f"{BELOW}/").text
        addresses = set(ADDRESS.findall(overview))
        assert len(addresses) > 15
        for address in addresses:
            assert address.startswith(f"{BELOW}/")
            answer = client.get(address.replace("&amp;", "&"))
            assert answer.status_code in (200, 405), address  # 405: that of a form
        holds = client.get(f"{BELOW}/holds").text
        given = {"csrf": csrf_of(holds), "glob": "ord*", "lasting": ""}
        asked = client.post(f"{BELOW}/actions/pause", data=given, headers=origin).text
        given |= {"reason": "why", "confirmed": "1"}
        done = client.post(form_of(asked, "confirmed"), data=given, headers=origin)
        assert "Done: Pause 1 queue" in done.text
    assert len(read_pauses(local_shop.client, LAYOUT).node.pauses) == 1


def test_a_middleware_says_who_visits(local_shop: FilledShop) -> None:
    """With what it stored in the scope, which `authorize` gets."""
    flask = local_shop.dashboard(
        anonymous=False,
        authorize=lambda environ: (environ["asgi.scope"]["user"], "viewer"),
        secret="0123456789abcdef",
    )
    web = fastapi(flask)

    async def with_user(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await web({**scope, "user": "Grace"}, receive, send)

    with TestClient(with_user, "http://localhost") as client:
        assert client.get("/queues/limits").status_code == 200
        with pytest.raises(KeyError):
            TestClient(web, "http://localhost").get("/queues/limits")


def csrf_of(page: str) -> str:
    return re.findall('name="csrf" value="([^"]+)"', page)[0]


def form_of(page: str, field: str) -> str:
    """Return the address of the form with a field."""
    (form,) = (each for each in page.split("<form ")[1:] if f'name="{field}"' in each)
    return re.findall('action="([^"]+)"', form)[0]


def test_the_command_serves_below_the_path_of_a_proxy(
    local_shop: FilledShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps: list[Any] = []
    monkeypatch.setattr(servers, "_serve", lambda name, app, *rest, **options: apps.append(app))
    places = {f"QDO_{name.upper()}": value for name, value in local_shop.places.items()}
    ran = run_in(local_shop.folder, "dashboard", "--app", "shop", env=places)
    assert ran.code == 0, ran.err
    (app,) = apps
    for headers, path in (({"X-Forwarded-Prefix": "/qdo"}, "/qdo"), ({}, "")):
        page = Client(app).get("/limits", base_url="http://localhost", headers=headers).text
        assert f'href="{path}/workers"' in page
