"""How soon commands and dashboard say the right thing, and whether the app recovers."""

from __future__ import annotations

import html
import http.client
import re
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from bench.drill.faults import Evidence, Fault, Incident
from bench.drill.stage import DrillStage, staged
from bench.support.processes import ProgramError
from tests.support.processes import wait_until

PATIENCE_SECONDS = 120.0
RECOVERY_SECONDS = 120.0
PAUSE_SECONDS = 0.5
_MARKUP = re.compile(r"<(script|style)\b.*?</\1>|<[^>]+>", re.DOTALL)


@dataclass(slots=True)
class Drill:
    """One fault, measured.

    :ivar first: seconds until `qdo status` was right, None if it never was, like the next two.
    :ivar named: the same of the command that the documentation names.
    :ivar page: the same of the page of the dashboard.
    :ivar step: the next step that `qdo status` printed.
    :ivar recovered: seconds from the remedy until every message was done.
    :ivar lost: messages that no job has finished then.
    :ivar problems: what is not as it must be.
    """

    fault: str
    first: float | None = None
    named: float | None = None
    page: float | None = None
    step: str = ""
    recovered: float | None = None
    lost: int = 0
    problems: list[str] = field(default_factory=list)


def measure(fault: Fault) -> Drill:
    """Let one fault happen, find it, and repair it."""
    drill = Drill(fault.name)
    with staged(fault.place) as stage:
        stage.start(fault.flags)
        stage.dashboard()
        wait_until(lambda: "Queues by state" in page(stage, "/"), "the dashboard", 30.0, 0.5)
        drill.problems += _false_alarms(stage)
        incident = fault.strike(stage)
        began = time.monotonic()
        _find(stage, incident, drill, began)
        _read_step(stage, incident, drill)
        _repair(stage, incident, drill)
    return drill


def _false_alarms(stage: DrillStage) -> list[str]:
    """Return what `qdo status` says against the fleet before its fault."""
    (item,) = stage.items("status")
    said = {name: item[name] for name in ("worst", "notices", "long_runs") if item[name]}
    return [f"the healthy fleet is called sick: {said}"] if said else []


def page(stage: DrillStage, path: str) -> str:
    """Return the text of a page of the dashboard, "" while it does not listen."""
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", stage.port, timeout=20)) as client:
            client.request("GET", path)
            text = client.getresponse().read().decode()
    except OSError:
        return ""
    return " ".join(html.unescape(_MARKUP.sub(" ", text)).split())


def read(stage: DrillStage, look: Evidence) -> str:
    """Return what an operator reads there, with one space between words."""
    if isinstance(look.at, str):
        return page(stage, look.at)
    ended = stage.qdo(*look.at)
    return " ".join((ended.out + ended.err).split())


def is_right(text: str, look: Evidence) -> bool:
    return all(re.search(each, text) for each in look.says)


def _find(stage: DrillStage, incident: Incident, drill: Drill, began: float) -> None:
    """Evidence at commands and at the dashboard, side by side, until all of them are right."""

    def look_for(name: str, look: Evidence) -> None:
        text = ""
        while time.monotonic() - began < PATIENCE_SECONDS:
            text = read(stage, look)
            if is_right(text, look):
                setattr(drill, name, time.monotonic() - began)
                return
            time.sleep(PAUSE_SECONDS)
        drill.problems.append(f"{look.title} does not say {look.says}: {text[-600:]}")

    looks = (("first", incident.first), ("named", incident.named), ("page", incident.page))
    threads = [threading.Thread(target=look_for, args=each) for each in looks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read_step(stage: DrillStage, incident: Incident, drill: Drill) -> None:
    if not incident.subject:
        return
    (item,) = stage.items("status")
    steps = [
        *((each["queue"], each["remedy"]) for each in item["worst"]),
        *((each["check"], each["remedy"]) for each in item["notices"]),
        *((each["queue"], each["remedy"]) for each in item["long_runs"]),
    ]
    drill.step = next((step for name, step in steps if name == incident.subject and step), "")
    if not drill.step:
        drill.problems.append(f"qdo status prints no next step for {incident.subject}")


def _repair(stage: DrillStage, incident: Incident, drill: Drill) -> None:
    began = time.monotonic()
    incident.repair()
    step = drill.step.partition(",")[0]
    typed = [tuple(shlex.split(step))[1:]] if step.startswith("qdo ") else []
    for words in (*typed, *incident.commands):
        ended = stage.qdo(*words)
        if ended.code:
            text = (ended.out + ended.err).strip()
            drill.problems.append(f"qdo {' '.join(words)} ended with {ended.code}: {text[-600:]}")
    stage.rest()
    _until(lambda: stage.missing() == 0, drill, "every message is done")
    _until(
        lambda: not is_right(read(stage, incident.first), incident.first),
        drill,
        "the fault is gone",
    )
    drill.lost = stage.missing()
    drill.recovered = None if drill.lost else time.monotonic() - began


def _until(condition: Callable[[], bool], drill: Drill, what: str) -> None:
    try:
        wait_until(condition, what, RECOVERY_SECONDS, PAUSE_SECONDS)
    except AssertionError as error:
        drill.problems.append(str(error))


def attempt(fault: Fault) -> Drill:
    """Measure one fault; a stage that cannot be made is a problem, and stops no other fault."""
    try:
        return measure(fault)
    except (AssertionError, ProgramError, TimeoutError, OSError) as error:
        return Drill(fault.name, problems=[f"not measured: {error}"])
