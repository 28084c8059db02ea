"""The archive: every message once, in files named after their content, in a folder and in S3."""

from __future__ import annotations

import base64
import gzip
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from qdo import DeadLetter, Message, Stop
from qdo.brokers.kinesis.positions import POSITIONS, pack
from qdo.errors import SettingsError
from qdo.positions import position_of_time
from qdo.programs import _archive_storage as archive_places
from qdo.programs import archive
from qdo.programs._archive_storage import Folder, Place, S3Storage, folder_of, open_place
from qdo.programs._options import read
from qdo.programs.archive import Archive, ArchiveOptions, Span, name_of, span_of

FIRST = 140049072629181272
DAY = 24 * 3600 * 10_000_000


def message(number: int, body: Any = None, queue: str = "orders", **more: Any) -> Message:
    """Return the message that many positions behind the first."""
    more = {"fence": 1, "id": 0x1234, **more}
    return Message(queue, FIRST + number, {"n": number} if body is None else body, **more)


def messages(first: int, last: int, **more: Any) -> list[Message]:
    return [message(number, **more) for number in range(first, last + 1)]


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of a real HTTP server that does as S3 does."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    server.stop()


class ArchiveSetup:
    """A store and its content."""

    place: Place

    def files(self) -> dict[str, bytes]:
        raise NotImplementedError

    def numbers(self) -> dict[str, list[int]]:
        """Return the numbers of the messages in each file."""
        return {
            name: [json.loads(line)["body"]["n"] for line in gzip.decompress(data).splitlines()]
            for name, data in self.files().items()
        }

    def all_numbers(self) -> list[int]:
        return [number for numbers in self.numbers().values() for number in numbers]


class FolderStore(ArchiveSetup):
    def __init__(self, root: Path) -> None:
        self._root = root
        self.place = Folder(root)

    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in self._root.rglob("*") if path.is_file())
        return {str(path.relative_to(self._root)): path.read_bytes() for path in found}


class BucketStore(ArchiveSetup):
    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, f"b-{uuid.uuid4().hex}", prefix
        client.create_bucket(Bucket=self._bucket)
        self.place = S3Storage(self._bucket, prefix, client)

    def files(self) -> dict[str, bytes]:
        listed = self._client.list_objects_v2(Bucket=self._bucket).get("Contents", [])
        start = f"{self._prefix}/" if self._prefix else ""
        assert all(each["Key"].startswith(start) for each in listed)
        return {
            each["Key"].removeprefix(start): self._client.get_object(
                Bucket=self._bucket, Key=each["Key"]
            )["Body"].read()
            for each in listed
        }


