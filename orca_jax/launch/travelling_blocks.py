"""Puts the transfer of prompts between servers together: leases, arriving blocks, and their transport."""

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from orca_jax.checks import host_and_port
from orca_jax.config import EngineConfig
from orca_jax.engine.block_transfer import LeaseServer, SocketTransport
from orca_jax.errors import ConfigError
from orca_jax.execution.host_blocks import PackedPrompt, StagesMemory
from orca_jax.execution.worker import Worker
from orca_jax.launch.block_fingerprint import block_fingerprint
from orca_jax.model_files.found_model import FoundModel
from orca_jax.request.kv_transfer import TransferFacts, is_local
from orca_jax.scheduling.arriving_blocks import ArrivingBlocks
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.leases import Leases

_FORMAT = 1
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of each file of weights


class TravellingBlocks:
    """The transfer of prompts to an engine in this process, and from it. Raises ConfigError."""

    def __init__(
        self, found: FoundModel, config: EngineConfig, dtype: str, kv: KVManager, workers: Sequence[Worker]
    ) -> None:
        memory = StagesMemory([worker.host for worker in workers if worker.host is not None])
        states = StagesMemory([worker.host_states for worker in workers if worker.host_states is not None])
        key = fingerprint(found, config, dtype, [*memory.kinds, *states.kinds])

        def pack(blocks: Sequence[int], state: int | None) -> PackedPrompt:
            packed = memory.pack(blocks, [worker.paged_caches for worker in workers])
            if state is None:
                return PackedPrompt(packed, len(blocks))
            of_state = states.pack([state], [worker.states_of_rows for worker in workers])
            return PackedPrompt(packed, len(blocks), of_state)

        facts = TransferFacts(key, config.control_secret)
        host, port = host_and_port("kv_transfer_address", config.kv_transfer_address or "127.0.0.1:0")
        if not config.control_secret and not is_local(host):
            raise ConfigError(
                f"kv_transfer_address is {config.kv_transfer_address!r}, which other machines can reach, and "
                "there is no control secret; set the same one for all servers, or use 127.0.0.1"
            )
        self._server: LeaseServer | None = None
        self._leases: Leases | None = None
        self._arriving: ArrivingBlocks | None = None
        if config.gives_blocks:
            self._server = LeaseServer(host, port, facts)
            self._leases = Leases(
                kv,
                facts,
                pack,
                block_bytes=memory.block_bytes,
                state_bytes=states.block_bytes,
                most_bytes=config.kv_host_bytes,
                seconds=config.kv_lease_seconds,
                engine_id=secrets.token_hex(16),
                address=(host, self._server.port),
                n_in_flight=len(workers) + 1,
            )
            self._server.start(self._leases)
            kv.leases = self._leases
        if config.takes_blocks:
            self._arriving = ArrivingBlocks(
                kv,
                facts,
                memory,
                SocketTransport(facts),
                seconds=config.kv_transfer_seconds,
                state_places=states if kv.host_states is not None else None,
            )
            kv.arriving = self._arriving

    def close(self) -> None:
        """End all transfers. No iteration is issued."""
        if self._arriving is not None:
            self._arriving.close()
        if self._leases is not None:
            self._leases.stop()
        if self._server is not None:
            self._server.close()


def fingerprint(found: FoundModel, config: EngineConfig, dtype: str, kinds: Sequence[object]) -> str:
    """A text that differs wherever the bytes of a block differ, and is the same on two machines.

    Weights count by the names and sizes of their files and by samples of their contents. Raises ConfigError
    for weights without files.
    """
    refusal = (
        f"role is {config.role!r}, and the model {found.name} has no files by which two servers would "
        "know that they have the same weights; leave it out"
    )
    return block_fingerprint(found, config, dtype, kinds, _samples, version=_FORMAT, refusal=refusal)


def _samples(files: Sequence[Path]) -> object:
    """A digest of the weights' names, sizes and samples; of all files where none is known to have weights."""
    weights = [path for path in files if path.suffix in (".safetensors", ".gguf")] or files
    digest = hashlib.sha256()
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
