"""Stages in actors on several nodes (raylets of this machine): the dead are restarted, streams continue."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.places import ROOT
from tests.ray.conftest import SOON, Served  # it prepares Ray's import
from tests.whole.workers.worker_harness import write_model

# isort: split
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from orca_jax import LLM, SamplingParams
from server.ray.app import build_app

T = TypeVar("T")

N_OUTPUT = 160
PROMPT = "stages"
RECOVERED = 300.0  # on a busy machine, with nothing compiled
SIZES: dict[str, Any] = {"max_batch_size": 2, "n_slots": 1024, "max_batch_tokens": 64, "dtype": "float32"}

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Stage:
    """A stage's actor: its processes and its node."""

    actor: int
    worker: int
    node: str
    address: str


class Nodes:
    """Three nodes, and an application with one engine of two stages, each on a separate node."""

    def __init__(self, cluster: Cluster, served: Served) -> None:
        self.cluster = cluster
        self.served = served

    def stages(self) -> list[Stage]:
        """Wait until both actors answer."""
        return [eventually(lambda stage=stage: self._stage(stage)) for stage in (1, 2)]

    def _stage(self, number: int) -> Stage | None:
        try:
            (name,) = actor_names(f" stage {number}")
            stage = Stage(*ray.get(ray.get_actor(**name).whereabouts.remote(), timeout=SOON))
        except (RayError, ValueError):  # it is being restarted
            return None
        return stage if stage.worker is not None else None

    def replica(self) -> int:
        """The process of the engine's replica."""
        (pid,) = [
            actor["Pid"]
            for actor in self.cluster.global_state.actor_table(None, None, "ALIVE").values()
            if "#orca-engine#" in actor["Name"] and " stage " not in actor["Name"]
        ]
        return pid

    def text(self, then: Callable[[], object] = lambda: None) -> str:
        """The text of a greedy stream; `then` runs after its third part."""
        with self.served.client(timeout=RECOVERED) as client:
            stream = client.completions.create(
                model="small", prompt=PROMPT, max_tokens=N_OUTPUT, temperature=0, stream=True
            )
            parts = list[str]()
            for chunk in stream:
                parts.append(chunk.choices[0].text)
                if len(parts) == 3:
                    then()
            return "".join(parts)

    def losses(self) -> float:
        """The number of workers that the engine has lost."""
        (line,) = [
            line
            for line in self.served.get("/metrics").text.splitlines()
            if line.startswith("orca_worker_losses_total")
        ]
        return float(line.split()[-1])


def actor_names(part: str) -> list[dict[str, str]]:
    """The names, with namespaces, of actors that have `part` in theirs."""
    every: Any = ray.util.list_named_actors(all_namespaces=True)  # its annotation leaves namespaces out
    return [named for named in every if part in named["name"]]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def secret_of(worker: int) -> str:
    """The secret in a process's environment, which only its user can read."""
    variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    (secret,) = (value for value in variables if value.startswith(b"ORCA_WORKER_SECRET="))
    return secret.decode().partition("=")[2]


def eventually(found: Callable[[], T | None], seconds: float = RECOVERED, pause: float = 0.2) -> T:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(pause)
    return value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), n_positions=256)


@pytest.fixture(scope="module")
def right(model: Path) -> str:
    """The expected texts, from an engine in one process."""
    with LLM(str(model), **SIZES) as llm:
        params = SamplingParams(max_tokens=N_OUTPUT, temperature=0)
        return llm.generate([PROMPT], params)[0].text


@pytest.fixture(scope="module")
def nodes(model: Path, http_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    small = {"object_store_memory": 80_000_000, "include_dashboard": False}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="ray") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=1, temp_dir=directory, **small)
            ray.init(address=cluster.address, log_to_driver=bool(os.environ.get("ORCA_TESTS_RAY_LOGS")))
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http_port})
            app = build_app(
                SIZES
                | {
                    "model": str(model),
                    "served_model_name": "small",
                    "pipeline_parallel": 2,
                    "stage_actors": True,
                    "stage_strategy": "STRICT_SPREAD",
                    "iteration_timeout": 30,
                    "ready_timeout": RECOVERED,
                    "access_log": "off",
                    "compile_cache": str(tmp_path_factory.mktemp("programs")),
                }
            )
            # The door is on the head's node, which no test removes; there is no room for an engine yet.
            serve.run_many([serve.RunTarget(app, name="orca")], wait_for_applications_running=False)
            eventually(lambda: actor_names("#orca-door#"))
            for _ in range(2):
                cluster.add_node(num_cpus=1, **small)
            served = Served("orca", f"http://127.0.0.1:{http_port}")
            eventually(lambda: serve.status().applications["orca"].status == "RUNNING", pause=1.0)
            yield Nodes(cluster, served)
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


def test_each_stage_has_a_node_and_streams_are_those_of_one_process(nodes: Nodes, right: str) -> None:
    assert len(right) > N_OUTPUT // 2
    one, two = nodes.stages()
    assert len({one.node, two.node}) == 2
    assert len({one.actor, one.worker, two.actor, two.worker}) == 4
    (secret,) = {secret_of(stage.worker) for stage in (one, two)}
    assert len(secret) == 64
    assert not any(secret in arguments.read_text() for arguments in Path("/proc").glob("[0-9]*/cmdline"))
    assert nodes.text() == right
    assert nodes.losses() == 0


@pytest.mark.parametrize("what", ["worker", "actor"])
def test_a_stream_outlives_a_stage_s_processes(nodes: Nodes, right: str, what: str) -> None:
    before = nodes.stages()[1]
    losses = nodes.losses()
    victim = before.worker if what == "worker" else before.actor
    assert nodes.text(lambda: os.kill(victim, signal.SIGKILL)) == right
    after = nodes.stages()[1]
    assert nodes.losses() > losses
    assert after.worker != before.worker
    assert (after.actor == before.actor) is (after.address == before.address) is (what == "worker")
    assert not is_alive(before.worker), "a worker ends with its actor"
    assert nodes.text() == right


def test_a_stream_outlives_a_stage_s_node(nodes: Nodes, right: str) -> None:
    stages = nodes.stages()
    lost, number = next(
        (node, number)
        for number, stage in enumerate(stages)
        for node in nodes.cluster.worker_nodes
        if node.node_id == stage.node
    )
    before = stages[number]
    nodes.cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    assert nodes.text(lambda: nodes.cluster.remove_node(lost, allow_graceful=False)) == right
    # The stream may end before the loss is noticed, and a process may outlive its node by a moment.
    assert eventually(lambda: nodes.stages()[number].node != before.node)
    assert nodes.stages()[number].address != before.address
    assert nodes.text() == right


def test_nothing_of_a_replica_outlives_it(nodes: Nodes) -> None:
    stages = nodes.stages()
    os.kill(nodes.replica(), signal.SIGKILL)
    pids = [pid for stage in stages for pid in (stage.actor, stage.worker)]
    assert len(pids) == 4
    eventually(lambda: not any(is_alive(pid) for pid in pids), SOON)
    again = nodes.stages()  # of the replica in its place
    assert {stage.actor for stage in again}.isdisjoint(pids)
