"""A LeaderWorkerSet simulated with processes: pods are loopback addresses, containers are processes.

This file sets the names and variables of a group as the controller does, and starts and restarts containers
with their command and environment as the kubelet does. Network and volumes are simulated by two programs,
`orca` and `cp`, which precede the real ones on PATH and put this machine's addresses and folders into their
arguments.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.places import ROOT
from tests.xla_flags import xla_flags

# Replaces names of pods by their addresses, "all addresses of this pod" by the one it has, and mounted paths
# by those of this machine; then it becomes the program.
_STAND_IN = """#!{python} -I
import json, os, sys
play = json.loads(os.environ.pop("PLAY"))

def here(text):
    host, colon, port = text.rpartition(":")
    if colon:
        return play["names"].get(host, host) + colon + port
    for mounted, folder in play["mounts"].items():
        if text == mounted or text.startswith(mounted + "/"):
            return folder + text[len(mounted):]
    return os.environ["POD_IP"] if text == "0.0.0.0" else text

words = [",".join(map(here, word.split(","))) for word in sys.argv[1:]]
program = {{"cp": ["/bin/cp"], "orca": [sys.executable, "-m", "server.cli"]}}[os.path.basename(sys.argv[0])]
os.execv(program[0], [*program, *words, *play["flags"].get(words[0], [])])
"""


def liveness(manifest: Mapping[str, Any], host: str, port: int) -> int:
    """The status of a container's liveness probe; `host` is the container's loopback address."""
    program, *words = manifest["livenessProbe"]["exec"]["command"]
    assert program == "python"
    here = [word.replace('"127.0.0.1", 8000', f'"{host}", {port}') for word in words]
    assert here != words
    return subprocess.run([sys.executable, *here], capture_output=True, timeout=30).returncode


class Container:
    """A container of a pod as a process; call `start` again to restart it as the kubelet does."""

    def __init__(
        self, manifest: Mapping[str, Any], environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        self.manifest = manifest
        self._folder = folder
        self.environment = environment
        self.n_starts = 0
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the last start."""
        assert self._process is not None, f"{self._log.stem} was never started"
        return self._process

    def start(self) -> None:
        """Start the command of the manifest."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.manifest["command"], *self.manifest.get("args", ())],
                env=dict(self.environment),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.n_starts += 1

    def stderr(self) -> str:
        """The stderr of all its processes."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def stop(self, seconds: float) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)


class Group:
    """The pods of one replica: a server, a worker for each stage, and each worker's init container."""

    def __init__(
        self,
        index: int,
        address: str,
        *,
        server: Container,
        workers: list[Container],
        once: list[Container],
    ) -> None:
        self.index = index
        self.address = address  # of the leader
        self.once = once
        self.server = server
        self.workers = workers

    @property
    def http_address(self) -> tuple[str, int]:
        """The address of the leader's endpoint."""
        (port,) = (port for port in self.server.manifest["ports"] if port["name"] == "http")
        return self.address, port["containerPort"]

    @property
    def containers(self) -> list[Container]:
        """All running containers, the leader's first, in the kubelet's order."""
        return [self.workers[0], self.server, *self.workers[1:]]

    def pids(self) -> list[int]:
        """Process ids of all containers."""
        return [container.process.pid for container in self.containers]

    def alive(self) -> bool:
        """Whether no container has ended."""
        return all(container.process.poll() is None for container in self.containers)

    def start(self) -> Self:
        """Run the init containers of all pods to their end, then start the others."""
        for container in self.once:
            container.start()
            assert container.process.wait(30) == 0, container.stderr()
        for container in self.containers:
            container.start()
        return self

    def stop(self, seconds: float = 30.0) -> list[int]:
        """Stop it as Kubernetes does: server, sidecar, then the other pods; return the exit statuses."""
        return [self.server.stop(seconds), *(worker.stop(seconds) for worker in self.workers)]


