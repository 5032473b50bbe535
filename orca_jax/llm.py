# pyright: standard
"""`LLM`: an engine inside a Python program, without a server.

An LLM is a service (service/orca.py) with a model's files on one side and Python values on the other. Its
constructor finds the model and its tokenizer, starts an engine (launch/start_engine.py) and gives both to the
service, whose thread runs Algorithm 1. Every method turns its arguments into requests and adds them to the
same pool, so `generate`, `stream`, `chat`, `score` and `embed`, called from any number of threads, share the
iterations of one engine (ORCA 3.1): a prompt never waits for another one's batch to end. All checks happen
before a request is added; what an added request can still raise is EngineError.

`update_weights`, `sleep` and `pause` act between two iterations, never during one (service/interludes.py).
"""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from orca_jax.config import EngineConfig, Layout
from orca_jax.engine.remote_pipeline import StartWorkers
from orca_jax.errors import ConfigError, EngineError, InvalidRequest, NotSupported, ServiceClosed
from orca_jax.execution.compile_counter import CompileCounter, CompileCounts
from orca_jax.launch.replay_recording import recording_header
from orca_jax.launch.start_engine import Start, start_engine
from orca_jax.options import takes
from orca_jax.request.beam_search import EarlyStopping
from orca_jax.request.chat.chat_prompts import ChatPrompts
from orca_jax.request.chat.template_files import load_chat_template
from orca_jax.request.pooled_vector import Vector, embedding
from orca_jax.request.pooling import Pooling, check_dimensions
from orca_jax.request.prompts import (
    decoder_token_ids,
    listed_pairs,
    listed_prompts,
    one_adapter_each,
    one_for_each,
    prompt_token_ids,
)
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.scheduling.admission import CheckedPrompt, check_use
from orca_jax.scheduling.policies import users_policy
from orca_jax.service.embeddings import pooled_prompt, pooled_vectors
from orca_jax.service.engine_controls import EngineControls
from orca_jax.service.generation import Generation, GenerationResult
from orca_jax.service.interludes import Running
from orca_jax.service.orca import Orca
from orca_jax.service.prepared_params import OutputRules
from orca_jax.service.recorder import Recorder
from orca_jax.service.scores import listed_token_ids, scores
from orca_jax.user_model.find import count_parameters, find_any_model

Prompt = str | Sequence[int] | np.ndarray
Message = Mapping[str, Any]

_LOGGER = logging.getLogger("orca_jax.model")


