"""The examples of the documentation happen as they are shown."""

from __future__ import annotations

import json
import re
import sqlite3
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.aws.clients import client
from tests.support.doc_pages import DOCS, Block, Shell, blocks, read, steps, table
from tests.support.postgresql.server import SUPERUSER
from tests.support.zookeeper import free_ports

# Text that differs from run to run, and its replacement in a comparison.
VARYING = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[14][0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "TIME"),
    (re.compile(r"\b1\d{17}\b"), "POSITION"),
    (re.compile(r"\[\d+\]"), "[PID]"),
    (re.compile(r"\bpid \d+"), "pid PID"),
    (re.compile(r"\bfence \d+"), "fence FENCE"),
    (re.compile(r"\b\d\.\d+$|\b0\.\d{2,4}\b", re.MULTILINE), "SECONDS"),
    (re.compile(r"\b\d+[smhd]( \d+[smh])?\b"), "DURATION"),
    (re.compile(r" {2,}"), " "),
)
WORK = "--burst --log-level warning"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def plain(text: str) -> list[str]:
    """Return lines without the parts that differ between runs; queues may come in any order."""
    for pattern, word in VARYING:
        text = pattern.sub(word, text)
    return sorted(line.strip() for line in text.splitlines() if line.strip())


Session = Sequence[tuple[str, list[str]]]
"""Commands, each with the lines that it prints."""


def session_of(page: list[Block]) -> Session:
    """Return the commands of the only block of a page that is run."""
    (session,) = [each for each in page if each.options.get("class") == "run"]
    return steps(session)


def write_files(shell: Shell, *page: Block) -> None:
    """Write the files of a page."""
    for block in page:
        if "caption" in block.options:
            shell.write(block.options["caption"], block.text)


def happens(
    shell: Shell, session: Session, setting: str = "true", alter: Callable[[str], str] = str
) -> int:
    """Check that each command prints what is shown; return how many there are.

    :param setting: a command that is run before each of them.
    :param alter: changes a command before it is run.
    """
    for command, shown in session:
        found = shell.run(f"{setting}; {alter(command)}")
        assert plain(found) == plain("\n".join(shown)), command
    return len(session)


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("quickstart", 10),
        ("dead-letters", 9),
        ("sending", 9),
        ("ordering", 2),
        ("failures", 12),
        ("idempotency", 6),
        ("state", 6),
        ("programs", 5),
        ("outbox", 2),
        ("documents", 2),
        ("locks", 1),
        ("limits", 2),
        ("holds", 6),
        ("actions", 3),
        ("live-settings", 7),
        ("history", 3),
        ("queue-states", 4),
        ("on-call", 16),
        ("capacity", 1),
        ("configuration", 1),
        ("tracing", 2),
        ("jobs", 2),
        ("bodies", 9),
        ("recipes", 10),
        ("timers", 3),
        ("requests", 9),
        ("workflows", 20),
        ("streams", 7),
        ("coming-from/celery", 2),
        ("coming-from/dramatiq", 2),
        ("coming-from/dbos", 2),
        ("coming-from/kafka", 3),
        ("coming-from/oban", 2),
        ("coming-from/procrastinate", 2),
        ("coming-from/rq", 3),
        ("coming-from/sidekiq", 2),
        ("coming-from/temporal", 3),
    ],
)
def test_a_page_happens_as_shown(shell: Shell, page: str, least: int) -> None:
    """Its files are written, and its commands give the output that is shown."""
    ran = 0
    for block in blocks(read(page)):
        write_files(shell, block)
        if block.options.get("class") == "run":
            ran += happens(shell, steps(block))
    assert ran >= least


