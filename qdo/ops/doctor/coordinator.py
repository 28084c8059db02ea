"""Checks of the coordinator: its servers, latency, clock, rights, and the leader of the app."""

from __future__ import annotations

import time

from qdo._version import FORMAT_LEVEL
from qdo.coordination.bulk_reads import read_children, read_nodes
from qdo.coordination.session_setup import SAFE, ServerReport, is_safe, read_server
from qdo.coordination.znodes.worker_node import parse_leader
from qdo.fleet.components import AppLevel, skew
from qdo.ops.acl import differences_of
from qdo.ops.doctor.case import Case, Diagnosis, failed, ok, unknown, warning
from qdo.system.native import run_parallel
from qdo.text import join_some, pluralize

READS = 9
SLOW_SECONDS, SLOWEST_SECONDS = 0.05, 1.0
SERVER_SECONDS = 1.0
MOST_SERVERS = 15
LEAST_VERSION = (3, 6, 0)
SKEW_SECONDS = 2.0
OLD_SECONDS = 60.0
ACL_QUEUES = 200
"""Queue nodes whose rights are compared; `qdo acl check` compares all."""


def latency(case: Case) -> Diagnosis:
    """Time a few reads of the node of the app."""
    client, times = case.connected(), []
    for _ in range(READS):
        began = time.monotonic()
        client.exists(case.layout.root)
        times.append(time.monotonic() - began)
    median, worst = sorted(times)[len(times) // 2], max(times)
    text = f"{READS} reads took {median * 1000:.1f} ms (median) and {worst * 1000:.1f} ms (worst)"
    if median > SLOW_SECONDS or worst > SLOWEST_SECONDS:
        return warning(
            text, "look at the disk and the load of the servers, and at the network to them"
        )
    return ok(text)


def servers(case: Case) -> Diagnosis:
    """Ask each server of the address for its version and mode."""
    client = case.connected()
    if client.address.path is not None:
        return ok(f"the coordinator is the file {client.address.path} on this machine")
    if client.access.tls is not None:
        return unknown("servers with TLS are not asked one by one", "ask each with zkServer.sh")
    return judge_servers(_reports(case))


def server_versions(case: Case) -> Diagnosis:
    """Look for versions that are too old or may lose transactions."""
    client = case.connected()
    if client.address.path is not None:
        return ok("the coordinator is a file: no server has a version")
    if client.access.tls is not None:
        return unknown("servers with TLS are not asked one by one", "ask each with zkServer.sh")
    return judge_versions(_reports(case))


def _reports(case: Case) -> list[ServerReport]:
    def ask() -> list[ServerReport]:
        hosts = case.connected().address.hosts.split(",")[:MOST_SERVERS]
        return run_parallel(lambda host: read_server(host, SERVER_SECONDS), hosts)

    return case.once("servers", ask)


def judge_servers(reports: list[ServerReport]) -> Diagnosis:
    """Return whether the servers are one ensemble, all of it running."""
    down = [f"{each.host} ({each.fault})" for each in reports if each.fault is not None]
    modes = sorted(each.mode for each in reports if each.mode)
    if modes.count("leader") > 1 or ("standalone" in modes and len(reports) > 1):
        return failed(
            f"the servers of the address are no single ensemble: {', '.join(modes)}",
            "correct the address, or the servers' configuration: each must list all of them",
        )
    if down:
        rest = f"{len(reports) - len(down)} of {len(reports)} servers answer"
        return warning(f"{rest}; not: {join_some(down)}", "start these servers again")
    if not modes:
        return unknown(
            "no server allows the command srvr", "add it to 4lw.commands.whitelist of the servers"
        )
    if "follower" in modes and "leader" not in modes and len(modes) == len(reports):
        return warning(
            f"no server of the address is the leader: {', '.join(modes)}",
            "name all servers of the ensemble in the address",
        )
    return ok(f"{pluralize(len(reports), 'server')}: {', '.join(modes)}")


def judge_versions(reports: list[ServerReport]) -> Diagnosis:
    """Return whether the servers keep what they acknowledge."""
    versions = sorted({".".join(map(str, each.version)) for each in reports if each.version})
    if not versions:
        return unknown("no server tells its version", "see the check coordinator-servers")
    old = [each.host for each in reports if each.version and each.version < LEAST_VERSION]
    if old:
        return failed(f"{join_some(old)}: ZooKeeper is too old", "upgrade it to 3.6 or newer")
    several = len(reports) > 1 or reports[0].mode != "standalone"
    unsafe = [e.host for e in reports if several and e.version and not is_safe(e.version)]
    if unsafe:
        why = f"{join_some(unsafe)} may lose acknowledged transactions in an election"
        return warning(why, f"upgrade ZooKeeper to a safe version: {SAFE}")
    return ok(f"the servers have version {' and '.join(versions)} of ZooKeeper")


def clock(case: Case) -> Diagnosis:
    """Compare the clocks of this machine, of the coordinator and of the workers.

    Nothing is written, so only what others have written tells the time of the coordinator: a clock
    that is behind others is certain, by how much is not.
    """
    client, now = case.connected(), time.time()
    found = [each for each in case.processes() if each.reported and each.fault is None]
    if not found:
        return unknown("no process has reported, so the clocks cannot be compared")
    paths = [f"{case.layout.components}/{each.kind}/{each.name}" for each in found[:100]]
    ahead = []
    for each, path in zip(found, paths, strict=False):
        stat = client.exists(path)
        if stat is not None and each.started and each.started > stat.ctime / 1000 + SKEW_SECONDS:
            behind = each.started - stat.ctime / 1000
            ahead.append(f"{each.host} (by {behind:.0f} s or more)")
    newest = max(each.reported or 0.0 for each in found)
    remedy = "synchronize the clocks of all machines, for instance with chrony"
    if ahead:
        return warning(f"clocks are ahead of the coordinator's: {join_some(ahead)}", remedy)
    if newest > now + SKEW_SECONDS:
        return warning(
            f"the clock of this machine is {newest - now:.0f} s or more behind that of the"
            " coordinator",
            remedy,
        )
    if newest < now - OLD_SECONDS:
        return unknown(
            f"the newest report of a process is {now - newest:.0f} s old: either all processes"
            " are silent, or the clock of this machine is ahead",
            remedy,
        )
    return ok("the reports of the processes agree with the clock of this machine")


def rights(case: Case) -> Diagnosis:
    """Compare the rights on some nodes with the settings."""
    client, layout = case.connected(), case.layout
    names = read_children(client, [layout.queues]).get(layout.queues, [])[:ACL_QUEUES]
    paths = [*map(layout.queue, names), *layout.persistent, layout.root]
    different = differences_of(client, paths)
    if different:
        return warning(
            f"{pluralize(len(different), 'node')} of {len(paths)} have other rights than the"
            f" settings give: {join_some([each.path for each in different], 3)}",
            "run `qdo acl check`, then `qdo acl apply`",
        )
    return ok("the nodes have the rights of the settings")


def versions(case: Case) -> Diagnosis:
    """Compare the versions of the processes with each other and with the app's format level."""
    found = read_nodes(case.connected(), [case.layout.root])
    level = AppLevel.parse(found[0].data) if found else AppLevel()
    if max(level.level, level.next) > FORMAT_LEVEL:
        return failed(
            f"the app has format level {max(level.level, level.next)}, and this version of qdo"
            f" supports {FORMAT_LEVEL}",
            "install the version that `qdo components` lists",
        )
    several = skew(case.processes())
    if several:
        return warning(f"several versions of qdo run: {several}", "finish the deploy")
    return ok(f"one version of qdo runs, with format level {level.level} of the app")


def leader(case: Case) -> Diagnosis:
    """Look for the leader, which assigns queues."""
    found = read_nodes(case.connected(), [case.layout.rebalancer])
    name, process = parse_leader(found[0].data) if found else ("", "")
    workers = [each.worker for each in case.workers()]
    if not workers:
        return failed("no worker is registered", "start one with `qdo-worker`")
    if name not in workers:
        last = f"{name} ({process})" if process else name or "none"
        return failed(
            f"no registered worker leads, the last one was {last}: queues are not assigned",
            "wait for a session timeout; if that changes nothing, look at the workers' logs",
        )
    return ok(f"{name} leads {pluralize(len(workers), 'worker')}")
