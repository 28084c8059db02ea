"""What `ps` shows of the processes of an app."""

from __future__ import annotations

from qdo.settings.settings import Settings


def process_title(role: str, settings: Settings, target: str | None) -> str:
    """Return the last word of a process's command line, which only people read."""
    named = target or settings.job
    return f"{role} of {named} (app {settings.app})" if settings.app else f"{role} of {named}"