@pytest.mark.parametrize(
    ("page", "port", "pid"),
    [("metrics", "9180", "worker.pid"), ("receivers", "8080", "ingest.pid")],
)
def test_a_page_with_a_port_happens_as_shown(shell: Shell, page: str, port: str, pid: str) -> None:
    """Only the port belongs to the test, and is given where the page has the default one."""
    (own,) = map(str, free_ports(1))
    found = list(blocks(read(page).replace(port, own)))
    write_files(shell, *found)
    listening = f"ci:app --listen 127.0.0.1:{own} >"
    try:
        happens(shell, session_of(found), alter=lambda each: each.replace("ci:app >", listening))
    finally:
        shell.run(f"kill $(cat {pid}) || true")


def moto_settings(page: list[Block], count: int, url: str) -> str:
    """Return the settings of a page for moto, whose port belongs to the test."""
    (start,) = [each for each in page if "moto_server" in each.text]
    exports = [each for each, _ in steps(start) if each.startswith("export ")]
    assert len(exports) == count
    setting = "; ".join(exports).replace("http://127.0.0.1:5000", url)
    assert url in setting
    return setting


def test_the_sqs_page_happens_as_shown(shell: Shell, moto_url: str, aws_prefix: str) -> None:
    """With the server of the page; only its port and the prefix belong to the test."""
    page = list(blocks(read("sqs")))
    setting = moto_settings(page, 2, moto_url)
    assert "shop-" in setting
    setting = setting.replace("shop-", aws_prefix)
    write_files(shell, *page)
    assert happens(shell, session_of(page), setting)


def test_the_kinesis_page_happens_as_shown(shell: Shell, moto_url: str, aws_stream: str) -> None:
    """With the server of the page; only its port and the stream belong to the test."""
    page = list(blocks(read("kinesis")))
    setting = moto_settings(page, 3, moto_url).replace("/clicks?", f"/{aws_stream}?")
    write_files(shell, *page)

    def own(command: str) -> str:
        # The app is called as the stream is, and stays.
        pattern = r"='clicks'|/clicks\?|clicks:app clicks"
        return re.sub(pattern, _renamed(aws_stream), command)

    assert happens(shell, session_of(page), setting, own) == 4


def _at_moto(page: list[Block], address: str, own: str) -> str:
    """Return the settings for the stand-in server; the page sets only an address of AWS."""
    (shown,) = [each.text for each in page if "export" in each.text]
    assert shown == f"$ export QDO_BROKER={address}\n"
    keys = "AWS_ACCESS_KEY_ID=testing AWS_SECRET_ACCESS_KEY=testing AWS_DEFAULT_REGION=eu-west-1"
    return f"export {keys} QDO_BROKER='{own}'"


def test_a_queue_of_shoryuken_is_processed_as_shown(
    shell: Shell, moto_url: str, aws_prefix: str
) -> None:
    """Only the endpoint, the prefix and the creation of the queue belong to the test."""
    page = list(blocks(read("coming-from/shoryuken")))
    write_files(shell, *page)
    own = f"sqs://eu-west-1/{aws_prefix}?endpoint={moto_url}&create=fifo&wait_seconds=1"
    setting = _at_moto(page, "sqs://eu-west-1/shop-", own)
    assert happens(shell, session_of(page), setting)


NEXT = '{"page": "/next"}'


def test_checkpoints_of_kcl_move_as_shown(shell: Shell, moto_url: str, aws_stream: str) -> None:
    """A fleet without positions resumes after the record that KCL has processed."""
    page = list(blocks(read("coming-from/kcl")))
    write_files(shell, *page)
    own = f"kinesis://eu-west-1/{aws_stream}?endpoint={moto_url}"
    setting = _at_moto(page, "kinesis://eu-west-1/clicks", own)
    setting = f"{setting} AWS_ENDPOINT_URL={moto_url}"
    kinesis = client("kinesis", moto_url, region="eu-west-1")
    kinesis.create_stream(StreamName=aws_stream, ShardCount=1)
    program, move = [each for each in page if each.options.get("class") == "run"]
    renamed = f" {aws_stream} "
    happens(shell, steps(program), setting, lambda each: each.replace(" clicks ", renamed))
    _store_lease(client("dynamodb", moto_url, region="eu-west-1"), aws_stream, shell)
    script = (shell.folder / "leases.py").read_text(encoding="utf-8")
    shell.write("leases.py", script.replace('"clicks"', f'"{aws_stream}"'))
    moved = f"{setting} QDO_COORDINATOR=sqlite:moved.db"
    shell.run(f"{moved}; qdo send --app clicks {aws_stream} '{NEXT}' --key ada")
    happens(shell, steps(move), moved)
    assert shell.run(f"{moved}; qdo-worker clicks:app {WORK}") == "ada saw /next\n"


