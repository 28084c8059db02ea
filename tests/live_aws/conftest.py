"""Tests on AWS itself, in the region and with the permissions of the current user.

``TESTS_AWS=1 python -m pytest tests/aws`` creates queues and a stream with names that
no other user has, and deletes them at the end, even if a test fails. It costs less than a cent.
``TESTS_AWS_ENDPOINT`` names a server compatible with AWS, to test these tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.aws.resources import Resources, ambient_region

ENDPOINT = "TESTS_AWS_ENDPOINT"


@pytest.fixture(scope="session")
def region() -> str:
    """The region of the ambient credentials."""
    return ambient_region()


@pytest.fixture
def resources(region: str) -> Iterator[Resources]:
    """Resources of a test at AWS; deleted when it ends."""
    with Resources(region, os.environ.get(ENDPOINT)) as made:
        yield made


@pytest.fixture
def options(region: str) -> str:
    """The query of the addresses of brokers."""
    endpoint = os.environ.get(ENDPOINT)
    return f"?endpoint={endpoint}" if endpoint else ""
