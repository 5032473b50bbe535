"""The files in deploy/ and the commands in docs/workers.md are valid and consistent."""

import argparse
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from orca_jax.options import values_of
from server import cli
from server.commands.worker import worker_options
from server.settings.serve_settings import serve_settings
from tests.places import ROOT
from tests.played_shell import orca_arguments

MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
WORKERS_MD = (ROOT / "docs" / "workers.md").read_text(encoding="utf-8")
SECRET = "0123456789abcdef"


def objects() -> dict[tuple[str, str], Any]:
    """Every object of the manifests, by kind and name."""
    result = [
        manifest for path in MANIFESTS for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    by_name = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in result}
    assert len(by_name) == len(result), "two objects of the same name"
    return by_name


OBJECTS = objects()
WORKERS, SERVER = OBJECTS["StatefulSet", "orca-worker"], OBJECTS["Deployment", "orca-server"]
WORKER_POD, SERVER_POD = (manifest["spec"]["template"]["spec"] for manifest in (WORKERS, SERVER))
(WORKER,), (SERVER_CONTAINER,) = WORKER_POD["containers"], SERVER_POD["containers"]


def as_kubelet(text: str, variables: Mapping[str, str]) -> str:
    """A container's argument after Kubernetes's own substitution, before any shell sees it."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def worker_pod_arguments(ordinal: int, tmp_path: Path, address: str = "10.2.0.9") -> list[str]:
    """The arguments with which the pod of this ordinal runs `orca`, as expanded by its shell."""
    environment = {"HOSTNAME": f"orca-worker-{ordinal}", "POD_IP": address}
    command = [as_kubelet(text, environment) for text in (*WORKER["command"], *WORKER["args"])]
    return orca_arguments(command, environment, tmp_path)


def parsed(arguments: list[str], tmp_path: Path) -> argparse.Namespace:
    """The parsed command line, with a temporary file in place of the secret's path."""
    args = cli.parser().parse_args(arguments)
    assert args.control_secret_file is not None
    args.control_secret_file = tmp_path / "secret"
    args.control_secret_file.write_text(SECRET)
    return args


def flags_of_workers(tmp_path: Path) -> list[argparse.Namespace]:
    every = [worker_pod_arguments(ordinal, tmp_path) for ordinal in range(WORKERS["spec"]["replicas"])]
    return [cli.parser().parse_args(arguments) for arguments in every]


def serve_arguments() -> list[str]:
    command = [*SERVER_CONTAINER["command"], *SERVER_CONTAINER["args"]]
    assert command.pop(0) == "orca"
    return command


