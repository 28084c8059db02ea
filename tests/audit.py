"""Looks for known vulnerabilities: ``make audit``.

``python -m tests.audit PROGRAM`` runs pip-audit, which is PROGRAM, on the lowest versions that qdo
accepts and on the installed ones. Exit code 0: nothing found, 1: a vulnerability, 3: some packages
could not be looked up, and nothing was found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from tests.support.paths import ROOT

FOUND, NO_DATA = 1, 3
_DEVELOPMENT = ("docs", "test")
"""Extras that users of qdo do not install."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is known about some packages.

    :ivar found: vulnerabilities, as "NAME VERSION: ID, corrected in VERSION".
    :ivar unknown: packages without data, each with the reason.
    """

    found: tuple[str, ...]
    unknown: tuple[str, ...]


def lowest(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lowest version of each package that users install, from lines of metadata."""
    found = {}
    for line in requirements:
        if any(f'extra == "{extra}"' in line.replace("'", '"') for extra in _DEVELOPMENT):
            continue
        name = re.match(r"[A-Za-z0-9._-]+", line)
        bound = re.search(r">=([0-9.]+)", line.partition(";")[0])
        if name is None or bound is None:
            raise SystemExit(f"a requirement must have a lower bound, got {line!r}")
        found[name[0]] = bound[1]
    return found


def installed() -> dict[str, str]:
    """Return the version of each package of this environment, without qdo itself."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {name: found[name] for name in sorted(found) if name != "qdo-queues"}


def look_up(program: str, versions: Mapping[str, str]) -> Lookup:
    """Ask pip-audit; it exits with 0 although it has no data about a package."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in versions.items())
        file.flush()
        options = ("--disable-pip", "--no-deps", "--progress-spinner", "off", "-f", "json")
        done = subprocess.run(
            [program, *options, "-r", file.name], capture_output=True, text=True, check=False
        )
    try:
        answer = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Lookup((), tuple(f"{name}: {reason}" for name in versions))
    found = tuple(
        f"{each['name']} {each['version']}: {hole['id']}, corrected in "
        f"{', '.join(hole['fix_versions']) or 'no version'}"
        for each in answer
        for hole in each.get("vulns", ())
    )
    unknown = [f"{e['name']}: {e['skip_reason']}" for e in answer if "skip_reason" in e]
    missing = {_plain(name) for name in versions} - {_plain(each["name"]) for each in answer}
    return Lookup(found, (*unknown, *(f"{name}: no answer" for name in sorted(missing))))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(program: str) -> int:
    """Look up both, print what was found, and return the exit code."""
    bounds = lowest(metadata.requires("qdo-queues") or ())
    built_with = re.search(r"setuptools>=[0-9.]+", (ROOT / "pyproject.toml").read_text())
    bounds |= lowest([built_with[0]] if built_with else ())
    code = 0
    for what, versions in (("lowest versions", bounds), ("installed versions", installed())):
        known = look_up(program, versions)
        print(f"{what}: {len(versions)} packages, {len(known.found)} vulnerabilities")
        for line in known.found:
            print(f"  {line}")
        if known.unknown:
            print(f"  no data about {len(known.unknown)} of them, so they were NOT checked, as:")
            print(f"  {known.unknown[0]}")
            print("  run `make audit` where pip-audit reaches pypi.org")
        code = FOUND if known.found else code or (NO_DATA if known.unknown else 0)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
