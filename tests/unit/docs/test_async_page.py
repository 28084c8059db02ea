"""The programs of the page about async programs work."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path

import pytest

from qdo.testing import TestKit
from tests.support.doc_pages import blocks, read


def test_the_programs_of_the_async_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for block in blocks(read("async")):
        if name := block.options.get("caption"):
            (tmp_path / name).write_text(block.text)
            monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    quotes = importlib.import_module("quotes")
    test = importlib.import_module("test_quotes").test_a_quote
    for name in ("quotes", "test_quotes"):
        monkeypatch.delitem(sys.modules, name)
    with TestKit(quotes.app):
        asyncio.run(quotes.main())
    assert capsys.readouterr().out == "42\n"
    with TestKit(quotes.app) as kit:
        asyncio.run(test(lambda app: kit))
