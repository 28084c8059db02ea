"""The pictures of the dashboard in the documentation: ``python -m docs.screenshots``.

A fleet of two workers runs the queues of an online shop with many tenants. Some queues are
blocked, failing, late, paused or without a job. Chromium takes the pictures. Needs Debian's
packages ``chromium`` and ``chromium-driver``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from qdo import App
from tests.support.cli import QDO, WORKER, clean_environment, command
from tests.support.dashboard.browser import Browser
from tests.support.paths import ROOT
from tests.support.processes import Proc, wait_until

PICTURES = ROOT / "docs" / "_static"
MOST_BYTES = 200_000
SHORT = 300
"""Height of the window: a picture ends where the page ends."""
TENANTS = (
    *("abendrot", "atelier-weber", "blumen-hahn", "buchhandlung-kern", "fahrrad-lenz", "gut-holm"),
    *("kaffee-orta", "kontor-nord", "lichthaus", "papier-und-tinte", "sommerwind", "teehaus-lin"),
)
LATE_SECONDS = 130.0
"""The queues that are late have been read for so long: their charts then have a shape."""

SHOP = """
import time

import qdo

app = qdo.App("shop")


@app.job("orders-*", policy=qdo.Policy(attempts=3, backoff_seconds=0.1, then="block"))
def order(message, context):
    if message.body == "unpriced":
        raise ValueError("article 4711 has no price")


@app.job("mail-*", policy=qdo.Policy(attempts=9, backoff_seconds=900, backoff_max_seconds=900))
def mail(message, context):
    if message.body == "refused":
        raise ConnectionRefusedError("smtp.fahrrad-lenz.example refuses the connection")


@app.job("feed-*")
def feed(message, context):
    time.sleep(0.4)


@app.job("invoices-*", policy=qdo.Policy(attempts=1))
def invoice(message, context):
    if message.body == "late":
        raise TimeoutError("the tax service has not answered within 10 s")
    if message.body == "abroad":
        raise ValueError("country 'XK' has no tax rate")
    if message.body != "fine":
        raise LookupError(f"customer {message.body} is gone")
"""


def main() -> int:
    """Take the pictures; return 1 if one is too large for a repository."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qdo-shop-")))
        address = _serve(folder, stack)
        browser = Browser(folder / "chromium")
        stack.callback(browser.close)
        _take(browser, address)
    sizes = {each.name: each.stat().st_size for each in PICTURES.glob("dashboard-*.png")}
    print("\n".join(f"{name}: {size:,} bytes" for name, size in sorted(sizes.items())))
    return int(max(sizes.values()) > MOST_BYTES)


def _serve(folder: Path, stack: ExitStack) -> str:
    """Run the fleet and its dashboard; return its address."""
    (folder / "shop.py").write_text(SHOP)
    environment = clean_environment({
        "QDO_APP": "shop:app",
        "QDO_BROKER": f"sqlite:{folder / 'messages.db'}",
        "QDO_COORDINATOR": f"sqlite:{folder / 'coordination.db'}",
        "QDO_HISTORY": f"sqlite:{folder / 'history.db'}",
        "USER": "ada",
    })  # fmt: skip
    for arguments in (
        ("send", "imports-kontor-nord", "1"),
        ("pause", "imports-kontor-nord", "--allow-none", "--reason", "moves to the new warehouse"),
    ):
        ended = command(*QDO, *arguments, cwd=folder, env=environment)
        if ended.code:
            raise RuntimeError(f"qdo {' '.join(arguments)} ended with {ended.code}: {ended.err}")
    with App("shop", broker=environment["QDO_BROKER"]) as app:
        app.send_many([(f"{kind}-{each}", "fine") for kind in KINDS for each in TENANTS])
        app.send_many(TROUBLE)
    stack.enter_context(
        Proc.python(*WORKER, "shop:app", "--processes", "2", env=environment, cwd=folder)
    )
    served = stack.enter_context(
        Proc.python(*QDO, "dashboard", "--listen", "127.0.0.1:0", env=environment, cwd=folder)
    )
    (found,) = served.wait_for_line(r"dashboard: (http://\S+)/")
    return found[1]


KINDS = ("orders", "mail", "invoices")
TROUBLE = [
    ("orders-blumen-hahn", "unpriced"),
    *[("orders-blumen-hahn", "fine")] * 41,
    ("mail-fahrrad-lenz", "refused"),
    *[("mail-fahrrad-lenz", "fine")] * 7,
    *[("feed-sommerwind", "fine")] * 1200,
    *[("feed-lichthaus", "fine")] * 700,
    *[("labels-atelier-weber", "fine")] * 3,
    *[("invoices-gut-holm", "late")] * 18,
    *[("invoices-teehaus-lin", "late")] * 9,
    *[("invoices-papier-und-tinte", "abroad")] * 12,
    *[("invoices-abendrot", str(number)) for number in range(1040, 1045)],
]


def _take(browser: Browser, address: str) -> None:
    browser.look(1280, height=SHORT)
    browser.driver.get(f"{address}/queue?name=feed-sommerwind")
    opened = time.monotonic()
    wait_until(lambda: time.monotonic() - opened > LATE_SECONDS, "the charts", LATE_SECONDS + 10)
    browser.picture(PICTURES / "dashboard-queue.png")
    browser.driver.get(f"{address}/")
    wait_until(lambda: "blocked" in browser.text(), "the overview")
    browser.picture(PICTURES / "dashboard-overview.png")
    browser.driver.get(f"{address}/dead-letters")
    wait_until(lambda: "tax service" in browser.text(), "the dead letters")
    browser.picture(PICTURES / "dashboard-dead-letters.png")
    browser.look(390, "dark", SHORT)
    browser.driver.get(f"{address}/")
    wait_until(lambda: "blocked" in browser.text(), "the overview")
    browser.picture(PICTURES / "dashboard-phone.png")


if __name__ == "__main__":
    sys.exit(main())
