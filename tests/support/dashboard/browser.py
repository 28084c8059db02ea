"""Chromium for tests: a real browser, headless, with what it reports about a page."""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

WIDTHS = (390, 820, 1280)
SCHEMES = ("light", "dark")
_HEIGHT = 900


class Browser:
    """One headless Chromium.

    :param folder: for its profile.
    """

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        # Its sandbox needs another user than root; it only ever loads our own pages.
        for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
            options.add_argument(f"--{flag}")
        for flag in ("disable-background-networking", "no-first-run", "disable-component-update"):
            options.add_argument(f"--{flag}")
        options.add_argument(f"--user-data-dir={folder}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(shutil.which("chromedriver") or "chromedriver")
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_page_load_timeout(30)
        self._width = WIDTHS[-1]

    def close(self) -> None:
        self.driver.quit()

    def look(self, width: int, scheme: str = "light", height: int = _HEIGHT) -> None:
        """Choose the size of the window, and a light or dark scheme."""
        self._width = width
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        height = self.driver.execute_script("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self._width, "height": max(1, min(height, 4000))}
        answer = self._devtools(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """Return what the browser reported since the last call: errors, refused content."""
        return [each["message"] for each in self.driver.get_log("browser")]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        script = (
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return int(self.driver.execute_script(script))

    def forget(self) -> None:
        """Leave the page, and forget all cookies."""
        self.driver.get("about:blank")
        self._devtools("Network.clearBrowserCookies")

    def heading(self) -> str:
        """Return the text of the first heading, "" if there is none yet."""
        script = "let found = document.querySelector('h1'); return found ? found.textContent : ''"
        return str(self.driver.execute_script(script)).strip()

    def text(self) -> str:
        """Return what a reader sees."""
        return str(self.driver.execute_script("return document.body.innerText"))

    def unnamed(self) -> list[str]:
        """Return the controls, links and tables without a name for a screen reader."""
        script = """
        let named = (each) => (each.textContent.trim() || each.getAttribute("aria-label") ||
            (each.labels && each.labels.length) || each.type === "hidden" || each.hidden);
        return [...document.querySelectorAll("a, button, input, select, textarea, table, nav")]
            .filter((each) => !named(each) || (each.tagName === "TABLE" && !each.caption))
            .map((each) => each.outerHTML.slice(0, 100));
        """
        found: list[str] = self.driver.execute_script(script)
        return found

    def type(self, name: str, text: str) -> None:
        """Type into the field of a form."""
        self.driver.find_element("name", name).send_keys(text)

    def press(self, label: str) -> None:
        """Press the button with a label."""
        self.driver.find_element("xpath", f"//main//button[text()='{label}']").click()

    def tab(self) -> str:
        """Press the tab key; return the text of what has the focus then."""
        self._keys(Keys.TAB)
        return str(self.driver.execute_script("return document.activeElement.textContent")).strip()

    def enter(self) -> None:
        """Press the enter key."""
        self._keys(Keys.ENTER)

    def _keys(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def _devtools(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)


def require_chromium() -> None:
    """Skip a test, or fail it if the Makefile runs it, where there is no Chromium."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    if os.environ.get("TESTS_REQUIRE_CHROMIUM"):
        pytest.fail("chromium and chromedriver must be installed; run `make browser`")
    pytest.skip("chromium is not installed")
