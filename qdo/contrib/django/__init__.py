"""qdo in a Django project: ``settings.QDO`` has the settings of the project's one app, `app`.

>>> from qdo.contrib.django import app
>>> app
<DjangoApp 'shop' with 2 jobs>

The app is made at first use: Django imports this package before its settings are complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qdo.app import App

    app: App

__all__ = ["app"]


def __getattr__(name: str) -> App:
    if name not in __all__:
        raise AttributeError(f"module 'qdo.contrib.django' has no attribute {name!r}")
    from qdo.contrib.django.project_app import project_app

    return project_app()


def __dir__() -> list[str]:
    return __all__
