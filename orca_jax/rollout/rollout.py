"""`Rollout`: groups of samples for a trainer, from an engine that has the trainer's weights.

A group is one prompt with n samples. Its samples are plain requests, which run in the same iterations as all
others and share their prompt's keys and values through the prefix cache. A sample of several turns is a
request for each turn: the next one's prompt is the exact tokens of all before, so no token is encoded twice,
and the prefix cache has most of its keys and values.

The engine's thread only says that a request has ended. One thread of the rollout (`_run`) does all that
follows, and the users' functions run on threads of a small pool, so that a slow tool delays nobody else.
"""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from orca_jax.checks import check_whole
from orca_jax.errors import (
    ConfigError,
    EngineError,
    NotSupported,
    OutputFailed,
    QueueFull,
    ServiceClosed,
)
from orca_jax.llm import LLM, Prompt
from orca_jax.request.prompts import prompt_token_ids
from orca_jax.request.request import FinishReason
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.rollout.sample import Group, Key, Sample, Transcript
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.generation import Generation
from orca_jax.service.interludes import Running
from orca_jax.service.output import OutputSoFar
from orca_jax.service.prepared_params import OutputRules

NextTurn = Callable[[Sample], Sequence[int] | None]
Enough = Callable[[Group], bool]

_LOOK_SECONDS = 1.0  # how often threads that wait check whether the engine still works
_CLOSE_SECONDS = 30.0  # for the user's functions that run at `close`
_SEED_BITS = 47
_TURNS_APART = 0x9E3779B97F4A7C15  # between the seeds of two turns, far more than the samples of a group
_FORMAT = 1  # of `Rollout.state`


