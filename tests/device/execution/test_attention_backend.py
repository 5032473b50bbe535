"""The choice of attention by device and model, on which the engine's tokens do not depend."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from orca_jax.config import Attention
from orca_jax.errors import ConfigError
from orca_jax.execution import attention_backend
from orca_jax.execution.attention_backend import GPU_PATHS, choose_attention, features_of
from orca_jax.execution.attention_paths import Cudnn, Kernel, LatentByRow, LatentKernel, Native, PureJax
from orca_jax.families.attention_config import KVCode, RelativeBias, Scores
from orca_jax.families.model_config import Encoder, ModelConfig
from orca_jax.families.presets import PRESETS
from tests.device.execution.interpreted_engine import LENGTHS
from tests.device.native.native_form import needs_native
from tests.gpt_config import gpt_config
from tests.places import ROOT

CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0", core_count=108)
L40S = SimpleNamespace(platform="gpu", device_kind="NVIDIA L40S", compute_capability="8.9", core_count=142)
H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132)
B200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0", core_count=148)
MI300 = SimpleNamespace(platform="gpu", device_kind="MI300X", compute_capability="gfx942", core_count=304)
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5e")

CUDNN = Cudnn(16)
FOLLOW, STATIC, KERNEL = PureJax(follow_lengths=True), PureJax(follow_lengths=False), Kernel(4, 1, 132, 16)


def model(head_size: int) -> ModelConfig:
    return gpt_config(
        vocab_size=64, n_positions=32, hidden_size=4 * head_size, n_layers=1, n_heads=4, ffn_size=64
    )


@pytest.mark.parametrize(
    ("device", "head_size", "dtype", "path", "message"),
    [
        pytest.param(CPU, 64, "float32", Native(), "native", marks=needs_native),
        (CPU, 72, "float32", FOLLOW, "real lengths: the native attention is for heads of 16 to 256"),
        pytest.param(CPU, 64, "bfloat16", Native(), "native", marks=needs_native),
        (CPU, 64, "float16", FOLLOW, "real lengths: the native attention is for float32"),
        (H200, 128, "bfloat16", KERNEL, "kernel"),
        (H200, 80, "float16", KERNEL, "kernel"),
        (H200, 128, "float32", STATIC, "static shapes: its K/V cache is float32"),
        (H200, 72, "bfloat16", CUDNN, "cuDNN's paged attention: its head size is 72"),
        (A100, 128, "bfloat16", CUDNN, "cuDNN's paged attention"),
        (A100, 100, "bfloat16", STATIC, "static shapes: its head size is 100; cuDNN"),
        (A100, 128, "float32", STATIC, "cuDNN has bfloat16 and float16"),
        (L40S, 64, "float16", replace(CUDNN, places=False), "cuDNN"),
        (B200, 128, "bfloat16", CUDNN, "cuDNN"),
        (MI300, 128, "bfloat16", STATIC, "pure JAX, static shapes"),
        (TPU, 128, "bfloat16", STATIC, "pure JAX, static shapes"),
    ],
)
def test_the_choice_by_device_and_model(
    device: SimpleNamespace, head_size: int, dtype: str, path: object, message: str
) -> None:
    choice = choose_attention(device, model(head_size), n_heads=4, block_size=16, dtype=dtype)
    assert choice.path == path
    assert message in choice.description


@pytest.mark.parametrize(
    ("device", "forced", "path"),
    [
        (H200, "kernel", KERNEL),
        (H200, "static", STATIC),
        (H200, "cudnn", CUDNN),
        (A100, "cudnn", CUDNN),
        (H200, "follow_lengths", FOLLOW),
        (CPU, "static", STATIC),
        (CPU, "interpreted", Kernel(4, 1, 1, 16, interpret=True)),
    ],
)
def test_an_attention_can_be_forced(device: SimpleNamespace, forced: Attention, path: object) -> None:
    choice = choose_attention(device, model(64), n_heads=4, block_size=16, dtype="bfloat16", forced=forced)
    assert choice.path == path


@pytest.mark.parametrize(
    ("device", "head_size", "block_size", "forced", "message"),
    [
        (CPU, 64, 16, "kernel", "cpu is no Hopper GPU"),
        (A100, 64, 16, "kernel", "8.0"),
        (H200, 72, 16, "kernel", "64, 80, 96, 128"),
        (H200, 64, 8, "kernel", "16, 32, 64, 128"),
        (CPU, 72, 16, "interpreted", "head size is 72"),
        (H200, 64, 16, "native", "is no CPU"),
        (CPU, 64, 16, "cudnn", "cpu is none of the GPUs that cuDNN's attention is for"),
        (MI300, 64, 16, "cudnn", "MI300X has compute capability gfx942 and is none of"),
        (H200, 100, 16, "cudnn", "head size is 100"),
        (A100, 64, 24, "cudnn", "24 slots; cuDNN has powers of two"),
    ],
)
def test_a_forced_attention_that_cannot_run_is_refused(
    device: SimpleNamespace, head_size: int, block_size: int, forced: Attention, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"attention is '{forced}'.*{message}"):
        choose_attention(
            device, model(head_size), n_heads=4, block_size=block_size, dtype="bfloat16", forced=forced
        )


@pytest.mark.parametrize(
    ("scores", "on_h200", "on_a100"),
    [
        (Scores(), Kernel(2, 2, 132, 16), CUDNN),
        (Scores(window=24), Kernel(2, 2, 132, 16, (None, 24)), Cudnn(16, (None, 24))),
        (Scores(soft_cap=50.0), Kernel(2, 2, 132, 16), STATIC),
        (Scores(alibi=1.0), STATIC, STATIC),
        (Scores(sinks=True, window=24), Cudnn(16, (None, 24)), Cudnn(16, (None, 24))),
    ],
)
def test_the_choice_by_the_form_of_scores(scores: Scores, on_h200: object, on_a100: object) -> None:
    plain = model(64)
    attention = replace(plain.attention, n_kv_heads=2)
    layers = [
        replace(plain.layers[0], attention=replace(attention, scores=own)) for own in (Scores(), scores)
    ]
    config = replace(plain, layers=tuple(layers))
    for device, path in ((H200, on_h200), (A100, on_a100)):
        choice = choose_attention(device, config, n_heads=4, block_size=16, dtype="bfloat16")
        assert choice.path == path
        assert choice.path != STATIC or "does not compute" in choice.description
        assert not scores.sinks or device != H200 or "kernel" in choice.description


def test_a_model_with_an_encoder_has_static_shapes_on_a_gpu() -> None:
    plain = model(64)
    layer, whole = plain.layers[0], replace(plain.attention, causal=False)
    encoder = Encoder(layers=(replace(layer, attention=whole),), n_positions=64)
    crossed = replace(plain, layers=(replace(layer, cross=whole),), encoder=encoder, decoder_start_token_id=0)
    assert features_of(crossed) == ("attention that is not causal",)
    biased = replace(layer, attention=replace(whole, scores=Scores(scale=1.0, relative=RelativeBias())))
    crossed = replace(crossed, encoder=replace(encoder, layers=(biased,)))
    assert features_of(crossed) == ("another scale", "a relative bias", "attention that is not causal")
    for device, path in ((H200, STATIC), (A100, STATIC), (CPU, FOLLOW)):
        choice = choose_attention(device, crossed, n_heads=4, block_size=16, dtype="float16")
        assert choice.path == path
    with pytest.raises(
        ConfigError, match="the kernel attention does not compute a relative bias or attention"
    ):
        choose_attention(H200, crossed, n_heads=4, block_size=16, dtype="bfloat16", forced="kernel")


@pytest.mark.parametrize("code", ["int8", "fp8"])
def test_a_cache_of_eight_bits_has_static_shapes_on_a_gpu(code: KVCode) -> None:
    held = model(64).with_kv_code(code)
    assert features_of(held) == ("keys and values in eight bits",)
    for device in (H200, A100):
        choice = choose_attention(device, held, n_heads=4, block_size=16, dtype="bfloat16")
        assert choice.path == STATIC and "keys and values in eight bits" in choice.description
    for kind in ("kernel", "cudnn"):
        with pytest.raises(
            ConfigError, match=f"the {kind} attention does not compute keys and values in eig"
        ):
            choose_attention(H200, held, n_heads=4, block_size=16, dtype="bfloat16", forced=kind)


def test_latent_attention_has_a_kernel_on_hopper_and_static_shapes_on_other_gpus() -> None:
    latent = PRESETS["deepseek-v3"]
    assert features_of(latent) == ("another scale", "latent keys and values")
    sizes = {"n_heads": 16, "block_size": 16, "dtype": "bfloat16"}
    choice = choose_attention(H200, latent, **sizes)
    assert choice.path == LatentKernel(16, 132, 16) and choice.description == "latent-attention kernel"
    assert choose_attention(H200, latent, **sizes, deterministic=True).path == LatentKernel(16, 132, 16, True)
    forced = choose_attention(CPU, latent, **sizes, forced="interpreted")
    assert forced.path == LatentKernel(16, 1, 16, interpret=True)
    choice = choose_attention(A100, latent, **sizes)
    assert choice.path == STATIC
    assert "does not compute latent keys and values" in choice.description
    choice = choose_attention(H200, latent, **{**sizes, "dtype": "float32"})
    assert choice.path == STATIC and "its cache is float32" in choice.description


def test_latent_attention_of_odd_sizes_is_in_pure_jax() -> None:
    latent = PRESETS["deepseek-v3"]
    own = latent.attention
    assert own.latent is not None and own.rotary is not None
    odd = replace(
        own,
        head_size=576 + 8,
        rotary=replace(own.rotary, size=72),
        latent=replace(own.latent, rotary_size=72),
    )
    layer = replace(latent.layers[0], attention=odd)
    choice = choose_attention(
        CPU, replace(latent, layers=(layer,)), n_heads=128, block_size=16, dtype="float32"
    )
    assert choice.path == LatentByRow(FOLLOW, replace(own.latent, rotary_size=72), in_c=False)
    assert "in steps of 16, not of 584 and 512" in choice.description
    wide = replace(latent, layers=(layer,))
    with pytest.raises(
        ConfigError, match="its latent keys have 584 elements; the kernel has multiples of 64"
    ):
        choose_attention(H200, wide, n_heads=128, block_size=16, dtype="bfloat16", forced="kernel")


@pytest.mark.matrix(but=["float32"])
@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latent_attention_on_a_cpu_has_both_forms_unless_it_is_deterministic(dtype: str) -> None:
    latent = PRESETS["deepseek-v3"]
    sizes = {"n_heads": 128, "block_size": 16, "dtype": dtype}
    choice = choose_attention(CPU, latent, **sizes)
    own = latent.attention.latent
    assert own is not None
    assert choice.path == LatentByRow(Native(), own, in_c=True)
    assert choice.description == "native split attention, prompts in the plain form"
    assert choose_attention(CPU, latent, **sizes, deterministic=True).path == Native()


def test_a_model_that_was_not_split_for_the_devices_is_refused() -> None:
    whole = PRESETS["llama-3.1-8b"]
    sizes = {"n_heads": 2, "block_size": 16, "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="2 of 32 query heads on a device have none of the model's 8"):
        choose_attention(CPU, whole, **sizes)
    assert choose_attention(H200, whole.for_devices(16), **sizes).kind == "kernel"


def test_cudnn_is_not_deterministic_because_it_chooses_the_splits() -> None:
    sizes = {"n_heads": 4, "block_size": 16, "dtype": "bfloat16", "deterministic": True}
    choice = choose_attention(A100, model(64), **sizes)
    assert choice.path == STATIC and "--deterministic" in choice.description
    assert choose_attention(H200, model(64), **sizes).kind == "kernel"
    with pytest.raises(ConfigError, match=r"attention is 'cudnn'.*--deterministic"):
        choose_attention(A100, model(64), **sizes, forced="cudnn")


def test_a_gpu_whose_cudnn_refuses_has_static_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The CPU stands in for a GPU that is there: its XLA knows no such call, as an old one would not.
    device = jax.devices("cpu")[0]
    monkeypatch.setattr(attention_backend, "_capability", lambda _: "8.0")
    sizes = {"n_heads": 4, "block_size": 16, "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"attention is 'cudnn', but its cuDNN refuses: .*fmhaSoftmax"):
        choose_attention(device, model(64), **sizes, forced="cudnn")
    monkeypatch.setattr(attention_backend, "_preferred", lambda _: ("cudnn", "static"))
    choice = choose_attention(device, model(64), **sizes)
    assert choice.path == STATIC and choice.description.startswith(
        "pure JAX, static shapes: its cuDNN refuses: "
    )


def test_the_documents_have_the_table_of_gpus() -> None:
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    for gpus, capabilities, takes, tested in GPU_PATHS:
        paths = ", else ".join(f"`{kind}`" for kind in takes)
        assert f"| {gpus} | {', '.join(capabilities) or 'any other'} | {paths} | {tested} |" in text


@pytest.mark.parametrize("model_name", ["gpt", "rotary", "latent"])
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_engine_has_the_same_tokens_with_the_kernel_interpreted(model_name: str) -> None:
    """Runs in a separate process: the interpreter's threads wait for each other, and need a large pool."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.execution.interpreted_engine", model_name],
        env={**os.environ, "PJRT_NPROC": "16", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["interpreted"] == result["static"]
    assert [len(result["static"][str(i)]) for i in range(len(LENGTHS))] == [n for _, n in LENGTHS]
    assert len({token for ids in result["static"].values() for token in ids}) > 3  # not one token over again
