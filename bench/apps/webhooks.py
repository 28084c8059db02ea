"""The app whose webhooks `bench.ingest` sends."""

from __future__ import annotations

import qdo

app = qdo.App("bench")
app.webhook("/github", queue="github", verify="github", secret="env:BENCH_SECRET")
