"""Errors of what the processes of an app share beside queues; see `qdo.errors`."""

from __future__ import annotations
