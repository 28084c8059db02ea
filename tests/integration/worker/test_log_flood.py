"""Messages that all fail at once do not flood the log."""

from __future__ import annotations

from pathlib import Path

from tests.support.cli import WORKER, command

APP = """
import qdo

app = qdo.App("flood")

@app.job()
def job(message, context):
    if message.queue == "bad":
        raise qdo.Skip("of no use")

for queue, count in (("bad", 5000), ("good", 10)):
    app.send_many([(queue, number) for number in range(count)])
"""


def test_a_queue_of_failures_does_not_flood_the_log(tmp_path: Path) -> None:
    """5,000 skipped messages are a few lines, and the line that counts the others."""
    (tmp_path / "flood.py").write_text(APP)
    ended = command(*WORKER, "flood:app", "--burst", cwd=tmp_path)
    assert ended.code == 0, ended.err
    lines = [line for line in ended.err.splitlines() if "queue bad" in line]
    assert 10 <= len(lines) < 200
