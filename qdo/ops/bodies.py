"""Bodies of stored messages as JSON values, for commands."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Any

from qdo.encoding import decode_strictly, is_raw, key_id_of, parsed
from qdo.errors import BodyDecodeError, KeyMissingError

if TYPE_CHECKING:
    from qdo.encryption.bodies import BodyVault


def decrypted(
    queue: str, body: bytes, headers: str | None, vault: BodyVault | None
) -> tuple[bytes, str | None, str | None]:
    """Return body and headers of a message, decrypted, and why they could not be.

    :param vault: decrypts the body; None without keys.
    """
    id = key_id_of(body)
    if id is None:
        return body, headers, None
    try:
        if vault is None:
            raise KeyMissingError(queue=queue, key=id, place="the setting keys")
        return *vault.open(queue, body, headers), None
    except (BodyDecodeError, KeyMissingError) as error:
        return body, headers, str(error)


def body_value(body: bytes, headers: str | None) -> dict[str, Any]:
    """Return `body` if it is JSON that a copy can hold, and `body_base64` otherwise."""
    read = parsed(headers)
    if not (read and is_raw(read)):
        try:
            return {"body": decode_strictly(body.decode())}
        except (ValueError, RecursionError):
            pass
    return {"body_base64": binascii.b2a_base64(body, newline=False).decode()}
