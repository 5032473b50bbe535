# pyright: standard
"""The offline API: a model, ready to continue prompts."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from orca_jax.checkpoint.load import find_model
from orca_jax.config import (
    COMPILE_CACHE,
    Attention,
    Deadlines,
    Dtype,
    EngineConfig,
    LoadFormat,
    OnCompile,
    RestartBound,
)
from orca_jax.errors import EngineError, InvalidRequest, ServiceClosed
from orca_jax.execution.compile_counter import CompileCounter, CompileCounts
from orca_jax.launch.start_engine import start_engine
from orca_jax.request.prompts import listed_prompts, one_for_each, prompt_token_ids
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.generation import Generation, GenerationResult
from orca_jax.service.orca import SCHEDULER_THREAD, Orca
from orca_jax.service.prepared_params import OutputRules

Prompt = str | Sequence[int] | np.ndarray


class LLM:
    """A model, ready to continue prompts; a context manager.

    `model` is None for the demo model in the package, a directory, a name on the Hugging Face hub, or with
    `load_format="dummy"` a preset's name: random weights, drawn from `seed` (0 without one), and no
    tokenizer, so that prompts are token ids and texts come out empty. `dtype` is float32 on a CPU and
    bfloat16 elsewhere unless said. `seed` also starts the seeds of requests that have none.

    `max_batch_size`, `n_slots`, `max_batch_tokens`, `block_size` and the `max_queue`s are ServingConfig's.
    By default `n_slots` is the largest that fits into `memory_fraction` of each device's memory beside
    weights, tables and temporaries, up to what all admitted requests could reserve (docs/plan.md): of a GPU
    into all that JAX holds of it, and on a CPU a full batch of the longest requests, in 2 GiB of keys and
    values at most. `max_batch_tokens` is 2048, or the model's positions where they are more. `deterministic`
    makes not a bit of an output depend on what else runs, at a price (docs/generation.md).

    `attention` is chosen by device and model unless given, and said in the attribute of that name:
    "kernel" (Hopper GPUs), "cudnn" (other NVIDIA GPUs from Ampere on), "native" (CPUs with a C compiler), or
    pure JAX with "static" shapes or run-time trip counts ("follow_lengths").

    The model is cut into `pipeline_parallel` stages of whole layers, and each layer over `tensor_parallel`
    devices (docs/parallelism.md); the first devices that JAX has are taken. With `command_buffer_collectives`
    a GPU's command buffers hold the sums over a layer's parts too. While one iteration runs the next one is
    prepared and issued; without `overlap` the scheduler is Algorithm 1 to the letter.

    With `worker_processes` each stage runs in a process of its own on this machine, which is started anew
    when it is lost. `workers` are the control ports of workers that somebody else has started, "host:port" of
    stage 1 first; they must run the same model, and know `control_secret`, if there is one. `deadlines` say
    how long workers are waited for, `restarts` how often they may be lost; `on_event` is told what becomes of
    the processes, and whom one waits for, a line at a time (docs/workers.md).

    With `compile_ahead` all that an iteration may need is compiled before this returns, and
    `on_program(done, total, name)` told the progress; without, each program when it is first needed, and its
    request waits. What is compiled behind that all the same is warned of in the log, or with
    `on_compile="error"` refused: the engine fails. Workers in processes of their own always compile ahead.
    Compiled programs are kept in the folder `compile_cache`, by JAX's own cache, one for the process; the
    variable JAX_COMPILATION_CACHE_DIR names another default, and None keeps nothing (docs/compiling.md).

    `on_load(done, total)` is told the progress of reading a checkpoint, in bytes of its files.

    Raises ConfigError or a CheckpointError. All methods may be called from many threads.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_batch_size: int = 32,
        n_slots: int | None = None,
        max_batch_tokens: int | None = None,
        dtype: Dtype | None = None,
        load_format: LoadFormat = "auto",
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
        memory_fraction: float | None = None,
        attention: Attention | None = None,
        workers: Sequence[str] | None = None,
        worker_processes: bool = False,
        control_secret: str = "",
        deadlines: Deadlines | None = None,
        restarts: RestartBound | None = None,
        compile_ahead: bool = False,
        on_compile: OnCompile = "warn",
        compile_cache: str | Path | None = COMPILE_CACHE,
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
            memory_fraction=memory_fraction,
            attention=attention,
            workers=workers,
            worker_processes=worker_processes,
            control_secret=control_secret,
            deadlines=deadlines or Deadlines(),
            restarts=restarts or RestartBound(),
            compile_ahead=compile_ahead,
            on_compile=on_compile,
            compile_cache=compile_cache,
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
    ) -> Self:
        """The same, from a configuration that was put together before."""
        llm = cls.__new__(cls)
        llm._start(config, on_load, on_program, on_event)
        return llm

    def _start(
        self,
        config: EngineConfig,
        on_load: Callable[[int, int], None] | None,
        on_program: Callable[[int, int, str], object] | None,
        on_event: Callable[[str], None] | None,
    ) -> None:
        found = find_model(config.model, config.load_format)
        self.name = found.name
        self.directory = found.directory
        self.tokenizer = found.tokenizer
        self._compiles = CompileCounter()
        built = start_engine(
            found, config, on_load=on_load, on_program=on_program, on_event=on_event or _ignore
        )
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
        )
        if config.compiling.compile_ahead and config.parallel.in_this_process:
            self._compiles.watch(SCHEDULER_THREAD, config.compiling.on_compile)
        self._service.start()
        self._finalizer = weakref.finalize(self, _close_quietly, self._service, self._close_engine)

    @property
    def service(self) -> Orca:
        """The service inside, with its scheduler and timeline. Raises ServiceClosed after `close`."""
        if self._service is None:
            raise ServiceClosed("this LLM is closed; make a new one")
        return self._service

    @property
    def compiles(self) -> CompileCounts:
        """What JAX has compiled in this process since this LLM was begun, for whomever."""
        return self._compiles.counts()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_result: Callable[[int, GenerationResult], object] | None = None,
    ) -> list[GenerationResult]:
        """Continue a prompt (a text or token ids) or a list of them; results in the order of the prompts.

        `sampling_params` is one for all or one for each; where its `n` is above 1 a prompt's outputs stand
        side by side. `on_result(index, result)` is told each result in order, as soon as it and those before
        it are there. All is checked before anything runs; what is
        raised then is a leaf of InvalidRequest and names the prompt. Raises EngineError if the engine fails,
        and ServiceClosed after `close`. Whatever is raised, nothing is left running.
        """
        service = self.service
        listed = listed_prompts(prompts)
        sampling = one_for_each(sampling_params, len(listed))
        prepared: list[tuple[list[int], OutputRules]] = []
        for i, (prompt, params) in enumerate(zip(listed, sampling, strict=True)):
            try:
                token_ids = prompt_token_ids(self.name, self.tokenizer, prompt)
                rules = service.rules(params)
                service.check(token_ids, rules)
            except InvalidRequest as error:
                if len(listed) == 1:
                    raise
                raise type(error)(f"prompt {i}: {error}", param=error.param) from error
            prepared += [(token_ids, choice) for choice in rules.choices()]
        results: list[GenerationResult] = []
        with ExitStack() as running:
            generations = [
                running.enter_context(service.submit(token_ids, rules)) for token_ids, rules in prepared
            ]
            for i, generation in enumerate(generations):
                results.append(generation.result())
                if on_result is not None:
                    on_result(i, results[i])
        return results

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Generation:
        """Continue one prompt, in pieces as they come: an iterator of `Piece`, and the whole in its `result`.

        The request runs from this call on, beside all others. Closing or dropping the iterator cancels it.
        `sampling_params.n` must be 1. Raises as `generate` does.
        """
        (params,) = one_for_each(sampling_params, 1)
        return self.service.submit(
            prompt_token_ids(self.name, self.tokenizer, prompt), params, request_id=request_id
        )

    def close(self) -> None:
        """Cancel what runs and free the device's memory; nothing the second time."""
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
            if kind is None:  # else what is on its way already tells more
                raise


def _ignore(line: str) -> None:
    """What becomes of the processes."""


def _close_both(close_engine: Callable[[], None], compiles: CompileCounter) -> None:
    try:
        close_engine()
    finally:
        compiles.close()


def _close_quietly(service: Orca, close_engine: Callable[[], None]) -> None:
    """For an LLM that was dropped, or the end of the program: nobody is there to be told."""
    try:
        service.close(timeout=10.0)
    except EngineError:
        pass
    close_engine()
