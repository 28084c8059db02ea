"""The value of the broker node: the file in which the messages of an app are."""

from __future__ import annotations

from dataclasses import dataclass

from qdo.coordination.znodes.values import encode, load


@dataclass(frozen=True, slots=True)
class BrokerNode:
    """The broker that the workers of an app use, if it is a file.

    :ivar id: random number of the file; it moves and is copied with the file.
    :ivar address: address with which the first worker opened it.
    :ivar host: host of that worker.
    """

    id: str
    address: str
    host: str

    @classmethod
    def parse(cls, data: bytes | None) -> BrokerNode:
        value, _ = load(data)
        return cls(*(str(value.get(key, "unknown")) for key in ("id", "address", "host")))

    def encode(self) -> bytes:
        return encode({"id": self.id, "address": self.address, "host": self.host})
