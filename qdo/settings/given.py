"""The types of settings in code, as in ``App(NAME, attempts=3)``, for type checkers.

`python -m tests.golden.given` writes this file from the declarations in `qdo.settings.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from qdo.jobs.policy_tables import QueuePolicy


class GivenSettings(TypedDict, total=False):
    """Settings by name; `qdo.Settings` explains them."""

    job: str
    queues: Sequence[str]
    exclude: Sequence[str]
    broker: str
    coordinator: str
    coordinator_ca: str
    coordinator_cert: str
    coordinator_key: str
    coordinator_verify: str
    coordinator_auth: str
    coordinator_password_file: str
    acl: str
    acl_workers: Sequence[str]
    acl_operators: Sequence[str]
    acl_monitors: Sequence[str]
    acl_senders: Sequence[str]
    group: str
    namespace: str
    keys: str
    encrypt: Sequence[str]
    require_encryption: bool
    hide: Sequence[str]
    zone: str
    address: str
    processes: int
    concurrency: int
    executor: str
    executor_processes: int
    burst: bool
    reload: bool
    max_messages: int
    max_seconds: float
    session_timeout_seconds: float
    connect_seconds: float
    checkpoint_seconds: float
    drain_seconds: float
    fetch: int
    turn_seconds: float
    attempts: int
    backoff_seconds: float
    backoff_max_seconds: float
    policies: Sequence[QueuePolicy | Mapping[str, object]]
    retention_seconds: float
    dead_letter_limit: int
    dead_letter_retention_seconds: float
    max_queues: int
    max_body_bytes: int
    history: str
    http: str
    doorbell: bool
    log_level: str
    log_format: str
    log_config: str
