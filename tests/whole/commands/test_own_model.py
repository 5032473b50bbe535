"""A user's model gives the tokens of its training code: on one device, on several, and in stages."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import orca_jax
from examples import train_own_model
from examples.own_model import GatedModel
from orca_jax import LLM, SamplingParams
from orca_jax.errors import CheckpointError, ConfigError, TensorMismatch
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.service.follower import CheckpointFollower
from orca_jax.service.generation import GenerationResult
from orca_jax.user_model.functions import FunctionModel
from tests.whole.documents.commands import serving
from tests.whole.training.weights import remove_once_read

ROOM: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 128, "n_slots": 1024, "dtype": "float32"}
SIZES = ("vocab_size", "n_positions", "hidden_size", "n_heads", "n_kv_heads", "head_size")
PARAMS = SamplingParams(max_tokens=10, temperature=0, logprobs=0, prompt_logprobs=0)


def prompts() -> list[list[int]]:
    """Prompts of all lengths, more than fit into a batch."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, n).tolist() for n in (1, 2, 17, 40, 3, 30)]


def as_trained(model: GatedModel) -> Callable[[list[int]], np.ndarray]:
    """The log-probabilities [length, V] after each token of a sequence, by the module's own forward pass."""
    forward = nnx.jit(lambda model, ids: jax.nn.log_softmax(model(ids)))

    def of(token_ids: list[int]) -> np.ndarray:
        padded = np.zeros((1, 64), np.int32)  # causal: what follows does not count
        padded[0, : len(token_ids)] = token_ids
        return np.asarray(forward(model, jnp.asarray(padded)))[0]

    return of


def check(model: GatedModel, results: list[GenerationResult]) -> None:
    own = as_trained(model)
    for prompt, result in zip(prompts(), results, strict=True):
        sequence = [*prompt, *result.token_ids]
        expected = own(sequence)[np.arange(len(sequence) - 1), sequence[1:]]
        assert result.logprobs is not None and result.prompt_logprobs is not None
        served = [token.logprob for token in (*result.prompt_logprobs, *result.logprobs)]
        np.testing.assert_allclose(served, expected, atol=2e-5)
        best = own(sequence)[len(prompt) - 1 : len(sequence) - 1]
        np.testing.assert_allclose(best.max(axis=1), expected[len(prompt) - 1 :], atol=2e-5)  # it is greedy


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"deterministic": True, "tensor_parallel": 2, "pipeline_parallel": 2},
            id="split",
            marks=pytest.mark.long,
        ),
        pytest.param({"prefill_tokens": 16}, id="in chunks", marks=pytest.mark.long),
        pytest.param({"tensor_parallel": 4, "compile_ahead": True}, id="ahead", marks=pytest.mark.long),
    ],
)
def test_it_is_served_as_it_was_trained(options: dict[str, Any]) -> None:
    model = GatedModel()
    before = jax.tree.map(lambda w: w.sharding, nnx.state(model))
    with LLM(model=model, **ROOM, **options) as llm:
        assert jax.tree.map(lambda w: w.sharding, nnx.state(model)) == before
        check(model, llm.generate(prompts(), PARAMS))
        scheduler = llm.service.scheduler
        assert max(record.n_rows for record in llm.service.timeline.iterations) == 4
        assert len(llm.service.pool) == scheduler.n_rsrv == 0
        if options.get("tensor_parallel") == 2:
            weights = [w for stage in engine_weights(llm) for w in stage]
            assert any(not w.sharding.is_fully_replicated for w in weights)


def engine_weights(llm: LLM) -> list[list[jax.Array]]:
    workers: Any = llm.service.scheduler.engine
    return [worker.stage.weights for worker in workers._workers.workers]


@pytest.mark.matrix
def test_a_recording_is_replayed_with_the_module(tmp_path: Path) -> None:
    with LLM(GatedModel(), **ROOM, record=tmp_path / "recording") as llm:
        llm.generate(prompts(), PARAMS)
    assert '"model":"GatedModel"' in (tmp_path / "recording").read_text().replace(" ", "")
    report = orca_jax.replay(tmp_path / "recording", model=GatedModel())
    assert report.same and report.n_outputs == len(prompts())


