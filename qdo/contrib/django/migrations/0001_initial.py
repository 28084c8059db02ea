"""Create qdo's schema in the databases that ``settings.QDO`` names as ``django:ALIAS``."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

from qdo.contrib.django.databases import upgrade_schema


class Migration(migrations.Migration):
    initial = True
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="Dashboard",
            fields=[("id", models.BigAutoField(primary_key=True, serialize=False))],
            options={
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
                "managed": False,
                "default_permissions": ("view", "change"),
            },
        ),
        # The schema stays when the migration is reversed, because it holds messages.
        migrations.RunPython(upgrade_schema, migrations.RunPython.noop),
    ]
