"""The systemd unit and the Kubernetes manifests are valid, and agree with qdo."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import ValidationError, validate
from kubernetes_validate.utils import all_versions

from qdo.errors import UnreachableError
from qdo.settings.settings import Settings
from qdo.worker.duties.watchdog import block_limit
from qdo.worker.metrics.catalog import BACKLOG
from qdo.worker.supervisor.restarts import DRAIN_MARGIN_SECONDS, RESTART_BACKOFF
from tests.support.containers.compose import load_services, seconds
from tests.support.containers.pods import load_manifests, worker_of
from tests.support.doc_pages import blocks, read
from tests.support.paths import ROOT

CONFIG = ROOT / "config"
UNIT = CONFIG / "qdo-worker.service"
UNITS = [UNIT, CONFIG / "qdo-ingest.service"]
SYSTEMD = Path("/lib/systemd/system")
# Older ones do not know `unhealthyPodEvictionPolicy`.
VERSIONS = [each for each in all_versions() if tuple(map(int, each.split("."))) >= (1, 27)]
OPERATORS = load_manifests(CONFIG / "kubernetes-operators.yaml")


@pytest.fixture
def manifests() -> dict[str, dict[str, Any]]:
    return load_manifests(CONFIG / "kubernetes.yaml")


def verified(unit: str, folder: Path) -> str:
    """Return what ``systemd-analyze verify`` says about a unit on an otherwise empty machine."""
    shutil.copytree(SYSTEMD, folder / "usr/lib/systemd/system", symlinks=True)
    units = folder / "etc/systemd/system"
    units.mkdir(parents=True)
    (units / UNIT.name).write_text(unit)
    programs = folder / "srv/qdo/venv/bin"
    programs.mkdir(parents=True)
    for program in ("qdo", "qdo-worker"):
        shutil.copy("/bin/true", programs / program)
    argv = ("systemd-analyze", "verify", f"--root={folder}", UNIT.name)
    # Its exit code is 0 for unknown and misspelt lines, too.
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    """As it is, without a remark."""
    assert verified(unit.read_text(), tmp_path) == ""


def test_systemd_reports_a_misspelt_line(tmp_path: Path) -> None:
    """So the silence of the test above means something."""
    assert "KilMode" in verified(UNIT.read_text().replace("KillMode", "KilMode"), tmp_path)


@pytest.mark.parametrize("path", UNITS, ids=lambda unit: unit.stem)
def test_systemd_restarts_the_unit_until_its_servers_respond(path: Path) -> None:
    """Each start may end within a second: no number of them is too many."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    unreachable = UnreachableError.exit_code
    assert str(unreachable) not in unit["Service"]["RestartPreventExitStatus"].split()


def test_the_page_shows_lines_of_the_unit() -> None:
    (shown,) = [each for each in blocks(read("deployment")) if each.language == "ini"]
    assert {*shown.text.splitlines()} <= {*UNIT.read_text().splitlines()}


def test_the_page_names_the_tried_versions() -> None:
    """Of Kubernetes: those of the schemas."""
    first, last = (version.removesuffix(".0") for version in (VERSIONS[0], VERSIONS[-1]))
    assert f"schemas of Kubernetes {first} and {last}" in read("deployment")


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_kubernetes_accepts_the_manifests(manifests: dict[str, Any], version: str) -> None:
    """Strictly: the schemas of the oldest and the newest version know every key."""
    assert len(manifests) == 6
    for manifest in manifests.values():
        validate(manifest, version, strict=True)


def test_kubernetes_rejects_a_misspelt_key(manifests: dict[str, Any]) -> None:
    worker_of(manifests)["startupProbe"]["periodSecond"] = 5
    with pytest.raises(ValidationError):
        validate(manifests["Deployment"], VERSIONS[-1], strict=True)