def _store_lease(dynamodb: Any, name: str, shell: Shell) -> None:
    """Store the table of KCL after it has processed the only record of the page."""
    dynamodb.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    item = {
        "leaseKey": {"S": "shardId-000000000000"},
        "checkpoint": {"S": (shell.folder / "id").read_text(encoding="utf-8").strip()},
        "checkpointSubSequenceNumber": {"N": "0"},
    }
    dynamodb.put_item(TableName=name, Item=item)


def _renamed(stream: str) -> Callable[[re.Match[str]], str]:
    def rename(found: re.Match[str]) -> str:
        return stream.join(found[0].rsplit("clicks", 1))

    return rename


def test_the_readme_example_happens_as_shown(shell: Shell, bare_database_url: str) -> None:
    """The first commands of a new user work, and so do those with PostgreSQL."""
    app, console, postgresql = blocks(read("README"))
    shell.write("hello.py", app.text)
    activate, *rest = steps(console)
    assert activate == (". .venv/bin/activate", [])
    assert len(rest) == 3
    happens(shell, rest)
    install, database, _, create, send = steps(postgresql)
    assert install[0].startswith("pip install -e")
    assert database[0].startswith("createdb ")
    happens(shell, (create, send), f"export QDO_BROKER={bare_database_url}")


def test_the_start_with_postgresql_happens_as_shown(shell: Shell, bare_database_url: str) -> None:
    """A second creation says that there is nothing to do, and an upgrade that roles need rights."""
    (app, *_) = [each for each in blocks(read("quickstart")) if "caption" in each.options]
    shell.write("welcome.py", app.text)
    _, start, *_ = [each for each in blocks(read("postgresql")) if each.language == "console"]
    setting = f"export QDO_BROKER={bare_database_url}"
    assert happens(shell, steps(start)[3:], setting) == 3
    again = shell.run(f"{setting}; qdo admin broker init --dry-run")
    assert again.splitlines()[-1] == "the schema is current; nothing to do"
    with psycopg.connect(bare_database_url, autocommit=True) as connection:
        connection.execute("UPDATE qdo.about SET functions = 'older'")
    upgraded = shell.run(f"{setting}; qdo admin broker init").splitlines()
    assert (upgraded[0], "qdo admin broker grants" in upgraded[1]) == ("upgraded the schema", True)


COUNT = '''
import collections, json, os, time, psycopg, qdo
app = qdo.App("count")
COUNT = """
SELECT application_name FROM pg_stat_activity
WHERE datname = current_database() AND application_name <> 'count'
"""

def show(purpose):
    with psycopg.connect(os.environ["QDO_BROKER"], application_name="count") as db:
        names = [name for (name,) in db.execute(COUNT)]
    assert all(name.startswith("qdo count ") for name in names), names
    print(purpose, json.dumps(collections.Counter(name.split()[2] for name in names)), flush=True)

@app.job("pool", pool=True)
def pool(request, context):
    app.send("done", 1)
    show("send")
    app.documents("d").put("k", 1)
    show("documents")
    app.send("apart", 1)

@app.job("apart", executor="process")
def apart(message, context):
    app.send("done", 1)
    show("process")

@app.job("done")
def done(message, context): ...

if __name__ == "__main__":
    app.request("pool", 1)
    show("sender")
'''
"""Counts without its own connections: the server may list one for a while after its end."""