@pytest.fixture(params=["folder", "bucket", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArchiveSetup:
    if request.param == "folder":
        return FolderStore(tmp_path / "archive")
    prefix = "a/b" if request.param == "prefix" else ""
    return BucketStore(request.getfixturevalue("s3"), prefix)


# --- files ----------------------------------------------------------------------------


def test_a_file_holds_the_messages_it_was_given(store: ArchiveSetup) -> None:
    """Its name contains queue, day, and the last and first position."""
    [name] = Archive(store.place).keep(messages(0, 2))
    assert name == f"orders/2026-08-01/00{FIRST + 2}-00{FIRST}.jsonl.gz"
    assert store.numbers() == {name: [0, 1, 2]}


def test_a_line_has_everything_of_its_message(store: ArchiveSetup) -> None:
    """Bodies that are bytes are in base64."""
    rows = [
        message(0, {"name": "Zoë"}, key="ada", headers={"source": "web"}),
        message(1, b"\xff\n"),
    ]
    Archive(store.place).keep(rows)
    [data] = store.files().values()
    first, second = map(json.loads, gzip.decompress(data).decode().splitlines())
    assert first == {
        "id": rows[0].id,
        "queue": "orders",
        "position": FIRST,
        "time": "2026-08-01T20:01:02.918127Z",
        "key": "ada",
        "headers": {"source": "web"},
        "body": {"name": "Zoë"},
    }
    assert base64.b64decode(second["body_base64"]) == b"\xff\n"
    assert "body" not in second


def test_files_sort_in_the_order_of_their_queue(store: ArchiveSetup) -> None:
    """Over the end of a day, too."""
    keeper = Archive(store.place)
    for number in (0, 5, DAY - 1, DAY, 2 * DAY, 300 * DAY):
        keeper.keep([message(number)])
    assert store.all_numbers() == [0, 5, DAY - 1, DAY, 2 * DAY, 300 * DAY]


def test_the_same_messages_make_the_same_file(store: ArchiveSetup) -> None:
    """Repeated by an owner that does not see the first one's file, it replaces it."""
    name = name_of("orders", Span(FIRST, FIRST + 2), archive.day_of(message(2)))
    for _ in range(2):
        store.place.write(name, archive.packed(messages(0, 2)))
    assert list(store.files()) == [name]
    assert archive.packed(messages(0, 2)) == archive.packed(messages(0, 2, fence=5, attempt=2))


# --- repetition -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "again",
    [
        [(0, 4), (5, 9)],
        [(0, 9)],
        [(0, 6), (7, 12)],
        [(3, 5), (6, 14)],
        [(4, 4), (5, 5), (6, 20)],
        [(9, 15)],
        [(10, 12)],
    ],
)
def test_what_runs_again_is_there_once(store: ArchiveSetup, again: list[tuple[int, int]]) -> None:
    """However the next owner, after a crash, cuts the queue into batches."""
    keeper = Archive(store.place)
    keeper.keep(messages(0, 4))
    keeper.keep(messages(5, 9))
    successor = Archive(store.place)
    for first, last in again:
        successor.keep(messages(first, last, fence=2))
    assert store.all_numbers() == list(range(max(9, again[-1][1]) + 1))


def test_a_gap_is_filled(store: ArchiveSetup) -> None:
    """A file that was deleted is written again by a replay; its neighbours stay."""
    keeper = Archive(store.place)
    for first in (0, 10):
        keeper.keep(messages(first, first + 4))
    written = Archive(store.place).keep(messages(0, 20, fence=2))
    assert len(written) == 2
    assert sorted(store.all_numbers()) == list(range(21))


def test_a_queue_that_comes_back_is_looked_at_again(store: ArchiveSetup) -> None:
    """Another worker has written meanwhile."""
    keeper, other = Archive(store.place), Archive(store.place)
    keeper.keep(messages(0, 4, fence=1))
    other.keep(messages(5, 9, fence=2))
    assert keeper.keep(messages(5, 9, fence=3)) == []
    assert store.all_numbers() == list(range(10))


def test_a_replay_under_the_same_owner(store: ArchiveSetup) -> None:
    """After an operator's seek, or in another attempt: existing messages are left out then, too."""
    keeper = Archive(store.place)
    keeper.keep(messages(0, 4))
    keeper.keep(messages(5, 9))
    assert keeper.keep(messages(2, 7)) == []
    keeper.keep(messages(8, 11))
    assert store.all_numbers() == list(range(12))


def test_queues_are_apart(store: ArchiveSetup) -> None:
    """Also queues whose name begins with that of another, or contains characters no path can."""
    keeper = Archive(store.place)
    for queue in ("a", "ab", "a b", "a%2Fb", "é", "x" * 200, "é" * 200, "è" * 200):
        keeper.keep([message(1, queue=queue)])
        assert Archive(store.place).keep([message(1, queue=queue, fence=2)]) == []
    assert len(store.files()) == 8


def test_many_files(s3: Any) -> None:
    """S3 lists a thousand names at a time; here ten, so that a few files need several lists."""
    names = "before-parameter-build.s3.ListObjectsV2"
    s3.meta.events.register(names, lambda params, **_: params.update(MaxKeys=10))
    store = BucketStore(s3, "p")
    keeper = Archive(store.place)
    for number in range(25):
        keeper.keep([message(number)])
    assert Archive(store.place).keep(messages(0, 24, fence=2)) == []
    assert Archive(store.place).keep(messages(20, 25, fence=3)) != []


def test_names_of_other_files() -> None:
    """Files that are not archive files are skipped."""
    span = Span(1, 2)
    assert span_of(name_of("q", span, "2025-01-01")) == span
    for name in (
        "readme",
        "x-y.jsonl.gz",
        "1.jsonl.gz",
        f"{'9' * 5000}-1.jsonl.gz",  # Python converts 4,300 digits at most
        "٣-٣.jsonl.gz",
    ):
        assert span_of(f"q/2026-08-01/{name}") is None


# --- folders --------------------------------------------------------------------------


def test_a_file_that_cannot_be_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither under its name nor beside it; the message counts as failed."""

    def fail(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    store = FolderStore(tmp_path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        Archive(store.place).keep(messages(0, 2))
    assert store.files() == {}


def test_half_written_files_of_the_dead_are_deleted(tmp_path: Path) -> None:
    """Once they are a day old; they are never taken for messages."""
    store = FolderStore(tmp_path)
    [name] = Archive(store.place).keep([message(0)])
    old, young = (tmp_path / name).with_name(".a.tmp"), (tmp_path / name).with_name(".b.tmp")
    for path in (old, young):
        path.write_bytes(b"half")
    yesterday = young.stat().st_mtime - archive_places.ABANDONED_SECONDS - 1
    os.utime(old, (yesterday, yesterday))
    Archive(store.place).keep([message(0, fence=2)])
    assert sorted(Path(each).name for each in store.files()) == [young.name, Path(name).name]


def test_files_and_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new folder, the file before it gets its name, and the folder that holds the name."""
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    place = Folder(tmp_path / "archive")
    monkeypatch.setattr(os, "fsync", fsync)
    [name] = Archive(place).keep([message(0)])
    day = (tmp_path / "archive" / name).parent
    assert synced[:2] == [str(day.parent.parent), str(day.parent)]
    assert synced[2].startswith(f"{day}/.")
    assert synced[3:] == [str(day)]


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["/srv/archive", "file:", "file://host/a", "s3:bucket", "http://a/b"]
)
def test_addresses_that_will_not_do(url: str) -> None:
    """They are rejected with the valid forms."""
    with pytest.raises(ValueError, match=r"file:FOLDER or s3://BUCKET/PREFIX"):
        open_place(url)


