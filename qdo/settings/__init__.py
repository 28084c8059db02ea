"""The settings of qdo. `settings` declares them, and `sources` reads them."""

from __future__ import annotations

from qdo.settings.settings import Settings as Settings
from qdo.settings.sources import load as load

__all__ = ["Settings", "load"]
