import qdo
from orders.models import Order
from qdo.contrib.django import app


@app.job("customer-*")
def ship(message, context):
    order = Order.objects.get(pk=message.body["order"])
    if order.item == "nothing":
        raise qdo.DeadLetter(f"order {order.pk} has nothing to ship")
    order.state = "shipped"
    order.save()
