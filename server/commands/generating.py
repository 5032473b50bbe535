"""Loads the model of `orca generate` and streams text to the terminal, or answers a file of requests."""

import argparse
import hashlib
import io
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orca_jax.config import EngineConfig
from orca_jax.errors import InvalidPrompt
from orca_jax.model_files.found_model import FoundModel, find_model, is_function
from orca_jax.request.sampled import TokenLogprobs
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.service.generation import Generation
from server.commands import jsonl
from server.commands.answer_file import Answers
from server.commands.loading import load, summary
from server.commands.notes import Notes
from server.commands.replies import Replies, close_outputs, printable, start_outputs
from server.commands.request_lines import model_hash
from server.errors import UsageError
from server.settings.sampling_flags import sampling_params

if TYPE_CHECKING:
    from orca_jax import LLM


_MAX_STDIN_BYTES = 1 << 24


def generate(args: argparse.Namespace, engine: EngineConfig, *, no_template: str) -> int:
    """Run the command; returns its exit status. `no_template` is advice for a model without a template."""
    notes = Notes()
    if args.input is None:
        prompts = _prompts(args.prompt)
        with _load(engine, notes) as llm:
            sampling = sampling_params(args, llm.generation_defaults.sampling)
            _stream_all(llm, prompts, sampling, notes)
        return 0
    with jsonl.open_files(args.input, args.output, overwrite=args.overwrite) as (source, answers):
        if len(answers) and not is_function(engine.model):
            _check_answers(args, engine, source, answers)
        with _load(engine, notes) as llm:
            return jsonl.run(
                llm,
                source,
                answers,
                sampling_params(args, llm.generation_defaults.sampling),
                notes.console,
                replies=lambda: Replies(
                    llm,
                    chat_template=args.chat_template,
                    tool_format=args.tool_format,
                    reasoning_format=args.reasoning_format,
                    advice=no_template,
                ),
                model=_model_hash(llm, args),
                retry_errors=args.retry_errors,
            )


def _check_answers(
    args: argparse.Namespace, engine: EngineConfig, source: BinaryIO, answers: Answers
) -> None:
    """Raise UsageError, before the model is loaded, if it cannot go on with these answers."""
    found = find_model(
        engine.model, engine.load_format, engine.generation_config, engine.tokenizer, engine.quantization
    )
    jsonl.check_answers(
        source,
        answers,
        sampling_params(args, found.generation.sampling),
        model=_model_hash(found, args),
        retry_errors=args.retry_errors,
    )


def _model_hash(model: "LLM | FoundModel", args: argparse.Namespace) -> str:
    """The hash of the files and flags that decide what the model answers."""
    settings: dict[str, object] = {"dtype": args.dtype, "load_format": args.load_format}
    if args.quantization is not None:
        settings["quantization"] = args.quantization
    if args.kv_cache_dtype != "auto":
        settings["kv_cache_dtype"] = args.kv_cache_dtype
    if model.directory is None:
        settings["model"] = args.model
    if args.chat_template is not None:
        settings["chat_template"] = hashlib.sha256(args.chat_template.read_bytes()).hexdigest()
    settings |= {"tool_format": args.tool_format, "reasoning_format": args.reasoning_format}
    return model_hash(model.directory, model.text_directory, settings)


def _load(engine: EngineConfig, notes: Notes) -> "LLM":
    llm = load(notes, engine)
    notes(summary(llm))
    if llm.generation_defaults.source:
        notes(f"sampling defaults: {llm.generation_defaults}")
    return llm


def _prompts(arguments: list[str]) -> list[str]:
    """The prompts; `-` means all of stdin, and so does no argument if stdin is a pipe."""
    if not arguments:
        if sys.stdin.isatty():
            raise UsageError("give a PROMPT, '-' to read one from stdin, or --input FILE.jsonl")
        arguments = ["-"]
    if arguments.count("-") > 1:
        raise UsageError("'-' reads all of stdin; give it only once")
    return [_read_stdin() if prompt == "-" else prompt for prompt in arguments]