def test_a_process_has_the_connections_of_the_page(shell: Shell, bare_database_url: str) -> None:
    """Each step of a worker process adds the connections of a row; their names tell the purpose."""
    rows = list(table("production", "connections").values())
    added = [(int(cells[1]), sorted(re.findall(r"\w+", cells[2]))) for cells in rows]
    assert [each[0] for each in added] == [len(each[1]) for each in added]
    shell.write("count.py", COUNT)
    setting = f"export QDO_APP=count:app QDO_BROKER={bare_database_url}"
    shell.run(f"{setting}; qdo admin broker init")
    found = shell.run(f"{setting}; python count.py") + shell.run(f"{setting}; qdo-worker {WORK}")
    lines = dict(line.split(" ", 1) for line in found.splitlines())
    counts = {step: Counter(json.loads(text)) for step, text in lines.items()}
    assert sorted(counts["sender"].elements()) == added[5][1]
    expected = Counter(added[0][1])
    for step, (_, purposes) in zip(("send", "documents", "process"), added[1:], strict=False):
        expected.update(purposes)
        assert counts[step] == expected, step


@pytest.mark.slow
def test_the_roles_of_production_happen_as_shown(shell: Shell, bare_database_url: str) -> None:
    """Each role of a new database does its task; server and names belong to the test."""
    page = list(blocks(read("production")))
    write_files(shell, *page)
    server, _, database = bare_database_url.rpartition("/")
    host = server.rpartition("@")[2].rpartition("/")[2]
    address, port = host.split(":")

    def own(command: str) -> str:
        for shown, used in (
            (
                r"^createdb .*",
                f'psql -qc "ALTER DATABASE {database} OWNER TO {database}_owner" {database}',
            ),
            ("createuser shop_", f"createuser {database}_"),
            (r"shop_(?=\w+[@ ])", f"{database}_"),
            (r"/dev/null shop$", f"/dev/null {database}"),
            ("@db.example/shop", f"@{host}/{database}"),
            ("-h db.example shop", f"-h {address} {database}"),
        ):
            command = re.sub(shown, used, command)
        return command

    setting = f"export PGHOST={address} PGPORT={port} PGUSER={SUPERUSER}"
    roles, use = [each for each in page if each.options.get("class") == "production"]
    exported = own(dict(enumerate(steps(roles)))[2][0])
    happens(shell, steps(roles), f"{setting}; {exported}", own)
    assert happens(shell, steps(use), setting, own) == 4


def test_a_fenced_write_counts_every_message_once(shell: Shell) -> None:
    """The worked example of the delivery rules stays exact when a queue is processed again."""
    (block,) = [each for each in blocks(read("delivery")) if each.language == "python"]
    shell.write(block.options["caption"], block.text)
    shell.write("lines", "".join(json.dumps({"amount": amount}) + "\n" for amount in (1, 2, 3)))
    shell.write(
        "total.py",
        "import sqlite3\n"
        "rows = sqlite3.connect('totals.db').execute('SELECT queue, amount FROM totals')\n"
        "print(*rows.fetchall())\n",
    )
    shell.run("qdo send --app totals till --file lines")
    for _ in range(2):
        shell.run(f"qdo-worker totals:app {WORK}")
        assert shell.run("python total.py") == "('till', 6)\n"
        shell.run("qdo seek --app totals till earliest --yes")


