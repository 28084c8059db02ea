"""The dashboard in Chromium: every page at three widths, light and dark, with nothing to complain.

Pictures of all pages are in tests/screenshots, which git ignores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.dashboard.test_server import Served
from tests.support.dashboard.browser import SCHEMES, WIDTHS, Browser, require_chromium
from tests.support.dashboard.shop import OPERATOR, POSITION, VIEWER, FilledShop
from tests.support.paths import ROOT
from tests.support.processes import wait_until

PICTURES = ROOT / "tests" / "screenshots"
PAGES = {
    "overview": "/",
    "queues": "/queues",
    "queue": "/queue?name=blocked",
    "workers": "/workers",
    "dead-letters": "/dead-letters",
    "dead-letters-list": "/dead-letters?list=1",
    "dead-letter": f"/dead-letter?queue=dead&id={POSITION}",
    "holds": "/holds",
    "audit": "/audit",
    "settings": "/settings",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    require_chromium()
    with tempfile.TemporaryDirectory(prefix="qdo-chromium-") as folder:
        made = Browser(Path(folder))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def served(local_shop: FilledShop) -> Iterator[str]:
    """A dashboard process, with names that are hard to lay out."""
    local_shop.app.send_many([(f"tenant-{'x' * 150}", 1), ("<img src=x onerror=alert(1)>", 2)])
    local_shop.record("blocked", "OSError")
    server = Served(
        local_shop,
        "--allow-actions",
        "--show-bodies",
        QDO_DASHBOARD_TOKEN=VIEWER,
        QDO_DASHBOARD_OPERATOR_TOKEN=OPERATOR,
    )
    with server.proc:
        yield f"http://127.0.0.1:{server.port}"


def log_in(browser: Browser, address: str) -> None:
    """Log in as an operator, by hand."""
    browser.forget()
    browser.complaints()  # of a page whose dashboard was killed at the end of another test
    browser.driver.get(f"{address}/queues")
    browser.type("token", OPERATOR)
    browser.type("name", "Grace")
    browser.press("Log in")
    wait_until(lambda: browser.heading() == "Queues", "the page that was asked for is shown")


def test_every_page_is_shown_without_complaint(browser: Browser, served: str) -> None:
    """No error on the console, nothing refused by the policy, nothing wider than the window."""
    browser.look(WIDTHS[-1])
    log_in(browser, served)
    for name, path in PAGES.items():
        for width in WIDTHS:
            for scheme in SCHEMES:
                browser.look(width, scheme)
                browser.driver.get(served + path)
                browser.picture(PICTURES / f"{name}-{width}-{scheme}.png")
                assert browser.complaints() == [], path
                assert browser.overflow() == 0, (path, width)
                assert browser.heading(), path
                assert browser.unnamed() == [], path


def test_an_open_page_follows_the_app(
    browser: Browser, served: str, local_shop: FilledShop
) -> None:
    """Without a reload, and without a complaint."""
    browser.look(1400)
    log_in(browser, served)
    browser.driver.execute_script("window.stayed = true")
    local_shop.app.send("came-later", 1)
    wait_until(lambda: "came-later" in browser.text(), "the new queue is shown", 30)
    assert browser.driver.execute_script("return window.stayed") is True
    assert browser.complaints() == []


def test_an_operator_acts_with_the_keyboard(browser: Browser, served: str) -> None:
    """From the list of queues to the action log; the first tab stop skips the navigation."""
    browser.look(800)
    log_in(browser, served)
    browser.driver.get(f"{served}/queue?name=blocked")
    assert browser.tab() == "Skip to content"
    while browser.tab() != "Make it a dead letter":
        pass
    browser.enter()
    wait_until(lambda: browser.heading().startswith("Make a dead letter of"), "it asks")
    browser.type("reason", "the customer agreed\n")
    wait_until(lambda: "Done: Make a dead letter of" in browser.text(), "it is done")
    browser.driver.get(f"{served}/audit")
    wait_until(lambda: "the customer agreed" in browser.text(), "the log has it")
    assert "Grace (dashboard" in browser.text()
    assert browser.complaints() == []