class LLM:
    """A loaded model that continues prompts; a context manager. All methods are thread-safe.

    The arguments of the constructor are the fields of EngineConfig and of Start, as in
    `LLM("DIRECTORY", max_batch_size=64, dtype="bfloat16", on_load=print)`; `help(LLM.__init__)` and the page
    Options of the documentation's reference describe them. It raises ConfigError, a CheckpointError, or
    TypeError for an argument that does not exist.

    The attribute `generation_defaults` has the sampling parameters that the model recommends, and the model's
    end-of-sequence tokens include the recommended ones (docs/generation.md).
    """

    @takes(Start)
    def __init__(self, start: Start) -> None:
        config = EngineConfig.part_of(start)
        if config.policy not in ("default", "orca"):
            users_policy(config.policy)  # a mistake in its name is reported before the weights are loaded
        found = find_any_model(config, shapes_only=not config.in_this_process)
        if config.pooling is not None:
            try:
                check_use(found.config, config.pooling)
            except NotSupported as error:
                raise ConfigError(str(error)) from error
        if found.note:
            (start.on_event or _LOGGER.warning)(found.note)
        self.name = found.name
        self.directory = found.directory
        self.text_directory = found.text_directory
        self.n_parameters = count_parameters(found)
        self.tokenizer = found.tokenizer
        self.generation_defaults = found.generation
        recorder = None if config.record is None else Recorder(config.record, max_bytes=config.record_bytes)
        self._compiles = CompileCounter()
        built = start_engine(found, start)
        if recorder is not None:
            recorder.begin(recording_header(config, built))
        self.config = built.model
        self.dtype = built.dtype
        self.device = built.device
        self.stages = built.stages
        self.attention = built.attention
        self.serving = built.serving
        self._close_engine = partial(_close_both, built.close, self._compiles)
        self._service: Orca | None = Orca(
            built.engine,
            built.kv,
            config=self.serving,
            model=self.config,
            tokenizer=self.tokenizer,
            bucket_sizes=built.buckets,
            seed=config.seed,
            restarts=config.restarts,
            recorder=recorder,
            adapters=built.adapters,
            drafter=built.drafter,
            pooling=found.pooling,
        )
        assert built.memory is not None
        self._controls = EngineControls(self._service, built.memory)
        if config.compile_ahead and config.in_this_process:
            self._compiles.watch(self._service.thread, config.on_compile)
        self._service.start()
        if built.compile_later is not None:
            built.compile_later(self._service.timeline.use_buckets)
        self._finalizer = weakref.finalize(self, _close_quietly, self._service, self._close_engine)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        on_load: Callable[[int, int], None] | None = None,
        on_program: Callable[[int, int, str], object] | None = None,
        on_event: Callable[[str], None] | None = None,
        start_workers: StartWorkers | None = None,
    ) -> Self:
        """Load a model from an EngineConfig; the other arguments are those of the constructor."""
        options: dict[str, Any] = {each.name: getattr(config, each.name) for each in fields(config)}
        return cls(
            **options,
            on_load=on_load,
            on_program=on_program,
            on_event=on_event,
            start_workers=start_workers,
        )

    @property
    def service(self) -> Orca:
        """The service, with its scheduler and timeline. Raises ServiceClosed after `close`."""
        if self._service is None:
            raise ServiceClosed("this LLM is closed; make a new one")
        return self._service

    @property
    def compiles(self) -> CompileCounts:
        """Counts of JAX's compilations in this process, by whatever code, since this LLM was constructed."""
        return self._compiles.counts()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        decoder_prompts: Prompt | Sequence[Prompt] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_result: Callable[[int, GenerationResult], object] | None = None,
    ) -> list[GenerationResult]:
        """Continue one prompt (a text or token ids) or a list of them. Results are in the prompts' order.

        Give one SamplingParams for all prompts or one for each; the `n` outputs of a prompt are adjacent.
        Without any, prompts run with the model's `generation_defaults`. For a model with an encoder a prompt
        is the encoder's input; `decoder_prompts`, one for each, are what the output continues. For
        `priority`, `cache_salt` and `adapter` see SchedulingParams; there may be an adapter for each prompt.
        `on_result(index, result)` receives the results in order, each as soon as it and all before it exist.

        Checks everything before running anything; raises a subclass of InvalidRequest that names the prompt.
        Raises EngineError if the engine fails, and ServiceClosed after `close`. After an exception nothing is
        left running.
        """
        service = self.service
        listed = listed_pairs(prompts, decoder_prompts)
        if sampling_params is None:
            sampling_params = self.generation_defaults.sampling_params()
        sampling = one_for_each(sampling_params, len(listed))
        named = one_adapter_each(adapter, len(listed))
        prepared: list[tuple[CheckedPrompt, OutputRules]] = []
        for i, ((prompt, begun), params) in enumerate(zip(listed, sampling, strict=True)):
            try:
                scheduling = SchedulingParams(priority=priority, cache_salt=cache_salt, adapter=named[i])
                checked, rules = self._prepared(prompt, begun, params, scheduling)
            except InvalidRequest as error:
                if len(listed) == 1:
                    raise
                raise type(error)(f"prompt {i}: {error}", param=error.param) from error
            prepared += [(checked, choice) for choice in rules.choices()]
        results: list[GenerationResult] = []
        with ExitStack() as running:
            generations = [running.enter_context(service.submit(prompt, rules)) for prompt, rules in prepared]
            for result in (result for generation in generations for result in generation.results()):
                results.append(result)
                if on_result is not None:
                    on_result(len(results) - 1, result)
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        on_result: Callable[[int, GenerationResult], object] | None = None,
    ) -> list[GenerationResult]:
        """Reply to a conversation, or to each of a list of them, with the model's chat template.

        Messages and tools have the form of OpenAI's chat API: `[{"role": "user", "content": "Hello"}]`. The
        results are those of `generate`; a tool call is text, as the model writes it. A reply may be as long
        as the model allows unless `sampling_params` say otherwise.

        The prompt ends with the beginning of a reply; with `continue_final_message` the output continues the
        last message, and with `add_generation_prompt` false the prompt ends after it. `chat_template` is the
        text of a template, the Path of a file, or the name of one of the model's; `chat_template_kwargs` are
        further variables of it. The other arguments and the errors are those of `generate`.

        Raises NotSupported for a model without a chat template, and BadConversation for messages that the
        template rejects; InvalidRequest has the field at fault in `param`.
        """
        prompts = self._chat_prompts.listed(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        if sampling_params is None:
            sampling_params = [self._reply_params(len(prompt)) for prompt in prompts]
        return self.generate(
            prompts,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            on_result=on_result,
        )

    @cached_property
    def _chat_prompts(self) -> ChatPrompts:
        return ChatPrompts(
            model=self.name,
            tokenizer=self.tokenizer,
            templates=load_chat_template(self.text_directory, None),
            directory=self.text_directory,
            has_encoder=self.config.encoder is not None,
        )

    def _reply_params(self, n_input: int) -> SamplingParams:
        """The parameters that the model recommends, for a reply as long as the model allows."""
        defaults = self.generation_defaults
        longest = self.service.most_output(n_input)
        # At least 1, so that `generate` rejects a prompt that is too long rather than these parameters.
        n = max(1, min(defaults.max_tokens or longest, longest))
        return SamplingParams(**{**defaults.sampling, "max_tokens": n})

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        decoder_prompt: Prompt | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Generation:
        """Stream one prompt's output: an iterator of `Piece`, with the complete output in its `result`.

        The request starts now and runs concurrently with all others. Closing or dropping the iterator cancels
        it. `sampling_params.n` must be 1. The other arguments and the errors are those of `generate`.
        """
        if sampling_params is None:
            sampling_params = self.generation_defaults.sampling_params()
        (params,) = one_for_each(sampling_params, 1)
        scheduling = SchedulingParams(priority=priority, cache_salt=cache_salt, adapter=adapter)
        prepared = self._prepared(prompt, decoder_prompt, params, scheduling)
        return self.service.submit(*prepared, request_id=request_id)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int,
        max_tokens: int = 16,
        n: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        decoder_prompts: Prompt | Sequence[Prompt] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[GenerationResult]:
        """The `n` best outputs of each prompt with their `score`; those of a prompt are adjacent, best first.

        The search has `beam_width` beams, 1 to 16 and at most `max_batch_size`; see SamplingParams for the
        other parameters. Prompts and errors are those of `generate`.
        """
        sampling = SamplingParams(
            use_beam_search=True,
            best_of=beam_width,
            n=n,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
        )
        return self.generate(
            prompts,
            sampling,
            decoder_prompts=decoder_prompts,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )

    def _prepared(
        self, prompt: object, begun: object, params: SamplingParams, scheduling: SchedulingParams
    ) -> tuple[CheckedPrompt, OutputRules]:
        rules, token_ids = self.service.rules(params), prompt_token_ids(self.name, self.tokenizer, prompt)
        begun_ids = decoder_token_ids(self.name, self.tokenizer, begun)
        return self.service.check(token_ids, rules, scheduling, decoder_ids=begun_ids), rules

    def score(
        self,
        token_id_lists: Sequence[Sequence[int] | np.ndarray],
        *,
        n_prompt: int | Sequence[int] | np.ndarray | None = None,
        priority: int = 0,
        adapter: str | None = None,
    ) -> list[list[float]]:
        """The log-probabilities of each list's tokens after the first, given those before them.

        As in `generate`, they are the model's own, before temperature and all other parameters. The requests
        run in the same batches as all others.

        `n_prompt` is the number of tokens of each list that are its prompt, by default all. It matters to a
        deterministic engine, which computes prompts and outputs in different shapes: with it the
        log-probabilities equal, bit for bit, the `prompt_logprobs` and `logprobs` of a `generate` with this
        prompt and output. For `priority` and `adapter` see SchedulingParams.

        Checks everything before running anything; raises a subclass of InvalidRequest that names the list.
        Raises EngineError if the engine fails, and ServiceClosed after `close`.
        """
        lists = [listed_token_ids(self.name, i, token_ids) for i, token_ids in enumerate(token_id_lists)]
        return scores(self.service, lists, n_prompt, SchedulingParams(priority=priority, adapter=adapter))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Vector]:
        """A vector for each prompt (one or a list, as in `generate`), from its final hidden states.

        Final hidden states are the inputs of the model's head, after the final norm; for a model of your own,
        the outputs of its last layer. `pooling` "last" takes the last token's state, "cls" the first one's,
        which models like BERT have, and "mean" the mean over all tokens. The default is the one that the
        checkpoint names (Sentence Transformers' `1_Pooling`), or else "cls" for models like BERT and "last"
        for others. A vector is cut to its first `dimensions` numbers, by default all, and then scaled to
        length 1 unless `normalize` is False. The requests run in the same batches as all others.

        Checks everything before running anything; raises a subclass of InvalidRequest that names the prompt.
        Raises EngineError if the engine fails, and ServiceClosed after `close`.
        """
        service = self.service
        check_dimensions(dimensions, service.model.pooled_size)
        scheduling = SchedulingParams(priority=priority, cache_salt=cache_salt, adapter=adapter)
        checked: list[tuple[CheckedPrompt, OutputRules]] = []
        for i, prompt in enumerate(listed_prompts(prompts)):
            try:
                token_ids = prompt_token_ids(self.name, self.tokenizer, prompt)
                checked.append(pooled_prompt(service, token_ids, pooling, scheduling))
            except InvalidRequest as error:
                raise type(error)(f"prompt {i}: {error}", param=error.param) from error
        vectors = pooled_vectors(service, checked)
        return [embedding(vector, dimensions=dimensions, normalize=normalize) for vector in vectors]

    @property
    def controls(self) -> EngineControls:
        """The controls of an operator or trainer. Raises ServiceClosed after `close`.

        The argument `running` of `update_weights`, `sleep` and `pause` says what happens to requests that
        have begun: they finish first, within `timeout` seconds, while others wait ("finish"); they end as
        cancelled ("abort"); or they stop between two iterations and continue afterwards ("continue").
        RequestsStillRunning means that they did not finish in time; nothing has changed then. Each of these
        methods also raises ServiceClosed, and EngineError if the engine has failed.
        """
        assert self.service
        return self._controls

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that requests may choose."""
        return tuple(self.service.adapters)

    def load_adapter(self, name: str, directory: str | Path, *, replace: bool = False) -> None:
        """Let requests choose the LoRA adapter in `directory`, a PEFT directory, by `name`.

        It is read and checked on the caller's thread while others run. `replace` allows a name that there is
        already; requests that have the old adapter keep it. Raises ConfigError or a CheckpointError.
        """
        self.controls.load_adapter(name, str(directory), replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Let no more requests choose an adapter; those that have it go on. Raises UnknownAdapter."""
        self.controls.unload_adapter(name)

    @property
    def weights_version(self) -> int:
        """The version of the weights: 0 as loaded, and counted up by `update_weights`."""
        return self.controls.weights_version

    def update_weights(
        self,
        weights: object,
        *,
        version: int | None = None,
        running: Running = "finish",
        timeout: float = 600.0,
        cast: bool = False,
        lora_scale: float = 1.0,
        layout: Layout | None = None,
        adapter: str | None = None,
    ) -> int:
        """Replace the weights between two iterations, without a compile; return their version.

        `weights` is a dict of arrays by the names of `families.parameters`, an nnx.State or nnx.Module with
        such paths, or the directory of a checkpoint of the same model. Arrays may also have the names and
        shapes of a trainer: that of `layout`, or by default the one that the names
        show. Arrays are copied; `cast` allows other floating dtypes. Names that end in .lora_a and .lora_b
        are adapters, which are multiplied with `lora_scale` and merged (docs/training.md). Names of a dict
        that begin with `draft.` are new weights of the draft model; without any it stays. `version` must be
        above the present one, and is one more by default.

        Requests that "continue" keep their tokens; all keys and values are computed again, so each further
        token depends on the new weights alone.

        With `adapter` nothing is merged: the arrays become the LoRA adapter of this name, in place of one
        that there is, and its version is returned. Requests that have the old one keep it.

        Raises ConfigError, a CheckpointError that names what differs, or RequestsStillRunning; the weights
        are then as before. Raises EngineError, and the engine has failed, if a device or a file fails midway.
        """
        return self.controls.update_weights(
            weights,
            version=version,
            running=running,
            timeout=timeout,
            cast=cast,
            lora_scale=lora_scale,
            layout=layout,
            adapter=adapter,
        )

    def sleep(self, level: int = 1, *, running: Running = "finish", timeout: float = 600.0) -> None:
        """Give back the memory of keys and values; with level 2 that of weights too, which go to the host.

        New requests are refused with EngineAsleep until `wake_up`. Raises ConfigError for another level.
        """
        self.controls.sleep(level, running=running, timeout=timeout)

    def wake_up(self, *, timeout: float = 600.0) -> None:
        """End a sleep: bring the weights back, unless `update_weights` did, and make empty caches."""
        self.controls.wake_up(timeout=timeout)

    def pause(self, *, running: Running = "continue", timeout: float = 600.0) -> None:
        """Issue no iteration until `resume`; requests are accepted and wait."""
        self.controls.pause(running=running, timeout=timeout)

    def resume(self) -> None:
        """End a pause."""
        self.controls.resume()

    def close(self) -> None:
        """Cancel running requests and free the device's memory. Idempotent."""
        if self._service is not None:
            service, self._service = self._service, None
            self._finalizer.detach()
            try:
                service.close()
            finally:
                self._close_engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except EngineError:
            if kind is None:  # otherwise the exception in flight says more
                raise


def _close_both(close_engine: Callable[[], None], compiles: CompileCounter) -> None:
    try:
        close_engine()
    finally:
        compiles.close()


def _close_quietly(service: Orca, close_engine: Callable[[], None]) -> None:
    """Close an LLM that was dropped, or at exit, when nobody can receive an engine's failure."""
    try:
        service.close(timeout=10.0)
    except EngineError:
        pass
    close_engine()
