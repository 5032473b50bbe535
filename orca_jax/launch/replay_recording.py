# pyright: standard
"""Composition: the header of a recording, and its replay on a new engine."""

import platform
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from orca_jax.config import EngineConfig, SchedulingOptions, ServingOptions
from orca_jax.engine.engine_master import BuiltEngine
from orca_jax.errors import BadRecording, ConfigError
from orca_jax.launch.start_engine import Start, start_engine
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.service.prepared_params import RuleMaker
from orca_jax.service.recording import Recording, read_recording
from orca_jax.service.replay import Replay, ReplayReport, recorded_serving, recorded_speculation
from orca_jax.user_model.find import find_any_model


def recording_header(config: EngineConfig, built: BuiltEngine) -> dict[str, Any]:
    """A recording's first line, from which its engine can be built again."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "device": built.device,
        "attention": built.attention,
        "model": _named(config.model),
        "n_positions": built.model.n_positions,
        "vocab_size": built.model.vocab_size,
        "load_format": config.load_format,
        **({} if config.quantization is None else {"quantization": config.quantization}),
        "kv_cache_dtype": config.kv_cache_dtype,
        "generation_config": str(config.generation_config),
        "tokenizer": None if config.tokenizer is None else str(config.tokenizer),
        "pooling": config.pooling,
        "weights_seed": config.seed or 0,
        "dtype": built.dtype,
        "asked_attention": config.attention,
        "tensor_parallel": config.tensor_parallel,
        "expert_exchange": config.expert_exchange,
        "n_workers": built.engine.n_workers,
        "keeps_tokens": built.engine.keeps_tokens,
        "compile_ahead": config.compile_ahead,
        "serving": built.serving.recorded(),
    }


def _named(model: object) -> str | None:
    """A model as a recording names it: its place, or the class of a user's module."""
    return str(model) if isinstance(model, str | Path) else None if model is None else type(model).__name__


def replay(of: str | Path | Recording, *, model: object = None) -> ReplayReport:
    """Repeat a Recording, or that of a file, on an engine of the same sizes; compare batches and outputs.

    The engine runs in this process. `model` is the recorded model's place on this machine, if another than
    recorded, or a user's module. Raises BadRecording, ConfigError, a CheckpointError or EngineError.
    """
    recording = of if isinstance(of, Recording) else read_recording(of)
    config = _engine_config(recording, model)
    found = find_any_model(config)
    header = recording.header
    if (found.config.vocab_size, found.config.n_positions) != (header["vocab_size"], header["n_positions"]):
        raise ConfigError(
            f"the recorded model has {header['vocab_size']} tokens and {header['n_positions']} positions, "
            f"but {found.name} has {found.config.vocab_size} and {found.config.n_positions}; pass the place "
            "of the recorded one as model"
        )
    serving = recorded_serving(recording)
    built = start_engine(found, config)
    try:
        speculation = recorded_speculation(recording, serving, built.drafter)
        rules = RuleMaker(found.config, found.tokenizer, speculation=speculation)

        def constraint(sampling: SamplingParams) -> Any:
            return rules.rules(sampling).constraint()

        whole = Replay(
            recording,
            built.engine,
            built.kv,
            config=serving,
            constraint=constraint,
            kind=lambda sampling, scored_ids: rules.rules(sampling).kind(scored_ids),
        )
        return whole.run()
    finally:
        built.close()


def _engine_config(recording: Recording, model: Any) -> Start:
    """The options of the recorded engine, with all stages in this process."""
    header = recording.header
    try:
        serving = recorded_serving(recording)
        return Start(
            on_event=print,
            model=header["model"] if model is None else model,
            load_format=header["load_format"],
            quantization=header.get("quantization"),
            kv_cache_dtype=header.get("kv_cache_dtype", "auto"),
            generation_config=header["generation_config"],
            tokenizer=header.get("tokenizer"),
            pooling=header.get("pooling"),
            dtype=header["dtype"],
            seed=header["weights_seed"],
            attention=header["asked_attention"],
            tensor_parallel=header["tensor_parallel"],
            expert_exchange=header.get("expert_exchange", "auto"),
            pipeline_parallel=header["n_workers"],
            **{each.name: getattr(serving, each.name) for each in fields(ServingOptions)},
            **{each.name: getattr(serving.scheduling, each.name) for each in fields(SchedulingOptions)},
            compile_ahead=header["compile_ahead"],
        )
    except (KeyError, TypeError) as error:
        raise BadRecording(f"the recording's first line lacks what makes its engine: {error!r}") from error
