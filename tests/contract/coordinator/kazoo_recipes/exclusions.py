"""Which of kazoo's tests the embedded coordinator is put to, and which not, with the reason."""

from __future__ import annotations

MODULES = (
    "test_barrier",
    "test_cache",
    "test_client",
    "test_counter",
    "test_election",
    "test_lease",
    "test_lock",
    "test_partitioner",
    "test_party",
    "test_queue",
    "test_watchers",
)

LEFT_OUT = {
    "test_client::TestClientConstructor": "builds clients only, never reaches a coordinator",
    "test_client::TestSSLClient": "TLS between client and server: there is no network",
    "test_client::TestReconfig": "changes the members of an ensemble: there is one file",
    "test_client::TestAuthentication::test_add_auth_on_reconnect": (
        "shuts down the TCP socket of kazoo's own connection: there is none"
    ),
    "test_client::TestClient::test_update_host_list": "needs several servers, one of them stopped",
    "test_client::TestClient::test_request_queuing_session_recovered": (
        "stops and starts the server: there is none"
    ),
    "test_client::TestClient::test_request_queuing_session_expired": (
        "stops and starts the server: there is none"
    ),
    "test_lock::KazooLockTests::test_lock": (
        "waits for ever if the next thread has the lock before it sees that the last one is done"
    ),
}
"""A test, or a class of tests, and why it is left out."""


LEFT_OUT_UNDER: dict[str, dict[str, str]] = {
    "gevent": {
        "test_client::TestCallbacks::test_async_result_callbacks_are_always_called": (
            "expects a callback before control returns to gevent's loop, which runs it"
        ),
    },
    "threading": {},
}
"""Tests that are left out under one handler only."""


def reason(name: str, handler: str) -> str | None:
    """Return why the test `module::class::test` is left out, None when it is not."""
    table = {**LEFT_OUT, **LEFT_OUT_UNDER[handler]}
    return table.get(name) or table.get(name.rpartition("::")[0])