UNTIL = "trap 'kill $!; wait' EXIT; {} & until qdo {} -o name | grep -q .; do :; done"
"""Run a program until the end of the shell, and wait until a command lists something."""
PREPARED = (
    ("audit", "qdo limits set crm --max 5", "qdo audit"),
    ("documents", "qdo documents put plans acme 1", "qdo documents list plans"),
    ("limits", "qdo limits set crm --max 5", "qdo limits list"),
    ("live-settings", "qdo settings set attempts 3", "qdo settings history"),
    ("locks", UNTIL.format("python lock.py", "locks"), "qdo locks"),
    ("operations", "qdo send office 1", "qdo queues"),
    ("quickstart", UNTIL.format("qdo-worker welcome:app", "workers"), "qdo workers"),
)
"""Pages with a table of past or other processes; a command that fills it; one that shows it."""
LOCK = """
import time, qdo
with qdo.App("shop").lock("nightly", reason="report", timeout_seconds=60):
    time.sleep(600)
"""


COMPARED = ("run", "production")
"""The classes of blocks whose whole output other tests compare."""


def shown_tables(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands whose tables no test compares line by line, with their columns."""
    return [
        (command, output[0].split())
        for block in blocks(read(page))
        if block.language == "console" and block.options.get("class") not in COMPARED
        for command, output in steps(block)
        if output and re.fullmatch("[A-Z][A-Z ]+", output[0])
    ]


@pytest.mark.parametrize(("page", "fill", "show"), PREPARED, ids=[each[0] for each in PREPARED])
def test_a_table_has_the_columns_of_its_command(
    shell: Shell, page: str, fill: str, show: str
) -> None:
    shell.write("lock.py", LOCK)
    shell.write("welcome.py", "import qdo; app = qdo.App('shop'); app.job()(print)")
    filled = f"export QDO_APP=shop; {{ {fill}; }} > filled.log 2>&1"
    columns = shell.run(f"{filled}; {show} 2> shown.log").splitlines()[0].split()
    ((command, shown),) = shown_tables(page)
    assert command.startswith(" ".join(show.split()[:3]))
    # A table leaves out the columns that are empty, which may be others on the page.
    both = [each for each in shown if each in columns]
    assert both == [each for each in columns if each in shown]
    assert len(both) > len(shown) / 2


def test_every_table_on_a_page_is_compared() -> None:
    """Those of README, too, by a test of its own."""
    found = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.rst")}
    with_tables = {page for page in found if shown_tables(page)}
    assert with_tables == {page for page, *_ in PREPARED}


def test_positions_move_to_another_coordinator(shell: Shell) -> None:
    """With the script of the operations page, also holds and settings."""
    (script,) = [each for each in blocks(read("operations")) if each.language == "python"]
    shell.write(script.options["caption"], script.text)
    worker = f"qdo-worker --app hello --job qdo.programs.echo:job {WORK}"
    shell.run("qdo send --app hello greetings 1")
    assert "greetings" in shell.run(worker)
    app = "--app hello"
    shell.run(f"qdo pause {app} lab --allow-none; qdo settings set {app} attempts 7")
    shell.run(f"qdo limits set {app} few --max 2")
    move = "python move.py sqlite:qdo-data/coordination.db sqlite:new.db hello"
    shell.run(move)
    assert shell.run(f"{worker} --coordinator sqlite:new.db") == ""
    there = "--app hello --coordinator sqlite:new.db"
    shell.run(f"qdo settings set {there} attempts 8; qdo limits set {there} few --max 3")
    assert "lab" in shell.run(f"qdo pause --list {there}")
    assert "8" in shell.run(f"qdo settings show {there}")
    assert "few" in shell.run(f"qdo limits list {there}")
    assert "another chroot" in shell.run(f"{move} 2>&1 || true")


KAFKA = """
class KafkaException(Exception):
    pass


class Record:
    def __init__(self, offset, order):
        self._offset, self._order = offset, order

    def error(self):
        return None

    def topic(self):
        return "orders"

    def partition(self):
        return 0

    def offset(self):
        return self._offset

    def key(self):
        return b"ada"

    def value(self):
        return b'{"order": %d}' % self._order


class Consumer:
    def __init__(self, settings):
        self._records = [Record(0, 1), Record(1, 2), Record(1, 2), Record(2, 3)]

    def subscribe(self, topics):
        pass

    def poll(self, timeout):
        if not self._records:
            raise SystemExit
        return self._records.pop(0)

    def commit(self, record, asynchronous):
        print("commit", record.offset())
"""


def test_a_consumer_of_kafka_forwards_each_record_once(shell: Shell) -> None:
    """A stand-in for Kafka delivers a record twice, as after a crash before the commit."""
    page = list(blocks(read("coming-from/kafka")))
    write_files(shell, *page)
    shell.write("confluent_kafka.py", KAFKA)
    assert shell.run("python consume.py").splitlines()[:2] == [
        "ada: order 1 is shipped",
        "commit 0",
    ]
    forward = textwrap.indent(page[-1].text, "    ")
    consume = (shell.folder / "consume.py").read_text(encoding="utf-8")
    (work,) = re.findall(r"^    print\(.*\n", consume, re.MULTILINE)
    shell.write("consume.py", "from shop import app\n" + consume.replace(work, forward))
    assert shell.run("python consume.py") == "commit 0\ncommit 1\ncommit 1\ncommit 2\n"
    assert shell.run(f"qdo-worker shop:app {WORK}").splitlines() == [
        "ada: order 1 is shipped",
        "ada: order 2 is shipped",
        "ada: order 3 is shipped",
    ]


def test_a_worker_runs_in_a_process_of_ones_own(shell: Shell) -> None:
    """The example of the API page works for the app of the quick start."""
    (app, *_) = [each for each in blocks(read("quickstart")) if "caption" in each.options]
    (own,) = [each for each in blocks(read("api")) if "caption" in each.options]
    for block in (app, own):
        shell.write(block.options["caption"], block.text)
    shell.run("python welcome.py")
    lines = shell.run(f"python {own.options['caption']}").splitlines()
    assert sorted(lines) == [
        "lab: hello, Barbara!",
        "office: hello, Ada!",
        "office: hello, Edsger!",
        "office: hello, Grace!",
    ]


TWO_JOBS = """
import pathlib
import time

import {module}

app = {module}.app
stored, failed = pathlib.Path("stored"), pathlib.Path("failed")


def wait_for(path):
    for _ in range(2000):
        if path.exists():
            return
        time.sleep(0.01)
    raise SystemExit(f"there is no {{path}}")


@app.job("good")
def good(message, context):
    context["db"].{execute}("INSERT INTO greeted VALUES ('good')")
    stored.touch()
    wait_for(failed)


@app.job("bad", policy={module}.qdo.Policy(attempts=1))
def bad(message, context):
    wait_for(stored)
    raise ValueError("this one fails")


@app.failure
def note(message, context, error):
    failed.touch()
"""


@pytest.mark.parametrize(
    ("module", "setting", "execute"),
    [
        ("welcome", "", "execute"),
        ("pooled", "QDO_EXECUTOR=thread WELCOME_DB=sqlite:///welcome.db", "exec_driver_sql"),
    ],
)
def test_a_failing_job_rolls_back_only_its_own_work(
    shell: Shell, module: str, setting: str, execute: str
) -> None:
    """The transaction middleware of the page about hooks, with two jobs at once."""
    (page,) = [
        each for each in blocks(read("hooks")) if each.options.get("caption") == f"{module}.py"
    ]
    shell.write(f"{module}.py", page.text)
    shell.write("two.py", TWO_JOBS.format(module=module, execute=execute))
    with sqlite3.connect(shell.folder / "welcome.db") as database:
        database.execute("CREATE TABLE greeted (message TEXT)")
    for queue in ("good", "bad"):
        shell.run(f"qdo send --app welcome {queue} 1")
    shell.run(f"{setting} qdo-worker two:app {WORK}")
    assert database.execute("SELECT message FROM greeted").fetchall() == [("good",)]
    database.close()
