"""The app of the drill. Files in its folder stand for the services that its jobs need."""

import os
import time

import sqlalchemy

import qdo
from qdo.outbox import Outbox

app = qdo.App("shop")
HERE = os.path.dirname(os.path.abspath(__file__))

IS_SQS = os.environ["QDO_BROKER"].startswith("sqs:")

if not IS_SQS:
    app.timer("tick", every_seconds=2, queue="ticks")
    engine = sqlalchemy.create_engine(f"sqlite:///{HERE}/orders.db")
    outbox = Outbox(app, engine)
    app.stream("visit", shards=2)


def exists(name: str) -> bool:
    return os.path.exists(os.path.join(HERE, name))


def done(message: qdo.Message) -> None:
    """Note that a message is done, in one write."""
    with open(os.path.join(HERE, "done"), "a") as file:
        file.write(f"{message.stream or message.queue} {message.body['n']}\n")


@app.job("ticks*")
def tick(message: qdo.Message, context: object) -> None:
    pass


@app.job("visit.*")
@app.job("tenant-*")
@app.job("eu-*")
def order(message: qdo.Message, context: object) -> None:
    done(message)


@app.job("mail-*")
def mail(message: qdo.Message, context: object) -> None:
    while message.body["what"] == "hang" and not exists("mail-server"):
        time.sleep(1)
    done(message)


@app.job("pay-*", policy=qdo.Policy(attempts=2, backoff_seconds=0.01, then="block"))
def pay(message: qdo.Message, context: object) -> None:
    if message.body["what"] == "poison" and not exists("account"):
        raise ValueError("no such account")
    done(message)


@app.job("scan-*", policy=qdo.Policy(attempts=1))
def scan(message: qdo.Message, context: object) -> None:
    if not exists("scanner"):
        raise LookupError("the service of scans is down")
    done(message)


def thumb(request: qdo.Request, context: object) -> None:
    if request.body["what"] and not exists("thumbnailer"):
        raise LookupError("the service of thumbnails is down")
    with open(os.path.join(HERE, "done"), "a") as file:
        file.write(f"thumb {request.body['n']}\n")


if not IS_SQS:
    app.job("thumb", pool=True, policy=qdo.Policy(attempts=1))(thumb)
if exists("letters-are-deployed"):
    app.job("letters")(order)
