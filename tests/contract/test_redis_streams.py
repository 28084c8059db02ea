"""The broker of docs/examples/redis_streams, installed from outside, keeps every contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qdo.brokers import registry
from qdo.testing.contracts.dead_letters import *
from qdo.testing.contracts.deletion import *
from qdo.testing.contracts.fixtures import *
from qdo.testing.contracts.logs import *
from qdo.testing.contracts.options import *
from qdo.testing.contracts.owners import *
from tests.support import redis_server as support


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[support.RedisServer]:
    support.require()
    server = support.RedisServer(tmp_path_factory.mktemp("redis"))
    with pytest.MonkeyPatch.context() as patch:
        for folder in support.installed_example(tmp_path_factory.mktemp("installed")):
            patch.syspath_prepend(folder)
        registry._installed.cache_clear()
        yield server
    registry._installed.cache_clear()
    server.close()


@pytest.fixture
def broker_url(redis_server: support.RedisServer) -> str:
    import redis

    redis.Redis(port=redis_server.port).flushall()
    return redis_server.url
