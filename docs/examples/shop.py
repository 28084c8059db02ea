"""Takes payments through a bank that is sometimes unreachable."""

import json
import urllib.request

import qdo

app = qdo.App("shop")
patient = qdo.Policy(attempts=3, backoff_seconds=10)


def charge(account, amount, reference):
    """Charge an account; the bank charges only once per reference."""
    urllib.request.urlopen(
        urllib.request.Request(
            "https://bank.example/charges",
            json.dumps({"account": account, "amount": amount}).encode(),
            {"Idempotency-Key": reference},
        ),
        timeout=10,
    )


@app.job("account-*", policy=patient)
def pay(message, context):
    charge(message.queue, message.body["amount"], message.id)
    app.send("receipts", {"payment": message.id}, once=message)


@app.job("receipts")
def receipt(message, context):
    print(f"receipt for {message.body['payment']}")
