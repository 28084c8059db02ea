"""The settings of the shop, with this app, and connections that Django would keep."""

from __future__ import annotations

import os

from shop import settings as shop
from shop.settings import *  # noqa: F403

INSTALLED_APPS = [*shop.INSTALLED_APPS, "checks"]
DATABASES = shop.DATABASES
DATABASES["default"].update(CONN_MAX_AGE=600, CONN_HEALTH_CHECKS=True)
QDO = shop.QDO | {
    "concurrency": 20,
    "executor_processes": 2,
    "attempts": 3,
    "backoff_seconds": 0.01,
}
if "SHOP_DB" not in os.environ:
    DATABASES["default"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}
TASKS = {"default": {"BACKEND": "qdo.contrib.django.tasks.QdoBackend"}}
