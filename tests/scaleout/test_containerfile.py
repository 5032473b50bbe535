"""deploy/Containerfile names existing files, stages and extras, and agrees with the manifests."""

import re
import shlex
import tomllib

import pytest

from tests.places import ROOT
from tests.scaleout.manifests import KUBERNETES, leader_worker_set, objects_of

TEXT = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
INSTRUCTIONS = [line.split(None, 1) for line in "\n".join(LINES).replace("\\\n", " ").splitlines()]
TEMPLATE = leader_worker_set()["spec"]["leaderWorkerTemplate"]
(DEPLOYMENT,) = objects_of(KUBERNETES / "replicas" / "deployment.yaml")
PODS = [TEMPLATE["leaderTemplate"], TEMPLATE["workerTemplate"], DEPLOYMENT["spec"]["template"]]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name, in order; the last one, the default target, is ""."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = None
    for instruction, rest in INSTRUCTIONS:
        if instruction == "FROM":
            words = rest.split()
            assert words[0] == "${PYTHON_IMAGE}" or words[0] in found, rest
            name = words[2] if len(words) == 3 else ""
            found[name] = list(found.get(words[0], ()))
        elif name is not None:
            found[name].append((instruction, rest))
    return found


def test_copied_paths_are_in_the_checkout_or_in_an_earlier_stage() -> None:
    n_copied = 0
    for name, instructions in stages().items():
        for instruction, rest in instructions:
            for stage in re.findall(r"from=(\w+)", rest):
                assert stage in stages() or (name, stage) == ("warm", "checkpoint"), rest
            if instruction == "COPY" and "--from" not in rest:
                *sources, _ = rest.split()
                assert all((ROOT / source).exists() for source in sources), rest
                n_copied += len(sources)
    assert n_copied >= 6
    assert "--build-context checkpoint=" in TEXT


def test_the_extra_exists_and_every_version_is_constrained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    default = dict(instruction for instruction in stages()["dependencies"])["ARG"]
    assert default == "EXTRA=cuda"
    assert "cuda" in project["optional-dependencies"]
    installs = re.findall(r"-m pip (?:install|wheel) [^&\n]*", TEXT)
    assert len(installs) == 5
    for install in installs:
        assert "constraints.txt" in install or "--no-index" in install, install
        assert "--no-cache-dir" in install
    # pip's first package is our own name with a version alone, which the real wheel replaces.
    assert "pip uninstall --yes orca_jax" in TEXT


@pytest.mark.parametrize("target", ["", "serve", "warm"])
def test_an_image_runs_as_the_manifests_user(target: str) -> None:
    instructions = stages()[target]
    user = [rest for instruction, rest in instructions if instruction == "USER"][-1]
    for pod in PODS:
        context = pod["spec"]["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert ("ENTRYPOINT", '["orca"]') in instructions
    assert stages()[""] == stages()["serve"], "the default target is another"


@pytest.mark.parametrize("pod", PODS, ids=["leader", "worker", "replica"])
def test_programs_of_the_image_are_found_at_the_path_they_were_compiled_for(pod: dict) -> None:
    compiles = [shlex.split(rest) for _, rest in stages()["warm"] if "orca compile" in rest]
    (words,) = compiles
    folder = words[words.index("--compile-cache") + 1]
    programs, *others = [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]
    (mount,) = programs["volumeMounts"]
    assert programs["command"] == ["cp", "--recursive", f"{folder}/.", mount["mountPath"]]
    assert mount["mountPath"] != folder, "the volume would hide the image's folder"
    users = [m for one in others for m in one["volumeMounts"] if m["name"] == mount["name"]]
    assert [m["mountPath"] for m in users] == [folder]
    variables = {entry["name"]: entry.get("value") for one in others for entry in one["env"]}
    assert variables.get("JAX_COMPILATION_CACHE_DIR", folder) == folder
