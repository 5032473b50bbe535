"""The commands in deploy/kubernetes/groups and replicas are valid, and fit each other and their probes."""

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from server import cli
from server.commands.worker import worker_options
from server.settings.serve_settings import ServeSettings, serve_settings
from tests import played_shell
from tests.scaleout.loopback_pods import liveness
from tests.scaleout.manifests import KUBERNETES, leader_worker_set, objects_of

SECRET = "0123456789abcdef"
GROUPS, REPLICAS = KUBERNETES / "groups", KUBERNETES / "replicas"
SET = leader_worker_set()
TEMPLATE = SET["spec"]["leaderWorkerTemplate"]
LEADER, WORKER = TEMPLATE["leaderTemplate"], TEMPLATE["workerTemplate"]
(SERVER,) = LEADER["spec"]["containers"]
(DEPLOYMENT,) = objects_of(REPLICAS / "deployment.yaml")
REPLICA = DEPLOYMENT["spec"]["template"]
(REPLICA_SERVER,) = REPLICA["spec"]["containers"]
SERVERS = [(LEADER, SERVER), (REPLICA, REPLICA_SERVER)]
PODS = [LEADER, WORKER, REPLICA]


def orca_arguments(container: dict[str, Any], variables: dict[str, str], tmp_path: Path) -> list[str]:
    """The arguments that the container's shell passes to `orca`."""
    return played_shell.orca_arguments([*container["command"], *container["args"]], variables, tmp_path)


def variables(index: int, size: int) -> dict[str, str]:
    """The variables that the controller sets in a pod of group 3 in the namespace `models`."""
    return {
        "LWS_LEADER_ADDRESS": "llama-orca-group-3.llama-orca-group.models",
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
        "POD_IP": f"10.2.0.{index}",
    }


def settings_of_leader(size: int, tmp_path: Path) -> ServeSettings:
    args = cli.parser().parse_args(orca_arguments(SERVER, variables(0, size), tmp_path))
    assert args.control_secret_file == Path("/etc/orca/control/secret")
    args.control_secret_file = tmp_path / "secret"
    args.control_secret_file.write_text(SECRET)
    return serve_settings(args, {})


def settings_of_replica() -> ServeSettings:
    _, *words = REPLICA_SERVER["command"]
    args = cli.parser().parse_args(words)
    (mount,) = (m for m in REPLICA_SERVER["volumeMounts"] if m["name"] == "settings")
    assert args.config == f"{mount['mountPath']}/serve.yaml"
    args.config = str(REPLICAS / "serve.yaml")
    return serve_settings(args, {})


def worker_flags(container: dict[str, Any], index: int, size: int, tmp_path: Path) -> argparse.Namespace:
    args = cli.parser().parse_args(orca_arguments(container, variables(index, size), tmp_path))
    options = worker_options(args, SECRET)
    assert (options.stage, options.n_stages) == (index, size)
    assert options.listen.rpartition(":")[0] == options.data_host == f"10.2.0.{index}"
    return args


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_leader_finds_the_workers_of_its_group(size: int, tmp_path: Path) -> None:
    sidecar, other = LEADER["spec"]["initContainers"][-1], WORKER["spec"]["containers"][0]
    settings = settings_of_leader(size, tmp_path)
    workers = [worker_flags(sidecar if i == 0 else other, i, size, tmp_path) for i in range(size)]
    ports = {int(flags.listen.rpartition(":")[2]) for flags in workers}
    assert ports == {port["containerPort"] for port in other["ports"]}
    (port,) = ports
    # The name of a pod of a group is its leader's with the index, and it has the same headless Service.
    names = [f"llama-orca-group-3-{i}.llama-orca-group.models" for i in range(1, size)]
    assert settings.engine.workers == tuple(f"{host}:{port}" for host in ("10.2.0.0", *names))
    assert settings.engine.pipeline_parallel == size
    assert {flags.tensor_parallel for flags in workers} == {settings.engine.tensor_parallel}
    assert other["resources"]["limits"]["nvidia.com/gpu"] == settings.engine.tensor_parallel


def test_recovery_is_left_to_the_server() -> None:
    assert TEMPLATE["restartPolicy"] == "None"
    assert SET["spec"]["startupPolicy"] == "LeaderCreated"
    assert TEMPLATE["size"] == 2
    for spec in (LEADER["spec"], WORKER["spec"]):
        assert spec.get("restartPolicy", "Always") == "Always"  # of containers, by the kubelet
    # A worker that takes long to load must not be killed.
    sidecar, other = LEADER["spec"]["initContainers"][-1], WORKER["spec"]["containers"][0]
    assert not {"livenessProbe", "startupProbe"} & (sidecar.keys() | other.keys())


