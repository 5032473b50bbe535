# pyright: standard
"""The offline API."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from flax import nnx

from orca_jax.config import (
    COMPILE_CACHE,
    RECORD_BYTES,
    Attention,
    Deadlines,
    Dtype,
    EngineConfig,
    ExpertExchange,
    LoadFormat,
    OnCompile,
    RestartBound,
)
from orca_jax.engine.owned_pipeline import StartWorkers
from orca_jax.errors import EngineError, InvalidRequest, ServiceClosed
from orca_jax.execution.compile_counter import CompileCounter, CompileCounts
from orca_jax.launch.own_model import count_parameters, find_any_model
from orca_jax.launch.replay import recording_header
from orca_jax.launch.start_engine import start_engine
from orca_jax.request.chat.chat_prompts import ChatPrompts
from orca_jax.request.chat.template_files import load_chat_template
from orca_jax.request.prompts import (
    CheckedPrompt,
    decoder_token_ids,
    listed_pairs,
    one_for_each,
    prompt_token_ids,
)
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import SchedulingParams
from orca_jax.scheduling_config import PolicyName, QueueOrder, Reservation
from orca_jax.service.beam_searching import BeamSearching
from orca_jax.service.embeddings import Embedding
from orca_jax.service.engine_controls import EngineControls
from orca_jax.service.generation import Generation, GenerationResult
from orca_jax.service.operable import Operable
from orca_jax.service.orca import SCHEDULER_THREAD, Orca
from orca_jax.service.prepared_params import OutputRules
from orca_jax.service.recorder import Recorder
from orca_jax.service.scores import listed_token_ids, scores

Prompt = str | Sequence[int] | np.ndarray
Message = Mapping[str, Any]

_LOGGER = logging.getLogger("orca_jax.model")


class LLM(Operable, BeamSearching, Embedding):
    """A loaded model that continues prompts; a context manager. All methods are thread-safe.

    `model` is None for the demo model in the package, a directory, a name on the Hugging Face hub, or with
    `load_format="dummy"` a preset's name. Dummy weights are random, drawn from `seed` (default 0), and
    have no tokenizer unless `tokenizer` names one: else prompts are token ids and texts are empty. A
    model of one's own is an nnx.Module, or "package.file:function" for what makes it (docs/training.md).
    "packed" keeps experts in MXFP4 (docs/ experts.md). `dtype` is float32 on a CPU, else bfloat16. `seed`
    also seeds requests without their own.

    The attribute `generation_defaults` has the sampling parameters that the model recommends, and the
    model's end-of-sequence tokens include the recommended ones. `generation_config` says where they come
    from: "auto" is generation_config.json in the model's directory, "none" nowhere, anything else a
    directory (docs/generation.md). `tokenizer` is a tokenizer.json, or a directory with one and perhaps a
    chat template, for a model without one or in place of the model's own.

    For `max_batch_size`, `n_slots`, `max_batch_tokens`, `block_size` and the `max_queue` limits see
    ServingConfig. `n_slots` defaults to the largest number that fits into `memory_fraction` of each device's
    memory next to weights, tables and temporaries, and at most to what all admitted requests can reserve
    (docs/plan.md). On a GPU that is all the memory that JAX reserves; on a CPU it is one full batch of the
    longest requests, in at most 2 GiB. `max_batch_tokens` defaults to 2048, or to the model's positions if
    they are more. `deterministic` makes each output bit for bit independent of other requests, but slower
    (docs/generation.md).

    `policy="orca"` is Algorithm 1 and nothing else. By default the scheduler also splits long prompts over
    iterations (`chunked_prefill`, at most `prefill_tokens` tokens in an iteration that delays others), reuses
    the keys and values of earlier prompts (`prefix_caching`), and gives requests memory as they grow
    (`reservation="on-demand"`; "full" is Algorithm 1's). `scheduling_policy` orders waiting requests:
    "fcfs", "priority", "fair" or "longest-prefix" (docs/scheduling.md).

    `attention` defaults to the best choice for device and model: "kernel" (Hopper GPUs), "cudnn" (other
    NVIDIA GPUs from Ampere on), "native" (CPUs with a C compiler), or pure JAX ("static", "follow_lengths").

    The model is split into `pipeline_parallel` stages of whole layers, and each layer over `tensor_parallel`
    devices (docs/parallelism.md), using the first devices of JAX. `command_buffer_collectives` records a
    split layer's sums into a GPU's command buffers; `expert_exchange` is in docs/experts.md. `overlap` issues
    an iteration while the previous one runs; without it the scheduler is exactly Algorithm 1.

    With `worker_processes` each stage runs in its own process on this machine, and is restarted if it dies.
    `workers` are the control ports of running workers, "host:port", stage 1 first; they must serve the same
    model and share `control_secret`, if there is one. `deadlines` are the workers' timeouts, and `restarts`
    limits how often they may be lost. `on_event(line)` receives a line for each event of a worker process
    and for each worker that is waited for (docs/workers.md).

    With `compile_ahead` every program is compiled before the constructor returns, `on_program(done, total,
    name)` receives the progress, and a program that is then missing is compiled with a warning, or with
    `on_compile="error"` the engine fails. Otherwise each is compiled on first use, while its request waits.
    Workers in separate processes always compile ahead. `compile_cache` is the folder for compiled programs,
    in JAX's own cache (one per process); the variable JAX_COMPILATION_CACHE_DIR changes the default, and None
    keeps nothing (docs/compiling.md). `on_load(done, total)` receives the bytes read of a checkpoint's files.

    `record` is a file of at most `record_bytes`, for `orca replay` (docs/serving.md); it has all prompts.

    Raises ConfigError or a CheckpointError.
    """

    def __init__(
        self,
        model: str | Path | nnx.Module | None = None,
        *,
        max_batch_size: int = 32,
        n_slots: int | None = None,
        max_batch_tokens: int | None = None,
        dtype: Dtype | None = None,
        load_format: LoadFormat = "auto",
        generation_config: str | Path = "auto",
        tokenizer: str | Path | None = None,
        seed: int | None = None,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        overlap: bool = True,
        block_size: int = 16,
        max_queue: int = 1 << 20,
        max_queue_bytes: int = 1 << 50,
        max_queue_share: float = 1.0,
        deterministic: bool = False,
        command_buffer_collectives: bool = False,
        expert_exchange: ExpertExchange = "auto",
        memory_fraction: float | None = None,
        policy: PolicyName = "default",
        chunked_prefill: bool | None = None,
        prefill_tokens: int | None = None,
        prefix_caching: bool | None = None,
        reservation: Reservation | None = None,
        scheduling_policy: QueueOrder = "fcfs",
        attention: Attention | None = None,
        workers: Sequence[str] | None = None,
        worker_processes: bool = False,
        control_secret: str = "",
        deadlines: Deadlines | None = None,
        restarts: RestartBound | None = None,
        compile_ahead: bool = False,
        on_compile: OnCompile = "warn",
        compile_cache: str | Path | None = COMPILE_CACHE,
        record: str | Path | None = None,
        record_bytes: int = RECORD_BYTES,
        on_load: Callable[[int, int], None] | None = None,
        on_program: Callable[[int, int, str], object] | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        config = EngineConfig.of(
            model=model,
            max_batch_size=max_batch_size,
            n_slots=n_slots,
            max_batch_tokens=max_batch_tokens,
            dtype=dtype,
            load_format=load_format,
            generation_config=str(generation_config),
            tokenizer=None if tokenizer is None else str(tokenizer),
            seed=seed,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            overlap=overlap,
            block_size=block_size,
            max_queue=max_queue,
            max_queue_bytes=max_queue_bytes,
            max_queue_share=max_queue_share,
            deterministic=deterministic,
            command_buffer_collectives=command_buffer_collectives,
            expert_exchange=expert_exchange,
            memory_fraction=memory_fraction,
            policy=policy,
            chunked_prefill=chunked_prefill,
            prefill_tokens=prefill_tokens,
            prefix_caching=prefix_caching,
            reservation=reservation,
            scheduling_policy=scheduling_policy,
            attention=attention,
            workers=workers,
            worker_processes=worker_processes,
            control_secret=control_secret,
            deadlines=deadlines or Deadlines(),
            restarts=restarts or RestartBound(),
            compile_ahead=compile_ahead,
            on_compile=on_compile,
            compile_cache=compile_cache,
            record=record,
            record_bytes=record_bytes,
        )
        self._start(config, on_load, on_program, on_event)

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
        """Load a model from an EngineConfig. `start_workers` is for worker processes elsewhere than here."""
        llm = cls.__new__(cls)
        llm._start(config, on_load, on_program, on_event, start_workers)
        return llm

    def _start(
        self,
        config: EngineConfig,
        on_load: Callable[[int, int], None] | None,
        on_program: Callable[[int, int, str], object] | None,
        on_event: Callable[[str], None] | None,
        start: StartWorkers | None = None,
    ) -> None:
        found = find_any_model(config)
        if found.note:
            (on_event or _LOGGER.warning)(found.note)
        self.name = found.name
        self.directory = found.directory
        self.text_directory = found.text_directory
        self.n_parameters = count_parameters(found)
        self.tokenizer = found.tokenizer
        self.generation_defaults = found.generation
        recorder = None if config.record is None else Recorder(config.record, max_bytes=config.record_bytes)
        self._compiles = CompileCounter()
        built = start_engine(
            found, config, on_load=on_load, on_program=on_program, on_event=on_event, start_workers=start
        )
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
        )
        assert built.memory is not None
        self._controls = EngineControls(self._service, built.memory)
        if config.compiling.compile_ahead and config.parallel.in_this_process:
            self._compiles.watch(SCHEDULER_THREAD, config.compiling.on_compile)
        self._service.start()
        if built.compile_later is not None:
            built.compile_later(self._service.timeline.use_buckets)
        self._finalizer = weakref.finalize(self, _close_quietly, self._service, self._close_engine)

    @property
    def service(self) -> Orca:
        """The service, with its scheduler and timeline. Raises ServiceClosed after `close`."""
        if self._service is None:
            raise ServiceClosed("this LLM is closed; make a new one")
        return self._service

    @property
    def compiles(self) -> CompileCounts:
        """What JAX has compiled in this process since this LLM was constructed, including for other users."""
        return self._compiles.counts()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        decoder_prompts: Prompt | Sequence[Prompt] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_result: Callable[[int, GenerationResult], object] | None = None,
    ) -> list[GenerationResult]:
        """Continue one prompt (a text or token ids) or a list of them. Results are in the prompts' order.

        Give one SamplingParams for all prompts or one for each; the `n` outputs of a prompt are adjacent.
        Without any, prompts run with the model's `generation_defaults`. For a model with an encoder a prompt
        is the encoder's input; `decoder_prompts`, one for each, are what the output continues. For `priority`
        and `cache_salt` see SchedulingParams.
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
        scheduling = SchedulingParams(priority=priority, cache_salt=cache_salt)
        prepared: list[tuple[CheckedPrompt, OutputRules]] = []
        for i, ((prompt, begun), params) in enumerate(zip(listed, sampling, strict=True)):
            try:
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
            prompts, sampling_params, priority=priority, cache_salt=cache_salt, on_result=on_result
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
        """The model's recommendations for a reply that nobody limits."""
        defaults = self.generation_defaults
        longest = self.service.most_output(n_input)
        # Without room for a token `generate` rejects the prompt, which these parameters must not forestall.
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
    ) -> Generation:
        """Stream one prompt's output: an iterator of `Piece`, with the complete output in its `result`.

        The request starts now and runs concurrently with all others. Closing or dropping the iterator cancels
        it. `sampling_params.n` must be 1. The other arguments and the errors are those of `generate`.
        """
        if sampling_params is None:
            sampling_params = self.generation_defaults.sampling_params()
        (params,) = one_for_each(sampling_params, 1)
        scheduling = SchedulingParams(priority=priority, cache_salt=cache_salt)
        prepared = self._prepared(prompt, decoder_prompt, params, scheduling)
        return self.service.submit(*prepared, request_id=request_id)

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
    ) -> list[list[float]]:
        """The log-probabilities of each list's tokens after the first, given those before them.

        They are the model's own, as those of `generate`: before temperature and everything else. Requests for
        them run in the same batches as all others.

        `n_prompt` says how many of each list's first tokens are the prompt, by default all. It makes a
        difference to a deterministic engine, which computes prompts and outputs in different shapes: the
        log-probabilities are then bit for bit those that `generate` gives for this prompt (`prompt_logprobs`)
        and this output (`logprobs`). For `priority` see SchedulingParams.

        Checks everything before running anything; raises a subclass of InvalidRequest that names the list.
        Raises EngineError if the engine fails, and ServiceClosed after `close`.
        """
        lists = [listed_token_ids(self.name, i, token_ids) for i, token_ids in enumerate(token_id_lists)]
        return scores(self.service, lists, n_prompt, SchedulingParams(priority=priority))

    @property
    def controls(self) -> EngineControls:
        """The controls behind `update_weights`, `sleep` and `pause`. Raises ServiceClosed after `close`."""
        assert self.service
        return self._controls

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
    """For an LLM that was dropped, or at exit: an engine's failure has no receiver."""
    try:
        service.close(timeout=10.0)
    except EngineError:
        pass
    close_engine()
