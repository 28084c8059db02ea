"""Storage for the files of `qdo.programs.archive`, in a folder or an S3 bucket."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from qdo.text import how_to_install

MAX_FOLDER = 200
"""Characters; file systems allow names of up to 255 bytes."""
ABANDONED_SECONDS = 86_400.0
"""Age at which a half-written file counts as abandoned."""

_TEMPORARY = ".tmp"


class Place(Protocol):
    """Stores named files. "/" separates the parts of a name."""

    def write(self, name: str, data: bytes) -> None:
        """Store a file atomically and durably. Replace a file of the same name."""

    def names(self, folder: str, start: str) -> Iterator[str]:
        """Yield the names of the form FOLDER/DAY/FILE that sort after `start`."""


def folder_of(queue: str) -> str:
    """Return the folder of a queue, which is the queue's name in an encoding for any file system.

    A long name ends with a digest. The character before the digest occurs in no encoded name, so no
    other queue can have this folder.
    """
    name = quote(queue, safe="")
    if len(name) <= MAX_FOLDER:
        return name
    digest = hashlib.sha256(queue.encode()).hexdigest()[:32]
    return f"{name[: MAX_FOLDER - len(digest) - 1]}+{digest}"


def open_place(url: str) -> Place:
    """Return the place at an address after checking that it is usable.

    :raises ValueError: the address is invalid, or the bucket is not usable.
    :raises OSError: the folder is not writable.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return Folder(Path(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        return S3Storage(parts.netloc, parts.path.strip("/"))
    raise ValueError(f"must be file:FOLDER or s3://BUCKET/PREFIX, got {url!r}")


class Folder:
    """Files on a file system that every worker of the app can reach."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        _make(self._root)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise PermissionError(f"cannot write to folder {root}")

    def write(self, name: str, data: bytes) -> None:
        """Write a temporary file, sync it, and rename it into place."""
        path = self._root / name
        _make(path.parent)
        temporary = path.with_name(f".{uuid.uuid4().hex}{_TEMPORARY}")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _sync(path.parent)

    def names(self, folder: str, start: str) -> Iterator[str]:
        """Yield names like `Place`. Delete unfinished files of dead processes."""
        base = self._root / folder
        if not base.is_dir():
            return
        first_day = start.split("/")[1]
        for day in sorted(each.name for each in base.iterdir() if each.name >= first_day):
            for path in sorted((base / day).iterdir()):
                name = f"{folder}/{day}/{path.name}"
                if path.name.endswith(_TEMPORARY):
                    _delete_abandoned(path)
                elif name >= start:
                    yield name


def _delete_abandoned(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
            path.unlink()


def _make(folder: Path) -> None:
    """Create a folder and its parents durably."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync(each.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class S3Storage:
    """Objects in S3, or in an S3-compatible service. boto3 reads its address from AWS_ENDPOINT_URL.

    :param client: a boto3 client. The default is a client with boto3's own settings.
    :raises ValueError: boto3 is missing, or the bucket is not usable.
    """

    def __init__(self, bucket: str, prefix: str, client: Any = None) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client() if client is None else client
        self._check()

    def write(self, name: str, data: bytes) -> None:
        """Store an object. S3 makes the object visible atomically."""
        self._client.put_object(
            Bucket=self._bucket,
            Key=self._prefix + name,
            Body=data,
            ContentType="application/gzip",
        )

    def names(self, folder: str, start: str) -> Iterator[str]:
        """Yield names like `Place`."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=f"{self._prefix}{folder}/",
            StartAfter=self._prefix + start,
        )
        for page in pages:
            for found in page.get("Contents", ()):
                yield str(found["Key"]).removeprefix(self._prefix)

    def _check(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.head_bucket(Bucket=self._bucket)
        except (BotoCoreError, ClientError) as error:
            raise ValueError(f"cannot use bucket {self._bucket!r}: {error}") from error


def _client() -> Any:
    try:
        import boto3
    except ImportError as error:
        raise ValueError(f"s3:// needs boto3; {how_to_install('aws')}") from error
    return boto3.client("s3")
