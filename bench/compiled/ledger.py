"""Lays launches and bytes of forward programs, compiled for GPUs that need not be present, beside a floor.

    JAX_PLATFORMS=cpu python -m bench.compiled.ledger [--models llama-3.1-8b,deepseek-v3] \
        [--devices h200,a100-80gb] [--decode 1,32,256] [--contexts 1024,32768] [--prefill 2048] \
        [--quantization int4]

Needs the CUDA plugin (the extra `cuda`), no GPU. A row is one model on one kind of GPU in one iteration:
decode of so many rows, each with the given context, or prefill of one prompt. A model's layers repeat, so the
program is compiled with one layer of each kind and the last, then once more for each kind with one more of
it; the difference is what a layer costs, and the figures are those of the whole model.

Launches are kernels and library calls; those in a loop count as often as it runs (trips). Bytes are counted
as bench/compiled/hlo_traffic.py says: Mosaic and cuDNN calls read the visible keys and values, and the
experts' kernel the experts that are chosen if tokens choose at random. The floor is that of
planning/cost_model.py, without the sampler, which is another program. Temporaries are those of the largest
program that was compiled. An encoder's own programs are left out. Nothing is run or autotuned: times need a
GPU.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.compiled.hlo_traffic import Counts, counts
from orca_jax.aot.compiled_stage import BLOCK_SIZE, compile_stage
from orca_jax.aot.described_gpu import described_devices
from orca_jax.config import ParallelConfig
from orca_jax.families.model_config import Layer, ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.families.quantization_config import ROUNDED, Rounding, rounded_forms
from orca_jax.model.kv_cache import cache_shape
from orca_jax.planning.cost_model import IterationShape, operations
from orca_jax.planning.known_devices import GPUS
from orca_jax.sharding.partition import split_model

MODELS = (
    "gpt3-13b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-30b-a3b",
    "gpt-oss-120b-mxfp4",
    "deepseek-v3",
    "gemma-3-27b",
    "t5-11b",
)
DEVICES = ("h200", "a100-80gb", "l40s", "b200")
_ITEM = 2  # bytes of bfloat16
_ENCODED = 512  # tokens of each row's encoder input


class Case(NamedTuple):
    """The requests of an iteration: `rows` decodes, or one prompt of `tokens`, whose context is `context`."""

    rows: int
    tokens: int
    context: int

    def __str__(self) -> str:
        if self.tokens == self.rows:
            return f"decode {self.rows} x {self.context}"
        return f"prefill {self.tokens}"

    def shape(self, model: ModelConfig) -> IterationShape:
        """The iteration for the cost model."""
        encoded = [_ENCODED] * self.rows if model.encoder else []
        return IterationShape([self.tokens // self.rows] * self.rows, [self.context] * self.rows, encoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The forward program of one case: counts of the whole model on one GPU; bytes and seconds.

    `a_layer` are the launches of a layer of the most common kind.
    """

    model: str
    device: str
    tensor_parallel: int
    case: str
    attention: str
    launches: int
    a_layer: int
    trips: int
    host_led: int
    read: float
    written: float
    floor: float
    temporaries: int
    seconds: float

    @property
    def over_floor(self) -> float:
        return (self.read + self.written) / self.floor


class _Compiled(NamedTuple):
    counts: Counts
    attention: str
    temporaries: int


def ledger_row(
    name: str,
    device: str,
    case: Case,
    *,
    tensor_parallel: int = 1,
    max_bs: int = 256,
    quantization: Rounding | None = None,
) -> Row:
    """Compile one case's programs and count."""
    model, start = PRESETS[name], time.perf_counter()
    if quantization is not None:
        model = model.with_forms(rounded_forms(model, quantization))
    few, more = shortened(model)
    base = _compiled(replace(model, layers=few), device, case, tensor_parallel, max_bs)
    total, largest, a_layer = Counts(), base.temporaries, 0.0
    total.add(base.counts)
    missing = Counter(model.layers)
    missing.subtract(few)
    for kind, layers in more.items():
        compiled = _compiled(replace(model, layers=layers), device, case, tensor_parallel, max_bs)
        each = Counts()
        each.add(compiled.counts)
        each.add(base.counts, -1)
        total.add(each, missing[kind])
        largest = max(largest, compiled.temporaries)
        if kind == Counter(model.layers).most_common(1)[0][0]:
            a_layer = each.launches
    floor = sum(
        operation.n_bytes
        for operation in operations(
            model, case.shape(model), weight_bytes=_ITEM, kv_bytes=_ITEM, n_shards=tensor_parallel
        )
        if operation.kind != "sampler"
    )
    return Row(
        model=name,
        device=device,
        tensor_parallel=tensor_parallel,
        case=str(case),
        attention=base.attention,
        launches=round(total.launches),
        a_layer=round(a_layer),
        trips=round(total.trips),
        host_led=base.counts.host_led,
        read=total.read,
        written=total.written,
        floor=floor,
        temporaries=largest,
        seconds=time.perf_counter() - start,
    )


def shortened(model: ModelConfig) -> tuple[tuple[Layer, ...], dict[Layer, tuple[Layer, ...]]]:
    """One layer of each kind and the last; and for each kind that repeats the same with one more of it."""
    few = (*dict.fromkeys(model.layers[:-1]), model.layers[-1])
    held, all_layers = Counter(few), Counter(model.layers)
    more: dict[Layer, tuple[Layer, ...]] = {}
    for i, kind in enumerate(few[:-1]):
        if all_layers[kind] > held[kind]:
            more[kind] = (*few[:i], kind, *few[i:])
    return few, more


