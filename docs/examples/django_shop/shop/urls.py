from django.contrib import admin
from django.urls import path
from orders import views

urlpatterns = [
    path("orders", views.place),
    path("orders/<int:number>", views.show),
    path("admin/", admin.site.urls),
]
