"""Visits the dashboard in the admin as users with and without permissions."""

from __future__ import annotations

import re

from django.contrib.auth.models import Permission, User
from django.test import Client

from qdo.contrib.django import admin

ROOT = "/admin/qdo/dashboard/"


def visit(user, linked, code, acting):
    client = Client(enforce_csrf_checks=True, SERVER_NAME="localhost")
    client.force_login(user)
    assert (ROOT in client.get("/admin/").text) == linked, user
    for page in ("", "queues", "api/config", "static/dashboard.css"):
        assert client.get(ROOT + page).status_code == code, (user, page)
    login = client.get(f"{ROOT}login")
    client.cookies.load(login.headers.get("Set-Cookie", ""))
    found = re.search('name="csrf" value="([^"]+)"', login.text)
    fields = {"csrf": found[1] if found else "x", "glob": "customer-e*", "lasting": "1h"}
    fields |= {"reason": "r", "confirmed": "1"}
    admin._dashboard.cache_clear()  # as in another process of the web server
    headers = {"origin": "http://localhost"}
    answer = client.post(f"{ROOT}actions/pause", fields, headers=headers)
    assert answer.status_code == acting, (user, answer.text)


visit(User.objects.create_superuser("ada"), True, 200, 302)
bob = User.objects.create_user("bob", is_staff=True)
bob.user_permissions.add(Permission.objects.get(codename="view_dashboard"))
visit(bob, True, 200, 403)
visit(User.objects.create_user("eve", is_staff=True), False, 403, 403)
assert "/admin/login/" in Client(SERVER_NAME="localhost").get(ROOT).url
