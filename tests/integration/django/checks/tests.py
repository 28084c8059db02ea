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
    def test_messages_and_requests_follow_transactions(self):
        """With each form of a connection; with autocommit, they are sent at once."""
        connection.ensure_connection()
        with TestKit(app) as kit:
            app.send("marked", 1, connection="default")
            kit.run_until_settled()
            with transaction.atomic():
                for form in ("default", connection, connections["default"], connection.connection):
                    app.send("marked", 2, connection=form)
                handle = app.request("pool", 20, connection="default")
                kit.run_until_settled()
                self.assertEqual(kit.done(), [1])
                with self.assertRaises(ValueError), transaction.atomic():
                    app.send("marked", 3, connection="default")
                    raise ValueError
            with self.assertRaises(ValueError), transaction.atomic():
                app.send("marked", 4, connection="default")
                app.request("pool", 30, connection="default")
                raise ValueError
            app.send("sending", 5)
            kit.run_until_settled()
            self.assertEqual(kit.done("marked"), [1, 2, 2, 2, 2, 5])
            self.assertEqual((handle.result(0), len(kit.requests())), (21, 1))

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


class InTestCase(Sending, TestCase):
    def test_a_captured_commit_sends_once(self):
        with TestKit(app) as kit:
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
                app.send("marked", 1, connection="default")
            kit.run_until_settled()
            self.assertEqual(kit.done(), [1])

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
    """The same where each transaction commits."""


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