class LoopbackPods:
    """The groups of a LeaderWorkerSet; a context manager that ends every process that still runs.

    They write to `folder` only. `mounts` says which folder or file of this machine is mounted in place of a
    path of the manifest, and `flags` what to add to the command line of each command of `orca`.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        n_groups: int,
        folder: Path,
        *,
        mounts: Mapping[str, Path],
        flags: Mapping[str, Any],
    ) -> None:
        self.folder = folder
        self._mounts, self._flags = mounts, flags
        (self.folder / "bin").mkdir()
        for program in (self.folder / "bin" / name for name in ("orca", "cp")):
            program.write_text(_STAND_IN.format(python=sys.executable))
            program.chmod(0o755)
        template = manifest["spec"]["leaderWorkerTemplate"]
        size = template["size"]
        network = f"127.{1 + os.getpid() % 250}"  # a run beside this one has other addresses
        self._name = manifest["metadata"]["name"]
        self._names = {
            self._dns_name(group, i): f"{network}.{group}.{i + 1}"
            for group in range(n_groups)
            for i in range(size)
        }
        self.programs = self.folder / "programs"  # what an image would have in /cache
        self.programs.mkdir()
        self.groups = [self._group(group, size, template) for group in range(n_groups)]

    def _pod_name(self, group: int, index: int) -> str:
        """The pod's name as the controller makes it."""
        return f"{self._name}-{group}" if index == 0 else f"{self._name}-{group}-{index}"

    def _dns_name(self, group: int, index: int) -> str:
        """The pod's DNS name; the subdomain policy Shared puts all pods into one headless Service."""
        return f"{self._pod_name(group, index)}.{self._name}.default"

    def _group(self, group: int, size: int, template: Mapping[str, Any]) -> Group:
        leader, worker = template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]
        specs = [leader] + [worker] * (size - 1)
        every: dict[str, list[Container]] = {"server": [], "worker": [], "programs": []}
        for i, spec in enumerate(specs):
            for manifest in (*spec["initContainers"], *spec["containers"]):
                every[manifest["name"]].append(self._container(manifest, group, i, size))
        (server,) = every["server"]
        address = self._names[self._dns_name(group, 0)]
        return Group(group, address, server=server, workers=every["worker"], once=every["programs"])

    def cache(self, group: int, index: int) -> Path:
        """The folder for a pod's volume of compiled programs."""
        return self.folder / self._pod_name(group, index) / "cache"

    def _container(self, manifest: Mapping[str, Any], group: int, index: int, size: int) -> Container:
        """Make a container, with the controller's variables before the manifest's."""
        address = self._names[self._dns_name(group, index)]
        variables = {
            "LWS_LEADER_ADDRESS": self._dns_name(group, 0),
            "LWS_GROUP_SIZE": str(size),
            "LWS_WORKER_INDEX": str(index),
            "HOSTNAME": self._pod_name(group, index),
        }
        # A program is found again at the same path only, so the volume has the same in every pod, as in a
        # cluster: `cache` in the pod's folder. A container that mounts it elsewhere sees the image's folder.
        mounts = {mounted: str(path) for mounted, path in self._mounts.items()} | {
            "/cache": str(self.programs)
        }
        mounts |= {m["mountPath"]: "cache" for m in manifest["volumeMounts"] if m["name"] == "cache"}
        cache = self.cache(group, index)
        cache.mkdir(parents=True, exist_ok=True)
        for entry in manifest.get("env", ()):
            if "value" not in entry:
                assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}, entry
            variables[entry["name"]] = entry.get("value", address)
        if "JAX_COMPILATION_CACHE_DIR" in variables:
            variables["JAX_COMPILATION_CACHE_DIR"] = mounts[variables["JAX_COMPILATION_CACHE_DIR"]]
        play = {"names": self._names, "mounts": mounts, "flags": self._flags}
        environment = {
            **variables,
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(),
            "PLAY": json.dumps(play),
        }
        return Container(manifest, environment, cache.parent, cache.with_name(f"{manifest['name']}.log"))

    def logs(self) -> str:
        """The end of each container's output, for a failure's message."""
        every = [container for group in self.groups for container in group.containers]
        return "\n".join(f"{c.environment['HOSTNAME']}: {c.stderr()[-1500:]}" for c in every if c.n_starts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            for container in group.containers:
                container.kill()
