"""LLM.update_weights with arrays as MaxText, Tunix and Gemma's own code hold them."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, traverse_util

from orca_jax import LLM, SamplingParams
from orca_jax.checkpoint.directory import load_checkpoint
from orca_jax.errors import ConfigError, TensorMismatch
from orca_jax.families.hf_config import read_config
from orca_jax.families.trainers.layouts import detect
from orca_jax.families.trainers.orca_json import read_description
from orca_jax.launch.new_weights import check_adapters, check_arrays, named_arrays
from tests.device.checkpoint.test_trainers import DIRECTORY, SOME, arrays_of, golden_of

SCANNED = "maxtext-llama2-scanned"  # a stack of layers, and a factor in its queries
FLOAT = jnp.dtype("float32")


def trainers_arrays(name: str) -> dict[str, np.ndarray]:
    """Only the weights, without the prefix that names have in a checkpoint but not in a trainer."""
    description = read_description(DIRECTORY / name)
    arrays = arrays_of(description.checkpoint)
    detected = detect(description.model, arrays)
    assert detected is not None
    beginning = re.compile(
        rf"{re.escape(detected.prefix)}|nnx_aux\.model\."
    )  # of weights, of other variables
    return {
        beginning.sub("", path, count=1).removesuffix(".value"): arrays[path]
        for stored in detected.names.values()
        for path in stored.names
    }


def nested(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Nest arrays by the parts of their names."""
    return traverse_util.unflatten_dict(arrays, sep=".")


@pytest.mark.parametrize("name", SOME)
def test_the_same_bits_as_from_a_checkpoint(name: str):
    """Weights are equal wherever the arrays are; equal layers share one program per weight."""
    expected = load_checkpoint(DIRECTORY / name, dtype=FLOAT)
    if name.startswith("gemma") and "flat" in name:
        arrays = arrays_of(read_description(DIRECTORY / name).checkpoint)
    else:
        arrays = trainers_arrays(name)
    for given in (arrays, jax.device_put(arrays)):
        made = check_arrays(given, expected.config, FLOAT, cast=False)
        assert made.keys() == expected.parameters.keys()
        for ours, values in expected.parameters.items():
            np.testing.assert_array_equal(made[ours](), values, ours)


@dataclasses.dataclass
class Named:
    """An array with named axes, as Haliax registers its own: without the name of its child."""

    array: Any


jax.tree_util.register_pytree_node(
    Named, lambda named: ((named.array,), None), lambda _, leaves: Named(*leaves)
)


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A module with attributes, as Equinox registers its own."""

    def __init__(self, parts: dict[str, Any]):
        self.parts = parts

    def tree_flatten_with_keys(self) -> Any:
        children = [(jax.tree_util.GetAttrKey(name), part) for name, part in self.parts.items()]
        return children, tuple(self.parts)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], parts: Any) -> "Module":
        return cls(dict(zip(names, parts, strict=True)))


def test_a_module_of_named_arrays():
    """Names go through attributes, and end inside each named array."""
    expected = load_checkpoint(DIRECTORY / "levanter-llama", dtype=FLOAT)

    def made(parts: Any) -> Any:
        return Module({n: made(p) for n, p in parts.items()}) if isinstance(parts, dict) else Named(parts)

    arrays = named_arrays(made(nested(trainers_arrays("levanter-llama"))))
    assert "transformer.layers.stacked.self_attn.q_proj.weight.0" in arrays
    weights = check_arrays(arrays, expected.config, FLOAT, cast=False, layout="levanter")
    for ours, values in expected.parameters.items():
        np.testing.assert_array_equal(weights[ours](), values, ours)
    with pytest.raises(TensorMismatch, match="layout tunix"):
        check_arrays(arrays, expected.config, FLOAT, cast=False, layout="tunix")
    with pytest.raises(TensorMismatch, match="the new weights are a list"):
        named_arrays([1, 2])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory):
    """An engine whose weights differ from the trainer's."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_bytes((DIRECTORY / SCANNED / "config.json").read_bytes())
    sizes: dict[str, Any] = {"max_batch_size": 2, "n_slots": 64, "max_batch_tokens": 4}
    with LLM(directory, load_format="dummy", **sizes, compile_ahead=True, on_compile="error") as llm:
        yield llm


def served(llm: LLM) -> list[list[int]]:
    golden = golden_of(SCANNED)
    sampling = SamplingParams(max_tokens=golden.tokens.shape[1], temperature=0, ignore_eos=True)
    return [result.token_ids for result in llm.generate(golden.prompts.tolist(), sampling)]


def test_served_with_the_trainer_s_own_tokens(llm: LLM):
    """The tree has NumPy's or JAX's arrays, boxed as Flax does; the second update compiles nothing."""
    expected = golden_of(SCANNED).tokens.tolist()
    first = served(llm)
    assert first != expected
    arrays = trainers_arrays(SCANNED)
    boxed = {
        name: linen.LogicallyPartitioned(values, ("x",) * values.ndim) for name, values in arrays.items()
    }
    other = nested({name: values + 1 for name, values in arrays.items()})
    on_device = jax.device_put(nested(arrays))
    for given, others in (
        (nested(arrays), other),
        ({"params": {"params": boxed}}, other),
        (on_device, jax.device_put(other)),
    ):
        version = llm.weights_version
        assert llm.update_weights(given, layout="maxtext-scanned") == version + 1 == llm.weights_version
        assert served(llm) == expected
        compiled = llm.compiles
        llm.update_weights(others)
        assert served(llm) != expected
        assert llm.compiles == compiled