class Rollout:
    """Samples groups with an engine that has the trainer's weights. Six methods, all thread-safe:

    - `submit` adds a group, and waits while too much is in flight;
    - `take` returns finished groups, in the order in which they finish;
    - `update` gives the engine new weights, with which running samples continue;
    - `score` returns log-probabilities of given tokens by the present weights;
    - `state` is everything that has not been taken, from which another Rollout goes on;
    - `close` ends what still runs. The LLM stays open.

    `next_turn(sample)` is called after each turn of a sample. It returns the ids of the tokens to insert
    before the model's next turn, such as a tool's result in the chat template's form, or None if the sample
    is complete. There are at most `max_turns`. Without it each sample has one turn. `enough(group)` is called
    with the samples that have ended so far, each time that one more ends; True ends the group early, and its
    other samples are cancelled. Both run on up to `threads` threads at a time. If one of them raises, so do
    `submit` and `take`.

    Groups count as in flight from `submit` until they are taken: at most `max_groups`, and at most
    `max_tokens` tokens, counted as if each sample had its greatest length. A token takes about 200 bytes of
    host memory. If each step of the trainer takes B groups, `max_groups` of (k + 1) * B means that no sample
    began with weights more than k updates older than those that will be trained on it.

    `seed` and a group's number decide its random draws, if its parameters have no seed. `state` is what
    another Rollout's `state` returned.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        next_turn: NextTurn | None = None,
        enough: Enough | None = None,
        max_turns: int = 16,
        max_groups: int = 1024,
        max_tokens: int = 1 << 24,
        threads: int = 8,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        check_whole("max_turns", max_turns, 1, 1 << 20)
        check_whole("max_groups", max_groups, 1, 1 << 20)
        check_whole("max_tokens", max_tokens, 1, 1 << 40)
        check_whole("threads", threads, 1, 1024)
        self.llm = llm
        self._next_turn = next_turn
        self._enough = enough
        self._max_turns = max_turns if next_turn is not None else 1
        self._max_groups = max_groups
        self._max_tokens = max_tokens
        self._seed = seed
        self._lock = threading.Lock()  # guards all below, and everything in a _Group
        self._changed = threading.Condition(self._lock)
        self._groups: dict[Key, _Group] = {}  # submitted and not finished
        self._finished: deque[_Group] = deque()  # and not taken
        self._n_submitted = 0
        self._n_tokens = 0  # of all groups that have not been taken, at their greatest length
        self._failure: BaseException | None = None
        self._closed = False
        # At most one event for each sample in flight.
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._users = ThreadPoolExecutor(threads, thread_name_prefix="rollout")
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        if state is not None:
            self._restore(state)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        key: Key | None = None,
        adapter: str | None = None,
        timeout: float = 600.0,
    ) -> Key:
        """Add a group of `params.n` samples of a prompt (a text or token ids); return its key.

        `params.max_tokens` is the limit of one turn. With `logprobs=0` samples have the log-probabilities of
        their tokens. These are the model's own, which is what tokens are sampled by at temperature 1; with
        another temperature than 1 or 0 they are refused. `key` is by default the group's number, from 0.
        `adapter` names a LoRA adapter.

        Waits up to `timeout` seconds while `max_groups` or `max_tokens` would be exceeded, and then raises
        QueueFull. A group larger than `max_tokens` runs alone. Raises a leaf of InvalidRequest for what the
        engine cannot run, ConfigError for a key that is in flight, EngineError or ServiceClosed.
        """
        if params.use_beam_search:
            raise NotSupported("a rollout samples; it has no beam search", param="use_beam_search")
        if params.logprobs is not None and params.temperature not in (0.0, 1.0):
            raise NotSupported(
                f"logprobs at temperature {params.temperature}: they would be the model's own, and not those "
                "of the samples; leave logprobs out, or sample at temperature 1",
                param="logprobs",
            )
        token_ids = tuple(prompt_token_ids(self.llm.name, self.llm.tokenizer, prompt))
        checked, rules = self._check(token_ids, params, adapter)  # once for all samples
        n_tokens = params.n * (len(token_ids) + params.max_tokens)

        def has_room() -> bool:
            n = len(self._groups) + len(self._finished)
            return not n or (n < self._max_groups and self._n_tokens + n_tokens <= self._max_tokens)

        with self._changed:
            self._wait(has_room, timeout)
            if not has_room():
                n = len(self._groups) + len(self._finished)
                raise QueueFull(
                    f"{n} groups of up to {self._n_tokens} tokens have not been taken after {timeout:g} "
                    f"seconds; take some, or raise max_groups ({self._max_groups}) or max_tokens "
                    f"({self._max_tokens})"
                )
            number = self._n_submitted
            name: Key = number if key is None else key
            if name in self._groups or any(name == group.key for group in self._finished):
                raise ConfigError(f"the key {name!r} is of a group that has not been taken; give another one")
            self._n_submitted += 1
            self._n_tokens += n_tokens
            seed = params.seed
            if seed is None:
                seed = random.Random(f"{self._seed}/{number}").getrandbits(_SEED_BITS)
            params = replace(params, seed=seed)
            group = self._groups[name] = _Group(name, token_ids, params, adapter, n_tokens)
            group.samples += [_Sample(group, seed + i) for i in range(params.n)]
            try:
                for sample in group.samples:
                    self._begin_turn(sample, checked=(checked, rules))
            except BaseException:
                self._forget(group)
                raise
        return name

    def take(self, n: int = 1, *, timeout: float = 600.0) -> list[Group]:
        """Wait for `n` finished groups, and return those that finished first.

        Raises TimeoutError after `timeout` seconds, and nothing is taken; EngineError if the engine failed;
        and whatever `next_turn` or `enough` raised.
        """
        check_whole("n", n, 1, 1 << 20)
        with self._changed:
            self._wait(lambda: len(self._finished) >= n, timeout)
            if len(self._finished) < n:
                raise TimeoutError(
                    f"{len(self._finished)} of {n} groups finished within {timeout:g} seconds, and "
                    f"{len(self._groups)} are running"
                )
            taken = [self._finished.popleft() for _ in range(n)]
            self._n_tokens -= sum(group.n_tokens for group in taken)
            self._changed.notify_all()
        return [group.public() for group in taken]

    def update(
        self,
        weights: object,
        *,
        version: int | None = None,
        running: Running = "continue",
        timeout: float = 600.0,
        **options: Any,
    ) -> int:
        """Give the engine new weights between two iterations; return their version.

        Running samples continue with them, and each token keeps its version. With running="finish" they end
        with the old weights first. The other arguments and the errors are those of `LLM.update_weights`.
        """
        return self.llm.update_weights(weights, version=version, running=running, timeout=timeout, **options)

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int] | npt.NDArray[np.integer]],
        *,
        adapter: str | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """The log-probabilities of each output's tokens after its prompt, by the present weights.

        They are computed in the same batches and by the same programs as samples. Each prompt has at least
        one token. Raises as `LLM.score` does.
        """
        pairs = list(zip(prompts, outputs, strict=True))
        given = [i for i, (_, output) in enumerate(pairs) if len(output)]
        lists = [[*map(int, pairs[i][0]), *map(int, pairs[i][1])] for i in given]
        found = self.llm.score(lists, n_prompt=[len(pairs[i][0]) for i in given], adapter=adapter)
        scores = [np.zeros(0, np.float32) for _ in pairs]
        for i, each in zip(given, found, strict=True):
            scores[i] = np.array(each[len(pairs[i][0]) - 1 :], np.float32)
        return scores

    def state(self) -> dict[str, Any]:
        """All groups that have not been taken, with every token so far, as values for JSON.

        A Rollout that is made with it continues them. With the same weights, seeds and functions it gives the
        same tokens as this one would have. It may be read at any time, also after a failure of the engine.
        """
        with self._lock:
            groups = [*self._finished, *self._groups.values()]
            return {
                "format": _FORMAT,
                "seed": self._seed,
                "n_submitted": self._n_submitted,
                "groups": [group.to_json() for group in groups],
            }

    def close(self) -> None:
        """End running samples, and the rollout's threads. Idempotent."""
        with self._changed:
            self._closed = True
            for group in self._groups.values():
                group.cancel()
            self._changed.notify_all()
        self._events.put(None)
        self._users.shutdown(wait=False, cancel_futures=True)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Under the lock.

    def _wait(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until `ready` or the deadline; raise if nothing will come any more."""
        deadline = time.monotonic() + timeout
        while True:
            if self._closed:
                raise ServiceClosed("this rollout is closed; make a new one with its state")
            if isinstance(self._failure, EngineError):
                raise EngineError(str(self._failure)) from self._failure
            if self._failure is not None:
                raise self._failure
            left = deadline - time.monotonic()
            if ready() or left <= 0:
                return
            self._changed.wait(min(left, _LOOK_SECONDS))

    def _begin_turn(
        self,
        sample: "_Sample",
        begun: OutputSoFar | None = None,
        checked: tuple[CheckedPrompt, OutputRules] | None = None,
    ) -> None:
        """Submit the request of a sample's next turn, or end the sample if there is no room for it.

        `checked` is what `_check` returned for the group's prompt and parameters, before its first turn.
        """
        group, service = sample.group, self.llm.service
        token_ids = (*group.prompt_ids, *sample.transcript.token_ids)
        n_output = min(group.params.max_tokens, service.most_output(len(token_ids)))
        if n_output < 1:
            self._end(sample, FinishReason.LENGTH)
            return
        seed, n_turns = sample.seed, sample.transcript.n_turns
        if n_turns:
            seed = (seed + n_turns * _TURNS_APART) % (1 << 62)
        params = replace(
            group.params,
            n=1,
            seed=seed,
            max_tokens=n_output,
            min_tokens=min(n_output, group.params.min_tokens),
        )
        if checked is None:
            prompt, rules = self._check(token_ids, params, group.adapter)
        else:
            prompt, rules = checked[0], replace(checked[1], sampling=params)
        group.n_tokens += (added := len(token_ids) + n_output - sample.n_counted)
        self._n_tokens += added
        sample.n_counted += added
        event = partial(self._events.put, partial(self._turn_ended, sample))
        sample.generation = service.submit(prompt, rules, begun=begun, on_end=event)

    def _check(
        self, token_ids: Sequence[int], params: SamplingParams, adapter: str | None
    ) -> tuple[CheckedPrompt, OutputRules]:
        service = self.llm.service
        rules = service.rules(params)
        return service.check(token_ids, rules, SchedulingParams(adapter=adapter)), rules

    def _end(self, sample: "_Sample", reason: FinishReason) -> None:
        """Take note that a sample is complete; its group may then be."""
        group = sample.group
        sample.generation = None
        sample.ended = reason
        group.n_running -= 1
        group.order.append(sample)
        if not group.n_running:
            self._finish(group)
        elif self._enough is not None:
            self._users.submit(self._ask_enough, group)

    def _forget(self, group: "_Group") -> None:
        """Undo the submission of a group that the engine does not take."""
        group.finished = True
        group.cancel()
        del self._groups[group.key]
        self._n_tokens -= group.n_tokens

    def _finish(self, group: "_Group") -> None:
        group.finished = True
        group.cancel()
        del self._groups[group.key]
        self._finished.append(group)
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._changed.notify_all()

    # On the rollout's thread.

    def _run(self) -> None:
        while self._failure is None:
            try:
                event = self._events.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                event = self._look
            if event is None:
                return
            try:
                event()
            except BaseException as error:
                with self._changed:
                    self._fail(error)

    def _look(self) -> None:
        """Notice that the engine has failed or is closed, if no request has reported it."""
        failure = self.llm.service.failure
        if failure is not None:
            raise failure

    def _turn_ended(self, sample: "_Sample") -> None:
        with self._changed:
            generation = sample.generation
            if sample.group.finished or generation is None or self._closed:
                return
            self._look()  # an LLM that is closed cancels its requests
            failure = generation.failure
            if failure is not None and not isinstance(failure, OutputFailed):
                raise failure
            output = generation.so_far()
            sample.transcript.n_cached += generation.n_cached
            self._add_turn(sample, output, generation.finish_reason or FinishReason.ERROR)

    def _add_turn(self, sample: "_Sample", output: OutputSoFar, reason: FinishReason) -> None:
        sample.transcript.add_turn(output)
        sample.generation = None
        sample.reason = reason
        asked = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self._next_turn is None or not asked or sample.transcript.n_turns >= self._max_turns:
            self._end(sample, reason)
        else:
            self._users.submit(self._ask_next, sample)

    def _continue(self, sample: "_Sample", token_ids: Sequence[int] | None) -> None:
        with self._changed:
            if sample.group.finished or self._closed:
                return
            if token_ids is None:
                self._end(sample, sample.reason)
                return
            sample.transcript.add_given(token_ids)
            self._begin_turn(sample)

    def _end_early(self, group: "_Group") -> None:
        with self._changed:
            if not group.finished and not self._closed:
                self._finish(group)

    # On the threads of the user's functions.

    def _ask_next(self, sample: "_Sample") -> None:
        try:
            with self._lock:
                seen = sample.public(sample.reason)
            token_ids = None if self._next_turn is None else self._next_turn(seen)
            self._events.put(partial(self._continue, sample, token_ids))
        except BaseException as error:
            with self._changed:
                self._fail(error)

    def _ask_enough(self, group: "_Group") -> None:
        try:
            with self._lock:
                seen = None if group.finished else group.public()
            if seen is not None and self._enough is not None and self._enough(seen):
                self._events.put(partial(self._end_early, group))
        except BaseException as error:
            with self._changed:
                self._fail(error)

    # Before anything runs.

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != _FORMAT:
            raise ConfigError(
                f"the state has the format {state.get('format')!r}; this version reads {_FORMAT}"
            )
        with self._changed:
            self._seed, self._n_submitted = state["seed"], state["n_submitted"]
            groups = [_Group.from_json(fields) for fields in state["groups"]]
            for group in groups:
                self._n_tokens += group.n_tokens
                if group.finished:
                    self._finished.append(group)
                else:
                    self._groups[group.key] = group
            for sample in [sample for group in groups if not group.finished for sample in group.samples]:
                begun, sample.begun = sample.begun, None
                if sample.ended is not None:
                    continue
                if begun is None and sample.transcript.n_turns and sample.transcript.sampled[-1]:
                    self._users.submit(self._ask_next, sample)
                elif begun is not None and begun.finish_reason is not None:
                    self._add_turn(sample, begun, begun.finish_reason)
                else:
                    self._begin_turn(sample, begun)


@dataclass(slots=True, eq=False)
class _Sample:
    """A sample in flight.

    A turn runs while there is a `generation`. After it, `reason` is the turn's, and `next_turn` is asked.
    `ended` is the reason of the whole sample. `begun` is a turn to continue, of a state that was read.
    """

    group: "_Group"
    seed: int
    transcript: Transcript = field(default_factory=Transcript)
    generation: Generation | None = None
    reason: FinishReason = FinishReason.LENGTH
    ended: FinishReason | None = None
    begun: OutputSoFar | None = None
    n_counted: int = 0  # tokens in the bound for this sample

    def __post_init__(self) -> None:
        self.n_counted = self.n_counted or len(self.group.prompt_ids) + self.group.params.max_tokens

    def public(self, reason: FinishReason) -> Sample:
        with_logprobs = self.group.params.logprobs is not None
        return self.transcript.sample(
            self.group.key, self.group.prompt_ids, reason, self.seed, with_logprobs=with_logprobs
        )

    def to_json(self) -> dict[str, Any]:
        turn = None if self.generation is None else self.generation.so_far()
        if turn is not None and turn.finish_reason is FinishReason.CANCELLED:  # the rollout was closed
            turn = replace(turn, finish_reason=None)
        return {
            "seed": self.seed,
            "transcript": self.transcript.to_json(),
            "reason": self.reason,
            "ended": self.ended,
            "n_counted": self.n_counted,
            "turn": turn
            and {
                "token_ids": list(turn.token_ids),
                "logprobs": [token.logprob for token in turn.logprobs],
                "versions": [list(pair) for pair in turn.weights_versions],
                "reason": turn.finish_reason,
            },
        }

    @classmethod
    def from_json(cls, group: "_Group", fields: Mapping[str, Any]) -> "_Sample":
        turn, begun = fields["turn"], None
        if turn is not None:
            pairs = zip(turn["token_ids"], turn["logprobs"], strict=False)
            versions = tuple((first, version) for first, version in turn["versions"])
            begun = OutputSoFar(
                tuple(turn["token_ids"]),
                tuple(TokenLogprobs(token_id, logprob, ()) for token_id, logprob in pairs),
                versions,
                turn["reason"] and FinishReason(turn["reason"]),
            )
        return cls(
            group,
            fields["seed"],
            Transcript.from_json(fields["transcript"]),
            reason=FinishReason(fields["reason"]),
            ended=fields["ended"] and FinishReason(fields["ended"]),
            begun=begun,
            n_counted=fields["n_counted"],
        )


@dataclass(slots=True, eq=False)
class _Group:
    """A group that has not been taken. `order` are the samples that have ended, the first one first."""

    key: Key
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None
    n_tokens: int
    samples: "list[_Sample]" = field(default_factory=list["_Sample"])
    order: "list[_Sample]" = field(default_factory=list["_Sample"])
    n_running: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        self.n_running = self.params.n

    def cancel(self) -> None:
        """Cancel the samples that still run."""
        for sample in self.samples:
            if sample.generation is not None:
                sample.generation.close()

    def public(self) -> Group:
        samples = [sample.public(sample.ended) for sample in self.order if sample.ended is not None]
        return Group(self.key, self.prompt_ids, tuple(samples))

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "prompt_ids": list(self.prompt_ids),
            "params": asdict(self.params),
            "adapter": self.adapter,
            "n_tokens": self.n_tokens,
            "finished": self.finished,
            "order": [self.samples.index(sample) for sample in self.order],
            "samples": [sample.to_json() for sample in self.samples],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "_Group":
        group = cls(
            fields["key"],
            tuple(fields["prompt_ids"]),
            SamplingParams(**fields["params"]),
            fields["adapter"],
            fields["n_tokens"],
        )
        group.samples = [_Sample.from_json(group, each) for each in fields["samples"]]
        group.order = [group.samples[i] for i in fields["order"]]
        group.n_running = len(group.samples) - len(group.order)
        group.finished = fields["finished"]
        return group
