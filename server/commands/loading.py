"""Loads a command's model, with progress bars if stderr is a terminal: first bytes, then programs."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import orca_jax
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, OrcaError
from orca_jax.families.hf_config import read_config
from orca_jax.model_files.found_model import DEMO_MODEL
from orca_jax.native.compiler import keep_libraries
from orca_jax.native.operations import build_all_ahead
from orca_jax.planning.known_devices import MEMORY_FRACTION
from orca_jax.request.chat.conversation import left_out
from orca_jax.request.chat.template_files import load_chat_template
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.workers.environment import compile_cache_folder, hold_memory, visible_gpus
from server.commands.notes import Notes, bytes_bar, programs_bar
from server.gateway.served_model import ServedModel
from server.gateway.tool_formats.table import reply_formats
from server.process.watchdog import settle
from server.settings.serve_settings import ServeSettings

if TYPE_CHECKING:  # for types alone: the second takes long to import
    from orca_jax import LLM
    from orca_jax.engine.remote_pipeline import StartWorkers


class LoadingBars:
    """Progress bars for building an LLM; a context manager that removes them."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._bars = ExitStack()
        self._start = time.monotonic()
        self._compile_start: float | None = None
        self._programs = 0
        self._show_bytes: Callable[[int, int], None]
        self._show_program: Callable[[int, int, str], None]

    def __enter__(self) -> Self:
        self._show_bytes = self._bars.enter_context(bytes_bar(self._notes, "Loading the model"))
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def loaded(self, done: int, total: int) -> None:
        self._show_bytes(done, total)

    def program(self, done: int, total: int, name: str) -> None:
        """Show progress in compiled programs. May be called from any thread, one call at a time."""
        if self._compile_start is None:
            self._compile_start, self._programs = time.monotonic(), total
            self._bars.close()  # one bar at a time
            self._show_program = self._bars.enter_context(programs_bar(self._notes))
        self._show_program(done, total, name)

    def summary(self, from_disk: int) -> str:
        """A line with the times so far; `from_disk` programs were cached by an earlier run."""
        now = time.monotonic()
        if self._compile_start is None:
            return f"loaded in {now - self._start:.1f} s"
        return (
            f"loaded in {self._compile_start - self._start:.1f} s, {self._programs} programs compiled in "
            f"{now - self._compile_start:.1f} s ({from_disk} were on disk)"
        )


def load(notes: Notes, config: EngineConfig, start_workers: "StartWorkers | None" = None) -> "LLM":
    """Build the LLM and show progress on stderr."""
    if not config.worker_processes:  # each of those reserves its own memory
        hold_memory(os.environ, config.memory_fraction or MEMORY_FRACTION)
    _begin_operations(config)
    with LoadingBars(notes) as bars:
        llm = orca_jax.LLM.from_config(
            config,
            on_load=bars.loaded,
            on_program=bars.program,
            on_event=notes,
            start_workers=start_workers,
        )
    if config.compile_ahead:
        notes(bars.summary(llm.compiles.from_disk))
    return llm


def load_served(
    settings: ServeSettings, notes: Notes, start_workers: "StartWorkers | None" = None
) -> "tuple[LLM, ServedModel]":
    """Load and warm up: compile what is compiled ahead, and run a prefill and a decode iteration, or embed.

    `start_workers` is as in LLM.from_config. The caller closes the LLM. Raises ConfigError or EngineError;
    then nothing is left running.
    """
    options = settings.endpoint
    # Mistakes in the settings are reported before the slow part.
    reply_formats(None, options.tool_format, options.reasoning_format)
    if settings.model_name in (settings.engine.adapters or ()):
        raise ConfigError(
            f"the model and a LoRA adapter are both called {settings.model_name!r}; rename one of them, for "
            "example with served_model_name"
        )
    if options.chat_template is not None:
        load_chat_template(None, options.chat_template)
    llm = load(notes, settings.engine, start_workers)
    try:
        template = load_chat_template(llm.text_directory, options.chat_template)
        if template is not None:
            template.read_ahead()
            if note := left_out(template):
                notes(note)
        formats = reply_formats(template, options.tool_format, options.reasoning_format)
        llm.service.scheduler.kv.hash_seed = settings.routing.prefix_hash_seed  # before the first request
        # A key's name is its place in the file, which another key may have after a restart.
        llm.service.scheduler.kv.tenants = settings.api_keys.fingerprints
        if settings.api_keys.weights:
            llm.service.weigh_owners(settings.api_keys.weights)
        if llm.config.only_pools:
            llm.embed([[0]])
        else:
            n_output = min(2, llm.service.most_output(1))
            llm.generate([[0]], SamplingParams(max_tokens=n_output, temperature=0.0, ignore_eos=True))
    except BaseException:
        llm.close()
        raise
    settle()
    shows_versions = settings.admin_keys.required or options.follow is not None
    return llm, ServedModel(
        name=settings.model_name,
        service=llm.service,
        config=llm.config,
        serving=llm.serving,
        tokenizer=llm.tokenizer,
        chat_template=template,
        tool_format=formats.tools,
        reasoning_format=formats.reasoning,
        defaults=llm.generation_defaults,
        compiles=lambda: llm.compiles,
        controls=llm.controls if shows_versions else None,
        shows_versions=shows_versions,
    )


def summary(llm: "LLM") -> str:
    """A line that describes the model."""
    return f"{llm.name}: {llm.n_parameters / 1e6:,.1f} million parameters, {llm.dtype}, {llm.device}"


def _begin_operations(config: EngineConfig) -> None:
    """Begin to build a CPU's operations while JAX is imported, since both take seconds.

    This is only a head start, for an engine in this process without a GPU and a model in a local directory:
    the engine itself builds what it needs, and reports what is wrong with the model.
    """
    directory = DEMO_MODEL if config.model is None else Path(str(config.model)).expanduser()
    if not config.in_this_process or visible_gpus(os.environ, os.listdir("/dev")):
        return
    try:
        model = read_config(directory)
    except (OrcaError, OSError, ValueError):
        return
    keep_libraries(compile_cache_folder(config.compile_cache, os.environ))
    dtype = config.dtype or "float32"
    forms = {"experts": model.kind_of_experts, "value_size": model.attention.value_part}
    kv_code = None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    build_all_ahead(model.head_size, config.block_size, dtype, kv_code=kv_code, **forms)