def test_what_does_not_fit_leaves_the_old_weights(llm: LLM):
    arrays = trainers_arrays(SCANNED)
    llm.update_weights(arrays)
    expected, version = served(llm), llm.weights_version
    query = "decoder.layers.self_attention.query.kernel"
    left = {name: values for name, values in arrays.items() if name != query}
    names = (query, query.replace("query", "key"))
    apart = {name: jax.device_put(arrays[name], jax.devices()[i]) for i, name in enumerate(names)}
    for given, words in (
        (left, f"{query} is missing"),
        (arrays | {"decoder.layers.bias": np.zeros(3)}, "decoder.layers.bias is not a weight of this model"),
        (arrays | {query: arrays[query][:, :1]}, rf"{query} has the shape \[16, 1, 4, 16\], expected"),
        (arrays | {query: arrays[query].astype(np.float16)}, f"{query} has the dtype float16"),
        (arrays | {query: None}, f"{query} is a NoneType"),
        (arrays | apart, f"{query} and .*key.kernel and .* are on different devices"),
    ):
        with pytest.raises(TensorMismatch, match=words):
            llm.update_weights(given)
    with pytest.raises(
        TensorMismatch, match="not in the layout tunix: their names are those of maxtext-scanned"
    ):
        llm.update_weights(arrays, layout="tunix")
    with pytest.raises(TensorMismatch, match="not in the layout gemma: their names are no trainer's"):
        llm.update_weights({"x": np.zeros(3)}, layout="gemma")
    with pytest.raises(ConfigError, match="layout is 'torch'; it must be one of tunix"):
        llm.update_weights(arrays, layout="torch")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="layout is for arrays"):
        llm.update_weights(DIRECTORY / SCANNED, layout="maxtext")
    assert served(llm) == expected and llm.weights_version == version


def test_from_the_trainer_s_own_checkpoint(llm: LLM):
    llm.update_weights(DIRECTORY / SCANNED)
    assert served(llm) == golden_of(SCANNED).tokens.tolist()


# What a product of Qwix's adapters adds to an array, by the end of the array's name.
EINSUMS = {
    "q_proj.w": "Dr,rNH->DNH",
    "v_proj.w": "Dr,rNH->DNH",
    "o_proj.w": "NHr,rD->NHD",
    "q_einsum.w": "Dr,rNH->NDH",
    "kv_einsum.w": "Dr,rCKH->CKDH",
    "qkv_einsum.w": "Dr,rCNH->CNDH",
    "attn_vec_einsum.w": "NHr,rD->NHD",
    "up_proj.kernel": "Dr,rF->DF",
    "down_proj.kernel": "Fr,rD->FD",
}


def trainers_adapters(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Adapters of all arrays in EINSUMS, and what they add to each array."""
    rng = np.random.default_rng(1)
    added, adapters = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for path, values in trainers_arrays(name).items():
        added[path] = np.zeros_like(values)
        form = next((form for end, form in EINSUMS.items() if path.endswith(end)), None)
        if form is None:
            continue
        theirs, to = form.split("->")
        sizes = dict(zip(to, values.shape, strict=True)) | {"r": 3}
        a, b = (rng.standard_normal([sizes[x] for x in part]).astype("f4") for part in theirs.split(","))
        adapters |= {f"{path}_lora_a": a, f"{path}_lora_b": b}
        added[path] = np.einsum(form, a, b)
    return adapters, added


@pytest.mark.parametrize("name", ["tunix-llama3", "tunix-gemma-fused", "tunix-gemma2"])
def test_adapters_of_some_arrays(name: str):
    """Each weight changes as it does where the trainer's own arrays have the products added."""
    model = read_config(DIRECTORY / name)
    adapters, added = trainers_adapters(name)
    found = check_adapters(adapters, model)
    assert found is not None
    for ours, made in check_arrays(added, model, FLOAT, cast=False).items():
        expected = np.asarray(made())
        if expected.any():
            adapter = found.pop(ours)
            np.testing.assert_allclose(adapter.change(adapter.arrays), expected, atol=1e-5, err_msg=ours)
    assert not found


def test_adapters_that_do_not_fit():
    model = read_config(DIRECTORY / "tunix-llama3")
    query, a, b = "layers.0.attn.q_proj.w", np.ones((32, 3), "f4"), np.ones((3, 4, 8), "f4")
    for given, words in (
        ({f"{query}_lora_a": a}, f"{query} has no _lora_b"),
        (
            {f"{query}_lora_a": a[1:], f"{query}_lora_b": b},
            r"\[31, 3\] times _lora_b \[3, 4, 8\] does not have the array's shape",
        ),
        (
            {f"{query}_lora_a": a, f"{query}_lora_b": b[1:]},
            r"does not have the array's shape \[32, 4, 8\]",
        ),
        ({"x_lora_a": a, "x_lora_b": b}, "x is not a weight of this model"),
        ({f"{query}_lora_a": a, query: b}, f"{query} is no .lora_a"),
        ({"layers.0.attn.q_norm.w_lora_a": a}, "layers.0.attn.q_norm.w is not a weight"),
        ({"final_norm.w_lora_a": a, "final_norm.w_lora_b": b}, "does not have the array's shape"),
    ):
        with pytest.raises(TensorMismatch, match=words):
            check_adapters(given, model)
    with pytest.raises(TensorMismatch, match="which the layout maxtext does not have"):
        check_adapters({f"{query}_lora_a": a, f"{query}_lora_b": b}, model, "maxtext")
