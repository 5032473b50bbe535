"""Checkpoints are loaded as they are finished, under load: no request fails, each token has one version."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax import LLM
from orca_jax.model import reference
from orca_jax.service.follower import CheckpointFollower
from orca_jax.service.generation import GenerationResult
from tests.device.checkpoint.tiny_checkpoint import gpt2_tensors, write_checkpoint
from tests.whole.training.weights import (
    CONFIG,
    LONG,
    PROMPTS,
    SIZES,
    arrays,
    model_of,
    remove_once_read,
    tokens,
)

SOON = 60.0


@pytest.fixture(scope="module")
def llm(old: Path) -> Iterator[LLM]:
    with LLM(old, **SIZES) as llm:
        yield llm


class Training:
    """A run that saves steps: whole ones, and in between some that are not."""

    def __init__(self, folder: Path, llm: LLM, first: Path) -> None:
        self.folder, self.llm = folder, llm
        self.saved = {llm.weights_version: first}  # by version
        self.loaded = threading.Condition()
        self.events = list[str]()
        self.follower = CheckpointFollower(folder, llm.controls, on_event=self.event, seconds=0.002)

    def event(self, text: str) -> None:
        with self.loaded:
            self.events.append(text)
            self.loaded.notify_all()

    def step(self, *, with_others: bool) -> None:
        """Save a step as a careful writer does, and wait until it is loaded.

        With others there are two later ones: one that lost the end of its file, and one without weights.
        """
        number = self.llm.weights_version + 3
        made = write_checkpoint(self.folder / "tmp", CONFIG, gpt2_tensors(CONFIG, seed=number))
        others = [self.folder / f"checkpoint-{number + 1}", self.folder / f"step-{number + 2}"]
        if with_others:
            damaged = shutil.copytree(made, self.folder / "damaged")
            file = damaged / "model.safetensors"
            os.truncate(file, file.stat().st_size - 4)
            damaged.rename(others[0])
            others[1].mkdir()
        self.saved[number] = made.rename(self.folder / f"checkpoint-{number}")
        self.until(number)
        for other in others:
            shutil.rmtree(other, ignore_errors=True)

    def until(self, version: int) -> None:
        with self.loaded:
            assert self.loaded.wait_for(lambda: self.llm.weights_version == version, SOON), self.events


def check_tokens(results: list[GenerationResult], saved: dict[int, Path]) -> None:
    """Each token is the best one by the weights of its version, for all tokens before it."""
    model = model_of(saved[min(saved)])
    forward = jax.jit(lambda weights, text: reference.forward(model, weights, text))
    weights = {version: arrays(path) for version, path in saved.items()}
    for prompt, result in zip(PROMPTS * len(results), results, strict=False):
        text = np.zeros(64, np.int32)
        whole = [*prompt, *result.token_ids]
        text[: len(whole)] = whole
        versions = np.array(result.token_versions)
        for version in {*result.token_versions}:
            logits = np.asarray(forward(weights[version], jnp.asarray(text)))
            given = logits[len(prompt) - 1 : len(whole) - 1][versions == version]
            chosen = np.array(result.token_ids)[versions == version]
            np.testing.assert_allclose(given[range(len(chosen)), chosen], given.max(axis=1), atol=1e-4)


@pytest.mark.parametrize("n", [3, pytest.param(100, marks=pytest.mark.long)])
def test_steps_under_load(llm: LLM, old: Path, tmp_path: Path, n: int) -> None:
    llm.update_weights(old)
    training = Training(tmp_path, llm, old)
    stop, results, failures = threading.Event(), list[GenerationResult](), list[BaseException]()

    def ask() -> None:
        try:
            while not stop.is_set():
                results.extend(llm.generate(PROMPTS, LONG))
        except BaseException as error:
            failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    training.follower.start()
    for i in range(n):
        training.step(with_others=i % 2 == 1)
    stop.set()
    asking.join(SOON)
    training.follower.close()
    assert not failures and not asking.is_alive()
    assert all(len(result.token_ids) == 40 == len(result.token_versions) for result in results)
    seen = {version for result in results for version in result.token_versions}
    assert seen <= training.saved.keys() and len(seen) > 1
    check_tokens(results[-200:], training.saved)
    loaded = [event for event in training.events if event.startswith("loaded")]
    assert len(loaded) == n and any("is left out" in event for event in training.events)


def test_a_step_may_be_removed_once_it_is_read(
    llm: LLM, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.update_weights(new)
    expected = tokens(llm)
    llm.update_weights({name: np.zeros_like(value) for name, value in arrays(new).items()})
    assert tokens(llm) != expected
    remove_once_read(llm, monkeypatch)
    shutil.copytree(new, tmp_path / "1000")
    follower = CheckpointFollower(tmp_path, llm.controls, on_event=lambda text: None)
    assert follower.look() and llm.weights_version == 1000
    assert tokens(llm) == expected
