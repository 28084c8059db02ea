import json

from django.db import transaction
from django.http import JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt

from orders.models import Order
from qdo.contrib.django import app


@csrf_exempt
def place(request):
    wanted = json.loads(request.body)
    with transaction.atomic():
        order = Order.objects.create(customer=wanted["customer"], item=wanted["item"])
        app.send(f"customer-{order.customer}", {"order": order.pk}, connection="default")
    return JsonResponse({"order": order.pk})


def show(request, number):
    return JsonResponse({"state": get_object_or_404(Order, pk=number).state})
