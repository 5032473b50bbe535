"""Checks that a cluster would accept an object: published schemas, without unknown fields."""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

# Kubernetes's own objects are validated as of these versions. 1.29 is the oldest that runs sidecars unasked.
VERSIONS = ("1.29", "1.37")
_CUSTOM = {"LeaderWorkerSet": "leader-worker-set.yaml", "PodMonitor": "pod-monitor.yaml"}
_HERE = Path(__file__).parent / "schemas"


def validate(manifest: Mapping[str, Any], version: str) -> None:
    """Raises jsonschema.ValidationError, or FileNotFoundError for a kind that has no schema."""
    _validator(manifest["kind"], manifest["apiVersion"], version).validate(manifest)


@cache
def _validator(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    """A validator with the schemas of kubernetes-validate: Kubernetes's, without unknown fields.

    For a custom resource it is our file, which refers to them for templates of pods and metadata.
    """
    published = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    definitions = json.loads((published / "_definitions.json").read_text(encoding="utf-8"))
    if kind in _CUSTOM:
        schema = yaml.safe_load((_HERE / _CUSTOM[kind]).read_text(encoding="utf-8"))
    else:
        group = re.sub(r"(\.[^/]*)?/", "-", api_version)  # networking.k8s.io/v1: networking-v1
        schema = json.loads((published / f"{kind.lower()}-{group}.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(definitions) @ Registry())
