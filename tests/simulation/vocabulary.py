"""Requests and answers in few words, for traces."""

from __future__ import annotations

from qdo.coordination.protocol.machine import (
    CheckOp,
    ChildrenRead,
    Commit,
    Committed,
    Create,
    DeleteOp,
    NodeRead,
    Op,
    Rejected,
    Response,
    SetOp,
)


def request_words(request: Commit | Create) -> str:
    if isinstance(request, Create):
        return f"create {request.path} {request.data.decode()}"
    return "; ".join(_operation(op) for op in request.ops)


def _operation(op: Op) -> str:
    name = "/".join(op.path.split("/")[-2:])
    if isinstance(op, CheckOp):
        return f"check {name}@{op.version}"
    if isinstance(op, SetOp):
        return f"set {name}@{op.version}={op.data.decode()}"
    if isinstance(op, DeleteOp):
        return f"delete {name}@{op.version}"
    return f"create {name}={op.data.decode()}"


def answer_words(answer: Response) -> str:
    if isinstance(answer, NodeRead):
        return f"{answer.data.decode()}@{answer.version}"
    if isinstance(answer, Committed):
        return f"done {answer.versions}"
    if isinstance(answer, Rejected):
        return f"refused [{answer.index}] {answer.fault.name}"
    if isinstance(answer, ChildrenRead):
        return f"{list(answer.names)}"
    return repr(answer)
