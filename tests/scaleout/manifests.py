"""Shared parts of the tests of deploy/kubernetes: paths of the manifests, and their reader."""

from pathlib import Path
from typing import Any

import yaml

from tests.places import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"


def objects_of(path: Path) -> list[dict[str, Any]]:
    """All objects of a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def manifest_files() -> list[Path]:
    """Every file of objects of a cluster in deploy/kubernetes."""
    files = set(KUBERNETES.rglob("*.yaml"))
    for path in KUBERNETES.rglob("kustomization.yaml"):
        (kustomization,) = objects_of(path)
        generated = [name for one in kustomization.get("configMapGenerator", ()) for name in one["files"]]
        no_objects = [path.name, *kustomization.get("configurations", ()), *generated]
        files -= {path.parent / name for name in no_objects}
    return sorted(files)


def leader_worker_set() -> dict[str, Any]:
    """The LeaderWorkerSet of deploy/kubernetes/groups."""
    (manifest,) = objects_of(KUBERNETES / "groups" / "leader-worker-set.yaml")
    return manifest