@pytest.mark.parametrize("url", ["nowhere:", "file:/proc/archive", None])
def test_bad_places_are_refused_at_the_start(
    url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the job's context, before any message."""
    monkeypatch.delenv("QDO_ARCHIVE_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("QDO_ARCHIVE_URL", url)
    with pytest.raises(SettingsError, match="QDO_ARCHIVE_URL"), archive.job_context():
        pytest.fail("it opened")


def test_a_bucket_that_does_not_exist(s3: Any) -> None:
    """It is not made."""
    with pytest.raises(ValueError, match="bucket 'missing'"):
        S3Storage("missing", "", s3)


def test_folders_may_be_relative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the folder in which the worker starts."""
    monkeypatch.chdir(tmp_path)
    place = open_place(read(ArchiveOptions, {"QDO_ARCHIVE_URL": "file:kept/here"}).url)
    Archive(place).keep([message(0)])
    assert (tmp_path / "kept" / "here" / "orders").is_dir()


def test_a_folder_of_a_queue_fits_any_file_system() -> None:
    """The name never changes."""
    assert folder_of("a/b c") == "a%2Fb%20c"
    assert len(folder_of("é" * 200)) == 200
    assert folder_of("é" * 200) != folder_of("é" * 199 + "è")


def test_no_queue_can_be_named_after_the_folder_of_another() -> None:
    """Its messages would count as those of the other, which would then be in no file."""
    cut = folder_of("tenant-" + "a" * 100 + ":" * 93)
    assert len(cut) == 200
    assert folder_of(cut) != cut


def test_a_body_that_is_no_utf8_does_not_stop_the_archive(tmp_path: Path) -> None:
    """Half of a surrogate pair stays escaped; an infinite number is a dead letter at once."""
    kept = Archive(Folder(tmp_path))
    (name,) = kept.keep([message(0, {"half": "\ud800"})])
    text = gzip.decompress((tmp_path / name).read_bytes())
    assert b'"half":"\\ud800"' in text
    with pytest.raises(DeadLetter):
        kept.keep([message(1, float("inf"))])


def test_a_job_without_its_context() -> None:
    """The worker stops and names the setting to make; the message is not touched."""
    with pytest.raises(Stop, match=r"qdo\.programs\.archive:job_context"):
        archive.job(message(0), {})  # type: ignore[arg-type]


def test_the_job_takes_one_message_or_several(tmp_path: Path) -> None:
    """Several become one file."""
    store = FolderStore(tmp_path)
    keeper = Archive(store.place)
    archive.job(message(0), keeper)
    archive.job(messages(1, 3), keeper)
    assert list(store.numbers().values()) == [[0], [1, 2, 3]]


# --- positions that are not times -----------------------------------------------------


def record(number: int, arrived: float = 1_700_000_000.0, **more: Any) -> Message:
    """Return a message of Kinesis."""
    position = pack(10**55 + number, 0, position_of_time(arrived))
    return Message("shard", position, number, id=POSITIONS, **{"fence": 1, **more})


def test_files_of_wide_positions_sort_as_these_do(store: ArchiveSetup) -> None:
    """Their day and the time in their lines are those of the messages."""
    kept = Archive(store.place)
    names = [
        *kept.keep([record(1), record(2)]),
        *kept.keep([record(99)]),
        *kept.keep([record(100), record(101, 1_700_003_600.0)]),
    ]
    assert names == sorted(names)
    assert all(name.startswith("shard/2023-11-1") for name in names)
    assert max(len(name.rpartition("/")[2]) for name in names) < 255
    lines = [json.loads(line) for line in gzip.decompress(store.files()[names[0]]).splitlines()]
    assert [line["time"] for line in lines] == ["2023-11-14T22:13:20Z"] * 2
    assert [line["position"] for line in lines] == [record(1).position, record(2).position]


def test_wide_positions_are_known_again_though_times_go_back(store: ArchiveSetup) -> None:
    """Around midnight, where a later record arrived a moment earlier than the one before it."""
    midnight = 1_700_006_400.0
    Archive(store.place).keep([record(1, midnight + 0.001), record(2, midnight - 0.001)])
    again = Archive(store.place)
    again.keep([record(n, midnight + 0.001 * (3 - 2 * n), fence=2) for n in (1, 2)])
    assert len(store.files()) == 1
    assert again.keep([record(3, midnight + 1, fence=2)])
