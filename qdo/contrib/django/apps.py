"""The configuration of the Django app: it imports the jobs of the project once models are ready."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class QdoConfig(AppConfig):
    """Imports the module `jobs` of every installed app, in workers, web servers and commands."""

    name = "qdo.contrib.django"
    label = "qdo"
    verbose_name = "qdo"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        autodiscover_modules("jobs")
