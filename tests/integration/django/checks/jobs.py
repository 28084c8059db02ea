"""Jobs that use Django's ORM, in each executor; one fails always."""

from __future__ import annotations

from django.db import connection, transaction
from orders.models import Order

import qdo
from qdo.contrib.django import app
from qdo.idempotency import ProcessedMessages


def mark(message, context):
    with transaction.atomic():
        order = Order.objects.select_for_update().get(pk=message.body["order"])
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(0.05)")
        order.state = message.queue.split("-")[0]
        order.save()
        app.send("marked", order.pk, connection=connection)


for executor in ("greenlet", "thread", "process"):
    app.job(f"{executor}-*", executor=executor)(mark)


@app.job("async-*")
async def in_coroutine(message, context):
    order = await Order.objects.aget(pk=message.body["order"])
    order.state = "async"
    order.item = "marked"
    await order.asave()


@app.job("marked")
def count(message, context):
    Order.objects.filter(pk=message.body).update(item="marked")


@app.job("failing")
def fail(message, context):
    raise ValueError(f"order {message.body} cannot be shipped")


@app.job("sending")
def send(message, context):
    with transaction.atomic():
        app.send("marked", message.body, connection="default")


@app.job("pool", pool=True)
def increment(request, context):
    return request.body + 1


@app.job("recorded")
def record(message, context):
    with transaction.atomic():
        if ProcessedMessages().record(connection.connection, message):
            Order.objects.create(customer="ada", item=message.body)


@app.failure
def note_failure(message, context, error):
    Order.objects.exists()


@app.observer
def note(event: qdo.Event):
    Order.objects.exists()


@app.observer
async def note_later(event: qdo.Event):
    await Order.objects.aexists()
