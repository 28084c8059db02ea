"""What an operator has typed in an editor is not lost when it cannot be used."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from qdo.cli.output import print_message


@contextmanager
def kept_on_failure(text: str, command: str) -> Iterator[None]:
    """If the block fails or is interrupted, write a text to a new file and name it.

    :param command: takes the file as its argument, after a correction.
    """
    try:
        yield
    except BaseException:
        # Only this user may read it, and nobody deletes it.
        with tempfile.NamedTemporaryFile(
            "w", prefix="qdo-settings-", suffix=".toml", encoding="utf-8", delete=False
        ) as file:
            file.write(text)
        print_message(f"hint: your text is in {file.name}; correct it, then: {command} {file.name}")
        raise
