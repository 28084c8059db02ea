"""The app of the drill. Files in its folder stand for the services that its jobs need."""

import os
import time

import qdo

app = qdo.App("shop")
HERE = os.path.dirname(os.path.abspath(__file__))


def exists(name: str) -> bool:
    return os.path.exists(os.path.join(HERE, name))


def done(message: qdo.Message) -> None:
    """Note that a message is done, in one write."""
    with open(os.path.join(HERE, "done"), "a") as file:
        file.write(f"{message.queue} {message.body['n']}\n")


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


if exists("letters-are-deployed"):
    app.job("letters")(order)
