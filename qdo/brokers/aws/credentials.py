"""Translates errors of retrieving AWS credentials into boto3 errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from botocore import exceptions as boto

from qdo.text import describe


def checked(credentials: Any) -> Any:
    """Make boto3 credentials raise the errors of boto3's clients when a renewal fails.

    If the credential process prints no credentials or expired ones, boto3 itself raises a
    ValueError, an OSError or a RuntimeError.
    """
    if credentials is not None and not hasattr(credentials, "_qdo_checked"):
        plain = credentials.get_frozen_credentials

        def get_frozen_credentials() -> Any:
            with retrieving():
                return plain()

        credentials.get_frozen_credentials = get_frozen_credentials
        credentials._qdo_checked = True
    return credentials


@contextlib.contextmanager
def retrieving() -> Iterator[None]:
    """Translate errors of retrieving credentials into errors of boto3's clients."""
    try:
        yield
    except boto.BotoCoreError:
        raise
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise boto.CredentialRetrievalError(provider="AWS", error_msg=describe(error)) from error
