"""Verifies webhooks at your own endpoints in Starlette and FastAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from qdo.ingest import endpoints_of, headers_of
from qdo.sending.messages import NewMessage
from qdo.sending.sender import Sender


def verified(app: Sender, path: str) -> Callable[[Request], Awaitable[NewMessage]]:
    """Return a function that verifies a request, to call or for ``Depends`` of FastAPI.

    It returns the message that stores the webhook once, or raises HTTPException with the status
    that `qdo ingest` would answer. It reads the body within the same limits, unless the endpoint
    has a parameter for the body: FastAPI reads such a body before it calls a dependency.

    >>> from qdo.contrib.starlette import verified
    >>> message = await verified(app, "/github")(request)
    >>> await app.asend_many([message])

    :param path: the path of a declared webhook; the path of the endpoint may be another one.
    :raises UsageError: the app has no such webhook, or its secret is missing or invalid.
    """
    endpoints = endpoints_of(app, path)

    async def verify(request: Request) -> NewMessage:
        try:
            found: int | NewMessage = await endpoints.areceive(
                "POST", path, headers_of(request.scope), request.stream(), endpoints.amessage
            )
        except ClientDisconnect:
            found = 400
        if isinstance(found, NewMessage):
            return found
        (_, *more), text = endpoints.answer(path, found)
        raise HTTPException(found, text.decode().strip(), dict(more))

    return verify
