"""The command `qdo-worker`, which runs worker processes until a stop signal."""

from __future__ import annotations

import sys

import click

from qdo.cli.framework import EXIT_CODES, run, version_option
from qdo.cli.options import with_settings
from qdo.loading import choose_target
from qdo.settings.settings import Settings

SIGNALS = """\b
Signals:
  SIGTERM, SIGINT  first: drain (start nothing new, finish, record, release);
                   second: abort running jobs and release their queues;
                   third: kill the worker processes and close their sessions
  SIGHUP           drain, however often it is sent; ignored under nohup

The parent kills a worker process that has not exited 10 seconds after `drain_seconds` have passed,
or 10 seconds after the second signal. With SQS, `wait_seconds` of the broker's address applies
instead of `drain_seconds` if it is longer."""


@click.command(
    epilog=f"{SIGNALS}\n\n{EXIT_CODES}", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("target", metavar="[MODULE:APP]", required=False)
@with_settings(
    "app",
    "job",
    "job_context",
    "job_failure",
    "queues",
    "exclude",
    "broker",
    "coordinator",
    "group",
    "namespace",
    "zone",
    "history",
    "http",
    "processes",
    "concurrency",
    "executor",
    "burst",
    "reload",
    "max_messages",
    "max_seconds",
    "connect_seconds",
    "session_timeout_seconds",
    "drain_seconds",
    "log_level",
    "log_format",
    "log_config",
    import_app=False,  # the worker processes import the app
)
@version_option
def worker(target: str | None, settings: Settings) -> int:
    """Run workers of an app: they run its jobs for the queues that the rebalancer assigns.

    Name the app as MODULE:APP, here or in the setting `app`, or use one function as its job:
    --app NAME --job MODULE:FUNCTION. Modules are also searched in the current folder, after all
    other folders.

    With --burst a worker exits when every queue that a live worker takes is empty and has an owner.
    It does not wait for delayed messages, blocked queues, or queues without a job. A burst worker
    that cannot start is not restarted, and qdo-worker exits with its exit code.

    With --reload the parent watches the files that the workers have imported, except those of
    Python, of installed packages and of qdo. When none has changed for 0.3 seconds after a change,
    every worker drains and is replaced. A worker that cannot start logs the reason, and the next
    change starts it again.
    """
    target = choose_target(settings, target)
    from qdo.worker.supervisor.supervisor import supervise

    return supervise(settings, target)


def main() -> None:
    sys.exit(run(worker, "qdo-worker"))


if __name__ == "__main__":
    main()