def _read_stdin() -> str:
    """All of stdin as one prompt, without its final newline."""
    data = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(data) > _MAX_STDIN_BYTES:
        raise InvalidPrompt(f"stdin has more than {_MAX_STDIN_BYTES} bytes", param="prompt")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"stdin is not UTF-8: {error}", param="prompt") from error


def _stream_all(llm: "LLM", prompts: list[str], sampling: SamplingParams, notes: Notes) -> None:
    """Run all outputs of all prompts concurrently, and show them one after the other."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for what the terminal cannot encode
    with ExitStack() as running:
        shown = list[tuple[str, Generation]]()
        for prompt in prompts:
            started = start_outputs(llm, prompt, sampling)
            running.callback(close_outputs, started)
            shown += [(prompt, stream) for stream in started]
        for i, (prompt, stream) in enumerate(shown):
            if i > 0:
                print()
            if len(shown) > 1:
                notes(f"[{i + 1} of {len(shown)}]")
            _show(prompt, stream, notes, llm.tokenizer, reads_apart=llm.config.encoder is not None)


def _show(
    prompt: str, stream: Generation, notes: Notes, tokenizer: Tokenizer | None, *, reads_apart: bool
) -> None:
    console = Console(highlight=False)
    start = time.monotonic()
    already_finished = stream.finish_reason is not None  # while another output was shown
    with notes.console.status("Compiling and running prefill"):
        piece = stream.next_piece()
    first = time.monotonic()
    if console.is_terminal:
        end = "\n" if reads_apart else ""  # an encoder's input, which the output does not continue
        console.out(printable(prompt), style="dim", end=end, highlight=False)
    while piece is not None:
        print(printable(piece.text) if console.is_terminal else piece.text, end="", flush=True)
        piece = stream.next_piece()
    print(flush=True)
    seconds = time.monotonic() - first
    result = stream.result()
    for title, logprobs in (("Prompt", result.prompt_logprobs), ("Output", result.logprobs)):
        if logprobs:
            notes.console.print(logprob_table(title, logprobs, tokenizer))
    if result.routed_experts is not None:
        n, layers, top_k = result.routed_experts.shape
        notes(f"{n} tokens chose {top_k} experts in each of {layers} layers; --input and --output write them")
    n_tokens = len(result.token_ids)
    times = ""
    if not already_finished:
        times = f", the first after {first - start:.1f} s"
        times += f", then {(n_tokens - 1) / seconds:,.0f} tokens/s" if n_tokens > 1 else ""
    for other in stream.results()[1:]:
        notes(f"score {result.score:.4f}")
        result = other
        print(f"\n{printable(other.text) if console.is_terminal else other.text}", flush=True)
    score = "" if result.score is None else f", score {result.score:.4f}"
    end = f"finish reason {result.finish_reason}, seed {result.seed}{score}"
    notes(f"{result.n_input} + {n_tokens} tokens{times}; {end}")


def logprob_table(title: str, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> Table:
    """A row per token: its id and text, its log-probability, and the most likely tokens.

    Texts are shown as Python literals: whitespace is visible and control characters are harmless.
    """
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE, pad_edge=False)
    table.add_column("token", justify="right")
    table.add_column("text", overflow="fold")
    table.add_column("logprob", justify="right")
    table.add_column("%", justify="right")
    has_top = any(token.top for token in logprobs)
    if has_top:
        table.add_column("most likely, %", overflow="fold")
    for token in logprobs:
        row = [
            str(token.token_id),
            _text(token.token_id, tokenizer),
            f"{token.logprob:.3f}",
            _percent(token.logprob),
        ]
        if has_top:
            row.append("  ".join(f"{_text(i, tokenizer) or i} {_percent(value)}" for i, value in token.top))
        table.add_row(*map(Text, row))  # Text: square brackets are not markup
    return table


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Empty for a special token, and if there is no tokenizer."""
    text = "" if tokenizer is None else tokenizer.decode([token_id])
    return repr(text) if text else ""


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.1f}"
