"""The log of qdo's processes."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator

import pytest

from qdo.errors import SettingsError
from qdo.system import logs as log


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    loggers = [root, logging.getLogger("kazoo"), logging.getLogger("botocore")]
    handlers, levels = list(root.handlers), [each.level for each in loggers]
    yield io.StringIO()
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_a_line_says_when_how_bad_where_and_what(stream: io.StringIO):
    log.configure("info", stream)
    logging.getLogger("qdo.worker.supervisor.supervisor").info("process %d started", 3)
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}Z INFO    "
        rf"qdo\.worker\.supervisor\.supervisor\[{os.getpid()}\] process 3 started\n",
        stream.getvalue(),
    )


def test_lines_below_the_level_are_left_out(stream: io.StringIO):
    log.configure("WARNING", stream)
    logging.getLogger("qdo").info("not worth it")
    logging.getLogger("qdo").warning("worth it")
    assert "not worth it" not in stream.getvalue()
    assert "worth it" in stream.getvalue()


def test_configuring_again_does_not_double_the_lines(stream: io.StringIO):
    log.configure("info", stream)
    log.configure("info", stream)
    logging.getLogger("qdo").info("once")
    assert stream.getvalue().count("once") == 1


def test_an_unknown_level_is_refused():
    with pytest.raises(SettingsError, match="'loud'") as caught:
        log.configure("loud")
    assert caught.value.details["name"] == "log_level"


def test_of_kazoo_only_errors_are_shown_unless_debugging(stream: io.StringIO):
    """qdo has a line of its own for each event of a connection."""
    log.configure("info", stream)
    logging.getLogger("kazoo.client").warning("Connection dropped")
    assert stream.getvalue() == ""
    logging.getLogger("kazoo.client").error("Unhandled exception")
    assert "Unhandled exception" in stream.getvalue()
    log.configure("debug", stream)
    logging.getLogger("kazoo.client").info("Connecting to")
    assert "Connecting to" in stream.getvalue()


def test_secrets_of_botocore_are_not_logged_at_debug_level(stream: io.StringIO):
    """Signed requests are at level debug; the place of credentials is logged only in debugging."""
    log.configure("info", stream)
    logging.getLogger("botocore.credentials").info("Found credentials")
    assert stream.getvalue() == ""
    log.configure("debug", stream)
    logging.getLogger("botocore.credentials").info("Found credentials")
    logging.getLogger("botocore.auth").debug("x-amz-security-token:secret")
    assert "Found credentials" in stream.getvalue()
    assert "secret" not in stream.getvalue()
