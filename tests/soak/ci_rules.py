"""The rules that the soak of the example `ci` checks, from what is stored and from ledgers.

=========  ====================================================================================
rule       it says
=========  ====================================================================================
webhook    each webhook answered with 202 is in its project's state once
build      each of its builds is over, with the outcome of its last attempt
order      per project, builds are asked for and reported in the order of the webhooks
limit      no more builds at once than the limit allows, beside those of frozen processes
timer      each occurrence of a timer is stored once
section    no decision runs while the pipelines are changed
outbox     each new end of a build has one row of the app and one message of its outbox, in the
           order of the project's rows
answer     each end is approved once, and each question of an approval's last take was answered
           with the answer to it
owner      one owner at every zxid (ZooKeeper)
=========  ====================================================================================

and those of `request_rules` for builds and approvals, and of `checks` for the runs of each project.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from qdo.brokers.base import Broker
from qdo.coordination.znodes.layout import Layout
from qdo.message import Message
from qdo.state import KeyedState
from tests.acceptance.ci_app import QUESTIONS, TICK_SECONDS
from tests.soak.checks import Entry, Judged, excused, fences, limits, overlaps
from tests.soak.request_rules import RequestFacts, check_requests
from tests.soak.request_steps import RequestStep
from tests.support.ownership_oracle import Oracle
from tests.support.zookeeper_txn_log import Txn

QUEUES = "github", "reports", "tick", "ended", "approved"
MOST_BUILDS = 8
"""The limit that the example declares."""
BUILD, APPROVAL = "/build", "/approval"
"""Ends of the ids of requests."""
ID_OF_POSITION = 23
"""So many characters of a message's id are its position."""


@dataclass
class CiFacts:
    """What a soak leaves.

    :ivar accepted: commits that were answered with 202, in their order, by project.
    :ivar stored: the messages of `QUEUES`, and of all shards as `project`.
    :ivar states: the state of each project.
    :ivar rows: project and number of each row that the app wrote beside a message of its outbox.
    :ivar steps: of the requests.
    :ivar codes: what the command of a build has written: exit code by id and take.
    """

    accepted: Mapping[str, Sequence[str]]
    stored: Mapping[str, Sequence[Message]]
    states: Mapping[str, Mapping[str, Any]]
    rows: Sequence[tuple[str, int]]
    steps: Sequence[RequestStep]
    codes: Mapping[tuple[str, int], int]
    journal: Sequence[Entry]
    judged: Judged
    offset: float


def read_messages(broker: Broker, queue: str) -> list[Message]:
    """Return the messages of a queue."""
    reader, found = broker.reader(queue, 0), list[Message]()
    while rows := reader.fetch(1000):
        found += [Message(queue, place, json.loads(body), key) for place, body, key, _ in rows]
    return found


def read_stored(broker: Broker) -> dict[str, list[Message]]:
    """Return the messages that the rules are about."""
    shards = [each.queue for each in broker.streams.shards("project")]
    found = [each for shard in shards for each in read_messages(broker, shard)]
    stored = {name: read_messages(broker, name) for name in QUEUES}
    return {**stored, "project": sorted(found, key=lambda each: each.position)}


def read_states(engine: Engine, messages: Iterable[Message]) -> dict[str, dict[str, Any]]:
    """Return the states of the projects that got messages, from the app's database."""
    projects = {each.key or "" for each in messages}
    with engine.connect() as connection:
        return {each: KeyedState().read(connection, "project", each) for each in projects}


