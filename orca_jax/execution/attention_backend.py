"""Chooses the split attention of a stage's forward program, by device and model; nothing else does.

A CPU with AVX-512 or AVX2 and a C compiler runs it in C (native/), other CPUs in pure JAX with loops that
follow the real lengths. For GPUs see GPU_PATHS.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from orca_jax.config import Attention
from orca_jax.cudnn import paged_attention as cudnn
from orca_jax.errors import ConfigError
from orca_jax.execution.attention_paths import (
    AttentionPath,
    Cudnn,
    Kernel,
    LatentByRow,
    LatentKernel,
    Native,
    PureJax,
    Sparse,
)
from orca_jax.execution.matmul_backend import TRITON
from orca_jax.families.attention_config import Indexer, KVCode, Latent
from orca_jax.families.model_config import ModelConfig
from orca_jax.model.kv_cache import dtype_on_cpu
from orca_jax.native import plain_latent
from orca_jax.native import split_attention as native
from orca_jax.native.compiler import NotBuilt
from orca_jax.pallas import latent_attention as latent_kernel
from orca_jax.pallas.kernel_shape import unsupported

_FOLLOWING = "pure JAX, following the real lengths"
_STATIC = "pure JAX, static shapes"

Device = Any  # a jax.Device


class GpuPath(NamedTuple):
    """The paths for some GPUs; the first of `takes` that supports the model is used."""

    gpus: str
    capabilities: tuple[str, ...]  # compute capabilities; empty for all others
    takes: tuple[Attention, ...]
    tested: str  # how far, for docs


_PLANNED = "planned by cuDNN 9.28 for a described {}; its mapping on the CPU; never run on one"
GPU_PATHS = (
    GpuPath(
        "Hopper: H100, H200",
        ("9.0",),
        ("kernel", "cudnn", "static"),
        "the kernel interpreted on the CPU, compiled for an H200; cuDNN as with the others",
    ),
    GpuPath("Ampere: A100", ("8.0",), ("cudnn", "static"), _PLANNED.format("A100")),
    GpuPath("Ada: L40S, L4", ("8.9",), ("cudnn", "static"), _PLANNED.format("L40S")),
    GpuPath("Blackwell: B200", ("10.0",), ("cudnn", "static"), _PLANNED.format("B200")),
    GpuPath(
        "other Ampere and Blackwell",
        ("8.6", "8.7", "10.3", "12.0", "12.1"),
        ("cudnn", "static"),
        "planned by cuDNN 9.28 for a described 8.6, 10.3 and 12.0; never run on one",
    ),
    GpuPath("any other GPU or TPU", (), ("static",), "on the CPU; never compiled or run there"),
)


Feature = Literal[
    "grouped heads",
    "another scale",
    "a sliding window",
    "attention in chunks",
    "a soft cap",
    "ALiBi",
    "a relative bias",
    "attention sinks",
    "attention that is not causal",
    "a window on both sides",
    "latent keys and values",
    "keys that an indexer selects",
    "keys and values in eight bits",
    "heads that differ by layer",
]
_EVERY_FEATURE = frozenset(get_args(Feature))
_CAUSAL_AND_UNBIASED = _EVERY_FEATURE - {
    *("ALiBi", "a relative bias", "attention that is not causal", "latent keys and values"),
    *("a window on both sides", "keys that an indexer selects"),
    *("keys and values in eight bits", "heads that differ by layer", "attention in chunks"),
}
_KERNEL = _EVERY_FEATURE - {
    *("ALiBi", "a relative bias", "attention that is not causal", "attention sinks"),
    "a window on both sides",
    *("keys and values in eight bits", "heads that differ by layer", "attention in chunks"),
}
# The features of each path, beyond causal attention with as many K/V heads as query heads. The kernels' work
# lists and cuDNN's masks assume causal attention, all plan their work for heads of one size in all layers,
# and none adds a bias to scores or has a scale for each key and value. cuDNN does not support heads as large
# as a latent key, or values that are read from the keys. Beside every path for latent keys the keys that an
# indexer selects are attended to in pure JAX (`Sparse`). The kernel divides the results of unsplit rows by
# their softmax sums before a sink could be added to these.
KNOWN_FEATURES: dict[Attention, frozenset[Feature]] = {
    "native": _EVERY_FEATURE - {"a window on both sides"},
    "follow_lengths": _EVERY_FEATURE,
    "static": _EVERY_FEATURE,
    "kernel": _KERNEL,
    "interpreted": _KERNEL,
    "cudnn": _CAUSAL_AND_UNBIASED - {"a soft cap"},
}


def features_of(config: ModelConfig) -> tuple[Feature, ...]:
    """The features of attention that any layer needs, the encoder's included."""
    layers = {*config.layers, *(config.encoder.layers if config.encoder else ())}
    kinds = {kind for layer in layers for kind in (layer.attention, layer.cross) if kind is not None}
    longest = config.n_positions  # a window of this size hides no key
    asked: dict[Feature, bool] = {
        "grouped heads": any(kind.group > 1 and kind.latent is None for kind in kinds),
        "another scale": any(kind.scores.scale is not None for kind in kinds),
        "a sliding window": any(
            kind.causal and (kind.scores.window or longest) < longest and not kind.scores.chunked
            for kind in kinds
        ),
        "attention in chunks": any(
            (kind.scores.window or longest) < longest and kind.scores.chunked for kind in kinds
        ),
        "a soft cap": any(kind.scores.soft_cap is not None for kind in kinds),
        "ALiBi": any(kind.scores.alibi is not None for kind in kinds),
        "a relative bias": any(kind.scores.relative is not None for kind in kinds),
        "attention sinks": any(kind.scores.sinks for kind in kinds),
        "attention that is not causal": not all(kind.causal for kind in kinds),
        "a window on both sides": any(not kind.causal and kind.scores.window is not None for kind in kinds),
        "latent keys and values": config.attention.latent is not None,
        "keys that an indexer selects": config.attention.indexer is not None,
        "keys and values in eight bits": config.attention.kv_code is not None,
        "heads that differ by layer": len(_heads_of(config)) > 1,
    }
    return tuple(feature for feature, is_asked in asked.items() if is_asked)


