from django.db import transaction
from django.test import TestCase

from orders.models import Order
from qdo.contrib.django import app
from qdo.testing import TestKit


class OrderTests(TestCase):
    def place(self, item):
        wanted = {"customer": "ada", "item": item}
        answer = self.client.post("/orders", wanted, content_type="application/json")
        return Order.objects.get(pk=answer.json()["order"])

    def test_an_order_is_shipped(self):
        with TestKit(app) as kit:
            order = self.place("book")
            kit.run_until_settled()
        order.refresh_from_db()
        self.assertEqual(order.state, "shipped")

    def test_an_empty_order_becomes_a_dead_letter(self):
        with TestKit(app) as kit:
            self.place("nothing")
            kit.run_until_settled()
            (letter,) = kit.dead_letters()
        self.assertIn("nothing to ship", letter.error)

    def test_a_rollback_sends_nothing(self):
        with TestKit(app) as kit:
            with self.assertRaises(ValueError), transaction.atomic():
                self.place("book")
                raise ValueError
            kit.run_until_settled()
            self.assertEqual(kit.attempts(), [])

    def test_a_view_without_a_kit(self):
        self.place("book")  # its message stays in memory, as mail does
