"""The dashboard below Django's admin, for users who may view or change it."""

from __future__ import annotations

import functools
import hashlib
import io
import sys
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import path, reverse
from django.views.decorators.csrf import csrf_exempt
from werkzeug.wrappers import Response

from qdo.contrib.django.models import Dashboard
from qdo.contrib.django.project_app import project_app
from qdo.dashboard import create_app

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    ModelAdmin = admin.ModelAdmin[Dashboard]
else:
    ModelAdmin = admin.ModelAdmin

VISITOR = "qdo.visitor"


@functools.cache
def _dashboard() -> WSGIApplication:
    # All processes of a web server sign the cookies of forms with the same key.
    secret = hashlib.sha256(f"qdo dashboard {settings.SECRET_KEY}".encode()).hexdigest()
    return create_app(
        project_app().settings,
        authorize=lambda environ: environ[VISITOR],
        allow_actions=True,
        secret=secret,
        hosts=("*",),  # Django has checked it
        https=settings.SESSION_COOKIE_SECURE,
    )


@admin.register(Dashboard)
class DashboardAdmin(ModelAdmin):
    """Serves every page of the dashboard in place of the pages of a model."""

    def get_urls(self) -> list[Any]:
        # The dashboard checks the origin and a token of its own in each form.
        view = self.admin_site.admin_view(csrf_exempt(self.show))
        return [
            path("", view, name="qdo_dashboard_changelist"),
            path("<path:page>", view),
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def show(self, request: HttpRequest, page: str = "") -> HttpResponse:
        if not self.has_view_or_change_permission(request):
            raise PermissionDenied
        role = "operator" if self.has_change_permission(request) else "viewer"
        root = reverse("admin:qdo_dashboard_changelist").rstrip("/")
        environ = {
            **request.META,
            VISITOR: (request.user.get_username(), role),
            "HTTP_HOST": request.get_host(),
            "SCRIPT_NAME": root,
            "PATH_INFO": "/" + page.encode().decode("latin-1"),
            "wsgi.url_scheme": request.scheme,
            "wsgi.input": io.BytesIO(request.body),
            "wsgi.errors": sys.stderr,
        }
        answer = Response.from_app(_dashboard(), environ)
        return HttpResponse(
            answer.get_data(), status=answer.status_code, headers=dict(answer.headers)
        )
