"""A receiver that never finishes its response does not keep the webhook program busy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import urllib3

from qdo import Message
from qdo.programs._http import MOST_INTERIM
from qdo.programs.webhook import Courier, UndeliveredError, WebhookOptions, new_secret

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
FINAL = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@contextmanager
def answering(response: bytes) -> Iterator[str]:
    """Yield the URL of a receiver that answers one request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(response)
                # Until the sender has hung up: closing earlier would discard unread bytes.
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        thread.join(10)
        assert not thread.is_alive()


def deliver(url: str) -> None:
    courier = Courier(WebhookOptions(url=url, secret=new_secret()))
    try:
        courier.deliver(Message("q", 140049072629181272, 1, id="0f5d"))
    finally:
        courier.close()


def test_interim_responses_are_limited() -> None:
    """http.client reads any number of them, without a pause in which other jobs could run."""
    with answering(INTERIM * (MOST_INTERIM + 1) + FINAL) as url:
        with pytest.raises(UndeliveredError) as caught:
            deliver(url)
        assert isinstance(caught.value.__cause__, urllib3.exceptions.ProtocolError)


def test_a_few_interim_responses_are_accepted() -> None:
    with answering(INTERIM * MOST_INTERIM + FINAL) as url:
        deliver(url)
