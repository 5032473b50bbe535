"""Latent attention: the reference against its definition, the list, and the interpreted kernel."""

import json
import os
import random
import shlex
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.errors import ConfigError
from orca_jax.pallas.latent_attention import latent_attention, latent_plan, unsupported
from orca_jax.pallas.latent_attention_reference import latent_attention_reference
from tests.device.model.ragged import ragged
from tests.device.pallas.grouped import Scores, by_group, definition
from tests.device.pallas.interpreted_latent import GIVES_UP, SIZES
from tests.places import ROOT


def test_the_reference_is_attention_by_its_definition() -> None:
    rows = ((1, 40), (5, 23), (0, 0), (4, 4), (1, 1))
    batch = ragged(3, rows, n_padding=2, n_heads=6, n_kv_heads=1, head_size=12, block_size=4)
    same = batch._replace(q=by_group(batch.q, 1), v_cache=batch.k_cache)
    wanted = definition(same, Scores(scale=0.4))[:, :, 0, :8]
    arrays = [jnp.asarray(each) for name, each in batch._asdict().items() if name != "v_cache"]
    got = latent_attention_reference(*arrays, rank=8, scale=0.4)
    np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5)


def test_heads_are_in_as_few_equal_groups_as_can_be() -> None:
    plans = [latent_plan(4, 4, n, 16, 132) for n in (1, 12, 16, 20, 64, 80, 128)]
    groups = [(plan.n_kv_heads, plan.group) for plan in plans]
    assert groups == [(1, 8), (1, 16), (1, 16), (1, 24), (1, 64), (2, 40), (2, 64)]


def test_unsupported_sizes_are_refused_by_name() -> None:
    assert unsupported(512, 576, 16, "bfloat16") is None
    assert "compressed vectors have 96 elements" in str(unsupported(96, 160, 16, "bfloat16"))
    assert "compressed vectors have 640 elements" in str(unsupported(640, 704, 16, "bfloat16"))
    assert "latent keys have 544 elements" in str(unsupported(512, 544, 16, "bfloat16"))
    assert "latent keys have 640 elements" in str(unsupported(512, 640, 16, "bfloat16"))
    assert "blocks have 8 slots" in str(unsupported(512, 576, 8, "bfloat16"))
    assert "its cache is float32" in str(unsupported(512, 576, 16, "float32"))


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"q": (3, 64)}, {}, r"they must be \[T, N, D\]"),
        (
            {"cache": (5, 2, 16, 192)},
            {},
            r"cache is bfloat16 \(5, 2, 16, 192\).* must be .*\(5, 1, 16, 192\)",
        ),
        ({"cache": (0, 1, 16, 192)}, {}, "nothing empty"),
        ({"row_start": (4,)}, {}, "row_start"),
        ({}, {"rank": 64}, "compressed vectors have 64 elements.*use the pure-JAX path"),
        ({}, {"plan": latent_plan(3, 2, 80, 16, 132)}, "make it with latent_plan"),
        ({}, {"work": jnp.zeros((3, 8), jnp.int32)}, "make it with work_items"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    changed: dict[str, tuple[int, ...]], options: dict[str, Any], message: str
) -> None:
    shapes = {"q": (3, 16, 192), "cache": (5, 1, 16, 192), "block_table": (2, 2)}
    shapes |= {"row_start": (3,), "kv_length": (2,)} | changed
    arrays = [
        jnp.zeros(shape, jnp.bfloat16 if name in ("q", "cache") else jnp.int32)
        for name, shape in shapes.items()
    ]
    with pytest.raises(ConfigError, match=message):
        latent_attention(*arrays, **{"rank": 128, "scale": 1.0, **options})


def test_the_list_can_be_made_under_a_trace() -> None:
    arrays = [jnp.zeros((3, 16, 192), jnp.bfloat16), jnp.zeros((5, 1, 16, 192), jnp.bfloat16)]
    arrays += [jnp.zeros(shape, jnp.int32) for shape in ((2, 2), (3,), (2,))]
    made = jax.eval_shape(lambda *of: latent_attention(*of, rank=128, scale=1.0, interpret=True), *arrays)
    assert made.shape == (3, 16, 128)


def interpreted(name: str, n_batches: int) -> None:
    """Runs in a separate process: the interpreter's threads wait for each other, and need a large pool."""
    module, seed = "tests.device.pallas.interpreted_latent", str(random.getrandbits(32))
    command = [sys.executable, "-m", module, name, seed, str(n_batches)]
    done = subprocess.run(
        command,
        env={**os.environ, "PJRT_NPROC": "16", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GIVES_UP + 20,
        check=False,
    )
    assert done.returncode == 0, f"PJRT_NPROC=16 {shlex.join(command)}\n{done.stdout[-4000:]}"
    assert json.loads(done.stdout.splitlines()[-1])["merged"] > 0


def test_the_interpreted_kernel_equals_the_reference() -> None:
    interpreted("small", 0)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_interpreted_kernel_equals_the_reference_for_random_rows(name: str) -> None:
    interpreted(name, 3)
