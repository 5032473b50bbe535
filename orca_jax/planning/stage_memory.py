"""The memory on each device of a stage, by arithmetic.

`orca plan` and the engine's choice of `n_slots` share this code. Weights, tables and slots are exact. XLA
decides how much memory a running program needs for temporaries; here they are estimated from observed memory
plans (docs/plan.md), and `orca plan` asks XLA where it can.
"""

from dataclasses import dataclass
from typing import Literal

from orca_jax.config import Attention
from orca_jax.families.adapters import adapter_bytes, padded_rank
from orca_jax.families.model_config import FeedForward, Layer, ModelConfig
from orca_jax.families.parameters import encoder_layers_of, stage_bytes, whole_experts
from orca_jax.families.recurrence_config import state_bytes as state_bytes_of_layer
from orca_jax.families.weight_form import Dense
from orca_jax.iteration.rows.scored import SCORED
from orca_jax.iteration.shape import EngineShape

Source = Literal["arithmetic", "compiled"]

ITEMSIZE: dict[str, int] = {  # by config.Dtype
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}
_TABLE_BYTES = 8  # execution/sampling.py: an int32 and a float32 for each token of the vocabulary ...
_LAST_TOKEN_BYTES = 4  # ... and an int32, for each row
_LOGIT_BYTES = 4
_INDEX_BYTES = 4
_FEWEST_SELECTED = 256  # model/selection.py: keys that one trip scores
_ANGLE_BYTES = 4  # model/rotation.py: cosine and sine are float32
# Iterations whose results are on a device at a time: the running one, and one whose tokens go to the host or
# whose hidden states go to the next stage.
KEPT_ITERATIONS = 2
# model/attention.py's static shapes: query tokens of a tile (the same in cudnn/tiles.py), and keys gathered
# for all tiles at once.
_TILE_QUERIES, _TILE_KEYS = 64, 256
_GATHERED = 2.5  # arrays of gathered keys or values that XLA keeps at a time
# pallas/work_list/bounds.py: queries of a tile that the kernel may split, the most heads per device for which
# it splits, and the number of parts it has room for: two per SM of a Hopper GPU.
_CUT_QUERIES, _CUT_HEADS, _CUT_PARTS = 128, 16, 2 * 132
_LATENT_HEADS = 64  # pallas/latent_attention.py: the most heads of a part


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes on each of a stage's devices.

    `tables` are the sampler's tables, which have a row per request, `states` those of recurrent layers, one
    for each row, `snapshots` those of the prefix cache, and `draft_states` those after drafted tokens.
    `adapters` is the room for LoRA adapters.
    `temporaries` are what programs need while they run, including results that later programs read. `slot` is
    one token's keys and values in the stage's layers. `source` says how `temporaries` was determined.
    """

    weights: int
    tables: int
    temporaries: int
    slot: int
    states: int = 0
    snapshots: int = 0
    draft_states: int = 0
    adapters: int = 0
    source: Source = "arithmetic"

    @property
    def fixed(self) -> int:
        """All memory except the KV cache."""
        states = self.states + self.snapshots + self.draft_states
        return self.weights + self.tables + states + self.adapters + self.temporaries


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRoom:
    """The memory left on a stage's devices after loading its weights, in bytes per device.

    `free` is None if the devices do not report it. `modest` bounds the KV cache on a machine whose memory the
    engine shares with other programs (None: no bound). At least one of the two is set. `temporaries` is XLA's
    figure, if it was asked. `itemsize` is the bytes of an element of weights, keys and values. `draft` is the
    memory that a draft model takes besides.
    """

    layers: range
    n_devices: int
    itemsize: int
    attention: Attention
    free: int | None
    modest: int | None = None
    temporaries: int | None = None
    draft: "DraftMemory | None" = None

    def memory(self, config: ModelConfig, shape: EngineShape) -> StageMemory:
        """The memory that the stage needs in an engine with the shape's rows and tokens.

        The number of blocks does not matter. Temporaries are estimated unless XLA was asked.
        """
        layers, n_devices, itemsize = self.layers, self.n_devices, self.itemsize
        temporaries = self.temporaries
        if temporaries is None:
            temporaries = temporary_bytes(
                config, layers, n_devices, shape, itemsize=itemsize, attention=self.attention
            )
        state = state_bytes(config, layers, n_devices, itemsize)
        return StageMemory(
            weights=stage_bytes(config, layers, n_devices, itemsize),
            tables=table_bytes(config, layers, shape.n_rows),
            temporaries=temporaries,
            slot=slot_bytes(config, layers, n_devices, itemsize),
            states=shape.n_rows * state,
            snapshots=shape.n_snapshots * state,
            draft_states=shape.n_draft_states * state,
            adapters=self._adapter_bytes(config, shape) if shape.max_adapters else 0,
            source="arithmetic" if self.temporaries is None else "compiled",
        )

    def _adapter_bytes(self, config: ModelConfig, shape: EngineShape) -> int:
        rank, extras = padded_rank(shape.adapter_rank), shape.adapter_extras
        each = adapter_bytes(config, self.layers, self.n_devices, self.itemsize, rank, extras)
        return shape.max_adapters * each

    def kv_bytes(self, memory: StageMemory) -> int | None:
        """The bytes left for the KV cache; None if the devices do not report their memory."""
        draft = 0 if self.draft is None else self.draft.fixed
        return None if self.free is None else max(0, self.free - memory.fixed + memory.weights - draft)

    def budget(self, memory: StageMemory) -> int:
        """The bytes that the KV cache may take."""
        budgets = [n for n in (self.kv_bytes(memory), self.modest) if n is not None]
        assert budgets, "a device that does not report its memory has a `modest` bound"
        return min(budgets)

    def slots(self, memory: StageMemory) -> int:
        """The number of slots that fit."""
        return self.budget(memory) // max(1, self.slot_bytes(memory))

    def slot_bytes(self, memory: StageMemory) -> int:
        """Bytes of one slot, and of the draft model's."""
        return memory.slot + (0 if self.draft is None else self.draft.slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftMemory:
    """A draft model's bytes on each device that it shares with a stage: it has as many slots as the engine.

    `fixed` is everything but its KV cache, `weights` among it. A `head` is with the last stage.
    """

    weights: int
    fixed: int
    slot: int
    head: bool = False


def slot_bytes(config: ModelConfig, layers: range, n_devices: int, itemsize: int) -> int:
    """Bytes of one slot on each device: keys and values of its heads in these layers (ORCA 4.2).

    Recurrent layers have none. A stage of recurrent layers alone has slots of no size. The states that a head
    reads are in the last stage's slots too.
    """
    kinds = [config.layers[i].attention for i in layers]
    own = sum(kind.cached_bytes(itemsize) // n_devices for kind in kinds if kind is not None)
    kept = config.kept_width // n_devices if layers.stop == config.n_layers else 0
    return own + kept * itemsize


def state_bytes(config: ModelConfig, layers: range, n_devices: int, itemsize: int) -> int:
    """Bytes of one request's states on each device, in these layers' recurrences, whatever its length.

    A head keeps its newest output for each row, from which it goes on.
    """
    kinds = [config.layers[i].recurrence for i in layers]
    newest = 0 if config.reads is None else config.hidden_size // n_devices * itemsize
    return newest + sum(state_bytes_of_layer(kind, itemsize) for kind in kinds if kind is not None)


def table_bytes(config: ModelConfig, layers: range, n_rows: int) -> int:
    """Bytes of the sampler's tables on each device; stages before the last keep only the last tokens."""
    if layers.stop != config.n_layers:
        return n_rows * _LAST_TOKEN_BYTES
    return n_rows * (config.vocab_size * _TABLE_BYTES + _LAST_TOKEN_BYTES)


def temporary_bytes(
    config: ModelConfig,
    layers: range,
    n_devices: int,
    shape: EngineShape,
    *,
    itemsize: int,
    attention: Attention,
) -> int:
    """The largest program's memory while it runs, plus what is kept between programs meanwhile."""
    n_tokens, n_rows = _largest_batch(shape)
    cpu = attention in ("native", "follow_lengths")
    encoding = encoder_layers_of(config, layers)
    every = {config.layers[i] for i in layers}
    every |= {config.encoder.layers[i] for i in encoding} if config.encoder else set()
    # On a CPU, programs that decodes can fill compute latent attention only in the absorbed form.
    latent = config.attention.latent if cpu and not shape.deterministic and n_tokens > n_rows else None
    in_both_forms = latent is not None and latent.is_plain(n_tokens, n_tokens)

    def elements(plain: Attention | None) -> int:
        return max(
            _elements_per_token(config.hidden_size, each, n_devices, cpu=cpu, plain=plain) for each in every
        )

    needed = itemsize * (n_tokens * elements(attention if in_both_forms else None))
    needed = max(needed, itemsize * n_rows * elements(None)) + max(
        _unpacked_bytes(config.hidden_size, layer, n_devices, itemsize, cpu=cpu) for layer in every
    )
    if attention == "cudnn" and shape.deterministic:
        attention = "static"  # as in execution/attention_backend.py
    if attention == "kernel" and not shape.deterministic:
        needed = max(needed, _kernel_bytes(config, n_devices, n_tokens, itemsize))
    if attention == "cudnn":
        needed = max(needed, _cudnn_attention_bytes(config, n_devices, shape, itemsize))
    if attention == "static":
        # With an encoder a decoder layer has two attentions, and the encoder is a separate program.
        most = max(len(layers) * (1 if config.encoder is None else 2), len(encoding))
        starts, work = _static_attention_bytes(config, most, n_devices, n_tokens, n_rows, itemsize)
        needed = starts + max(needed, work)
    if config.attention.indexer is not None:
        needed += _selection_bytes(config, n_devices, n_tokens, itemsize, cpu=cpu)
    needed += _rotation_bytes(config, layers, n_tokens)
    if layers.start == 0:  # all layers' own inputs: the rows of a table, what is projected, their sum
        needed += 3 * n_tokens * config.n_layers * (config.input_size or 0) * itemsize
    if config.reads is not None:  # the states that a head reads, and what its layer makes of them
        needed += n_tokens * (config.reads.width + 4 * config.hidden_size) * itemsize
    if layers.stop == config.n_layers:
        # The full sampler keeps each row's probabilities. Scoring keeps logits and candidates for the most
        # likely tokens; on a CPU it sorts whole rows with their indices.
        full = n_rows * config.vocab_size * _LOGIT_BYTES
        scored = SCORED * config.vocab_size * (4 * _LOGIT_BYTES if cpu else itemsize + 1)
        needed = max(needed, full, scored)
    return needed + result_bytes(config, layers, itemsize, n_tokens=n_tokens, n_rows=n_rows)


def _elements_per_token(
    hidden: int, layer: Layer, n_devices: int, *, cpu: bool, plain: Attention | None
) -> int:
    """The most elements that a layer holds at a time, per token.

    `plain` is the attention that computes the plain form of latent attention; None if no row takes that form.
    """
    feed_forward = _elements_of_feed_forward(hidden, layer, n_devices, cpu=cpu)
    own = layer.attention
    if layer.recurrence is not None:
        return max(feed_forward, hidden + layer.recurrence.share.elements_per_token)
    if own is None or own.latent is None:
        return feed_forward
    n_heads = own.n_heads // n_devices
    if plain is not None:
        # Queries of all heads in two parts and joined, and results alike; pure JAX has sums of values too.
        n_results = 2 if plain == "native" else 4
        sizes = 2 * own.latent.query_size + n_results * own.latent.value_size
        return max(feed_forward, hidden + n_heads * sizes)
    # The residual stream, twice the queries in the cache's space, and the result. On a CPU the zeros into
    # which results are written stay all along, as in _static_attention_bytes.
    around = hidden + n_heads * (2 * own.head_size + own.latent.rank)
    return max(feed_forward, around) + (n_heads * own.latent.rank if cpu else 0)


def _elements_of_feed_forward(hidden: int, layer: Layer, n_devices: int, *, cpu: bool) -> int:
    """The most elements per token in the feed-forward part, or in experts beside it, whose results stay."""
    parts = [part for part in (layer.feed_forward, layer.beside) if part is not None]
    beside = 2 * hidden if layer.beside is not None else 0
    whole = layer.has_whole_experts
    return beside + max(
        (_elements_of(hidden, part, n_devices, whole, cpu=cpu) for part in parts), default=hidden
    )


def _elements_of(hidden: int, feed_forward: FeedForward, n_devices: int, whole: bool, *, cpu: bool) -> int:
    """The most elements per token in a feed-forward.

    The residual stream stays. The first product needs its input, and the activation function the product: a
    GPU applies it in place unless the layer is gated, where the result is half as wide as the product.
    """
    size = feed_forward.size // n_devices
    product = size * (2 if feed_forward.gated else 1)
    if feed_forward.experts is not None:
        # A row for each expert of a token: its input or its result, and the values in between.
        experts = feed_forward.experts
        if whole_experts(feed_forward.size, experts.number, n_devices, packed=whole):
            size, product = size * n_devices, product * n_devices
        middle = size if feed_forward.gated or cpu else 0
        width = hidden if experts.latent_size is None else experts.latent_size
        taken = product + max(width, middle)
        if not cpu and width >= product:
            # XLA places the largest array first: input and result share one place, and the values in between
            # get another.
            taken = width + product + middle
        return hidden * (2 if cpu else 1) + 2 * (experts.latent_size or 0) + experts.top_k * taken
    if cpu:
        return 2 * hidden + product + size
    return hidden + product + max(hidden, size if feed_forward.gated else 0)


def _unpacked_bytes(hidden: int, layer: Layer, n_devices: int, itemsize: int, *, cpu: bool) -> int:
    """Bytes for unpacking packed experts: one at a time on a CPU, the device's share at once on a GPU."""
    own, experts = layer.sparse, layer.experts
    if own is None or experts is None or isinstance(experts.form, Dense):
        return 0
    n_rows = own.size * (2 if own.gated else 1)
    return (1 if cpu else experts.number // n_devices) * n_rows * hidden * itemsize


def result_bytes(config: ModelConfig, layers: range, itemsize: int, *, n_tokens: int, n_rows: int) -> int:
    """Bytes kept between programs: a stage's hidden states, those it received, and logits.

    The first stage receives none, and only the last stage has logits. Every stage keeps an encoder's output,
    of at most as many tokens, for its cross attention.
    """
    hidden = n_tokens * config.hidden_size * itemsize
    arrived = hidden if layers.start > 0 else 0
    arrived += hidden if config.encoder is not None else 0
    logits = n_rows * config.vocab_size * _LOGIT_BYTES if layers.stop == config.n_layers else 0
    return KEPT_ITERATIONS * (arrived + hidden + logits)


def _rotation_bytes(config: ModelConfig, layers: range, n_tokens: int) -> int:
    """Bytes of the cosines and sines of the tokens' rotary positions, `size` / 2 of each per kind of rotary.

    They are computed once for all layers of a kind, and stay for the whole forward pass.
    """
    kinds = {config.layers[i].rotary for i in layers}
    return sum(n_tokens * kind.size * _ANGLE_BYTES for kind in kinds if kind is not None)


def _largest_batch(shape: EngineShape) -> tuple[int, int]:
    """The most tokens and rows of one iteration."""
    return shape.max_tokens, min(shape.max_rows, shape.max_tokens)


def _kernel_bytes(config: ModelConfig, n_devices: int, n_tokens: int, itemsize: int) -> int:
    """Bytes of one layer of attention by the kernel: queries, keys, values, result, and the tiles' parts.

    A part takes 4 bytes an element: float32, or 16 bits and 16 bits of rounding error. Latent attention has
    parts of rows, of up to 64 heads and 16 bits an element; its keys are in the cache already.
    """
    attention = config.widest
    if attention.latent is not None:
        n_heads, rank = attention.n_heads // n_devices, attention.latent.rank
        own = config.hidden_size + n_heads * (attention.head_size + rank)
        return itemsize * (n_tokens * own + _CUT_PARTS * min(n_heads, _LATENT_HEADS) * rank)
    own = 2 * (attention.width + attention.kv_width) // n_devices
    around = n_tokens * itemsize * (config.hidden_size + own)
    if n_tokens <= _CUT_QUERIES or config.n_heads // n_devices > _CUT_HEADS:
        return around
    return around + _CUT_PARTS * _CUT_QUERIES * attention.head_size * 4


def _cudnn_attention_bytes(config: ModelConfig, n_devices: int, shape: EngineShape, itemsize: int) -> int:
    """Bytes of one layer of attention by cuDNN: each tile's queries, both results and near keys.

    For the near keys XLA keeps a contiguous copy of their values, and a weight per query and head.
    """
    (n_tokens, n_rows), block = _largest_batch(shape), shape.block_size
    width, heads = config.widest.width // n_devices, config.n_heads // n_devices
    kv_width = config.widest.kv_width // n_devices
    queries = min(_TILE_QUERIES, n_tokens)
    n_tiles = n_tokens // queries + min(n_rows, n_tokens // 2)
    keys = ((block + queries - 2) // block + 1) * block
    tile = queries * width * (2 * itemsize + 4) + keys * kv_width * itemsize + queries * keys * heads * 4
    return n_tiles * tile + 3 * n_tokens * config.hidden_size * itemsize


def _selection_bytes(config: ModelConfig, n_devices: int, n_tokens: int, itemsize: int, *, cpu: bool) -> int:
    """Bytes of one layer's sparse attention: what is kept for all tokens, and one trip's work.

    Of all tokens these are the index queries and the selected positions; of a trip's queries the scores of a
    chunk of keys by index query, then the selected vectors and their scores by head.
    """
    own, indexer = config.attention, config.attention.indexer
    assert indexer is not None and own.latent is not None
    top_k, heads = indexer.top_k, own.n_heads // n_devices
    if top_k >= config.n_positions:
        return 0
    every = n_tokens * (indexer.n_heads * indexer.head_size * itemsize + 2 * top_k * _INDEX_BYTES)
    if cpu:  # results in the cache's space, of tokens that the plain form has not computed
        every += n_tokens * heads * (own.head_size + own.latent.rank) * itemsize
    chunk = max(top_k, _FEWEST_SELECTED)
    scored = chunk * (indexer.n_heads * _LOGIT_BYTES + indexer.head_size * itemsize)
    attended = top_k * (2 * own.latent.width * itemsize + 2 * heads * _LOGIT_BYTES)
    return every + min(n_tokens, 8 if cpu else 32) * max(scored, attended)


def _static_attention_bytes(
    config: ModelConfig, n_layers: int, n_devices: int, n_tokens: int, n_rows: int, itemsize: int
) -> tuple[int, int]:
    """Bytes of attention by static shapes: the initial state of every layer's loop, and one layer's work.

    XLA fills the initial sums of all layers before the first layer. A layer's work is the keys and values
    gathered for all tiles at once, and their scores.
    """
    own = config.widest
    heads, kv_width = config.n_heads // n_devices, own.kv_width // n_devices
    queries, keys = min(_TILE_QUERIES, n_tokens), min(_TILE_KEYS, config.n_positions)
    n_tiles = n_tokens // queries + min(n_rows, n_tokens // 2)
    results = heads * own.value_size
    starts = n_tiles * queries * 4 * (results + 2 * heads) + n_tokens * results * itemsize
    gathered, scores = n_tiles * keys * kv_width * itemsize, n_tiles * heads * queries * keys * 4
    around = 2 * n_tokens * config.hidden_size * itemsize
    if own.latent is not None:  # queries are wider than results
        around += n_tiles * queries * heads * own.head_size * itemsize
    return n_layers * starts, int(_GATHERED * gathered) + scores + around