@pytest.mark.parametrize(("ordinal", "stage"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_a_pods_ordinal_determines_its_stage(ordinal: int, stage: int, tmp_path: Path) -> None:
    command, model, *rest = worker_pod_arguments(ordinal, tmp_path)
    assert (command, model) == ("worker", "/models/checkpoint")
    assert rest[rest.index("--stage") + 1] == str(stage)


def test_the_workers_command_is_valid(tmp_path: Path) -> None:
    args = parsed(worker_pod_arguments(1, tmp_path), tmp_path)
    options = worker_options(args, SECRET)
    assert (options.stage, options.n_stages) == (1, WORKERS["spec"]["replicas"])
    assert (options.listen, options.data_host) == ("10.2.0.9:7000", "10.2.0.9")
    assert WORKER["resources"]["limits"]["nvidia.com/gpu"] == options.engine.tensor_parallel


def test_the_servers_command_is_valid(tmp_path: Path) -> None:
    settings = serve_settings(parsed(serve_arguments(), tmp_path), {})
    assert settings.engine.pipeline_parallel == WORKERS["spec"]["replicas"]
    assert settings.endpoint.host == "0.0.0.0"  # probes connect to the pod's own address
    (flags, *_) = flags_of_workers(tmp_path)
    assert settings.engine.tensor_parallel == flags.tensor_parallel
    assert settings.engine.model == cli.parser().parse_args(worker_pod_arguments(0, tmp_path)).model


def test_the_server_connects_to_the_workers_addresses(tmp_path: Path) -> None:
    workers = flags_of_workers(tmp_path)
    assert {flags.of for flags in workers} == {len(workers)}
    ports = {int(flags.listen.rpartition(":")[2]) for flags in workers}
    assert ports == {port["containerPort"] for port in WORKER["ports"]}
    (port,) = ports
    service = OBJECTS["Service", WORKERS["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert [entry["port"] for entry in service["spec"]["ports"]] == [port]
    name, within = WORKERS["metadata"]["name"], service["metadata"]["name"]
    expected = [f"{name}-{ordinal}.{within}:{port}" for ordinal in range(len(workers))]
    assert cli.parser().parse_args(serve_arguments()).workers == tuple(expected)


def test_port_names_and_labels_refer_to_something() -> None:
    pods = [
        (manifest["spec"]["template"], manifest["spec"]["selector"]["matchLabels"])
        for manifest in (WORKERS, SERVER)
    ]
    for template, selector in pods:
        assert selector == template["metadata"]["labels"]
        (container,) = template["spec"]["containers"]
        names = {port["name"] for port in container["ports"]}
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        ports = [(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes]
        (service,) = [
            manifest
            for (kind, _), manifest in OBJECTS.items()
            if kind == "Service" and manifest["spec"]["selector"] == selector
        ]
        assert {*ports, *(port["targetPort"] for port in service["spec"]["ports"])} <= names
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    assert pods[0][1] != pods[1][1]


def test_the_servers_ports_match_its_flags() -> None:
    args = cli.parser().parse_args(serve_arguments())
    ports = {port["name"]: port["containerPort"] for port in SERVER_CONTAINER["ports"]}
    assert ports == {"http": args.port, "grpc": args.grpc_port}
    assert {port["port"] for port in OBJECTS["Service", "orca"]["spec"]["ports"]} == set(ports.values())


@pytest.mark.parametrize(("pod", "container"), [(WORKER_POD, WORKER), (SERVER_POD, SERVER_CONTAINER)])
def test_the_secret_is_mounted_where_the_command_looks(pod: Any, container: Any, tmp_path: Path) -> None:
    arguments = worker_pod_arguments(0, tmp_path) if container is WORKER else serve_arguments()
    path = cli.parser().parse_args(arguments).control_secret_file
    (volume,) = [each for each in pod["volumes"] if "secret" in each]
    assert volume["secret"]["secretName"] == "orca-control"
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
    assert path == Path(mount["mountPath"]) / "secret"
    assert (
        f"kubectl create secret generic {volume['secret']['secretName']} --from-literal=secret=" in WORKERS_MD
    )
    assert volume["secret"]["defaultMode"] & 0o007 == 0
    # Otherwise the process could not read it.
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_pods_get_no_service_variables() -> None:
    assert WORKER_POD["enableServiceLinks"] is SERVER_POD["enableServiceLinks"] is False


def test_the_server_has_time_to_start_and_to_stop() -> None:
    args = cli.parser().parse_args(serve_arguments())
    startup = SERVER_CONTAINER["startupProbe"]
    assert startup["httpGet"]["path"] == "/ready"
    assert startup["periodSeconds"] * startup["failureThreshold"] > 2 * args.ready_timeout
    assert SERVER_CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert SERVER_CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health"
    program, seconds = SERVER_CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert SERVER_POD["terminationGracePeriodSeconds"] > int(seconds) + args.drain_timeout + 10


def test_there_is_one_server_and_all_workers_at_once() -> None:
    assert (SERVER["spec"]["replicas"], SERVER["spec"]["strategy"]["type"]) == (1, "Recreate")
    assert WORKERS["spec"]["podManagementPolicy"] == "Parallel"
    # A worker that takes long to load must not be killed.
    assert not {"livenessProbe", "startupProbe"} & WORKER.keys()


def test_only_these_pods_reach_a_worker() -> None:
    policy = OBJECTS["NetworkPolicy", "orca-workers"]["spec"]
    worker, server = (manifest["spec"]["template"]["metadata"]["labels"] for manifest in (WORKERS, SERVER))
    assert policy["podSelector"]["matchLabels"] == worker
    assert policy["policyTypes"] == ["Ingress"]
    allowed = [
        (source["podSelector"]["matchLabels"], [port["port"] for port in rule.get("ports", [])])
        for rule in policy["ingress"]
        for source in rule["from"]
    ]
    assert allowed == [(server, ["control"]), (worker, [])]  # no ports listed: all ports
    assert all(len(source) == 1 for rule in policy["ingress"] for source in rule["from"])
    assert "control" in {port["name"] for port in WORKER["ports"]}


def test_the_documented_commands_are_valid() -> None:
    lines = [line for line in WORKERS_MD.splitlines() if line.startswith("orca ")]
    assert len(lines) == 5
    for line in lines:
        cli.parser().parse_args(shlex.split(line, comments=True)[1:])
    named = set(re.findall(r"`(--[a-z-]+)`", WORKERS_MD))
    help_texts = [
        subparser.format_help()
        for action in cli.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
        for subparser in action.choices.values()
    ]
    known = set(re.findall(r"--[a-z-]+", " ".join(help_texts)))
    assert named - known == {"--requeue"}  # an argument of Slurm


def test_the_documented_deadlines_are_the_servers() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([0-9.]+) \|", WORKERS_MD, re.MULTILINE)
    defaults = serve_settings(cli.parser().parse_args(["serve"]), {})
    documented = {name.replace("-", "_"): float(value) for name, value in rows}
    assert len(documented) == 7
    for name, value in documented.items():
        assert {**values_of(defaults.engine), **values_of(defaults.endpoint)}[name] == value, name