def _heads_of(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """The different sizes of heads and numbers of K/V heads, those of the first layer first."""
    return tuple(dict.fromkeys((each.head_size, each.n_kv_heads) for each in config.attentions))


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen path, its kind, and its description at startup."""

    path: AttentionPath
    kind: Attention
    description: str

    def stored(self, device: Device, dtype: Any) -> np.dtype[Any]:
        """The dtype in which the device stores keys and values of `dtype`."""
        # The GPU kernel, even interpreted, cannot read bfloat16 stored as uint16.
        as_bits = device.platform == "cpu" and self.kind != "interpreted"
        return dtype_on_cpu(dtype) if as_bits else np.dtype(dtype)


def choose_attention(
    device: Device,
    config: ModelConfig,
    *,
    n_heads: int,
    block_size: int,
    dtype: Any,
    forced: Attention | None = None,
    deterministic: bool = False,
) -> AttentionChoice:
    """Choose the attention for K/V blocks of `block_size` slots of `dtype` on a device, unless `forced`.

    `n_heads` is the number of the model's query heads on this device. With `deterministic` rows are split at
    fixed positions. Raises ConfigError if the forced attention cannot run on the device.
    """
    n_kv_heads = config.n_kv_heads * n_heads // config.n_heads
    if not n_kv_heads and config.attention.latent is None:
        raise ConfigError(
            f"{n_heads} of {config.n_heads} query heads on a device have none of the model's "
            f"{config.n_kv_heads} key/value heads; take the model of `for_devices`"
        )
    heads = (config.head_size, n_heads, n_kv_heads)
    attentions = (layer.attention for layer in config.layers if layer.attention is not None)
    windows = tuple(dict.fromkeys(each.scores.window for each in attentions))
    sizes = (*heads, block_size, np.dtype(dtype).name, deterministic)
    own = config.attention
    others = tuple((head_size, n * n_heads // config.n_heads) for head_size, n in _heads_of(config)[1:])
    kinds = (own.latent, own.kv_code, others, own.indexer)
    model = _OnDevice(device, *sizes, features_of(config), windows, *kinds)
    reasons: list[str] = []
    for kind in (forced,) if forced is not None else _preferred(device):
        reason = model.refusal(kind)
        if reason is None:
            path, description = model.path_with_indexer(kind)
            return AttentionChoice(path, kind, ": ".join([description, *reasons][:2]))
        if forced is not None:
            raise ConfigError(
                f"attention is {forced!r}, but {reason}; leave it out, and one that can run here is chosen"
            )
        reasons = ["; ".join([*reasons, reason])]
    raise AssertionError(f"the last of {_preferred(device)} runs anywhere")


def _preferred(device: Device) -> tuple[Attention, ...]:
    if device.platform == "cpu":
        return "native", "follow_lengths"
    capability = _capability(device)
    return next(path.takes for path in GPU_PATHS if capability in path.capabilities or not path.capabilities)


def _capability(device: Device) -> str:
    """An NVIDIA GPU's compute capability, such as "8.0"; other devices give another form, or "None"."""
    return str(getattr(device, "compute_capability", None))


class _OnDevice(NamedTuple):
    """A device and the sizes of the model that it runs."""

    device: Device
    head_size: int
    n_heads: int
    n_kv_heads: int
    block_size: int
    dtype: str
    deterministic: bool
    features: tuple[Feature, ...]
    windows: tuple[int | None, ...]  # the layers' different windows
    latent: Latent | None = None
    kv_code: KVCode | None = None
    others: tuple[tuple[int, int], ...] = ()  # further sizes of heads and numbers of K/V heads
    indexer: Indexer | None = None

    @property
    def value_part(self) -> int | None:
        """Size of a value that is the first elements of its key; None if values are stored separately."""
        return None if self.latent is None else self.latent.rank

    def path_with_indexer(self, kind: Attention) -> tuple[AttentionPath, str]:
        """The path of a kind that `refusal` does not refuse, with the selection of keys, if there is one."""
        path, description = self.path(kind)
        if self.indexer is None:
            return path, description
        top_k, follow = self.indexer.top_k, kind in ("native", "follow_lengths")
        sparse = Sparse(path, top_k, self.block_size, follow)
        return sparse, f"{description}, beyond {top_k} keys those that an indexer selects, in pure JAX"

    def path(self, kind: Attention) -> tuple[AttentionPath, str]:
        """The path of a kind that `refusal` does not refuse, and its description."""
        if kind == "native":
            return self._in_both_forms(Native(), "native split attention")
        if kind == "follow_lengths":
            return self._in_both_forms(PureJax(follow_lengths=True), _FOLLOWING)
        if kind == "static":
            return PureJax(follow_lengths=False), _STATIC
        if kind == "cudnn":
            places = _capability(self.device) in TRITON
            return Cudnn(self.block_size, self.windows, places=places), "cuDNN's paged attention"
        n_cores = getattr(self.device, "core_count", 2)
        if self.latent is not None:
            latent = LatentKernel(self.n_heads, n_cores, self.block_size, fixed=self.deterministic)
            if kind == "kernel":
                return latent, "latent-attention kernel"
            return replace(latent, n_cores=1, interpret=True), "latent-attention kernel, interpreted"
        group = self.n_heads // self.n_kv_heads
        sizes = (self.n_kv_heads, group, n_cores, self.block_size, self.windows)
        kernel = Kernel(*sizes, fixed=self.deterministic)
        if kind == "kernel":
            return kernel, "split-attention kernel"
        return replace(kernel, n_cores=1, interpret=True), "split-attention kernel, interpreted"

    def _in_both_forms(self, path: PureJax | Native, description: str) -> tuple[AttentionPath, str]:
        """The path and its description, for latent attention with the plain form next to the absorbed one.

        A row's form depends on how many of its tokens are computed at once, which differs when a request
        resumes, so --deterministic uses one form. So do static shapes, where both would run for all rows.
        """
        if self.latent is None or self.deterministic:
            return path, description
        in_c = isinstance(path, Native) and self._has_plain_in_c(self.latent)
        return LatentByRow(path, self.latent, in_c), f"{description}, prompts in the plain form"

    def _has_plain_in_c(self, latent: Latent) -> bool:
        sizes = {name: getattr(latent, name) for name in ("rank", "rotary_size", "plain_size", "value_size")}
        if plain_latent.unsupported(self.dtype, **sizes) is not None:
            return False
        try:
            return bool(plain_latent.plain_latent_target(self.dtype, self.dtype))
        except NotBuilt:
            return False

    def refusal(self, kind: Attention) -> str | None:
        """Why a kind of attention cannot run, as a clause; None if it can."""
        sizes = self._sizes(self.head_size, self.n_kv_heads)
        unknown = [feature for feature in self.features if feature not in KNOWN_FEATURES[kind]]
        if unknown:
            return f"the {kind} attention does not compute {' or '.join(unknown)}"
        if kind == "native":
            every = ((self.head_size, self.n_kv_heads), *self.others)
            return next(filter(None, (self._not_native(self._sizes(*heads)) for heads in every)), None)
        if kind == "kernel":
            wanted = "no Hopper GPU (9.0), for which the kernel is written"
            return self._other_gpu(["9.0"], wanted) or self._not_kernel(sizes)
        if kind == "interpreted":
            return self._not_kernel(sizes)
        if kind == "cudnn":
            return self._not_cudnn(sizes)
        return None

    def _not_kernel(self, sizes: tuple[int, int, str, int, int]) -> str | None:
        if self.latent is None:
            return unsupported(*sizes)
        return latent_kernel.unsupported(self.latent.rank, self.head_size, self.block_size, self.dtype)

    def _sizes(self, head_size: int, n_kv_heads: int) -> tuple[int, int, str, int, int]:
        return head_size, self.block_size, self.dtype, self.n_heads, n_kv_heads

    def _not_native(self, sizes: tuple[int, int, str, int, int]) -> str | None:
        if self.device.platform != "cpu":
            return f"{self.device.device_kind} is no CPU"
        reason = native.unsupported(*sizes, self.value_part)
        if reason is None:
            try:
                native.attention_target(
                    sizes[0], self.block_size, self.dtype, self.kv_code or self.dtype, self.value_part
                )
            except NotBuilt as error:
                return str(error)
        return reason

    def _not_cudnn(self, sizes: tuple[int, int, str, int, int]) -> str | None:
        capabilities = [each for path in GPU_PATHS if "cudnn" in path.takes for each in path.capabilities]
        reason = self._other_gpu(capabilities, "none of the GPUs that cuDNN's attention is for")
        if reason is None and self.deterministic:
            # cuDNN documents that every run gives the same result, but not where it splits a row's keys. That
            # may depend on the lengths of other rows.
            reason = "cuDNN does not say where it splits a row, which --deterministic must know"
        if reason is None:
            reason = cudnn.unsupported(*sizes)
        if reason is None and isinstance(self.device, jax.Device):
            reason = cudnn.refusal(self.device, *sizes)
        return reason

    def _other_gpu(self, capabilities: Sequence[str], complaint: str) -> str | None:
        """The complaint about this device, unless it has one of these compute capabilities."""
        capability = _capability(self.device)
        if capability in capabilities:
            return None
        has = "" if capability == "None" else f" has compute capability {capability} and"
        return f"{self.device.device_kind}{has} is {complaint}"
