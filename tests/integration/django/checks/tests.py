"""Tests as users of Django write them; `manage.py test` runs them with the database of the shop."""

from __future__ import annotations

import os
from datetime import timedelta

from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import TestCase, TransactionTestCase
from django.utils import timezone
from orders.models import Order

from checks import tasks
from qdo.contrib.django import app
from qdo.errors import UnsupportedError, UsageError
from qdo.idempotency import ProcessedMessages
from qdo.testing import TestKit


class Sending:
    def bodies(self, act):
        with TestKit(app) as kit:
            act()
            kit.run_until_settled()
            return kit.done("marked")

    def test_every_form_of_a_connection(self):
        connection.ensure_connection()
        forms = ("default", connection, connections["default"], connection.connection)

        def act():
            for number, form in enumerate(forms):
                with transaction.atomic():
                    app.send("marked", number, connection=form)

        self.assertEqual(self.bodies(act), [0, 1, 2, 3])

    def test_rollbacks_send_nothing(self):
        def act():
            with transaction.atomic():
                app.send("marked", 1, connection="default")
                with self.assertRaises(ValueError), transaction.atomic():
                    app.send("marked", 2, connection="default")
                    raise ValueError
            with self.assertRaises(ValueError), transaction.atomic():
                app.send("marked", 3, connection="default")
                raise ValueError

        self.assertEqual(self.bodies(act), [1])

    def test_an_open_transaction_keeps_its_messages(self):
        with TestKit(app) as kit, transaction.atomic():
            app.send("marked", 1, connection="default")
            kit.run_until_settled()
            self.assertEqual(kit.done(), [])

    def test_autocommit_sends_at_once(self):
        self.assertEqual(self.bodies(lambda: app.send("marked", 1, connection="default")), [1])

    def test_requests_follow_transactions(self):
        with TestKit(app) as kit:
            with transaction.atomic():
                handle = app.request("pool", 20, connection="default")
            with self.assertRaises(ValueError), transaction.atomic():
                app.request("pool", 30, connection="default")
                raise ValueError
            kit.run_until_settled()
            self.assertEqual(handle.result(0), 21)
            self.assertEqual(len(kit.requests()), 1)

    def test_writes_join_transactions(self):
        with TestKit(app) as kit:
            with transaction.atomic():
                ProcessedMessages().create(connection.connection)
            app.send("recorded", "book")
            kit.run_until_settled()
            self.assertEqual(kit.done("recorded"), ["book"])
            self.assertEqual(Order.objects.filter(item="book").count(), 1)
            with connection.cursor() as cursor:
                cursor.execute("DROP TABLE qdo_done_messages")

    def test_jobs_send_in_their_transactions(self):
        self.assertEqual(self.bodies(lambda: app.send("sending", 7)), [7])


class InTestCase(Sending, TestCase):
    def test_a_captured_commit_sends_once(self):
        with TestKit(app) as kit:
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
                app.send("marked", 1, connection="default")
            kit.run_until_settled()
            self.assertEqual(kit.done(), [1])

    def test_the_transaction_survives_a_job(self):
        order = Order.objects.create(customer="ada", item="book")
        self.bodies(lambda: app.send("marked", order.pk))
        order.refresh_from_db()
        self.assertEqual(order.item, "marked")

    def test_a_failing_job_is_quiet(self):
        with TestKit(app) as kit:
            app.send("failing", 1)
            kit.run_until_settled()
            (letter,) = kit.dead_letters()
        self.assertIn("cannot be shipped", letter.error)

    def test_messages_without_a_kit_stay_in_memory(self):
        app.send("marked", 1)
        with transaction.atomic():
            app.send("marked", 2, connection="default")
        self.assertIn("memory", type(app.broker.writer).__module__)

    def test_wrong_connections(self):
        for wrong in ("defautl", object()):
            with TestKit(app), self.assertRaises(UsageError):
                app.send("marked", 1, connection=wrong)


class WithCommits(Sending, TransactionTestCase):
    pass


class DjangoTasks(TestCase):
    def test_tasks_run_as_requests(self):
        later = timezone.now() + timedelta(hours=1)
        with TestKit(app) as kit:
            found = [
                tasks.add.enqueue(1, two=2),
                tasks.say.enqueue("hello"),
                tasks.double.enqueue(4),
                tasks.add.using(run_after=later).enqueue(5),
                tasks.divide.enqueue(1),
            ]
            self.assertEqual({each.status for each in found}, {"READY"})
            kit.run_until_idle()
            values = [each.status for each in found if each.refresh() is None]
            self.assertEqual(values, [*["SUCCESSFUL"] * 3, "READY", "READY"])
            self.assertEqual([each.return_value for each in found[:3]], [3, "hello 1", 8])
            kit.run_until_settled()
            again = tasks.add.get_result(found[3].id)
            self.assertEqual((again.return_value, again.args, again.attempts), (5, [5], 1))
            self.assertGreater(again.finished_at, again.enqueued_at)
            found[4].refresh()
            self.assertEqual((found[4].status, found[4].attempts), ("FAILED", 3))
            self.assertIn("ZeroDivisionError", found[4].errors[0].traceback)
            with self.assertRaises(Exception) as error:
                tasks.add.get_result("unknown")
            self.assertEqual(type(error.exception).__name__, "TaskResultDoesNotExist")


class Migrations(TestCase):
    def test_none_is_missing(self):
        call_command("makemigrations", "--check", verbosity=0)


class OnSqlite(TestCase):
    def test_a_real_broker_refuses(self):
        if "SHOP_DB" in os.environ:
            self.skipTest("this is PostgreSQL")
        from qdo.app import App
        from qdo.brokers.app_transactions import executor_of

        with self.assertRaises(UsageError):
            executor_of(connection)
        with App("own") as own, self.assertRaises(UnsupportedError):
            own.send("q", 1, connection="default")
