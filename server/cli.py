"""The command `orca`."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import orca_jax
from orca_jax.errors import EngineError, OrcaError
from server.commands import compile as compile_command
from server.commands import convert, generate, plan, serve, worker
from server.settings.flags import (
    COMPILE_OPTIONS,
    PLAN_OPTIONS,
    WORKER_OPTIONS,
    UsageError,
    add_engine_flags,
    add_flags,
    add_sampling_flags,
    add_serve_flags,
)

INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


class _Parser(argparse.ArgumentParser):
    """Complains in one line, as every other mistake is told."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """Every command with its flags; `run` in the namespace is what it does."""
    top = _Parser(prog="orca", description="ORCA (OSDI 2022) in JAX: a serving engine for language models.")
    top.add_argument("--version", action="version", version=f"orca {orca_jax.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser(
        "generate",
        help="continue prompts, on the terminal or from a file",
        description="Continue each PROMPT and stream the text to the terminal, or continue every line of a "
        "JSONL file. Notes go to stderr, so that stdout holds the text alone.",
        epilog='A line of FILE.jsonl is {"prompt": a text or a list of token ids} and may set any sampling '
        'flag for itself, as in {"prompt": "In the", "max_tokens": 8, "stop": ["."]}. Each gets one line in '
        "the output, in order, with the text and the finish reason, or with an error. Blank lines are passed "
        "over. Exit status: 0; 1 if some lines had errors or the engine failed; 2 for a mistake in how the "
        "command was called; 130 after Ctrl-C.",
        allow_abbrev=False,
    )
    command.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="'-', or none where stdin is a pipe: read it from stdin"
    )
    files = command.add_argument_group("files")
    files.add_argument("--input", metavar="FILE.jsonl", help="continue every line of this file ('-': stdin)")
    files.add_argument("--output", metavar="FILE.jsonl", help="write the results here (default: stdout)")
    add_sampling_flags(command.add_argument_group("sampling"))
    add_engine_flags(command.add_argument_group("model and engine"))
    command.set_defaults(run=_generate)

    command = commands.add_parser(
        "serve",
        help="answer requests over HTTP (OpenAI's API) and gRPC",
        usage="orca serve [MODEL] [--config FILE.yaml] [FLAGS]",
        description="Serve MODEL over OpenAI's HTTP API and over gRPC, until SIGTERM or Ctrl-C; what runs "
        "then is finished first.",
        epilog="Each setting may come from four places, and the first that has it counts: the flag; the "
        "variable of its name in capitals with ORCA_ in front, as in ORCA_MAX_QUEUE=64 (ORCA_MODEL and "
        "ORCA_CONFIG too; an empty one counts as not set); the --config file, a YAML mapping of names to "
        "values, as in 'max_queue: 64'; the default. 'none' is a value for whatever may be left out. Paths "
        "are relative to the working directory, those in the file too. API keys themselves are never "
        "flags, which other users of a machine can read. Exit status: 0 after a drain; 1 if "
        "the engine failed; 2 for a mistake in the settings.",
        formatter_class=_wide,
        allow_abbrev=False,
    )
    add_serve_flags(command)
    command.set_defaults(run=serve.run)

    command = commands.add_parser(
        "compile",
        help="compile the programs of a model ahead of time",
        usage="orca compile [MODEL] [--config FILE.yaml] [FLAGS]",
        description="Compile every program that an `orca serve` of the same settings needs, for the devices "
        "of this machine, and keep them in the folder of compiled programs: a server that finds them there "
        "starts in a fraction of the time. No weights are read.",
        epilog="Settings come from where those of `orca serve` do: flags, variables, a --config file. A "
        "program is found again by the same code, version of JAX, kind of device and sizes. Exit status: 0; "
        "2 for a mistake in the settings; 130 after Ctrl-C.",
        formatter_class=_wide,
        allow_abbrev=False,
    )
    add_serve_flags(command, COMPILE_OPTIONS)
    command.set_defaults(run=_compile)

    command = commands.add_parser(
        "worker",
        help="run one stage of a pipeline, for an `orca serve --workers` elsewhere",
        usage="orca worker [MODEL] --stage I --of N --listen HOST:PORT [FLAGS]",
        description="Load stage I of MODEL's N stages and compute its part of each iteration that a server "
        "asks for. Start one for each stage, in any order, and then `orca serve [MODEL] --workers "
        "HOST:PORT,HOST:PORT...` with their addresses.",
        epilog="A worker that is lost may be started again at any time: the server waits for it, and its "
        "requests run again. Exit status: 0 after SIGTERM or Ctrl-C; 1 when its device hangs; 2 for a "
        "mistake in the flags or the checkpoint.",
        formatter_class=_wide,
        allow_abbrev=False,
    )
    add_flags(command, WORKER_OPTIONS, title="worker")
    command.set_defaults(run=_worker)

    command = commands.add_parser(
        "plan",
        help="what a model needs on given devices, and what to expect of them",
        usage="orca plan [MODEL] --device DEVICE [FLAGS]",
        description="Say for each stage what lies on its devices: weights, tables, temporaries, and slots "
        "of keys and values that fit beside them, the least time that an iteration can take by batch size "
        "and phase, and the tokens per second at that floor; and what does not fit, and why. Neither the "
        "devices nor the weights need be there.",
        epilog="Temporaries are XLA's own where its compiler is installed (for GPUs: pip install "
        "'orca_jax[cuda]'), which takes minutes for large models. Floors are by the data sheets' rates; a "
        "CPU's are measured. Exit status: 0; 1 where something does not fit; 2 for a mistake in the flags.",
        formatter_class=_wide,
        allow_abbrev=False,
    )
    add_flags(
        command,
        PLAN_OPTIONS,
        title="plan",
        model_help="a preset's name, a directory or a name on the Hugging Face hub (default: the demo model)",
    )
    command.set_defaults(run=_plan)

    command = commands.add_parser(
        "convert",
        help="turn a checkpoint of safetensors into an Orbax one, or back",
        description="Read the checkpoint SRC and write it to DST in the other format: a Hugging Face "
        "directory of safetensors becomes an Orbax checkpoint, an Orbax checkpoint becomes such a directory. "
        "The tokenizer and what else stands beside the weights come along. Both serve alike.",
        epilog="DST appears when all of it is written. Exit status: 0; 2 for a mistake, in SRC too; 130 "
        "after Ctrl-C.",
        allow_abbrev=False,
    )
    convert.add_flags(command)
    command.set_defaults(run=_convert)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, and never lets a user's mistake become a traceback."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA reads it when it is loaded
    try:
        args = parser().parse_args(argv)
        return args.run(args)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our stdout has left: nothing more to say, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OrcaError as error:
        print(f"orca: error: {_one_line(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2


def _generate(args: argparse.Namespace) -> int:
    with _quiet():
        return generate.run(args)


def _compile(args: argparse.Namespace) -> int:
    with _quiet():
        return compile_command.run(args)


def _worker(args: argparse.Namespace) -> int:
    with _quiet():
        return worker.run(args)


def _plan(args: argparse.Namespace) -> int:
    with _quiet():
        return plan.run(args)


def _convert(args: argparse.Namespace) -> int:
    with _quiet():
        return convert.run(args)


def _wide(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=32)


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 1000 else f"{line[:1000]}..."


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' warnings and logs off the terminal; errors come as exceptions."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
