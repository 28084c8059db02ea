"""The alert rules and the dashboard: promtool accepts them, and each metric in them exists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import yaml
from prometheus_client.parser import text_string_to_metric_families

from qdo.outcomes import OutcomeName
from qdo.worker.metrics.catalog import FROM_PARENT, FROM_WORKERS, MetricKind, exposition
from qdo.worker.metrics.duty import STATES
from tests.support.paths import ROOT

CONFIG = ROOT / "config"
ALERTS = CONFIG / "alerts.yml"
CASES = Path(__file__).parent / "alerts.test.yml"


def promtool(*argv: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        ["promtool", *map(str, argv)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert group["rules"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CONFIG / "grafana.json").read_text())["panels"]
    assert found
    return found


def expressions() -> list[str]:
    """Return the expressions of all rules and of all panels of the dashboard."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [*(rule["expr"] for rule in rules()), *shown]


def served() -> set[str]:
    """Return the names of all samples that qdo serves."""
    values = {}
    for metric in (*FROM_WORKERS, *FROM_PARENT):
        size = len(metric.bounds) + 2 if metric.kind is MetricKind.HISTOGRAM else 1
        values[metric] = {tuple("x" for _ in metric.labels): [1.0] * size}
    families = text_string_to_metric_families(exposition(values).decode())
    return {sample.name for family in families for sample in family.samples}


def test_promtool_accepts_the_rules() -> None:
    assert promtool("check", "rules", ALERTS)[0] == 0


def test_promtool_rejects_a_misspelt_rule(tmp_path: Path) -> None:
    """So its silence above means something."""
    wrong = tmp_path / "alerts.yml"
    wrong.write_text(ALERTS.read_text().replace("humanizeDuration", "humaniseDuration"))
    assert promtool("check", "rules", wrong)[0] != 0


def test_alerts_fire_when_they_must(tmp_path: Path) -> None:
    """promtool would compare texts word by word: they are left out."""
    without = [{k: v for k, v in rule.items() if k != "annotations"} for rule in rules()]
    (tmp_path / "alerts.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "qdo", "rules": without}]})
    )
    (tmp_path / CASES.name).write_text(CASES.read_text())
    code, output = promtool("test", "rules", tmp_path / CASES.name)
    assert code == 0, output


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    tests = yaml.safe_load(CASES.read_text())["tests"]
    for fires in (True, False):
        found = {
            each["alertname"]
            for case in tests
            for each in case["alert_rule_test"]
            if bool(each["exp_alerts"]) == fires
        }
        assert found == {rule["alert"] for rule in rules()}


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert all(len(rule["annotations"][name]) > 20 for name in ("summary", "description"))


def test_rules_and_dashboard_use_served_metrics_only() -> None:
    """And values of labels that exist."""
    text = "\n".join(expressions())
    used = set(re.findall(r"\bqdo_\w+", text))
    assert used - served() == set()
    states = set(re.findall(r'qdo_queues\{[^}]*state="([^"]*)"', text))
    outcomes = {
        name for found in re.findall(r'outcome[!=]=?~?"([^"]*)"', text) for name in found.split("|")
    }
    assert states
    assert states <= set(STATES)
    assert outcomes
    assert outcomes <= set(get_args(OutcomeName))


def test_the_dashboard_shows_every_metric() -> None:
    """Nothing is served that nobody looks at."""
    text = "\n".join(expressions())
    for metric in (*FROM_WORKERS, *FROM_PARENT):
        assert metric.name in text


def test_promtool_parses_every_expression(tmp_path: Path) -> None:
    """With Grafana's variables replaced."""
    plain = [each.replace("$__rate_interval", "5m").replace("$job", ".*") for each in expressions()]
    recorded = [{"record": f"x{number}", "expr": each} for number, each in enumerate(plain)]
    rule = tmp_path / "rule.yml"
    rule.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": recorded}]}))
    code, output = promtool("check", "rules", rule)
    assert code == 0, output


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
