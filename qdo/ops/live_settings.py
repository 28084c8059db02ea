"""The effect of a change of live settings."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.fleet.live_settings import Edit, next_number, read_answers, read_settings
from qdo.fleet.settings_node import SettingsNode, check_size


@dataclass(frozen=True, slots=True)
class SettingsPlan:
    """A change of live settings that is not made yet.

    :ivar version: the number that the new version would have.
    :ivar before: the text in force, "" for none.
    :ivar after: the text of the new version.
    :ivar workers: the number of workers that would have to accept it.
    :ivar same: whether these live settings are in force already.
    """

    version: int
    before: str
    after: str
    workers: int
    same: bool


def plan_settings(
    client: Client | None, layout: Layout, edit: Edit, *, damaged: bool = False
) -> SettingsPlan:
    """Return the effect of a change, without asking the workers.

    :param client: None if the coordinator is a file that does not exist yet.
    :raises: as `fleet.live_settings.propose`.
    """
    node, version, workers = SettingsNode(), 1, 0
    if client is not None:
        node = read_settings(client, layout, damaged=damaged)
        version = next_number(client, layout, node)
        workers = len(read_answers(client, layout))
    text = edit(node)
    check_size(text)
    same = text == node.text and node.fault is None
    return SettingsPlan(version, node.text, text, workers, same)