def _compiled(model: ModelConfig, device: str, case: Case, tensor_parallel: int, max_bs: int) -> _Compiled:
    (part,) = split_model(
        model, described_devices(device, tensor_parallel), ParallelConfig(tensor_parallel=tensor_parallel)
    )
    n_blocks = max_bs * -(-case.context // BLOCK_SIZE)
    decodes = case.tokens == case.rows
    compiled = compile_stage(
        model,
        part,
        case.tokens,
        max_bs=max_bs,
        n_blocks=n_blocks,
        decode_context=case.context if decodes else None,
    )
    text, memory = compiled.program.as_text(), compiled.program.memory_analysis()
    assert text is not None and memory is not None
    n_kv_heads, *rest = cache_shape(model.attention, n_blocks=n_blocks, block_size=BLOCK_SIZE)[1:]
    shared = tensor_parallel if model.attention.latent is None else 1
    cache = f"bf16[{n_blocks},{n_kv_heads // shared},{','.join(map(str, rest))}]"
    counted = counts(text, {cache: 0.0, **_experts_read(model, case, tensor_parallel)})
    if counted.stated.get(cache):
        counted.read += _visible_bytes(model, case) / tensor_parallel
    return _Compiled(counted, compiled.attention, memory.temp_size_in_bytes)


def _visible_bytes(model: ModelConfig, case: Case) -> float:
    """Bytes of keys and values that the layers' queries see, each read once."""
    shape, width = case.shape(model), model.attention.cached_width
    attentions = (layer.attention for layer in model.layers if layer.attention is not None)
    return sum(shape.sums(each.scores.window).n_keys * width * _ITEM for each in attentions)


def _experts_read(model: ModelConfig, case: Case, tensor_parallel: int) -> dict[str, float]:
    """The bytes that the experts' kernel reads of each weight, by its dtype and shape on a device."""
    stated: dict[str, float] = {}
    for layer in model.layers:
        feed, experts = layer.feed_forward, layer.experts
        if feed is None or experts is None:
            continue
        here = experts.number // tensor_parallel
        hit = experts.expected_hit(case.tokens) / experts.number
        hidden, inner = model.hidden_size, feed.size
        for sizes in ((2 * inner, hidden), (2, inner, hidden), (hidden, inner)):
            text = f"bf16[{','.join(map(str, (here, *sizes)))}]"
            n_elements = here * sizes[0] * sizes[1] * (sizes[2] if len(sizes) > 2 else 1)
            stated[text] = hit * n_elements * _ITEM
    return stated


def cases(decode: Sequence[int], contexts: Sequence[int], prefill: Sequence[int]) -> Iterator[Case]:
    """Every number of decode rows with every context, then the prompts."""
    for context in contexts:
        for rows in decode:
            yield Case(rows, rows, context)
    for tokens in prefill:
        yield Case(1, tokens, tokens)


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    made = Table(title="forward programs, bfloat16, compiled without the GPUs")
    for column in (
        "model, GPUs",
        "case",
        "attention",
        "launches",
        "a layer",
        "trips",
        "read + written, GB",
        "floor, GB",
        "over floor",
        "temporaries, MB",
        "compile s",
    ):
        made.add_column(column, justify="left" if column in ("model, GPUs", "case", "attention") else "right")
    for row in rows:
        made.add_row(
            f"{row.model}, {row.tensor_parallel} x {row.device}",
            row.case,
            row.attention.split(":")[0],
            f"{row.launches:,}",
            f"{row.a_layer:,}",
            f"{row.trips:,}" + (" host-led" if row.host_led else ""),
            f"{row.read / 1e9:.2f} + {row.written / 1e9:.2f}",
            f"{row.floor / 1e9:.2f}",
            f"{row.over_floor:.2f}",
            f"{row.temporaries / 1e6:.1f}",
            f"{row.seconds:.0f}",
        )
    return made


def main() -> None:
    """Compile, print a table and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled.ledger", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="presets (default: all of the ledger)")
    parser.add_argument("--devices", default=",".join(DEVICES), help="GPUs (default: all of the ledger)")
    parser.add_argument("--decode", default="1,32,256", help="rows (default: 1,32,256; empty: none)")
    parser.add_argument("--contexts", default="1024,32768", help="tokens of each row (default: 1024,32768)")
    parser.add_argument("--prefill", default="2048", help="tokens of a prompt (default: 2048; empty: none)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share a layer (default: 1)")
    parser.add_argument("--quantization", choices=[*ROUNDED], help="weights rounded to a packed form")
    flags = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # so that seconds are those of compiling
    decode, contexts, prefill = (
        [int(n) for n in text.split(",") if n] for text in (flags.decode, flags.contexts, flags.prefill)
    )
    models, devices = flags.models.split(","), flags.devices.split(",")
    for name, known in [*((model, PRESETS) for model in models), *((device, GPUS) for device in devices)]:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    wanted = [
        (model, device, case)
        for model in models
        for device in devices
        for case in cases(decode, contexts, prefill)
        if case.context <= PRESETS[model].n_positions
    ]
    rows = [
        ledger_row(
            model, device, case, tensor_parallel=flags.tensor_parallel, quantization=flags.quantization
        )
        for model, device, case in track(wanted, "compiling", console=Console(stderr=True))
    ]
    Console(width=180).print(table(rows))
    print(json.dumps({"jax": jax.__version__, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
