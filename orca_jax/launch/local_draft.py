# pyright: standard
"""Composition: loads a draft model into an engine of its own, beside the one that is served."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.config import EngineConfig, Layout, ServingConfig
from orca_jax.engine.draft_engine import DraftEngine, ServedCache
from orca_jax.engine_memory import EngineMemory
from orca_jax.errors import TensorMismatch
from orca_jax.execution.capacity import check_weights, stage_room
from orca_jax.execution.programs import OnProgram
from orca_jax.execution.served_states import ServedStates, states_shape
from orca_jax.execution.worker import Worker
from orca_jax.families.hf_config import read_hf_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.next_token import next_token_head
from orca_jax.families.parameters import HEAD_OFFSETS, shared_weights
from orca_jax.iteration.shape import EngineShape
from orca_jax.launch.local_engine import build_engine
from orca_jax.launch.local_memory import LocalMemory
from orca_jax.model.transformer import Parameters
from orca_jax.model_files.draft_model import eagle3_reader
from orca_jax.model_files.found_model import FoundModel
from orca_jax.planning.draft_model import (
    check_draft_model,
    draft_costs,
    draft_memory,
    draft_serving,
    draft_split,
)
from orca_jax.planning.sizes import engine_shape
from orca_jax.planning.stage_memory import DraftMemory, StageRoom
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.sharding.device_group import DeviceGroup, device_name
from orca_jax.sharding.partition import StagePart, split_model
from orca_jax.sharding.random_parameters import random_parameters
from orca_jax.sharding.specs import CACHE_SPEC

_log = logging.getLogger(__name__)

OF_DRAFT = "draft."  # begins the names of the draft model's weights in an update


@dataclass(frozen=True, slots=True)
class DraftPlace:
    """A draft model on its devices, before its weights are loaded; `memory` is what it will take of each."""

    name: str
    model: ModelConfig
    part: StagePart
    room: StageRoom
    memory: DraftMemory


def draft_place(name: str, model: ModelConfig, config: EngineConfig, dtype: jnp.dtype) -> DraftPlace:
    """The place of a draft model. Raises ConfigError for a model that cannot draft or does not fit."""
    check_draft_model(name, model)
    split, devices = draft_split(model, config), jax.devices()
    if model.reads is not None:
        devices = devices[config.n_devices - split.tensor_parallel :]
    (part,) = split_model(model, devices, split)
    model, n_devices = model.for_devices(len(part.group)), len(part.group)
    check_weights(model, dtype.itemsize, part, n_devices=n_devices)
    room = stage_room(model, dtype, part, n_devices=n_devices, block_size=config.block_size)
    return DraftPlace(name, model, part, room, draft_memory(model, config, room))


class LoadedDraft(NamedTuple):
    """A draft model's engine, weights and devices, and a head's way to the states that it reads."""

    engine: DraftEngine
    memory: LocalMemory
    group: DeviceGroup
    states: ServedStates | None

    def read(self, served: Worker, kv: KVManager) -> None:
        """Let a head read the states of the served model's worker, whose blocks `kv` has."""
        if self.states is not None:
            self.states.read = lambda: served.kept_states
            self.engine.served = ServedCache(kv, self.states.of_block)

    def share(self, served: Sequence[Worker]) -> None:
        """Let a head have the weights that it shares, of the served model's workers."""
        for name in shared_weights(self.engine.model):
            weight = _last(name, [worker.stage.parameters for worker in served])
            self.memory.share(name, _on_devices(weight, self.group))


def local_draft_engine(
    found: FoundModel,
    place: DraftPlace,
    config: EngineConfig,
    serving: ServingConfig,
    served: ModelConfig,
    parameters: Sequence[Parameters],
    rooms: Sequence[StageRoom],
    dtype: jnp.dtype,
    *,
    on_program: OnProgram | None = None,
) -> LoadedDraft:
    """Load the draft model `found`, beside the model `served` with these sizes on these stages.

    `parameters` are the weights of the served model's stages. Raises a CheckpointError.
    """
    model, part = place.model, place.part
    sizes = draft_serving(serving, n_slots=serving.n_slots, prefix_caching=serving.scheduling.prefix_caching)
    weights, worker = _weights(found, model, served, part, config, dtype), None
    shared = {name: _on_devices(_last(name, parameters), part.group) for name in shared_weights(model)}
    weights = {**shared, **weights}
    if model.reads is not None:
        worker = _head_worker(model, weights, sizes, part, config, engine_shape(served, serving, n_workers=1))
    built = build_engine(
        model,
        [weights],
        sizes,
        [part],
        workers=None if worker is None else [worker],
        compile_ahead=config.compile_ahead,
        on_program=on_program,
    )
    device = device_name(part.group.devices[0])
    memory = LocalMemory(built.workers.workers, stored=found.config, model=model, dtype=dtype)
    engine = DraftEngine(
        built.engine,
        built.kv,
        model=model,
        config=sizes,
        costs=draft_costs(sizes, model, place.room, served, rooms, device=device),
        memory=memory,
    )
    return LoadedDraft(engine, memory, part.group, None if worker is None else worker.states)


def _last(name: str, stages: Sequence[Parameters]) -> Any:
    """The weight on the last of the stages that has it: a head is there."""
    return next(parameters[name] for parameters in reversed(stages) if name in parameters)


