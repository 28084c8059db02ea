"""A model without a table: the entry of the dashboard in the admin, and its permissions."""

from __future__ import annotations

from django.db import models


class Dashboard(models.Model):
    """Who may view it sees the dashboard; who may change it is an operator there."""

    class Meta:
        managed = False
        default_permissions = ("view", "change")
        verbose_name = "dashboard"
        verbose_name_plural = "dashboard"