def test_selectors_match_the_pods(manifests: dict[str, Any]) -> None:
    """Those of everything that is for the pods of the Deployment, and not of the schema's Job."""
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert manifests[kind]["spec"]["selector"] == {"matchLabels": labels}
    (spread,) = manifests["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
    others = (spread["labelSelector"], manifests["NetworkPolicy"]["spec"]["podSelector"])
    assert [*others, OPERATORS["PodMonitor"]["spec"]["selector"]] == [{"matchLabels": labels}] * 3
    assert manifests["Job"]["spec"]["template"]["metadata"]["labels"] != labels


def test_probes_and_annotations_name_the_address(manifests: dict[str, Any]) -> None:
    """The kubelet and Prometheus ask where qdo-worker listens."""
    settings = tomllib.loads(manifests["ConfigMap"]["data"]["qdo.toml"])
    worker, template = worker_of(manifests), manifests["Deployment"]["spec"]["template"]
    (port,) = worker["ports"]
    assert settings["http"] == f"0.0.0.0:{port['containerPort']}"
    probes = {name: worker[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")}
    assert all(each == {"path": "/readyz", "port": port["name"]} for each in probes.values())
    assert worker["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port["containerPort"]),
        "prometheus.io/path": "/metrics",
    }
    (rule,) = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": port["containerPort"]}]
    (endpoint,) = OPERATORS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")


def test_the_liveness_probe_waits_for_the_parent(manifests: dict[str, Any]) -> None:
    """Which replaces a dead process after a while, and a blocked one after its limit."""
    probe, settings = worker_of(manifests)["livenessProbe"], Settings()
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience > 2 * RESTART_BACKOFF.max_seconds
    assert patience > 2 * block_limit(None, settings.session_timeout_seconds)


def test_the_autoscalers_follow_a_served_metric(manifests: dict[str, Any]) -> None:
    """Both the same one, of this app only, within the same limits."""
    spec = manifests["HorizontalPodAutoscaler"]["spec"]
    scaled = OPERATORS["ScaledObject"]["spec"]
    (metric,) = spec["metrics"]
    ((label, app),) = metric["external"]["metric"]["selector"]["matchLabels"].items()
    (asked,) = [each["metadata"] for each in scaled["triggers"]]
    assert metric["external"]["metric"]["name"] == BACKLOG.name
    assert BACKLOG.name in read("deployment")
    assert asked["query"] == f'max({BACKLOG.name}{{namespace="default", {label}="{app}"}})'
    assert asked["threshold"] == metric["external"]["target"]["averageValue"]
    assert manifests["Deployment"]["spec"]["template"]["metadata"]["labels"] == {label: app}
    assert OPERATORS["PodMonitor"]["spec"]["podTargetLabels"] == [label]
    names = (spec["scaleTargetRef"]["name"], scaled["scaleTargetRef"]["name"])
    assert names == (manifests["Deployment"]["metadata"]["name"],) * 2
    assert spec["behavior"] == scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    limits = (scaled["minReplicaCount"], scaled["maxReplicaCount"])
    assert (spec["minReplicas"], spec["maxReplicas"]) == limits
    assert "replicas" not in manifests["Deployment"]["spec"]


def test_every_pod_may_use_a_core_for_each_process(manifests: dict[str, Any]) -> None:
    settings = tomllib.loads(manifests["ConfigMap"]["data"]["qdo.toml"])
    assert worker_of(manifests)["resources"]["requests"]["cpu"] == str(settings["processes"])


def test_all_files_leave_enough_time_to_drain(manifests: dict[str, Any]) -> None:
    """A kill before the parent process has ended would repeat messages."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(UNIT)
    services = load_services(CONFIG / "compose.yaml", {"POSTGRES_PASSWORD": ""})
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    settings = tomllib.loads(manifests["ConfigMap"]["data"]["qdo.toml"])
    drain = Settings().drain_seconds
    assert settings["drain_seconds"] == drain
    for grace in (
        unit.getfloat("Service", "TimeoutStopSec"),
        seconds(services["worker"]["stop_grace_period"]),
        pod["terminationGracePeriodSeconds"],
    ):
        assert grace > drain + DRAIN_MARGIN_SECONDS
