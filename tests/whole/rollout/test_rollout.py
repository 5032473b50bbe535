"""Rollouts of a user's module: each token against the trainer's forward pass, whatever happens between."""

import gc
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import grpo_own_model
from examples.own_model import GatedModel
from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError, EngineError, NotSupported, PromptTooLong, QueueFull, ServiceClosed
from orca_jax.launch import module_update
from orca_jax.rollout import Group, Rollout, Sample
from tests.whole.pauses import pause_after

SOON = 60.0
SIZES: dict[str, Any] = {"max_batch_size": 16, "max_batch_tokens": 16, "n_slots": 4096, "block_size": 4}
PARAMS = SamplingParams(n=4, max_tokens=20, temperature=1.0, ignore_eos=True, logprobs=0, seed=5)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7], [*range(20, 40)]]
TOOL = [60, 61, 62]


@pytest.fixture(scope="module")
def model() -> GatedModel:
    return GatedModel(vocab_size=64)


@pytest.fixture(scope="module")
def llm(model: GatedModel) -> Iterator[LLM]:
    with LLM(model, **SIZES, compile_ahead=True) as llm:
        yield llm


def weights_of(model: GatedModel) -> nnx.State:
    """The weights as they are now, in host memory."""
    return jax.tree.map(np.array, nnx.state(model, nnx.Param))


def drawn(model: GatedModel, seed: int) -> nnx.State:
    """Other weights of the model."""
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.Param)
    return jax.tree.map(lambda w: w + jnp.asarray(rng.normal(0, 0.1, w.shape), w.dtype), state)