def test_stage_1_is_a_sidecar_that_is_otherwise_like_every_worker() -> None:
    *first, sidecar = LEADER["spec"]["initContainers"]
    (other,) = WORKER["spec"]["containers"]
    assert sidecar == other | {"restartPolicy": "Always"}
    assert first == WORKER["spec"]["initContainers"]
    assert LEADER["spec"]["volumes"] == WORKER["spec"]["volumes"]


def test_the_servers_settings_are_valid(tmp_path: Path) -> None:
    for settings, container in (
        (settings_of_leader(2, tmp_path), SERVER),
        (settings_of_replica(), REPLICA_SERVER),
    ):
        endpoint = settings.endpoint
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"http": endpoint.port, "grpc": endpoint.grpc_port}
        assert endpoint.host == "0.0.0.0"  # probes connect to the pod's address and, inside, to loopback
        assert settings.engine.model == "/models/checkpoint" and settings.notes == ()
    replica = settings_of_replica()
    assert str(replica.engine.compile_cache) == "/cache"
    assert REPLICA_SERVER["resources"]["limits"]["nvidia.com/gpu"] == replica.engine.tensor_parallel


@pytest.mark.parametrize("number", [0, 1])
def test_a_server_has_time_to_start_and_to_stop(number: int, tmp_path: Path) -> None:
    pod, server = SERVERS[number]
    settings = settings_of_replica() if number else settings_of_leader(2, tmp_path)
    startup = server["startupProbe"]
    seconds = startup["periodSeconds"] * startup["failureThreshold"]
    assert startup["httpGet"]["path"] == server["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert seconds > 2 * settings.engine.deadlines.ready_seconds
    if number:
        assert DEPLOYMENT["spec"]["progressDeadlineSeconds"] > seconds
    program, wait = server["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(wait) + settings.endpoint.drain_timeout + 10


def test_a_replica_that_is_not_ready_gets_no_request_at_once() -> None:
    for _, server in SERVERS:
        assert server["readinessProbe"].get("failureThreshold") == 1
        assert server["readinessProbe"]["periodSeconds"] <= 5


@pytest.mark.parametrize("pod", PODS, ids=["leader", "worker", "replica"])
def test_containers_refer_to_ports_and_volumes_that_are_there(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    containers = [*spec["initContainers"], *spec["containers"]]
    for container in containers:
        names = {port["name"] for port in container.get("ports", ())}
        probes = [
            probe for name, probe in container.items() if name.endswith("Probe") and "exec" not in probe
        ]
        assert {(probe.get("httpGet") or probe["tcpSocket"])["port"] for probe in probes} <= names
        assert {m["name"] for m in container["volumeMounts"]} <= {v["name"] for v in spec["volumes"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {m["name"] for container in containers for m in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    # Otherwise the process could not read the secret.
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


@pytest.mark.parametrize("folder", [GROUPS, REPLICAS], ids=["groups", "replicas"])
def test_clients_reach_servers_and_no_worker(folder: Path) -> None:
    (service,) = objects_of(folder / "service.yaml")
    selector = service["spec"]["selector"].items()
    chosen = [pod for pod in PODS if selector <= pod["metadata"]["labels"].items()]
    assert chosen == [LEADER if folder is GROUPS else REPLICA]
    names = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == names
    # The controller makes a headless Service with the name of the set.
    assert service["metadata"]["name"] != SET["metadata"]["name"]


def test_only_pods_of_groups_reach_a_worker() -> None:
    (policy,) = (one["spec"] for one in objects_of(GROUPS / "network-policy.yaml"))
    selected = policy["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in (LEADER, WORKER))
    assert not selected <= REPLICA["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    everybody, members = policy["ingress"]
    assert "from" not in everybody
    assert {port["port"] for port in everybody["ports"]} == {port["name"] for port in SERVER["ports"]}
    assert members == {"from": [{"podSelector": policy["podSelector"]}]}


@contextmanager
def server_that_says(status: str, code: int) -> Iterator[int]:
    """A server on loopback that always answers with this phase; returns its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"status": status}).encode()
            self.send_response(code if self.path == "/ready" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.parametrize("container", [SERVER, REPLICA_SERVER], ids=["leader", "replica"])
def test_only_an_engine_that_failed_for_good_or_no_answer_fails_the_liveness_probe(
    container: dict[str, Any],
) -> None:
    for status, code, expected in (
        ("ready", 200, 0),
        ("loading", 503, 0),
        ("recovering", 503, 0),
        ("draining", 503, 0),
        ("failed", 503, 1),
    ):
        with server_that_says(status, code) as port:
            assert liveness(container, "127.0.0.1", port) == expected, status
    assert liveness(container, "127.0.0.1", port) != 0  # nobody answers any more