def read_rows(engine: Engine) -> list[tuple[str, int]]:
    """Return the rows that `ci_app` wrote, in the order of their numbers."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT project, number FROM ended ORDER BY place")
        return [(project, number) for project, number in rows]


def read_codes(path: Path) -> dict[tuple[str, int], int]:
    """Return what the commands of builds have written."""
    lines = (each.split() for each in path.read_text().splitlines())
    return {(id, int(take)): int(code) for id, take, code in lines}


def check_ci(facts: CiFacts) -> list[str]:
    """Return the violations."""
    requests: list[Entry] = []
    runs: dict[str, list[Entry]] = defaultdict(list)
    for each in facts.journal:
        if each.kind in "SEX":
            is_request = each.queue.endswith((BUILD, APPROVAL))
            (requests if is_request else runs[each.queue]).append(each)
    found = [*_webhooks(facts), *_builds(facts), *_timer(facts.stored["tick"])]
    found += [*_outbox(facts), *_answers(facts)]
    found += _sections(facts.journal, runs, facts.judged)
    for name, entries in runs.items():
        found += fences(entries, facts.judged)
        if name not in ("reports", "tick", "ended"):  # without one order
            found += overlaps(entries, facts.judged)
    judged = replace(facts.judged, most_at_once=MOST_BUILDS)
    builds = [each for each in requests if each.queue.endswith(BUILD)]
    found += limits([each._replace(queue=f"limit {each.queue}") for each in builds], judged)
    steps = [each._replace(then="") for each in facts.steps]  # a shard may get those of another
    return found + check_requests(
        RequestFacts([], steps, [], requests, {}, facts.judged, facts.offset)
    )


def _by_project(messages: Iterable[Message]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in messages:
        found[each.key or each.body["repository"]["full_name"]].append(each.body)
    return found


def _webhooks(facts: CiFacts) -> Iterator[str]:
    events, reports = map(_by_project, (facts.stored["github"], facts.stored["reports"]))
    asked = _by_project(each for each in facts.stored["project"] if each.body["do"] == "build")
    for project in {*facts.accepted, *events, *reports, *facts.states}:
        sent, told = [*facts.accepted.get(project, ())], reports[project]
        if [each["after"] for each in events[project]] != sent:
            yield f"webhook: {project} accepted {sent}, stored {events[project]}"
        if [each["commit"] for each in told if each["pipeline"] == "gate"] != sent:
            yield f"order: {project} accepted {sent}, reported {told}"
        place = {commit: place for place, commit in enumerate(sent)}
        places = [place.get(each["commit"], -1) for each in told]
        if places != sorted(places) or -1 in places:
            yield f"order: {project} accepted {sent}, reported {told}"
        wishes = [(each["pipeline"], each["commit"]) for each in asked[project]]
        if [(each["pipeline"], each["commit"]) for each in told] != wishes:
            yield f"order: {project} asked for {wishes}, reported {told}"
        if len({*wishes}) != len(wishes):
            yield f"webhook: {project} asked twice: {wishes}"
        state = facts.states.get(project, {})
        numbers = [each["number"] for each in told]
        if state.get("asked") != len(told) or state.get("builds") != []:
            yield f"webhook: {project} has {len(told)} reports and the state {state}"
        if numbers != [*range(1, len(told) + 1)]:
            yield f"order: {project} reported {numbers}"


def _builds(facts: CiFacts) -> Iterator[str]:
    wishes = {each.id[:ID_OF_POSITION]: each for each in facts.stored["project"]}
    steps = [each for each in facts.steps if each.id.endswith(BUILD)]
    last = {each.id: each for each in steps}
    told = {(each.key, each.body["number"]): each.body for each in facts.stored["reports"]}
    next_number: Counter[str | None] = Counter()
    for id, first in {each.id: each for each in reversed(steps)}.items():
        wish = wishes.get(id[:ID_OF_POSITION])
        if wish is None or first.take:
            yield f"build: {first} without a wish"
    for id in dict.fromkeys(each.id for each in steps):  # in the order of their asking
        project = wishes[id[:ID_OF_POSITION]].key
        next_number[project] += 1
        report = told.get((project, next_number[project]), {})
        code = facts.codes.get((id, last[id].take))
        result = {"exit": code} if last[id].outcome == "done" else None
        if (report.get("outcome"), report.get("result")) != (last[id].outcome, result):
            yield f"build: {last[id]} with exit code {code} was reported as {report}"
        if report.get("commit") != wishes[id[:ID_OF_POSITION]].body["commit"]:
            yield f"order: {last[id]} was asked for as number {next_number[project]}: {report}"


def _outbox(facts: CiFacts) -> Iterator[str]:
    sent, ends = map(_by_project, (facts.stored["ended"], facts.stored["reports"]))
    rows: dict[str, list[int]] = defaultdict(list)
    for project, number in facts.rows:
        rows[project].append(number)
    for project in {*sent, *ends, *rows}:
        own, due = rows[project], sorted(each["number"] for each in ends[project])
        numbers = [each["number"] for each in sent[project]]
        if sorted(own) != due or numbers != own:
            yield f"outbox: {project} ended {due}, wrote rows {own} and sent {numbers}"


def _answers(facts: CiFacts) -> Iterator[str]:
    takes = {each.id: each.take for each in facts.steps}
    due = Counter(f"{project}/{number}{APPROVAL}" for project, number in {*facts.rows})
    told = Counter(each.body["request"] for each in facts.stored["approved"])
    if told != due:
        yield f"answer: {told - due} were told too often, and {due - told} not"
    for each in facts.stored["approved"]:
        id, answers = each.body["request"], (each.body["result"] or {}).get("answers", [])
        asked = [f"{id} {takes.get(id)} {question}" for question in QUESTIONS]
        if [question for question, _ in answers] != asked:
            yield f"answer: {id} was to ask {asked}: {each.body}"
        for question, answer in answers:
            if question != answer:
                yield f"answer: {question!r} got the answer to {answer!r}"


def _timer(ticks: Iterable[Message]) -> Iterator[str]:
    found = [(datetime.fromisoformat(each.body["at"][:-1]), each.body) for each in ticks]
    for (before, _), (at, body) in pairwise(sorted(found, key=lambda each: each[0])):
        missed = (at - before).total_seconds() / TICK_SECONDS - 1
        if not 0 <= missed <= body["missed"]:
            yield f"timer: {body} after {before}"
    if len(found) < 2:
        yield f"timer: only {found}"


def _sections(
    journal: Iterable[Entry], runs: Mapping[str, Sequence[Entry]], judged: Judged
) -> Iterator[str]:
    began = {(each.queue, each.pid): each.at for each in journal if each.kind == "H"}
    held = [(began[each.queue, each.pid], each.at) for each in journal if each.kind == "R"]
    for name, entries in runs.items():
        if name != "github" and not name.startswith("project|"):
            continue
        starts: dict[tuple[int, int, int], Entry] = {}
        for each in entries:
            run = each.number, each.fence, each.pid
            if each.kind == "S":
                starts[run] = each
            elif (start := starts.pop(run, None)) is not None:
                for begin, end in held:
                    if start.at < end and each.at > begin and not excused(start, end, judged):
                        yield f"section: {start} to {each.at} within {begin} to {end}"


def check_owners(logs: Sequence[Sequence[Txn]], app: str) -> list[str]:
    """Return the violations of the rule of one owner in the logs of all servers.

    A server that is killed while it catches up writes again what it has in its log: the longest log
    that is in order is complete.
    """
    in_order = [log for log in logs if all(a.zxid < b.zxid for a, b in pairwise(log))]
    log = max(in_order, key=len, default=())
    missing = sum(b.zxid - a.zxid > 1 and a.zxid >> 32 == b.zxid >> 32 for a, b in pairwise(log))
    oracle = Oracle(Layout.of(app))
    oracle.replay(log)
    found = [f"owner: {missing} gaps in the log"] if missing or not oracle.claims else []
    return found + [f"owner: {each}" for each in oracle.violations]


def told(facts: CiFacts) -> str:
    """Return what happened, in numbers."""
    runs = Counter((each.queue, each.number) for each in facts.journal if each.kind == "S")
    again = sum(runs.values()) - len(runs)
    takes = {each.id: each.take for each in facts.steps}
    sections = sum(each.kind == "R" for each in facts.journal)
    total = sum(map(len, facts.stored.values()))
    stored = ", ".join(f"{len(each)} {name}" for name, each in facts.stored.items())
    requests = f"{len(takes)} requests in {sum(takes.values())} takes"
    return (
        f"{total} messages ({stored}), {requests}, {len(facts.rows)} outbox rows,"
        f" {len(runs)} runs and {again} repetitions, {sections} sections"
    )