class Trainer:
    """The model's forward pass, as training has it, with the weights of each version."""

    def __init__(self, model: GatedModel) -> None:
        graph, _ = nnx.split(model)
        self._forward = jax.jit(lambda weights, ids: jax.nn.log_softmax(nnx.merge(graph, weights)(ids)))
        self.weights = dict[int, nnx.State]()

    def logprobs(self, samples: Sequence[Sample], version: int) -> list[np.ndarray]:
        """The log-probabilities of each sample's tokens by the weights of a version."""
        ids = np.zeros((-(-len(samples) // 16) * 16, 128), np.int32)  # causal: what follows does not count
        for row, sample in zip(ids, samples, strict=False):
            row[: len(sample.prompt_ids) + len(sample.token_ids)] = (*sample.prompt_ids, *sample.token_ids)
        found = [
            row
            for part in np.split(ids, len(ids) // 16)
            for row in self._forward(self.weights[version], part)
        ]
        return [
            np.asarray(row)[len(sample.prompt_ids) - 1 :][range(len(sample.token_ids)), sample.token_ids]
            for row, sample in zip(found, samples, strict=False)
        ]

    def check(self, samples: Sequence[Sample]) -> None:
        """Each sampled token has the log-probability that the weights of its version give."""
        for version in {v for sample in samples for v in sample.versions[sample.sampled].tolist()}:
            for sample, exact in zip(samples, self.logprobs(samples, version), strict=True):
                assert sample.logprobs is not None
                these = sample.versions == version
                np.testing.assert_allclose(sample.logprobs[these], exact[these], atol=1e-4)
        for sample in samples:
            assert sample.logprobs is not None and not sample.logprobs[~sample.sampled].any()
            assert (sample.versions[~sample.sampled] == -1).all()


@pytest.fixture
def trainer(model: GatedModel, llm: LLM) -> Trainer:
    trainer = Trainer(model)
    trainer.weights[llm.update_weights(model)] = weights_of(model)
    return trainer


def tokens(groups: Sequence[Group]) -> dict[Any, list[list[int]]]:
    """The tokens of each group's samples, in the order of their seeds."""
    in_order = {group.key: sorted(group.samples, key=lambda sample: sample.seed) for group in groups}
    return {key: [sample.token_ids.tolist() for sample in samples] for key, samples in in_order.items()}


def tool(sample: Sample) -> list[int] | None:
    """A tool that answers twice."""
    return None if sample.n_turns == 3 else [*TOOL, int(sample.token_ids[-1])]


def test_samples_are_those_of_the_engine_and_share_their_prompt(llm: LLM, trainer: Trainer) -> None:
    with Rollout(llm) as rollout:
        keys = [rollout.submit(prompt, PARAMS) for prompt in PROMPTS]
        groups = rollout.take(3)
    assert keys == [0, 1, 2]
    results = iter(llm.generate(PROMPTS, PARAMS))
    assert tokens(groups) == {key: [next(results).token_ids for _ in range(4)] for key in keys}
    for group in groups:
        assert group.prompt_ids == (*PROMPTS[int(group.key)],)
        trainer.check(group.samples)
        for sample in group.samples:
            assert sample.finish_reason == "length" and sample.n_turns == 1 and sample.sampled.all()
        # All but one sample find the full blocks of the prompt, of which the last token is computed again.
        shared = (len(group.prompt_ids) - 1) // 4 * 4
        assert sorted(sample.n_cached for sample in group.samples)[1:] == [shared] * 3
    rescored = [sample for group in groups for sample in group.samples]
    with Rollout(llm) as rollout:
        scores = rollout.score([[*s.prompt_ids] for s in rescored], [s.token_ids for s in rescored])
        (nothing,) = rollout.score([[1]], [[]])
    assert not len(nothing)
    for sample, score in zip(rescored, scores, strict=True):
        assert sample.logprobs is not None
        np.testing.assert_allclose(score, sample.logprobs, atol=1e-5)


def test_turns_put_exact_tokens_back(llm: LLM, trainer: Trainer) -> None:
    with Rollout(llm, next_turn=tool) as rollout:
        for prompt in PROMPTS:
            rollout.submit(prompt, PARAMS)
        groups = rollout.take(3)
    trainer.check([sample for group in groups for sample in group.samples])
    for sample in (sample for group in groups for sample in group.samples):
        first = sample.token_ids[:48].reshape(2, 24)
        assert first[:, 20:23].tolist() == [TOOL] * 2 and (first[:, 23] == first[:, 19]).all()
        mask = ([True] * 20 + [False] * 4) * 2 + [True] * 20
        assert sample.sampled.tolist() == mask and sample.n_turns == 3
        # A turn finds all full blocks of the turns before; the last sampled token was never computed.
        n = len(sample.prompt_ids)
        assert sample.n_cached >= sum((n + computed) // 4 * 4 for computed in (19, 43))


def test_running_samples_continue_with_new_weights(model: GatedModel, llm: LLM, trainer: Trainer) -> None:
    """Samples in the middle of a turn take an update; every token has the version that made it."""
    with Rollout(llm, next_turn=tool) as rollout:
        for seed in (1, 2):
            paused = pause_after(llm, 10)
            if seed == 1:
                for prompt in PROMPTS:
                    rollout.submit(prompt, PARAMS)
            else:
                llm.resume()
            assert paused.wait(SOON)
            other = drawn(model, seed)
            trainer.weights[rollout.update(other)] = other
        llm.resume()
        samples = [sample for group in rollout.take(3) for sample in group.samples]
    trainer.check(samples)
    n_versions = list[int]()
    for sample in samples:
        assert len(sample.versions) == 68 and (np.diff(sample.versions[sample.sampled]) >= 0).all()
        assert sample.versions[-1] == llm.weights_version
        n_versions.append(len({*sample.versions.tolist()} - {-1}))
    assert max(n_versions) == 3 and any(len({*sample.versions[:20].tolist()}) > 1 for sample in samples)


def test_a_group_ends_early_and_frees_its_slots(llm: LLM, trainer: Trainer) -> None:
    long = SamplingParams(n=8, max_tokens=100, temperature=1.0, stop_token_ids=(7, 9), logprobs=0, seed=3)
    with Rollout(llm, enough=lambda group: len(group.samples) >= 2) as rollout:
        rollout.submit([1, 2], long, key="early")
        (group,) = rollout.take()
        rollout.submit([1, 2], PARAMS, key="early")  # the key is free again
        assert rollout.take()[0].key == "early"
    assert group.key == "early" and 2 <= len(group.samples) < 8
    whole = {result.seed: result.token_ids for result in llm.generate([1, 2], long)}
    for sample in group.samples:
        assert sample.token_ids.tolist() == whole[sample.seed]
    trainer.check(group.samples)
    until_idle(llm)
    assert llm.service.scheduler.n_rsrv == 0


def until_idle(llm: LLM) -> None:
    """An update that waits for all requests, also those that are being cancelled."""
    llm.pause(running="finish", timeout=SOON)
    llm.resume()


def test_too_much_in_flight_waits(llm: LLM, trainer: Trainer) -> None:
    with Rollout(llm, max_groups=2) as rollout:
        rollout.submit([1], PARAMS)
        rollout.submit([2], PARAMS)
        with pytest.raises(QueueFull, match=r"2 groups of up to 168 tokens .* after 0 seconds; take some"):
            rollout.submit([3], PARAMS, timeout=0)
        later = threading.Thread(target=rollout.submit, args=([4], PARAMS))
        later.start()
        taken = rollout.take(2)
        later.join(SOON)
        assert [group.key for group in (*sorted(taken, key=lambda g: g.key), *rollout.take())] == [0, 1, 2]
        with pytest.raises(TimeoutError, match="0 of 1 groups finished within 0 seconds, and 0 are running"):
            rollout.take(timeout=0)
    with Rollout(llm, max_tokens=100) as rollout:
        rollout.submit([1] * 20, PARAMS)  # larger than the bound, and alone
        with pytest.raises(QueueFull, match="1 groups of up to 160 tokens"):
            rollout.submit([2], PARAMS, timeout=0)
        rollout.take()
        rollout.submit([2], PARAMS)
        rollout.take()
    with pytest.raises(ServiceClosed, match="this rollout is closed"):
        rollout.submit([1], PARAMS)


def test_what_cannot_run_is_refused_at_once(llm: LLM, trainer: Trainer) -> None:
    with Rollout(llm, max_groups=1) as rollout:
        with pytest.raises(PromptTooLong):
            rollout.submit([1] * 128, PARAMS)
        with pytest.raises(NotSupported, match=r"logprobs at temperature 0\.5"):
            rollout.submit([1], SamplingParams(temperature=0.5, logprobs=0))
        with pytest.raises(NotSupported, match="no beam search"):
            rollout.submit([1], SamplingParams(n=2, use_beam_search=True))
        rollout.submit([1], PARAMS)  # the others have left no trace
        with pytest.raises(ConfigError, match="the key 0 is of a group"):
            Rollout(llm, state=rollout.state()).submit([1], PARAMS, key=0)
    with pytest.raises(ConfigError, match="the state has the format None"):
        Rollout(llm, state={})
    # A sample without room for another turn ends.
    with Rollout(llm, next_turn=lambda sample: [1] * 60) as rollout:
        rollout.submit([1], PARAMS)
        (group,) = rollout.take()
        for sample in group.samples:
            assert len(sample.token_ids) == 20 + 60 + 20 + 60 and sample.finish_reason == "length"


def test_an_error_of_the_environment_is_the_trainers(llm: LLM, trainer: Trainer) -> None:
    def fails(sample: Sample) -> list[int] | None:
        raise KeyError("no such tool")

    with Rollout(llm, next_turn=fails) as rollout:
        rollout.submit([1, 2, 3], PARAMS)
        with pytest.raises(KeyError, match="no such tool"):
            rollout.take()
        state = json.loads(json.dumps(rollout.state()))
    with Rollout(llm, next_turn=tool, state=state) as rollout:
        (resumed,) = rollout.take()
    with Rollout(llm, next_turn=tool) as rollout:
        rollout.submit([1, 2, 3], PARAMS)
        assert tokens([resumed]) == tokens(rollout.take())


@pytest.mark.parametrize("at", [1, 4, pytest.param(9, marks=pytest.mark.matrix), 14])
def test_another_rollout_continues_the_state(model: GatedModel, llm: LLM, trainer: Trainer, at: int) -> None:
    """At some turn the whole rollout is written down and thrown away; all tokens come as they would have."""
    states, n_calls, caught, lock = list[str](), 0, threading.Event(), threading.Lock()
    sampling = SamplingParams(n=3, max_tokens=12, temperature=1.0, ignore_eos=True, logprobs=0)

    def interrupted(sample: Sample) -> list[int] | None:
        nonlocal n_calls
        with lock:
            n_calls += 1
            if n_calls == at:
                states.append(json.dumps(rollout.state()))
                caught.set()
        return tool(sample)

    with Rollout(llm, next_turn=tool, seed=11) as rollout:
        for prompt in PROMPTS:
            rollout.submit(prompt, sampling)
        expected = rollout.take(3)
    with Rollout(llm, next_turn=interrupted, seed=11) as rollout:
        for prompt in PROMPTS:
            rollout.submit(prompt, sampling)
        assert caught.wait(SOON)
    state = json.loads(states[0])
    with Rollout(llm, next_turn=tool, max_groups=3, state=state) as rollout:
        with pytest.raises(QueueFull):
            rollout.submit([1], sampling, timeout=0)
        found = rollout.take(3)
        assert rollout.submit([1], sampling) == 3
    assert tokens(found) == tokens(expected)
    # With other weights, the tokens that there were stay, and only further ones are sampled.
    old, other = llm.weights_version, drawn(model, 1)
    trainer.weights[llm.update_weights(other)] = other
    with Rollout(llm, next_turn=tool, state=state) as rollout:
        continued = rollout.take(3)
    for groups in (found, continued):
        samples = {(sample.key, sample.seed): sample for group in groups for sample in group.samples}
        trainer.check([*samples.values()])
        assert all(sample.n_turns == 3 and sample.finish_reason == "length" for sample in samples.values())
    for group in state["groups"]:
        for written in group["samples"]:
            sample, turn = samples[group["key"], written["seed"]], written["turn"] or {"token_ids": []}
            kept = [*written["transcript"]["token_ids"], *turn["token_ids"]]
            assert sample.token_ids[: len(kept)].tolist() == kept
            assert (sample.versions[len(kept) :] != old).all()
            assert {*sample.versions[: len(kept)].tolist()} <= {old, -1}


def test_an_update_that_fails_in_the_middle(
    model: GatedModel, llm: LLM, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token comes from a mixture of weights, and another engine continues with the same tokens."""
    with Rollout(llm, next_turn=tool, seed=11) as rollout:
        for prompt in PROMPTS:
            rollout.submit(prompt, PARAMS)
        expected = rollout.take(3)
    n_moved, moved = 0, module_update.moved

    def fails(*arguments: Any) -> jax.Array:
        nonlocal n_moved
        n_moved += 1
        if n_moved == 12:
            raise RuntimeError("the device is gone")
        return moved(*arguments)

    with LLM(model, **SIZES) as failing, Rollout(failing, next_turn=tool, seed=11) as rollout:
        paused = pause_after(failing, 10)
        for prompt in PROMPTS:
            rollout.submit(prompt, PARAMS)
        assert paused.wait(SOON)
        monkeypatch.setattr(module_update, "moved", fails)
        with pytest.raises(EngineError, match="the device is gone"):
            rollout.update(drawn(model, 1))
        failing.resume()
        with pytest.raises(EngineError, match="the device is gone"):
            rollout.take()
        state = json.loads(json.dumps(rollout.state()))
    monkeypatch.undo()
    assert any(sample["turn"]["token_ids"] for group in state["groups"] for sample in group["samples"])
    trainer.weights[0] = weights_of(model)
    with Rollout(llm, next_turn=tool, state=state) as rollout:
        found = rollout.take(3)
    assert tokens(found) == tokens(expected)
    trainer.check([sample for group in found for sample in group.samples])


def test_ten_steps_of_grpo(model: GatedModel, llm: LLM, trainer: Trainer) -> None:
    """The log-probabilities are the trainer's in every step; nothing is compiled, no memory grows."""
    own = GatedModel(vocab_size=64)
    trainer.weights = {llm.update_weights(own): weights_of(own)}
    compiled, memory, lags = list[int](), list[int](), set[int]()

    def seen(rollout: Rollout, groups: list[Group]) -> None:
        now = llm.weights_version
        trainer.weights[now] = weights_of(own)
        samples = [sample for group in groups for sample in group.samples]
        trainer.check(samples)
        lags.update(*((now - sample.versions).tolist() for sample in samples))
        scores = rollout.score([sample.prompt_ids for sample in samples], [s.token_ids for s in samples])
        for exact, score in zip(trainer.logprobs(samples, now), scores, strict=True):
            np.testing.assert_allclose(score, exact, atol=1e-4)
        compiled.append(llm.compiles.programs)
        gc.collect()
        memory.append(sum(array.nbytes for array in jax.live_arrays()))

    rewards = grpo_own_model.train(own, llm, 10, seen)
    assert len(trainer.weights) == 10
    assert np.mean(rewards[-3:]) > 0.8 > 0.6 > rewards[0]
    assert len({*compiled[1:]}) == 1
    assert max(memory[2:]) - min(memory[2:]) < 16 * 1024  # arguments of iterations in flight
    assert lags == {0, 1}
