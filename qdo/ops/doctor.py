"""The checks of `qdo doctor`. A new check is a function and a line in `CHECKS`."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from qdo._version import FORMAT_LEVEL
from qdo.coordination.bulk_reads import names_below, read_nodes
from qdo.coordination.session_setup import SAFE, ServerReport, is_safe, read_server
from qdo.coordination.znodes.worker_node import parse_leader
from qdo.coordination.znodes.worker_report import STARVED_SECONDS
from qdo.errors import QdoError, UnreachableError
from qdo.fleet.chores import read_records
from qdo.fleet.components import AppLevel, skew
from qdo.fleet.limits import list_limits
from qdo.ops.acl import differences_of
from qdo.ops.doctor_case import Case, Diagnosis, failed, ok, unknown, warning
from qdo.ops.items import SILENT_SECONDS, silent
from qdo.ops.requests import check_dead_letters, check_requests
from qdo.ops.timers import check_outboxes, check_timers
from qdo.ops.verdicts import QueueHealth
from qdo.ops.worker_status import deaths, lost_workers
from qdo.queues import POOL, QueueFilter, why_untaken
from qdo.system.files import sqlite_path
from qdo.system.native import run_parallel
from qdo.system.processes import RESERVE
from qdo.text import describe, join_some, pluralize, short_duration

READS = 9
SLOW_SECONDS = 0.05
SLOWEST_SECONDS = 1.0
SERVER_SECONDS = 1.0
MOST_SERVERS = 15
LEAST_VERSION = (3, 6, 0)
SKEW_SECONDS = 2.0
OLD_SECONDS = 60.0
# Maximum number of queue nodes with compared rights. `qdo admin acl check` compares all nodes.
ACL_QUEUES = 200
# A leader does its chores about once a minute.
CHORES_SECONDS = 300.0
SLOW_LISTING_SECONDS = 2.0
# Maximum number of queues whose attributes the doctor reads if each queue costs a request.
MOST_QUEUES = 50
LITTLE_BYTES = 1 << 30
TOO_LITTLE_BYTES = 100 << 20
USUAL_FILES = 1024
# Time limit of all checks together, excluding the time to open the coordinator and the broker.
TOTAL_SECONDS = 8.0
CHECK_SECONDS = 5.0
# Time limit of the checks that `qdo status` runs.
FIRST_SECONDS = 2.0
BOTH = ("coordinator", "broker")
LOST_SECONDS = 3600.0
REACH = "do what it says, start it, or correct its address"
JOBS_UNKNOWN = unknown("the jobs are not known", "name the app as MODULE:APP")


def latency(case: Case) -> Diagnosis:
    """Measure the time of a few reads of the app's node."""
    client = case.connected()
    times = []
    for _ in range(READS):
        began = time.monotonic()
        client.exists(case.layout.root)
        times.append(time.monotonic() - began)
    median = sorted(times)[len(times) // 2]
    worst = max(times)
    text = f"{READS} reads took {median * 1000:.1f} ms (median) and {worst * 1000:.1f} ms (worst)"
    if median > SLOW_SECONDS or worst > SLOWEST_SECONDS:
        return warning(
            text, "look at the disk and the load of the servers, and at the network to them"
        )
    return ok(text)


def servers(case: Case) -> Diagnosis:
    """Ask each server of the address for its version and mode."""
    none = f"the coordinator is the database {case.connected().server}"
    return _of_servers(case, judge_servers, none)


def server_versions(case: Case) -> Diagnosis:
    """Find versions that are too old or may lose transactions."""
    none = "the coordinator is a database: no ZooKeeper server has a version"
    return _of_servers(case, judge_versions, none)


def _of_servers(
    case: Case, judge: Callable[[list[ServerReport]], Diagnosis], none: str
) -> Diagnosis:
    client = case.connected()
    if not client.address.has_servers:
        return ok(none)
    if client.access.tls is not None:
        return unknown("servers with TLS are not asked one by one", "ask each with zkServer.sh")
    hosts = client.address.hosts.split(",")[:MOST_SERVERS]
    read = partial(run_parallel, lambda host: read_server(host, SERVER_SECONDS), hosts)
    return judge(case.once("servers", read))


def judge_servers(reports: list[ServerReport]) -> Diagnosis:
    """Judge whether the servers are one ensemble, and whether all of them run."""
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
    """Judge whether the servers' versions keep acknowledged transactions."""
    versions = sorted({".".join(map(str, each.version)) for each in reports if each.version})
    if not versions:
        return unknown("no server reports its version", "see the check coordinator-servers")
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
    """Compare the clocks of this machine, of the coordinator and of the workers."""
    # The check writes nothing, so only the nodes of other processes show the coordinator's time.
    # These times prove that a clock is behind, but not by how much.
    client = case.connected()
    now = time.time()
    processes = [each for each in case.processes() if each.reported and each.fault is None]
    if not processes:
        return unknown("no process has reported, so the clocks cannot be compared")
    paths = [f"{case.layout.components}/{each.kind}/{each.name}" for each in processes[:100]]
    ahead = []
    for each, path in zip(processes, paths, strict=False):
        stat = client.exists(path)
        behind = 0.0 if stat is None else (each.started or 0.0) - stat.ctime / 1000
        if behind > SKEW_SECONDS:
            ahead.append(f"{each.host} (by {behind:.0f} s or more)")
    newest = max(each.reported or 0.0 for each in processes)
    if not ahead and case.coordinator_url.startswith("sqlite:"):
        # If the coordinator is a file, processes use their own clocks for their reports.
        late = {str(each.host) for each in processes if (each.reported or 0.0) > now + SKEW_SECONDS}
        ahead = sorted(late)
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
    client = case.connected()
    layout = case.layout
    names = names_below(client, layout.queues)[:ACL_QUEUES]
    paths = [*map(layout.queue, names), *layout.persistent, layout.root]
    different = differences_of(client, paths)
    if different:
        return warning(
            f"{pluralize(len(different), 'node')} of {len(paths)} have other rights than the"
            f" settings give: {join_some([each.path for each in different], 3)}",
            "run `qdo admin acl check`, then `qdo admin acl apply`",
        )
    return ok("the nodes have the rights of the settings")


def versions(case: Case) -> Diagnosis:
    """Compare the versions of the processes with each other and with the app's format level."""
    nodes = read_nodes(case.connected(), [case.layout.root])
    app = AppLevel.parse(nodes[0].data) if nodes else AppLevel()
    needed = max(app.format_level, app.next_level)
    if needed > FORMAT_LEVEL:
        return failed(
            f"the app has format level {needed}, and this version of qdo supports {FORMAT_LEVEL}",
            "install the version that `qdo workers --all` lists",
        )
    several = skew(case.processes())
    if several:
        return warning(f"several versions of qdo run: {several}", "finish the deploy")
    return ok(f"one version of qdo runs, with format level {app.format_level} of the app")


def leader(case: Case) -> Diagnosis:
    """Check that there is a leader, which assigns queues."""
    nodes = read_nodes(case.connected(), [case.layout.rebalancer])
    name, process = parse_leader(nodes[0].data) if nodes else ("", "")
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


def chores(case: Case) -> Diagnosis:
    """Check the time and the failures of the leader's last chores."""
    records, fault = read_records(case.connected(), case.layout)
    if fault is not None:
        path = case.layout.fleet.chores
        return unknown(f"{path} cannot be read: {fault}", "wait: the leader writes it again")
    broken = [f"{each.chore} ({each.fault})" for each in records if each.fault is not None]
    if broken:
        return warning(f"chores of the leader fail: {join_some(broken)}", "see the leader's log")
    last = max((each.at or 0.0 for each in records), default=0.0)
    if not last:
        return ok("no leader has done chores yet, the first come after a minute")
    names = {each.leader for each in records if each.leader is not None}
    deleted = sum(each.deleted or 0 for each in records)
    age = max(0.0, time.time() - last)
    text = f"{join_some(sorted(names)) or 'a leader'} did {pluralize(len(records), 'chore')}"
    text += f" {short_duration(age)} ago, and deleted {pluralize(deleted, 'node')}"
    if age > CHORES_SECONDS:
        return warning(text, "see the log of the leader; without workers nothing is cleaned up")
    return ok(text)


def listing(case: Case) -> Diagnosis:
    began = time.monotonic()
    names = case.names()
    seconds = time.monotonic() - began
    text = f"the broker listed {pluralize(len(names), 'queue')} in {seconds * 1000:.0f} ms"
    if seconds > SLOW_LISTING_SECONDS:
        return warning(text, "look at the load of the broker, and at the network to it")
    return ok(text)


def configuration(case: Case) -> Diagnosis:
    """Ask the broker for the warnings that a starting worker would log."""
    broker = case.opened()
    if not broker.capabilities.checks_config:
        return ok("this broker has no settings for its queues")
    known = case.policy_of
    names = [] if known is None else broker.catalog.names()[:MOST_QUEUES]
    warnings = broker.catalog.config_warnings({} if known is None else {n: known(n) for n in names})
    warnings = [*warnings, *broker.catalog.connection_warnings(case.concurrency())]
    if warnings:
        return warning(
            join_some(warnings, 1), "correct the named settings; workers log each warning"
        )
    if known is None:
        return JOBS_UNKNOWN
    return ok(f"the settings of {pluralize(len(names), 'queue')} fit the failure policies")


def deadlines(case: Case) -> Diagnosis:
    """Compare the time limits of jobs with the broker's visibility timeout."""
    hold = case.opened().capabilities.hold_seconds
    if hold is None:
        return ok("this broker can hold a message for any time")
    if case.jobs is None:
        return JOBS_UNKNOWN
    long = [each.name for each in case.jobs if each.timeout_seconds and each.timeout_seconds > hold]
    if long:
        return failed(
            f"timeout_seconds of {join_some(long)} is longer than the {hold:g} s for which the"
            " broker can hide a message",
            f"set it to {hold:g} or less; workers do not start with such a job",
        )
    limit = short_duration(hold)
    without = [each.name for each in case.jobs if each.timeout_seconds is None]
    if without:
        return ok(f"{join_some(without)} may take {limit}, without a limit of theirs")
    return ok(f"every job ends within the {limit} that a message can be hidden")


def retention(case: Case) -> Diagnosis:
    """Compare the age of waiting messages with the broker's retention."""
    judged = case.judged()
    for state, answer in ((QueueHealth.LOST, failed), (QueueHealth.EXPIRING, warning)):
        found = [(queue.queue, why) for queue, why in judged if why.state is state]
        if found:
            queue, verdict = found[0]
            remedy = "raise the retention of the broker, or add workers; see `qdo status`"
            text = f"{pluralize(len(found), 'queue')} {state.value}, first {queue}"
            return answer(f"{text}: {verdict.reason}", remedy)
    unasked = case.statuses().unasked
    more = f"; {unasked} queues were not asked" if unasked else ""
    return ok(f"the broker is not about to delete a message{more}")


def open_files(case: Case) -> Diagnosis:
    """Compare the limit of open files with the number that a worker needs to own all queues."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return ok("this user may open any number of files")
    needed = USUAL_FILES
    if case.broker is not None and case.broker.capabilities.subscriptions:
        workers = max(1, len(case.workers()) if case.client is not None else 1)
        needed = max(needed, RESERVE + -(-len(case.names()) // workers))
    text = f"a process of this user may open {hard} files, and a worker needs up to {needed}"
    if hard < needed:
        return warning(text, f"raise the hard limit (LimitNOFILE, ulimit -Hn) to {needed}")
    return ok(text)


def disk(case: Case) -> Diagnosis:
    """Check the free disk space for the files of this machine."""
    urls = (case.coordinator_url, case.broker_url)
    paths = [path.partition("?")[0] for path in map(sqlite_path, urls) if path is not None]
    folders = {os.path.dirname(os.path.abspath(path)) for path in paths}
    rooms = [(shutil.disk_usage(each).free, each) for each in folders if os.path.isdir(each)]
    if not rooms:
        return ok("neither messages nor progress are in a file of this machine")
    free, folder = min(rooms)
    text = f"{free / (1 << 30):.1f} GiB are free at {folder}"
    if free < LITTLE_BYTES:
        answer = failed if free < TOO_LITTLE_BYTES else warning
        return answer(text, "free disk space: sending stops when the disk is full")
    return ok(text)


def queues(case: Case) -> Diagnosis:
    """Count the queues that need attention, except those with an unrequested backlog."""
    unasked = QueueHealth.UNKNOWN
    judged = [each for each in case.judged() if each[0].error or each[1].state is not unasked]
    critical = Counter(each.state.value for _, each in judged if each.state.is_critical)
    late = Counter(each.state.value for _, each in judged if each.state.is_warning)
    remedy = "see `qdo status` for the worst of them and the next step"
    if critical:
        return failed(f"of {pluralize(len(judged), 'queue')}: {_counts(critical + late)}", remedy)
    if late:
        return warning(f"of {pluralize(len(judged), 'queue')}: {_counts(late)}", remedy)
    count = len(case.judged()) - len(judged)
    more = f"; {count} were not asked" if count else ""
    return ok(f"no queue of {len(judged)} needs attention{more}")


def limits(case: Case) -> Diagnosis:
    """Find limits that jobs name but that do not exist in the coordinator."""
    named = {name for each in case.jobs or () for name in each.limits}
    missing = named - list_limits(case.connected(), case.layout).keys() - {*case.declared}
    missing |= {name for each in case.workers() for name in each.report.unusable}
    if missing:
        first = min(missing)
        return failed(
            f"jobs wait for limits that permit nothing: {join_some(sorted(missing))}",
            f"see `qdo limits list`; run `qdo limits set {first}` with --max or --rate",
        )
    if case.jobs is None:
        return JOBS_UNKNOWN
    return ok(f"the {pluralize(len(named), 'limit')} of the jobs exist")


def jobs_without_queues(case: Case) -> Diagnosis:
    """Find jobs whose globs match no queue."""
    if case.jobs is None:
        return JOBS_UNKNOWN
    names = case.names()
    idle = [
        f"{each.name} ({each.queues})"
        for each in case.jobs
        if not each.pool and not any(fnmatchcase(name, each.queues) for name in names)
    ]
    if idle:
        return warning(
            f"no queue matches the glob of {join_some(idle)} yet",
            "if its messages were sent, correct the glob",
        )
    return ok(f"each of {pluralize(len(case.jobs), 'job')} has a queue")


def queues_without_jobs(case: Case) -> Diagnosis:
    """Find queues that no job takes, or that no worker takes."""
    names = case.names()
    if case.jobs is not None:
        has_job = QueueFilter(jobs=tuple(each.queues for each in case.jobs)).matcher()
        bare = [name for name in names if not has_job(name)]
        if bare:
            return failed(
                f"no job takes {join_some(bare)}",
                "register a job whose glob matches, or run `qdo delete --with-messages`",
            )
    filters = {each.takes for each in case.workers() if each.fault is None}
    untaken = {name: why for name in names if (why := why_untaken(name, filters))}
    if untaken:
        remedy = "start a worker that has a job for it, with other --queues or --exclude"
        if set(untaken.values()) == {POOL}:
            remedy = "use app.request, and run `qdo delete --with-messages`"
        named = [f"{name} ({why})" for name, why in untaken.items()]
        return failed(f"no worker takes {join_some(named)}", remedy)
    if case.jobs is None and not filters:
        return unknown("the jobs are not known", "name the app as MODULE:APP, or start a worker")
    return ok(f"each of {pluralize(len(names), 'queue')} has a job")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def workers(case: Case) -> Diagnosis:
    """Find workers that do not report, or that get no queues."""
    statuses = case.workers()
    if not statuses:
        return failed("no worker is registered", "start one with `qdo-worker`")
    faulty = [f"{each.worker} ({each.fault})" for each in statuses if each.fault is not None]
    if faulty:
        return warning(f"workers get no queues: {join_some(faulty)}", "see `qdo workers`")
    quiet = silent(statuses)
    if quiet:
        return warning(
            f"{join_some(quiet)} of {pluralize(len(statuses), 'worker')} did not report for"
            f" {SILENT_SECONDS:g} s",
            "see `qdo workers NAME`; a job may block the process, or the process is frozen",
        )
    return ok(f"{pluralize(len(statuses), 'worker')} reported within {SILENT_SECONDS:g} s")


def lost(case: Case) -> Diagnosis:
    """Find workers that ended without releasing their queues and were not replaced."""
    now = time.time()
    found = lost_workers(case.workers(), now - LOST_SECONDS)
    if not found:
        return ok(f"no worker was lost in the last {short_duration(LOST_SECONDS)}")
    names = [
        f"{each.name} ({each.process or 'host unknown'}, {short_duration(now - each.at)} ago)"
        for each in reversed(found)
    ]
    return warning(
        f"{join_some(names)} went without releasing queues; other workers have taken them",
        "look for that process with `ps`: STAT T is stopped; without it, see the end of its log,"
        " and whether its host is up",
    )


def dead_processes(case: Case) -> Diagnosis:
    """Find worker processes that died and were replaced."""
    now = time.time()
    found = deaths(case.workers(), now - LOST_SECONDS)
    if not found:
        return ok(f"no worker process died in the last {short_duration(LOST_SECONDS)}")
    worker, last = found[-1]
    count = f"{pluralize(len(found), 'worker')} died and {'was' if len(found) == 1 else 'were'}"
    count += f" replaced in the last {short_duration(LOST_SECONDS)}"
    return warning(
        f"{count}; {last.text(worker.report.host)}, {short_duration(now - last.at)} ago",
        "see the log of qdo-worker there; without an operator, SIGKILL comes from the kernel when"
        " memory is short (dmesg): limit jobs with memory_mib, or run fewer at once",
    )


def starved(case: Case) -> Diagnosis:
    """Find workers whose machine or quota gives them hardly any processor time."""
    found = [
        f"{each.worker} ({each.report.host}, process {each.report.pid}: {each.report.starved:.0%})"
        for each in case.workers()
        if each.report.starved is not None
    ]
    if not found:
        return ok("each worker gets the processor that it needs")
    return warning(
        f"{join_some(found)} waited for a processor for that share of {STARVED_SECONDS:g} s",
        "see `top` on that host: raise the CPU quota of the worker, or run fewer processes there",
    )


@dataclass(frozen=True, slots=True)
class Check:
    # A stable name, because programs may use it.
    name: str
    find: Callable[[Case], Diagnosis]
    # The services that must be reachable: "coordinator", "broker", both or none.
    needs: tuple[str, ...] = ()
    # Whether `qdo status` and the dashboard also run this check, which must be cheap.
    first: bool = False


# The checks, in the order in which the doctor runs and shows them. Slow checks come last.
CHECKS = (
    Check("coordinator-latency", latency, ("coordinator",)),
    Check("coordinator-servers", servers, ("coordinator",), first=True),
    Check("coordinator-versions", server_versions, ("coordinator",)),
    Check("leader", leader, ("coordinator",)),
    Check("workers", workers, ("coordinator",)),
    Check("lost-workers", lost, ("coordinator",), first=True),
    Check("dead-processes", dead_processes, ("coordinator",), first=True),
    Check("starved-workers", starved, ("coordinator",), first=True),
    Check("chores", chores, ("coordinator",)),
    Check("versions", versions, ("coordinator",)),
    Check("clocks", clock, ("coordinator",), first=True),
    Check("broker-latency", listing, ("broker",)),
    Check("disk", disk, first=True),
    Check("open-files", open_files),
    Check("deadlines", deadlines, ("broker",)),
    Check("dead-letters", check_dead_letters, ("broker",)),
    Check("limits", limits, ("coordinator",)),
    Check("timers", check_timers, ("coordinator",), first=True),
    Check("outbox", check_outboxes, ("coordinator",), first=True),
    Check("requests", check_requests, BOTH, first=True),
    Check("queues-without-jobs", queues_without_jobs, BOTH),
    Check("jobs-without-queues", jobs_without_queues, ("broker",)),
    Check("broker-settings", configuration, ("broker",)),
    Check("rights", rights, ("coordinator",)),
    Check("queues", queues, BOTH),
    Check("retention", retention, ("broker",)),
)


def diagnose(
    case: Case, total_seconds: float = TOTAL_SECONDS, checks: tuple[Check, ...] = CHECKS
) -> Iterator[tuple[str, Diagnosis]]:
    """Yield the name and the result of each check, within the time limit."""
    yield from ((name, _reach(case, name)) for name in BOTH)
    deadline = time.monotonic() + total_seconds
    for check in checks:
        missing = [name for name in check.needs if _is_missing(case, name)]
        left = min(deadline - time.monotonic(), CHECK_SECONDS)
        if missing:
            yield check.name, unknown(f"this needs the {missing[0]}")
        elif left <= 0:
            yield check.name, unknown("not checked: the checks before it took too long")
        else:
            yield check.name, within(left, partial(_answer, check, case))


def notices(case: Case) -> list[dict[str, str | None]]:
    """Return the faults that the cheap checks find outside of queues, as items."""
    first = tuple(each for each in CHECKS if each.first)
    return [
        {"check": name, "status": found.status, "reason": found.text, "remedy": found.remedy}
        for name, found in diagnose(case, FIRST_SECONDS, first)
        if name not in BOTH and found.status in ("warning", "failed")
    ]


def within(seconds: float, ask: Callable[[], Diagnosis]) -> Diagnosis:
    """Return the result of a check, or "unknown" after a timeout. The check's thread continues."""
    answers: list[Diagnosis] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else unknown(f"no answer within {seconds:.1f} s")


def _answer(check: Check, case: Case) -> Diagnosis:
    try:
        return check.find(case)
    except UnreachableError as error:
        return failed(str(error), REACH)
    except QdoError as error:
        return unknown(str(error))
    except Exception as error:  # noqa: BLE001 - one check must not hide the others
        return unknown(describe(error))


def _is_missing(case: Case, name: str) -> bool:
    return (case.client if name == "coordinator" else case.broker) is None


def _reach(case: Case, name: str) -> Diagnosis:
    url = case.coordinator_url if name == "coordinator" else case.broker_url
    fault = case.faults.get(name)
    if fault is not None:
        return failed(fault, REACH)
    if _is_missing(case, name):
        what = "worker has used it" if name == "coordinator" else "message was sent to it"
        remedy = "correct the address, or start qdo-worker"
        return failed(f"{url} does not exist: no {what}", remedy)
    return ok(f"{url} can be reached")
