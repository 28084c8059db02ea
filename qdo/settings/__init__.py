"""Settings: declared in `settings`, read from `sources`."""

from __future__ import annotations

from qdo.settings.settings import Settings as Settings
from qdo.settings.sources import load as load

__all__ = ["Settings", "load"]
