# pyright: standard
"""LoRA adapters on their way to the devices: of workers in this process, or in pieces to other processes."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import numpy as np

from orca_jax.checkpoint.peft import LoadedAdapter, Low
from orca_jax.config import LORA_EXTRAS
from orca_jax.control.adapter_call import AdapterPiece
from orca_jax.engine.adapter_sender import AdapterSender
from orca_jax.engine.remote_workers import RemoteWorkers
from orca_jax.errors import BadFrame
from orca_jax.execution.stage_device import PlaceAdapter
from orca_jax.execution.worker import Worker
from orca_jax.families.adapters import adaptable, change_shapes, padded_rank, part_sizes
from orca_jax.families.model_config import ModelConfig
from orca_jax.launch.adapter_library import Place
from orca_jax.planning.stage_layers import stage_layers
from orca_jax.request.adapter import Adapter
from orca_jax.scheduling.adapter_slots import PutAdapter


def placed_here(workers: Sequence[Worker], model: ModelConfig, dtype: np.dtype, max_rank: int) -> Place:
    """Put adapters on the devices of workers in this process."""

    def place(adapter: Adapter, loaded: LoadedAdapter) -> PutAdapter:
        stacked = loaded.stacked(model, padded_rank(max_rank), dtype)
        puts = [partial(worker.put_adapter, worker.placed_adapter(stacked)) for worker in workers]

        def put(slot: int) -> None:
            for one in puts:
                one(slot)

        return put

    return place


def sent_to(workers: RemoteWorkers, sender: AdapterSender, model: ModelConfig) -> Place:
    """Send adapters to worker processes, each of which gets those of its layers."""
    stages = [
        [*adaptable(model, layers, LORA_EXTRAS)] for layers in stage_layers(model.n_layers, workers.n_stages)
    ]

    def place(adapter: Adapter, loaded: LoadedAdapter) -> PutAdapter:
        def pieces_of(names: Sequence[str]) -> Iterator[AdapterPiece]:
            for name in names:
                for part, low in enumerate(loaded.changes.get(name, ())):
                    if low is not None:
                        yield AdapterPiece(name, part, low.rank, low.a.tobytes(), low.b.tobytes())

        sender.send(adapter.version, [partial(pieces_of, names) for names in stages])
        return partial(workers.put_adapter, adapter.version)

    return place


def from_pieces(model: ModelConfig, dtype: np.dtype) -> PlaceAdapter:
    """Put what `sent_to` sends on a worker's devices."""

    def place(worker: Worker, pieces: Iterator[AdapterPiece]) -> list[jax.Array]:
        shape = worker.shape
        rank, table = shape.adapter_rank, adaptable(model, worker.stage.part.layers, shape.adapter_extras)
        changes = dict[str, list[Low | None]]()
        for piece in pieces:
            parameter = table.get(piece.weight)
            n_parts = 0 if parameter is None else len(part_sizes(parameter))
            if parameter is None or piece.part >= n_parts or not 1 <= piece.rank <= rank:
                raise BadFrame(
                    f"an adapter of rank {piece.rank} came for part {piece.part} of {piece.weight[:200]!r}; "
                    f"this stage has no such part, or room for rank {rank} alone"
                )
            a, b = change_shapes(parameter, piece.part, piece.rank)
            parts = changes.setdefault(piece.weight, [None] * n_parts)
            parts[piece.part] = Low(_array(piece.a, a, dtype), _array(piece.b, b, dtype))
        return worker.placed_adapter(LoadedAdapter(changes, rank).stacked(model, padded_rank(rank), dtype))

    return place


def _array(data: bytes, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Raises BadFrame."""
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except ValueError as error:
        raise BadFrame(f"{len(data)} bytes of an adapter came; {list(shape)} of {dtype} is needed") from error
