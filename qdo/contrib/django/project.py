"""The app for programs that have not set Django up: ``qdo-worker qdo.contrib.django.project:app``.

`manage.py qdo` and the processes of its workers use this name.
"""

from __future__ import annotations

import django

from qdo.contrib.django.project_app import project_app

django.setup()  # imports the jobs of the project
app = project_app()