def _on_devices(weight: Any, group: DeviceGroup) -> Any:
    """The weight's arrays, split the same way over the devices of `group`."""

    def put(array: jax.Array) -> jax.Array:
        split = array.sharding
        place = group.place(split.spec) if isinstance(split, NamedSharding) else group.place()
        return array if place == split else jax.device_put(array, place)

    return jax.tree.map(put, weight)


def _head_worker(
    model: ModelConfig,
    weights: Parameters,
    sizes: ServingConfig,
    part: StagePart,
    config: EngineConfig,
    served: EngineShape,
) -> Worker:
    """The worker of a head, which reads states in the cache of an engine with the shape `served`."""
    reads, shape = model.reads, engine_shape(model, sizes, n_workers=1)
    assert reads is not None
    worker = Worker(model, weights, shape, part, caches=not config.compile_ahead)
    worker.states = ServedStates(
        np.zeros(shape.n_blocks, np.int32),
        states_shape(reads.width, served, len(part.group)),
        worker.stored,
        place=part.group.place(),
        of_states=part.group.place(CACHE_SPEC),
    )
    return worker


def _weights(
    found: FoundModel,
    model: ModelConfig,
    served: ModelConfig,
    part: StagePart,
    config: EngineConfig,
    dtype: jnp.dtype,
) -> Parameters:
    placement = part.placement(model)
    if config.load_format == "dummy":
        return random_parameters(model, config.seed or 0, dtype, placement)
    assert found.directory is not None
    read = read_hf_config
    if model.reads is not None:
        own = model.reads.kind == "eagle3"
        read = partial(eagle3_reader, served=served) if own else next_token_head
    (weights,) = load_checkpoint(
        found.directory,
        dtype=dtype,
        vocab_multiple=model.vocab_multiple,
        kv_repeats=model.attention.kv_repeats,
        state_shares=model.n_state_shares,
        packed=model.has_packed_experts,
        forms=model.weight_forms,
        placements=[placement],
        read=read,
    ).stages
    if HEAD_OFFSETS in weights:
        _check_offsets(weights[HEAD_OFFSETS], model.vocab_size, found.directory)
    return weights


def _check_offsets(offsets: jax.Array, vocab_size: int, directory: Path) -> None:
    """Raise TensorMismatch unless a head's tokens are different ones of the vocabulary."""
    token_ids = np.arange(len(offsets)) + np.asarray(offsets).astype(np.int64)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or len({*token_ids.tolist()}) < len(token_ids):
        raise TensorMismatch(
            f"{directory}: tensor 'd2t': expected the distance of each token to a different one of "
            f"{vocab_size}, found tokens from {token_ids.min()} to {token_ids.max()}, "
            f"{len({*token_ids.tolist()})} of {len(token_ids)} different"
        )


class MemoryWithDraft:
    """An EngineMemory of the served model and its draft model.

    New weights whose names begin with "draft." are the draft model's; without any it keeps those that it has.
    Those of a head in the served model's checkpoint are read with the model's from a directory that has them.
    `share` is called when the served model's weights are others, or in other places.
    """

    def __init__(self, served: EngineMemory, draft: DraftEngine, share: Callable[[], None]) -> None:
        assert draft.memory is not None
        self._served = served
        self._draft = draft
        self._of_draft = draft.memory
        self._share = share

    def prepare(
        self, weights: object, *, cast: bool, lora_scale: float, layout: Layout | None = None
    ) -> Callable[[], None]:
        served, draft = _split(weights)
        parts = [self._served.prepare(served, cast=cast, lora_scale=lora_scale, layout=layout)]
        if draft:
            parts.append(self._of_draft.prepare(draft, cast=cast, lora_scale=1.0))
        elif isinstance(weights, str | Path):
            parts += self._of_head(lambda: self._of_draft.prepare(weights, cast=cast, lora_scale=1.0))

        return partial(self._install, parts, drafts_change=bool(draft))

    def read_ahead(self, directory: Path) -> Callable[[], None]:
        parts = [self._served.read_ahead(directory)]
        parts += self._of_head(lambda: self._of_draft.read_ahead(directory))
        return partial(self._install, parts, drafts_change=False)

    def _install(self, parts: Sequence[Callable[[], None]], *, drafts_change: bool) -> None:
        """Install new weights. A head's keys and values depend on the served model's too."""
        for part in parts:
            part()
        self._share()
        if drafts_change or self._draft.model.reads is not None:
            self._draft.forget()

    def _of_head(self, read: Callable[[], Callable[[], None]]) -> list[Callable[[], None]]:
        """A function that installs the head's weights in a directory; nothing if it has none."""
        reads = self._draft.model.reads
        if reads is None or reads.kind == "eagle3":  # which has a directory of its own
            return []
        try:
            return [read()]
        except TensorMismatch as error:
            _log.warning("the head that drafts keeps its weights: %s", error)
            return []

    def release(self, level: int) -> None:
        self._draft.forget()
        self._served.release(level)
        self._of_draft.release(level)

    def restore(self) -> None:
        self._served.restore()
        self._of_draft.restore()
        self._share()


def _split(weights: object) -> tuple[object, dict[str, Any]]:
    """The new weights without those of the draft model, and those."""
    if not isinstance(weights, Mapping):
        return weights, {}
    draft = {
        str(name).removeprefix(OF_DRAFT): value
        for name, value in weights.items()
        if str(name).startswith(OF_DRAFT)
    }
    if not draft:
        return weights, {}
    return {name: value for name, value in weights.items() if not str(name).startswith(OF_DRAFT)}, draft
