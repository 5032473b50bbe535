"""Every manifest and every rendered kustomization is valid by the published schemas."""

import copy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from server import cli
from server.settings.serve_settings import serve_settings
from tests.places import ROOT
from tests.scaleout.manifests import KUBERNETES, manifest_files, objects_of
from tests.scaleout.published_schemas import VERSIONS, validate

FOLDERS = ("groups", "replicas")
# Mappings whose keys are the user's.
FREE = {"labels", "matchLabels", "annotations", "limits", "requests", "data", "nodeSelector"}
OVERLAY = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: models
namePrefix: llama-
labels:
  - {{includeSelectors: true, pairs: {{model: llama}}}}
resources: [{base}]
images:
  - {{name: registry.example/orca_jax, newName: registry.example/mine, newTag: "7"}}
"""


def rendered(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization, rendered by kustomize."""
    tools = (["kustomize", "build"], ["kubectl", "kustomize"])
    tool = next((tool for tool in tools if shutil.which(tool[0])), None)
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is on the PATH to render the kustomizations")
    done = subprocess.run([*tool, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def overlay(folder: str, tmp_path: Path, more: str = "") -> list[dict[str, Any]]:
    """The objects of a user's kustomization that builds on `folder`; kustomize wants a relative path."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(OVERLAY.format(base=f"../kubernetes/{folder}") + more)
    return rendered(mine)


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in an object whose keys are fields."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            if key not in FREE:
                yield from mappings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from mappings(inner)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", manifest_files(), ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_every_manifest_is_valid(path: Path, version: str) -> None:
    for manifest in objects_of(path):
        validate(manifest, version)


def test_all_kinds_are_among_the_manifests() -> None:
    kinds = {manifest["kind"] for path in manifest_files() for manifest in objects_of(path)}
    assert kinds >= {"LeaderWorkerSet", "PodMonitor", "HorizontalPodAutoscaler", "Deployment", "StatefulSet"}


@pytest.mark.parametrize("path", manifest_files(), ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_a_misspelled_field_is_refused_wherever_it_stands(path: Path) -> None:
    n_tried = 0
    for manifest in copy.deepcopy(objects_of(path)):
        for mapping in mappings(manifest):
            mapping["misspelled"] = 1
            with pytest.raises(jsonschema.ValidationError, match="misspelled"):
                validate(manifest, VERSIONS[-1])
            del mapping["misspelled"]
            n_tried += 1
        validate(manifest, VERSIONS[-1])
    assert n_tried >= 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("restartPolicy", "Never"),
        ("restartPolicy", None),  # what an unquoted null would be
        ("size", "2"),
        ("workerTemplate", {"spec": {"containers": "none"}}),
    ],
)
def test_a_wrong_value_in_a_leader_worker_set_is_refused(field: str, value: Any) -> None:
    (manifest,) = objects_of(KUBERNETES / "groups" / "leader-worker-set.yaml")
    manifest["spec"]["leaderWorkerTemplate"][field] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest, VERSIONS[-1])


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_kustomization_renders_to_valid_objects(folder: str, tmp_path: Path) -> None:
    for manifests in (rendered(KUBERNETES / folder), overlay(folder, tmp_path)):
        for manifest in manifests:
            for version in VERSIONS:
                validate(manifest, version)
        kinds = [manifest["kind"] for manifest in manifests]
        assert {"Service", "HorizontalPodAutoscaler", "PodMonitor"} < set(kinds)
        assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_and_labels_of_an_overlay_arrive_everywhere(folder: str, tmp_path: Path) -> None:
    by_kind = {manifest["kind"]: manifest for manifest in overlay(folder, tmp_path)}
    assert all(one["metadata"]["name"].startswith("llama-") for one in by_kind.values())
    assert {one["metadata"]["namespace"] for one in by_kind.values()} == {"models"}
    if folder == "groups":
        template = by_kind["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
        pods = [template["leaderTemplate"], template["workerTemplate"]]
        scaled = by_kind["LeaderWorkerSet"]
        policy = by_kind["NetworkPolicy"]["spec"]
        assert policy["podSelector"]["matchLabels"]["model"] == "llama"
        (source,) = (source for rule in policy["ingress"] for source in rule.get("from", ()))
        assert source["podSelector"]["matchLabels"]["model"] == "llama"
    else:
        pods = [by_kind["Deployment"]["spec"]["template"]]
        scaled = by_kind["Deployment"]
        (settings,) = (v["configMap"] for v in pods[0]["spec"]["volumes"] if "configMap" in v)
        assert settings["name"] == by_kind["ConfigMap"]["metadata"]["name"]
        assert settings["name"].startswith("llama-orca-serve-"), "a change of settings would be no rollout"
    server = pods[0]["metadata"]["labels"]
    assert server["model"] == "llama"
    for selector in (
        by_kind["Service"]["spec"]["selector"],
        by_kind["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector["model"] == "llama" and selector.items() <= server.items()
        assert not any(selector.items() <= pod["metadata"]["labels"].items() for pod in pods[1:])
    target = by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": scaled["apiVersion"],
        "kind": scaled["kind"],
        "name": scaled["metadata"]["name"],
    }
    images = {
        container["image"]
        for pod in pods
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ()))
    }
    assert images == {"registry.example/mine:7"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_llm_d_finds_the_metrics_that_a_pods_label_promises(folder: str, tmp_path: Path) -> None:
    """A pod that says vllm, or nothing, is read with vLLM's names; an unknown engine is an error."""
    by_kind = {
        manifest["kind"]: manifest
        for manifest in overlay(folder, tmp_path, "components: [../kubernetes/llm-d]\n")
    }
    if folder == "groups":
        template = by_kind["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
        validate(by_kind["LeaderWorkerSet"], VERSIONS[-1])
        pod = template["leaderTemplate"]
        assert "llm-d.ai/engine-type" not in template["workerTemplate"]["metadata"]["labels"]
    else:
        validate(by_kind["Deployment"], VERSIONS[-1])
        pod = by_kind["Deployment"]["spec"]["template"]
    assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    (server,) = pod["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in server["env"]}
    settings = serve_settings(cli.parser().parse_args(["serve"]), variables)
    assert settings.routing.metric_names == "vllm"


def test_the_documents_example_is_the_overlay_that_is_tested() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert OVERLAY.format(base="../orca_jax/deploy/kubernetes/replicas").strip() in text.replace(
        "\n    ", "\n"
    )
