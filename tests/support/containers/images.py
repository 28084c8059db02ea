"""Builds the image of a Containerfile: its instructions run as they are, without a network.

This machine's Python stands in for that of the base image, and its installed libraries for those
that pip would download.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Template

from tests.support.containers.engine import LIBRARIES, PYTHON, ContainerEngine, Image, Spec
from tests.support.paths import ROOT

BUILD_SECONDS = 120.0
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""In a variable, 0 means that pip does not isolate the build."""


def build(engine: ContainerEngine, containerfile: Path) -> Image:
    """Return the image of the last stage."""
    stages: dict[str, Image] = {}
    image = Image(Path("/"))
    for word, rest in _instructions(containerfile.read_text()):
        if word == "FROM":
            name = re.sub(r".* AS ", "", rest)
            image = Image(_base(engine, f"stage-{len(stages)}"))
            stages[name] = image
        elif word == "COPY":
            _copy(engine, image, stages, rest.split())
        elif word == "RUN" and "apt-get" not in rest:  # this machine has what it installs
            _run(engine, image, rest)
        elif word == "RUN":
            continue
        elif word == "ENV":
            name, _, value = rest.partition("=")
            value = Template(value).substitute(image.env)
            image = replace(image, env={**image.env, name: value})
        elif word == "WORKDIR":
            engine.shell(f"mkdir -p {image.layer}{rest}")
            image = replace(image, folder=rest)
        elif word == "USER":
            image = replace(image, user=rest)
        elif word == "ENTRYPOINT":
            image = replace(image, entrypoint=json.loads(rest))
        else:
            raise NotImplementedError(f"{containerfile}: {word}")
    return image


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


def _base(engine: ContainerEngine, name: str) -> Path:
    """Return a layer with nothing but the command `python3`."""
    layer = engine.folder(name)
    python = f"{layer}/usr/local/bin/python3"
    # No link, from which Python would derive the places of its modules.
    script = f"""#!/bin/sh\nexec {PYTHON} "$@"\n"""
    quoted = shlex.quote(script)
    engine.shell(f"mkdir -p $(dirname {python}); printf %s {quoted} > {python}; chmod 755 {python}")
    return layer


def _copy(
    engine: ContainerEngine, image: Image, stages: dict[str, Image], words: list[str]
) -> None:
    """Copy files to the target, and contents of folders into it."""
    origin = ROOT
    if words[0].startswith("--from="):
        origin = stages[words.pop(0).partition("=")[2]].layer
    *sources, target = words
    path = f"{image.layer}{os.path.join(image.folder, target)}"
    for source in sources:
        found = origin / source.lstrip("/")
        contents = f"if [ -d {found} ]; then echo {found}/.; else echo {found}; fi"
        engine.shell(f"mkdir -p {path}; cp -a $({contents}) {path}")


def _run(engine: ContainerEngine, image: Image, command: str) -> None:
    # Without the other libraries, among which pip would find itself installed.
    tools = Path(f"{image.layer}-tools")
    engine.shell(
        f"mkdir -p {tools}; cp -a {LIBRARIES}/*setuptools* {LIBRARIES}/_distutils_hack {tools}"
    )
    libraries = "/tools" if " pip " in command else "/libraries"
    env = {**OFFLINE, "PYTHONPATH": libraries}
    spec = Spec("build", image, ("/bin/sh", "-c", command), env, {"/tools": tools})
    container = engine.start(spec)
    code = container.proc.wait(BUILD_SECONDS)
    if code:
        raise RuntimeError(f"{command} ended with {code}\n{container.proc.output}")
    engine.shell(f"cp -a {container.written}/. {image.layer}")
