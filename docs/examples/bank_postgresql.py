"""Transfers between accounts: a message, its effect and the next message in one transaction."""

import os

from sqlalchemy import create_engine, text

import qdo
from qdo.errors import StaleClaimError
from qdo.idempotency import FencedWrites, Write

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
    """Change a balance, and send the other half of a transfer to its account."""
    with engine.begin() as connection:
        write = writes.admit(connection, message)
        if write is Write.STALE:
            raise StaleClaimError(queue=message.queue, fence=message.fence)
        if write is Write.REPEATED:
            return
        amount, to = message.body["amount"], message.body.get("to")
        connection.execute(text(ADD), {"account": message.queue, "amount": amount})
        if to is not None:
            app.send(to, {"amount": -amount}, connection=connection)
