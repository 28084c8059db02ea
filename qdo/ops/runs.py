"""The running messages, from the answers of workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdo.coordination.client import Client
from qdo.coordination.znodes.layout import Layout
from qdo.fleet import actions as names
from qdo.fleet.action_machine import DONE
from qdo.fleet.actions import Asked, ask_workers, wait_for_results
from qdo.fleet.audit_entries import Values
from qdo.fleet.names import exactly
from qdo.text import one_line, printable_lines


@dataclass(slots=True)
class RunsRead:
    """The answers of workers."""

    # The items of qdo.runs/1, the longest run first.
    items: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    # For each worker whose loop is blocked: the answer of its parent process, which names the
    # blocking message.
    blocked: dict[str, str] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)


def ask_owner(
    client: Client, layout: Layout, owner: str, queue: str, most: int, seconds: float, by: str = ""
) -> Asked:
    """Ask the owner of a queue for its `most` longest runs, and wait for the answer."""
    args: Values = {"queues": exactly(queue), "most": most}
    asked = ask_workers(client, layout, [owner], names.RUNS, args, within_seconds=seconds, by=by)
    wait_for_results(client, layout, asked, seconds)
    return asked[0]


def read_runs(asked: Sequence[Asked]) -> RunsRead:
    answers = RunsRead()
    for each in asked:
        if each.outcome != DONE:
            answers.silent.append(each.worker)
            continue
        answer = _answer(each.output)
        if "blocked" in answer:
            answers.blocked[each.worker] = str(answer["blocked"])
        listed = answer.get("runs")
        runs = listed if isinstance(listed, list) else []
        items = [_item(each.worker, run) for run in runs if _is_run(run)]
        total = answer.get("total")
        answers.items += items
        answers.total += max(len(items), total if type(total) is int else 0)
    answers.items.sort(key=lambda item: -item["seconds"])
    return answers


def blocked_texts(found: RunsRead) -> list[str]:
    return [
        f"{worker}: {one_line(why)}; its other messages are unknown; see `qdo action {worker}"
        " stacks`"
        for worker, why in found.blocked.items()
    ]


def stack_text(item: Mapping[str, Any]) -> str:
    return printable_lines("\n".join(item["stack"]) or "its executor reports no stack")


def _is_run(run: Any) -> bool:
    """Return whether a worker, and not another program, wrote this value."""
    return (
        isinstance(run, dict)
        and isinstance(run.get("seconds"), int | float)
        and isinstance(run.get("stack"), list)
    )


def _answer(output: str) -> dict[str, Any]:
    try:
        found = json.loads(output)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _item(worker: str, run: dict[str, Any]) -> dict[str, Any]:
    stack = [str(frame) for frame in run["stack"]]
    return {
        "worker": worker,
        "queue": run.get("queue"),
        "id": run.get("id"),
        "position": run.get("position"),
        "attempt": run.get("attempt"),
        "seconds": run["seconds"],
        "where": _short(stack[-1]) if stack else None,
        "stack": stack,
    }


def _short(frame: str) -> str:
    return frame.rpartition("/")[2]
