"""The rights of the files that the settings name."""

from __future__ import annotations

from collections.abc import Iterator

from qdo.settings.settings import Settings
from qdo.system.files import rights_problems, share_database
from qdo.system.sqlite import translated


def share_files(settings: Settings) -> None:
    """Create the files of broker and coordinator for the setting `group`, unless they exist.

    Without a group, each is created when it is opened, for this user alone.

    :raises SettingsError: the user is not in the group.
    :raises DatabaseError: a file cannot be created.
    """
    if settings.group:
        for path in _paths(settings):
            with translated(path):
                share_database(path, settings.group)


def file_warnings(settings: Settings) -> Iterator[str]:
    """Yield what is wrong with the rights of existing files."""
    for path in _paths(settings):
        with translated(path):
            yield from rights_problems(path, settings.group)


def _paths(settings: Settings) -> Iterator[str]:
    for address in (settings.broker, settings.coordinator.partition("?chroot=")[0]):
        path = address.removeprefix("sqlite:")
        if path != address:
            yield path
