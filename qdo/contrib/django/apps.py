"""The configuration of the Django app: it imports the jobs of the project once models are ready."""

from __future__ import annotations

from importlib import import_module

from django.apps import AppConfig
from django.conf import settings
from django.utils.module_loading import autodiscover_modules

TASKS = "qdo.contrib.django.tasks"


class QdoConfig(AppConfig):
    """Imports the module `jobs` of every installed app, in workers, web servers and commands."""

    name = "qdo.contrib.django"
    label = "qdo"
    verbose_name = "qdo"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        autodiscover_modules("jobs")
        backends = getattr(settings, "TASKS", {}).values()
        if any(each.get("BACKEND", "").startswith(TASKS) for each in backends):
            import_module(TASKS)  # its jobs run the tasks
