"""A small CI: a queue per project decides, builds run on any worker, reports come in order."""

import os
import subprocess

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import qdo
from qdo.state import KeyedState

DATABASE = os.environ.get("CI_DATABASE", "sqlite:///ci.db?timeout=60")
CHECKOUTS = os.environ.get("CI_CHECKOUTS", "checkouts")  # a folder for each project
COMMAND = os.environ.get("CI_COMMAND", "make test")  # finds CI_COMMIT, CI_PIPELINE, CI_NUMBER
app = qdo.App("ci")
projects = app.stream("project", shards=4)  # queues project.-40 to project.c0-
tenants = app.documents("tenants")  # which events start which pipelines; changed while it runs
states = KeyedState()
strict = qdo.Policy(attempts=1000, then="block")  # a skipped one would be missing forever
few = qdo.Policy(attempts=3)  # of a build whose workers die; a command that fails is a result
app.limit("nodes", max=8)
app.webhook("/github", queue="github", verify="github", secret="env:CI_SECRET")
app.timer("nightly", "30 2 * * *", tz="Europe/Berlin", queue="nightly")


@app.context
def database():
    engine = create_engine(DATABASE, pool_pre_ping=True)
    yield engine
    engine.dispose()


def wish(pipeline, commit):
    return {"do": "build", "pipeline": pipeline, "commit": commit}


@app.job("github", policy=strict)
def dispatch(message, engine):
    """Pass an event on to its project, once for each pipeline that wants it."""
    event, kind = message.body, message.headers["x-github-event"]
    project, commit = event["repository"]["full_name"], event["after"]
    wanted = [name for name, kinds in tenants["pipelines"].items() if kind in kinds]
    projects.send_many([(project, wish(name, commit)) for name in wanted], once=message)


@app.job("nightly")
def nightly(message, engine):
    wishes = [(project, wish("nightly", "HEAD")) for project in tenants.get("nightly", [])]
    projects.send_many(wishes, once=message)


@app.job("project.*", order="key", executor="thread", policy=strict)
def decide(message, engine):
    """Decide about one project at a time; its state is as new as its progress."""
    event = message.body
    with Session(engine) as session, session.begin(), states.of(session, message) as state:
        if not state.new:
            return  # a repetition: everything below was done before
        builds = state.setdefault("builds", [])
        if event["do"] == "build":
            number = state["asked"] = state.get("asked", 0) + 1
            what = {"number": number, "pipeline": event["pipeline"], "commit": event["commit"]}
            builds.append({**what, "outcome": None})
            terms = {"then": projects, "key": message.key, "tag": {"do": "end", "number": number}}
            # The next attempt, should this one fail, asks for the same and gets no second build.
            id, body = f"{message.id}/build", {**what, "project": message.key}
            app.request("build", body, id=id, **terms)
        else:
            for each in builds:
                if each["number"] == event["number"]:
                    each |= {"outcome": event["outcome"], "result": event["result"]}
            while builds and builds[0]["outcome"]:  # in the order of the events
                app.send("reports", builds.pop(0), key=message.key, once=message)


@app.job("build", pool=True, executor="process", timeout_seconds=900, limits=["nodes"], policy=few)
def build(request, engine):
    """Run the command in the checkout of the project, on any worker."""
    request.progress("running")
    names = {f"CI_{name.upper()}": str(value) for name, value in request.body.items()}
    folder = os.path.join(CHECKOUTS, request.body["project"])
    environment = {"PATH": os.environ["PATH"], **names}  # without secrets of the CI
    done = subprocess.run(["sh", "-c", COMMAND], cwd=folder, env=environment, check=False)
    return {"exit": done.returncode}


@app.job("reports", order="key")
def report(message, engine):
    print(message.key, message.body["number"], message.body["outcome"], message.body["result"])


@app.job("manage")
def reconfigure(message, engine):
    """Change the pipelines while no decision is under way."""
    with app.exclusive("github", "project.*", reason="new pipelines") as section:
        section.check()
        tenants.put("pipelines", message.body)


if __name__ == "__main__":  # once, before the first worker starts
    with create_engine(DATABASE).begin() as connection:
        states.create(connection)
