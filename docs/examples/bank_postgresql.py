"""Transfers between accounts: a message, its effect and the next message in one transaction."""

import os

from sqlalchemy import create_engine, text

import qdo
from qdo.idempotency import FencedWrites

DATABASE = os.environ["DATABASE"]  # such as postgresql://app@db.example/bank
app = qdo.App("bank", broker=DATABASE)
writes = FencedWrites()
ADD = """
INSERT INTO balances VALUES (:account, :amount)
ON CONFLICT (account) DO UPDATE SET amount = balances.amount + excluded.amount
"""


@app.context
def engine():
    engine = create_engine(DATABASE.replace("postgresql:", "postgresql+psycopg:", 1))
    with engine.begin() as connection:
        writes.create(connection)
        connection.execute(
            text("CREATE TABLE IF NOT EXISTS balances (account text PRIMARY KEY, amount bigint)")
        )
    yield engine
    engine.dispose()


@app.job()
def book(message, engine):
    """Change a balance; a transfer goes on to the other account."""
    with engine.begin() as connection:
        if not writes.admit(connection, message):
            return  # booked before, or another worker owns the account now
        amount, to = message.body["amount"], message.body.get("to")
        connection.execute(text(ADD), {"account": message.queue, "amount": amount})
        if to is not None:
            app.send(to, {"amount": -amount}, connection=connection)
