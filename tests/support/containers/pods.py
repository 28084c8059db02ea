"""The pods of ``config/kubernetes.yaml`` as containers of `ContainerEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.containers.engine import Image, Spec


def load_manifests(path: Path) -> dict[str, dict[str, Any]]:
    """Return the objects of a file by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def worker_of(manifests: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only container of the Deployment."""
    (found,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def pod_spec(
    manifests: Mapping[str, Any],
    name: str,
    image: Image,
    secrets: Mapping[tuple[str, str], str],
    folder: Path,
) -> Spec:
    """Return a pod of the Deployment.

    :param secrets: values by the name of the secret and the key.
    :param folder: is created for the files of the ConfigMap.
    """
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    worker = worker_of(manifests)
    if pod["securityContext"]["runAsNonRoot"] and int(image.user.partition(":")[0]) == 0:
        raise ValueError("the image runs as root")
    settings = manifests["ConfigMap"]
    folder.mkdir(mode=0o755)
    for key, text in settings["data"].items():
        (folder / key).write_text(text)
    files, scratch = {}, []
    volumes = {each.pop("name"): each for each in map(dict, pod["volumes"])}
    for mount in worker["volumeMounts"]:
        volume = volumes[mount["name"]]
        if volume == {"configMap": {"name": settings["metadata"]["name"]}}:
            files[mount["mountPath"]] = folder
        elif volume == {"emptyDir": {}}:
            scratch.append(mount["mountPath"])
        else:
            raise NotImplementedError(str(volume))
    rights = worker["securityContext"]
    return Spec(
        name,
        image,
        worker.get("command", image.entrypoint),
        {each["name"]: _value(each, secrets) for each in worker["env"]},
        files,
        rights["readOnlyRootFilesystem"],
        rights["capabilities"]["drop"] == ["ALL"] and not rights["allowPrivilegeEscalation"],
        scratch,
    )


def _value(variable: Mapping[str, Any], secrets: Mapping[tuple[str, str], str]) -> str:
    if "value" in variable:
        return str(variable["value"])
    reference = variable["valueFrom"]["secretKeyRef"]
    return secrets[reference["name"], reference["key"]]