def test_a_function_by_name() -> None:
    with LLM("examples.own_model:GatedModel", **ROOM, deterministic=True) as llm:
        check(GatedModel(), llm.generate(prompts(), PARAMS))
        # Token embedding and head; in each of 3 layers norms, q, gate and out, k and v, up and down.
        assert llm.n_parameters == 64 * (2 * 256 + 3 * (2 + 3 * 128 + 2 * 64 + 2 * 160))
        assert max(record.n_rows for record in llm.service.timeline.iterations) == 4


def test_plain_functions_give_the_same_tokens() -> None:
    """Functions of the same weights in a dict give the same tokens."""
    model = GatedModel()
    graph, layers = zip(*[nnx.split(layer) for layer in model.layers], strict=True)
    outside = {"tokens": model.tokens.embedding[...], "head": model.head.kernel[...]}
    sizes = {name: getattr(model, name) for name in SIZES}
    functions = FunctionModel(
        embed=lambda p, token_ids, positions: p["tokens"][token_ids],
        layer=lambda p, x, positions, attend: nnx.merge(graph[0], nnx.State(p))(x, positions, attend),
        unembed=lambda p, x: x @ p["head"],
        outside=outside,
        layers=[nnx.to_pure_dict(state) for state in layers],
        outside_specs={"tokens": None, "head": P(None, "tensor")},
        **sizes,
    )
    with LLM(functions, **ROOM, deterministic=True, tensor_parallel=2) as llm:
        check(model, llm.generate(prompts(), PARAMS))
        trained = trained_further(model)
        outside = {"tokens": trained.tokens.embedding[...], "head": trained.head.kernel[...]}
        layers = [nnx.to_pure_dict(nnx.state(layer)) for layer in trained.layers]
        llm.update_weights({"outside": outside, "layers": layers})
        check(trained, llm.generate(prompts(), PARAMS))
        del outside["head"]
        with pytest.raises(TensorMismatch, match=r"outside\.head is missing"):
            llm.update_weights({"outside": outside, "layers": layers})


def trained_further(model: GatedModel) -> GatedModel:
    """A copy with other weights, as after more training."""
    rng = np.random.default_rng(7)
    state = jax.tree.map(lambda w: w + 0.02 * rng.standard_normal(w.shape).astype(w.dtype), nnx.state(model))
    return nnx.merge(nnx.graphdef(model), state)


