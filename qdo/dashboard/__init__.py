"""A dashboard for the queues of an app. Run `qdo dashboard`, or mount it in your own WSGI app."""

from __future__ import annotations

from qdo.dashboard.app import close_app as close_app
from qdo.dashboard.app import create_app as create_app
from qdo.dashboard.board import DashboardOptions as DashboardOptions
from qdo.ops.verdicts import VerdictRules as VerdictRules

__all__ = ["DashboardOptions", "VerdictRules", "close_app", "create_app"]
