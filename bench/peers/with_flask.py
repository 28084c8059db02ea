"""A receiver of webhooks as one writes it with Flask: verified, and pushed into a list of Redis.

Served by gevent, as `qdo ingest` is; an address HOST:PORT is its argument.
"""

from __future__ import annotations

from gevent import monkey  # it must patch before other imports

monkey.patch_all()

# ruff: noqa: E402

import hashlib
import hmac
import os
import sys

from flask import Flask, abort, request
from gevent.pywsgi import WSGIServer
from redis import Redis

app = Flask(__name__)
redis = Redis.from_url(os.environ["BENCH_REDIS"])
KEY = os.environ["BENCH_SECRET"].encode()


@app.post("/github")
def receive() -> tuple[str, int]:
    body = request.get_data()
    wanted = "sha256=" + hmac.new(KEY, body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(wanted, request.headers.get("X-Hub-Signature-256", "")):
        abort(401)
    redis.lpush("github", body)
    return "accepted", 202


if __name__ == "__main__":
    host, _, port = sys.argv[1].partition(":")
    WSGIServer((host, int(port)), app, log=None).serve_forever()