def test_new_weights_in_every_form_are_served() -> None:
    """Weights come as the module, its state or NumPy arrays; on devices that split layers, and in stages."""
    model = GatedModel()
    trained = trained_further(model)
    flat = {
        ".".join(map(str, path)): np.asarray(value[...])
        for path, value in nnx.to_flat_state(nnx.state(model))
    }
    with LLM(model=model, **ROOM, deterministic=True, tensor_parallel=2, pipeline_parallel=2) as llm:
        check(model, llm.generate(prompts(), PARAMS))
        before = [[w.sharding for w in stage] for stage in engine_weights(llm)]
        assert llm.update_weights(trained) == 1
        check(trained, llm.generate(prompts(), PARAMS))
        llm.sleep(2)
        assert llm.update_weights(flat, version=5) == 5
        llm.wake_up()
        check(model, llm.generate(prompts(), PARAMS))
        assert [[w.sharding for w in stage] for stage in engine_weights(llm)] == before
        # The trainer splits its arrays over eight devices, and may donate them: the engine has copies.
        fsdp = NamedSharding(Mesh(jax.devices()[:8], "fsdp"), P("fsdp"))
        split = jax.device_put(nnx.state(trained, nnx.Param), fsdp)
        llm.update_weights(split)
        for leaf in jax.tree.leaves(split):
            leaf.delete()
        check(trained_further(model), llm.generate(prompts(), PARAMS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("layers.1.q.kernel"), "layers.1.q.kernel is missing"),
        (lambda w: w.update(bias=np.zeros(3, np.float32)), "bias is not a weight of this model"),
        (lambda w: w.update({"head.kernel": np.zeros((64, 255), np.float32)}), r"expected \[64, 256\]"),
        (lambda w: w.update({"head.kernel": np.zeros((64, 256), np.float16)}), "cast=True converts it"),
    ],
)
def test_new_weights_that_do_not_fit(
    own_llm: LLM, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    model, before = GatedModel(), own_llm.weights_version
    weights = {
        ".".join(map(str, path)): np.asarray(value[...])
        for path, value in nnx.to_flat_state(nnx.state(model))
    }
    change(weights)
    with pytest.raises(TensorMismatch, match=words):
        own_llm.update_weights(weights)
    assert own_llm.weights_version == before


def test_training_pushes_each_step_and_compiles_nothing(own_llm: LLM) -> None:
    """The engine's log-probabilities are the trainer's at each step, and its memory is level."""
    model, sequences = GatedModel(), [[*range(3, 40)], [7, 7, 9], [*range(20)]]
    window = jnp.asarray(np.resize(sequences[0], (2, 33)))

    @nnx.jit
    def train_step(model: GatedModel) -> None:
        def loss(model: GatedModel) -> jax.Array:
            scores = jax.nn.log_softmax(model(window[:, :-1]))
            return -jnp.take_along_axis(scores, window[:, 1:, None], 2).mean()

        gradients = nnx.grad(loss)(model)
        stepped = jax.tree.map(lambda w, g: w - 0.5 * g, nnx.state(model, nnx.Param), gradients)
        nnx.update(model, stepped)

    own, before = as_trained(model), own_llm.weights_version
    levels, compiled, scores = list[int](), list[int](), list[float]()
    for step in range(1, 6):
        train_step(model)
        assert own_llm.update_weights(model) == before + step
        for sequence, served in zip(sequences, own_llm.score(sequences), strict=True):
            expected = own(sequence)[np.arange(len(sequence) - 1), sequence[1:]]
            np.testing.assert_allclose(served, expected, atol=1e-4)
            scores.append(served[0])
        assert own_llm.generate([sequences[1]], PARAMS)[0].token_versions == [before + step] * 10
        compiled.append(own_llm.compiles.programs)
        levels.append(sum(array.nbytes for array in jax.live_arrays()))
    assert len({*scores}) == len(scores)  # each step changed the weights
    assert {*compiled[1:]} == {compiled[0]}
    assert max(levels[1:]) <= levels[0] + 1000  # an iteration in flight has a few tokens


@pytest.mark.parametrize("form", ["state", "training state", "safetensors"])
def test_new_weights_from_a_checkpoint(own_llm: LLM, tmp_path: Path, form: str) -> None:
    trained, before = trained_further(GatedModel()), own_llm.weights_version
    state = nnx.state(trained, nnx.Param)
    if form == "safetensors":
        flat = {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}
        save_file(flat, tmp_path / "model.safetensors")
    else:
        moments = jax.tree.map(jnp.zeros_like, state)
        tree = {"model": state, "opt": {"mu": moments}, "step": 3} if form == "training state" else state
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "saved", tree)
        tmp_path /= "saved"
    assert own_llm.update_weights(tmp_path) == before + 1
    check(trained, own_llm.generate(prompts(), PARAMS))


