"""The memory of one stage, by arithmetic: what lies on each of its devices.

One truth for `orca plan` and for the engine's choice of `n_slots`. Weights, tables and slots are exact. What
a running program needs besides is XLA's to decide; here it is estimated from what XLA was seen to keep
(docs/plan.md), and `orca plan` asks XLA where it can.

T is the tokens of the largest bucket, R the rows of a batch, n the devices of the stage.
"""

from dataclasses import dataclass, replace
from typing import Literal

from orca_jax.config import Attention, ServingConfig
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.parameters import stage_elements

Source = Literal["arithmetic", "compiled"]

ITEMSIZE: dict[str, int] = {  # of a config.Dtype
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}
_TABLE_BYTES = 8  # execution/sampling.py: an int32 and a float32 for each token of the vocabulary ...
_LAST_TOKEN_BYTES = 4  # ... and an int32, for each row
_SCORED = 128  # execution/stage.py: tokens of a prompt that are scored at a time
_LOGIT_BYTES = 4
# Iterations whose results are on a device at a time: one that runs, and one whose tokens are on their way.
_KEPT = 2
# model/attention.py's static shapes: query tokens of a tile (cudnn/tiles.py has as many), and keys gathered
# for all tiles at once.
_TILE_QUERIES, _TILE_KEYS = 64, 256
_GATHERED = 2.5  # such gathered arrays, of keys or of values, that XLA keeps at a time
# pallas/work_list/bounds.py: queries of a tile that the kernel may cut, the heads of a device up to which it
# does so, and how many parts there is room for: two of each core of a Hopper GPU.
_CUT_QUERIES, _CUT_HEADS, _CUT_PARTS = 128, 16, 2 * 132


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes on each of a stage's devices.

    `tables` are what the choice of tokens keeps by row. `temporaries` are what programs need while they run,
    with the results that later programs take from them. `slot` is one token's keys and values in the stage's
    layers. `source` is where `temporaries` come from.
    """

    weights: int
    tables: int
    temporaries: int
    slot: int
    source: Source = "arithmetic"

    @property
    def fixed(self) -> int:
        """What is not for keys and values."""
        return self.weights + self.tables + self.temporaries


def stage_memory(
    config: ModelConfig,
    layers: range,
    n_devices: int,
    serving: ServingConfig,
    *,
    n_rows: int,
    itemsize: int,
    attention: Attention,
) -> StageMemory:
    """That of the stage of these layers on `n_devices`, by arithmetic.

    `serving` says the sizes of a batch (`n_slots` does not matter here), `n_rows` how many requests may be
    admitted, `itemsize` is in bytes, of an element of weights, keys and values.
    """
    return StageMemory(
        weights=stage_weight_bytes(config, layers, n_devices, itemsize),
        tables=table_bytes(config, layers, n_rows),
        temporaries=temporary_bytes(
            config, layers, n_devices, serving, itemsize=itemsize, attention=attention
        ),
        slot=slot_bytes(config, layers, n_devices, itemsize),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRoom:
    """What a stage's devices have left, their weights loaded; bytes are those of each device.

    `free` is for all else, None where the devices do not say. `modest` is what keys and values take at most
    unless somebody says more: on a machine whose memory is not this engine's alone; else None. One of both is
    there. `temporaries` are XLA's own, where it was asked.
    """

    layers: range
    n_devices: int
    itemsize: int
    attention: Attention
    free: int | None
    modest: int | None = None
    temporaries: int | None = None

    def memory(self, config: ModelConfig, serving: ServingConfig, n_rows: int) -> StageMemory:
        """What the stage needs for batches of these sizes."""
        memory = stage_memory(
            config,
            self.layers,
            self.n_devices,
            serving,
            n_rows=n_rows,
            itemsize=self.itemsize,
            attention=self.attention,
        )
        if self.temporaries is None:
            return memory
        return replace(memory, temporaries=self.temporaries, source="compiled")

    def kv_bytes(self, memory: StageMemory) -> int | None:
        """What is free for keys and values beside tables and temporaries; None where nobody knows."""
        return None if self.free is None else max(0, self.free - memory.tables - memory.temporaries)

    def slots(self, memory: StageMemory) -> int:
        """The slots that fit."""
        budgets = [n for n in (self.kv_bytes(memory), self.modest) if n is not None]
        assert budgets, "a device that does not say what it has gets a modest share"
        return min(budgets) // memory.slot


def shared_vocabulary(config: ModelConfig, n_devices: int) -> ModelConfig:
    """The model as it lies on that many devices: its vocabulary padded so that they share it evenly."""
    rows = -(-config.padded_vocab_size // n_devices) * n_devices
    return config if rows == config.padded_vocab_size else replace(config, vocab_multiple=rows)


def stage_weight_bytes(config: ModelConfig, layers: range, n_devices: int, itemsize: int) -> int:
    """Of each device: its share of what is split, and all of the rest."""
    return itemsize * stage_elements(config, layers, n_devices)


def slot_bytes(config: ModelConfig, layers: range, n_devices: int, itemsize: int) -> int:
    """Of one slot on each device: the keys and values of its heads in these layers (ORCA 4.2)."""
    return 2 * len(layers) * config.attention.kv_width // n_devices * itemsize


def table_bytes(config: ModelConfig, layers: range, n_rows: int) -> int:
    """What the last stage keeps for the choice of tokens, on each device; of others the last tokens."""
    if layers.stop != config.n_layers:
        return n_rows * _LAST_TOKEN_BYTES
    return n_rows * (config.vocab_size * _TABLE_BYTES + _LAST_TOKEN_BYTES)


def temporary_bytes(
    config: ModelConfig,
    layers: range,
    n_devices: int,
    serving: ServingConfig,
    *,
    itemsize: int,
    attention: Attention,
) -> int:
    """What the largest program needs while it runs, and the results of iterations that are kept meanwhile."""
    n_tokens, n_rows = serving.max_batch_tokens, min(serving.max_batch_size, serving.max_batch_tokens)
    cpu = attention in ("native", "follow_lengths")
    # The residual stream, the feed-forward layer's inner array, and the product behind it. A GPU's programs
    # apply the activation function in place.
    inner = max(config.layers[i].feed_forward.size for i in layers) // n_devices * (2 if cpu else 1)
    needed = n_tokens * itemsize * (2 * config.hidden_size + inner)
    if attention == "cudnn" and serving.deterministic:
        attention = "static"  # as execution/attention_backend.py has it
    if attention == "kernel" and not serving.deterministic:
        needed = max(needed, _kernel_bytes(config, n_devices, n_tokens, itemsize))
    if attention == "cudnn":
        needed = max(needed, _cudnn_attention_bytes(config, n_devices, serving, n_rows, itemsize))
    if attention == "static":
        starts, work = _static_attention_bytes(config, len(layers), n_devices, n_tokens, n_rows, itemsize)
        needed = starts + max(needed, work)
    if layers.stop == config.n_layers:
        # The full sampler keeps the rows' weights. Scoring has the product, and candidates for the likeliest;
        # a CPU's sorts whole rows with their indices.
        full = n_rows * config.vocab_size * _LOGIT_BYTES
        scored = _SCORED * config.vocab_size * (4 * _LOGIT_BYTES if cpu else itemsize + 1)
        needed = max(needed, full, scored)
    return needed + result_bytes(config, layers, serving, itemsize)


def result_bytes(config: ModelConfig, layers: range, serving: ServingConfig, itemsize: int) -> int:
    """What is kept of iterations between their programs: hidden states, and of the last stage the logits."""
    n_tokens, n_rows = serving.max_batch_tokens, min(serving.max_batch_size, serving.max_batch_tokens)
    logits = n_rows * config.vocab_size * _LOGIT_BYTES if layers.stop == config.n_layers else 0
    return _KEPT * (n_tokens * config.hidden_size * itemsize + logits)


def _kernel_bytes(config: ModelConfig, n_devices: int, n_tokens: int, itemsize: int) -> int:
    """Of attention by the kernel, one layer's work: its queries, keys, values and result, and tiles' parts.

    A part in 16 bits has what its rounding took away beside it; in 32 bits it has not.
    """
    around = n_tokens * itemsize * (config.hidden_size + 4 * config.hidden_size // n_devices)
    if n_tokens <= _CUT_QUERIES or config.n_heads // n_devices > _CUT_HEADS:
        return around
    return around + _CUT_PARTS * _CUT_QUERIES * config.head_size * 4


def _cudnn_attention_bytes(
    config: ModelConfig, n_devices: int, serving: ServingConfig, n_rows: int, itemsize: int
) -> int:
    """Of attention by cuDNN, one layer's work: of each tile its queries and both results, and the near keys.

    For the near keys XLA keeps their values side by side, and a weight for each query and head.
    """
    n_tokens, block = serving.max_batch_tokens, serving.block_size
    width, heads = config.hidden_size // n_devices, config.n_heads // n_devices
    queries = min(_TILE_QUERIES, n_tokens)
    n_tiles = n_tokens // queries + min(n_rows, n_tokens // 2)
    keys = ((block + queries - 2) // block + 1) * block
    tile = queries * width * (2 * itemsize + 4) + keys * width * itemsize + queries * keys * heads * 4
    return n_tiles * tile + 3 * n_tokens * config.hidden_size * itemsize


def _static_attention_bytes(
    config: ModelConfig, n_layers: int, n_devices: int, n_tokens: int, n_rows: int, itemsize: int
) -> tuple[int, int]:
    """Of attention by static shapes: what every layer's loop starts from, and the work of one layer.

    XLA fills the starting sums of all layers before the first. A layer's work is the keys and values that are
    gathered for all tiles at once, and their scores.
    """
    width, heads = config.hidden_size // n_devices, config.n_heads // n_devices
    queries, keys = min(_TILE_QUERIES, n_tokens), min(_TILE_KEYS, config.n_positions)
    n_tiles = n_tokens // queries + min(n_rows, n_tokens // 2)
    starts = n_tiles * queries * 4 * (width + 2 * heads) + n_tokens * width * itemsize
    gathered, scores = n_tiles * keys * width * itemsize, n_tiles * heads * queries * keys * 4
    around = 2 * n_tokens * config.hidden_size * itemsize
    return n_layers * starts, int(_GATHERED * gathered) + scores + around