def test_steps_of_a_training_run_by_orbax(
    own_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only complete ones are loaded: not one under its temporary name, nor one whose data is damaged."""
    first, trained, events = own_llm.weights_version, trained_further(GatedModel()), list[str]()
    follower = CheckpointFollower(tmp_path, own_llm.controls, on_event=events.append)
    with ocp.CheckpointManager(tmp_path) as manager:
        for step, model in ((first + 1, GatedModel()), (first + 2, trained)):
            manager.save(step, args=ocp.args.StandardSave(nnx.state(model, nnx.Param)))
        manager.wait_until_finished()
    shutil.copytree(tmp_path / f"{first + 2}", tmp_path / f"{first + 4}.orbax-checkpoint-tmp-7")
    damaged = shutil.copytree(tmp_path / f"{first + 2}", tmp_path / f"{first + 3}")
    for file in damaged.glob("**/d/*"):
        os.truncate(file, file.stat().st_size // 2)
    assert follower.look()
    assert own_llm.weights_version == first + 2
    check(trained, own_llm.generate(prompts(), PARAMS))
    assert not follower.look()
    damage, loaded = events
    assert damage.startswith(f"step {first + 3} is left out until its files change: ") and "\n" not in damage
    assert loaded == f"loaded step {first + 2} from {tmp_path / str(first + 2)}"
    # The trainer may remove a step as soon as it is read.
    earlier = tmp_path / str(first + 1)
    remove_once_read(own_llm, monkeypatch)
    own_llm.controls.update_weights(
        str(earlier), version=None, running="finish", timeout=60.0, read_ahead=True
    )
    check(GatedModel(), own_llm.generate(prompts(), PARAMS))


def test_checkpoints_that_do_not_fit(own_llm: LLM, tmp_path: Path) -> None:
    before = own_llm.weights_version
    with pytest.raises(CheckpointError):
        own_llm.update_weights(tmp_path)
    for change, words in (
        ({"head.kernel": None}, "1 of the module's weights are missing, such as head.kernel"),
        ({"head.kernel": np.zeros((64, 255), np.float32)}, r"expected the shape \[64, 256\] of head.kernel"),
        ({"bias": np.zeros(3, np.float32)}, "1 arrays are not the module's, such as bias"),
    ):
        state = nnx.to_flat_state(nnx.state(GatedModel(), nnx.Param))
        flat = {".".join(map(str, path)): np.asarray(v[...]) for path, v in state} | change
        save_file({name: v for name, v in flat.items() if v is not None}, tmp_path / "model.safetensors")
        with pytest.raises(TensorMismatch, match=words):
            own_llm.update_weights(tmp_path)
    with pytest.raises(ConfigError, match="layout is for models of a family"):
        own_llm.update_weights(GatedModel(), layout="tunix")
    assert own_llm.weights_version == before


@pytest.fixture(scope="module")
def own_llm() -> Iterator[LLM]:
    with LLM(model=GatedModel(), **ROOM) as llm:
        yield llm


@pytest.mark.parametrize("way", ["attribute", "argument"])
def test_text_with_a_tokenizer(way: str) -> None:
    tokenizer = Tokenizer.from_file(DEMO_MODEL / "tokenizer.json")
    model = GatedModel(2048, str(DEMO_MODEL / "tokenizer.json") if way == "attribute" else None)
    with LLM(model, **ROOM, tokenizer=DEMO_MODEL if way == "argument" else None) as llm:
        (result,) = llm.generate(["In the beginning"], SamplingParams(max_tokens=12, temperature=0))
        assert result.n_input == len(tokenizer.encode("In the beginning"))
        assert result.text == tokenizer.decode(result.token_ids) != ""


CHAT = [{"role": "user", "content": "The king"}]


def test_trained_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example: text and chat come from the weights that training left."""
    monkeypatch.chdir(tmp_path)
    train_own_model.main(["--steps", "2"])
    assert "step 2, loss " in capsys.readouterr().out
    trained, untrained = train_own_model.saved(), train_own_model.new_model()
    assert not np.array_equal(trained.head.kernel[...], untrained.head.kernel[...])
    with LLM("examples.train_own_model:saved", dtype="float32") as llm:
        prompt = Tokenizer.from_file(DEMO_MODEL / "tokenizer.json").encode("In the beginning")
        (result,) = llm.generate(["In the beginning"], PARAMS)
        sequence = [*prompt, *result.token_ids]
        given = as_trained(trained)(sequence)[len(prompt) - 1 : len(sequence) - 1]
        assert given.argmax(axis=1).tolist() == list(result.token_ids)
        (reply,) = llm.chat(CHAT, SamplingParams(max_tokens=8))
        assert reply.text  # the tokenizer's folder has the chat template


@pytest.mark.matrix
def test_trained_saved_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same over HTTP."""
    monkeypatch.chdir(tmp_path)
    train_own_model.main(["--steps", "2"])
    with LLM(train_own_model.saved(), dtype="float32") as llm:
        (expected,) = llm.generate(["In the beginning"], SamplingParams(max_tokens=8, temperature=0))
    with serving(["orca", "serve", "examples.train_own_model:saved"], tmp_path) as url:
        body = {"prompt": "In the beginning", "max_tokens": 8, "temperature": 0}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"] == expected.text != ""
        body = {"messages": CHAT, "max_tokens": 8, "temperature": 0}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"]  # the tokenizer's folder has the chat template
        body = {"messages": CHAT, "max_tokens": 8}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"]


@pytest.mark.matrix
def test_a_server_follows_a_training_run(tmp_path: Path) -> None:
    trained = trained_further(GatedModel())
    command = ["orca", "serve", "examples.own_model:GatedModel", "--follow", str(tmp_path / "run")]
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
    with serving([*command, "--dtype", "float32"], tmp_path) as url:
        versions = list[int]()
        choice: dict[str, Any] = {}
        while len(versions) < 2:
            choice = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
            if choice["weights_version"] not in versions:
                versions.append(choice["weights_version"])
            if len(versions) == 1 and not (tmp_path / "run").exists():
                with ocp.CheckpointManager(tmp_path / "run") as manager:
                    manager.save(30, args=ocp.args.StandardSave(nnx.state(trained, nnx.Param)))
        body["return_token_ids"] = True
        choice = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert versions == [0, 30]
    with LLM(trained, **ROOM) as llm:
        (result,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0))
    assert choice["token_ids"] == result.token_ids


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer is .*; it must be a tokenizer.json"):
        LLM(model=GatedModel(), **ROOM, tokenizer=tmp_path)


class Broken(GatedModel):
    """A model with one mistake."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "no layers":
            self.layers = nnx.List([])
        elif how == "sizes":
            self.head_size = 32
        elif how == "vocabulary":
            self.vocab_size = 300
        elif how in ("twice", "never"):
            self.layers.append(Attends(2 if how == "twice" else 0))

    def embed(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.tokens(token_ids)
        return x[:, :-1] if self.how == "hidden" else x


class Attends(nnx.Module):
    """A layer that calls attend that many times."""

    def __init__(self, n_times: int) -> None:
        self.n_times = n_times

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Any) -> jax.Array:
        for _ in range(self.n_times):
            attend(jnp.zeros((*x.shape[:-1], 8, 16)), *[jnp.zeros((*x.shape[:-1], 4, 16))] * 2)
        return x


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no layers", "no nnx.List of layers"),
        ("sizes", "calls attend with q"),
        ("vocabulary", "vocab_size is 300"),
        ("hidden", "hidden_size is 64"),
        ("twice", "layer 3 calls attend 2 times"),
        ("never", "layer 3 calls attend 0 times"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_at_start(how: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model=Broken(how), **ROOM)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (GatedModel, {}, "must be a directory"),
        (7, {}, "it must be a directory"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {}, "vocab_size"),
        ("examples.own_model:Missing", {}, "cannot be imported"),
        ("no_such_file:model", {}, "cannot be imported"),
        ("examples.own_model:H", {}, "is not a function"),
        (GatedModel(), {"tensor_parallel": 3}, "not a multiple"),
        (GatedModel(), {"tensor_parallel": 8}, "4 key/value heads"),
        (GatedModel(), {"worker_processes": True}, "name the function that makes it"),
    ],
)
def test_unsupported_user_models_are_refused(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model=model, **ROOM, **options)
