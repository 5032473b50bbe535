"""The commands of `orca` with their flags. Imports none of them, so that a mistake is reported at once."""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, get_args

import orca_jax
from orca_jax.config import FORMATS, Dtype, Rounding
from orca_jax.errors import did_you_mean
from server.errors import UsageError
from server.settings.bench_flags import add_bench_flags
from server.settings.flags import (
    COMPILE_OPTIONS,
    PlanFlags,
    WorkerFlags,
    add_engine_flags,
    add_flags,
    add_model,
    add_serve_flags,
    argparse_type,
)
from server.settings.foreign_flags import add_foreign_flags
from server.settings.sampling_flags import add_chat_sampling_flags, add_sampling_flags, text_or_file

_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a negative number


class CommandParser(argparse.ArgumentParser):
    """Reports a mistake as UsageError. `commands` has the parsers of all commands by name.

    argparse looks for arguments that are missing before flags that do not exist. A misspelled flag is often
    both, so here it comes first.
    """

    commands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})
    is_command = True  # rather than what has the commands

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse as argparse does, after a look for flags and commands that do not exist."""
        for word in sys.argv[1:] if args is None else args:
            if word == "--":
                break
            if not self.is_command and not word.startswith("-"):
                if word not in self.commands:
                    known = f"{did_you_mean(word, self.commands)}; it is one of {', '.join(self.commands)}"
                    self.error(f"there is no command {word!r}{known}")
                break  # its own parser reads the rest
            self._check_flag(word)
        return super().parse_known_args(args, namespace)

    def _check_flag(self, word: str) -> None:
        """Raise UsageError for a word that argparse would take for a flag and not find."""
        if len(word) < 2 or not word.startswith("-") or " " in word or _NUMBER.fullmatch(word):
            return
        name, known = word.partition("=")[0], self._option_string_actions
        if name in known or (not name.startswith("--") and name[:2] in known):  # -n8 is -n 8
            return
        others = [f"`orca {each}`" for each, parser in self.commands.items() if name in shown_flags(parser)]
        if others:
            self.error(f"{name} is a flag of {' and '.join(others)}, not of `{self.prog}`")
        long = [each for each in known if each.startswith("--")]
        self.error(f"{name} is not a flag of `{self.prog}`{did_you_mean(name, long, prefix='--')}")


def shown_flags(parser: argparse.ArgumentParser) -> set[str]:
    """The flags in the parser's `--help`."""
    actions = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return {name for action in actions for name in action.option_strings}


Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"  # what argparse calls it
SHELLS = ("bash", "zsh", "fish")


def parser() -> CommandParser:
    """All commands with their flags.

    `run` in the namespace names the command's function, and `quiet` says whether it keeps libraries' warnings
    and logs off the terminal.
    """
    top = CommandParser(
        prog="orca",
        description="ORCA (OSDI 2022) in JAX: a serving engine for language models.",
    )
    top.add_argument("--version", action="version", version=f"orca {orca_jax.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    for add in (
        _generate,
        _chat,
        _serve,
        _compile,
        _worker,
        _plan,
        _bench,
        _route,
        _replay,
        _convert,
        _diff,
        _completion,
    ):
        add(commands)
    for name, command in commands.choices.items():
        command.set_defaults(run=f"server.commands.{name}:run", quiet=name != "serve")
        add_foreign_flags(command)
        command.commands = commands.choices
    top.commands, top.is_command = commands.choices, False
    return top


def _generate(commands: Commands) -> None:
    command = commands.add_parser(
        "generate",
        help="continue prompts, on the terminal or from a file",
        description="Continue each PROMPT and stream the text to the terminal, or continue every line of a "
        "JSONL file. Notes go to stderr, so that stdout holds only the text.",
        epilog='A line of FILE.jsonl is {"prompt": a text or a list of token ids}, or {"messages": [...]} '
        'with or without "tools", and may have its own sampling parameters, as in {"prompt": "In the", '
        '"max_tokens": 8, "stop": ["."]}. The output has one line for each, in order, with the text and the '
        "finish reason, or with an error. To continue a stopped run, run the same command again. Exit "
        "status: 0; 1 if some lines had errors or the engine failed; 2 for a mistake in the command line; "
        "130 after Ctrl-C.",
    )
    command.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="'-', or no PROMPT if stdin is a pipe: read stdin"
    )
    files = command.add_argument_group("files")
    files.add_argument("--input", metavar="FILE.jsonl", help="continue every line of this file ('-': stdin)")
    files.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="write the results here, or continue those of an earlier run (default: stdout)",
    )
    files.add_argument("--overwrite", action="store_true", help="replace the --output file if there is one")
    files.add_argument(
        "--retry-errors",
        action="store_true",
        help="with an --output file of an earlier run, also run the lines that had errors again",
    )
    add_sampling_flags(command.add_argument_group("sampling"))
    add_engine_flags(command.add_argument_group("model and engine"))


def _chat(commands: Commands) -> None:
    command = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        usage="orca chat [MODEL] [FLAGS]",
        description="Talk with MODEL: each line is a message, and the reply is streamed. /help lists the "
        "commands, such as /retry and /set temperature 0.7. Ctrl-C stops a reply, Ctrl-D ends.",
        epilog="If stdin is a pipe, each line of it is a message, and stdout holds only the replies. Exit "
        "status: 0; 1 if the engine failed; 2 for a mistake in the command line or, from a pipe, in a "
        "message; 130 after Ctrl-C.",
    )
    command.add_argument(
        "--system",
        metavar="TEXT",
        type=argparse_type(text_or_file),
        help="the system prompt; @FILE reads it from a file (default: none)",
    )
    add_chat_sampling_flags(command.add_argument_group("sampling"))
    add_flags(command, "chat", title="model and engine")


def _serve(commands: Commands) -> None:
    command = commands.add_parser(
        "serve",
        help="serve a model over HTTP (OpenAI's API) and gRPC",
        usage="orca serve [MODEL] [--config FILE.yaml] [FLAGS]",
        description="Serve MODEL over OpenAI's HTTP API and over gRPC. SIGTERM or Ctrl-C lets running "
        "requests finish and stops the server.",
        epilog="A setting can come from four sources, in this order of precedence: flag; environment "
        "variable, as in ORCA_MAX_QUEUE=64 (also ORCA_MODEL and ORCA_CONFIG; an empty variable counts as not "
        "set); --config file, a YAML mapping such as 'max_queue: 64'; default. 'none' unsets an optional "
        "setting. Paths are relative to the working directory, in the file too. API keys are never flags, "
        "because other users of the machine can read those. Exit status: 0 after a drain; 1 if the engine "
        "failed; 2 for a mistake in the settings.",
        formatter_class=_wide,
    )
    add_serve_flags(command)


def _compile(commands: Commands) -> None:
    command = commands.add_parser(
        "compile",
        help="compile a model's programs ahead of time",
        usage="orca compile [MODEL] [--config FILE.yaml] [FLAGS]",
        description="Compile every program that `orca serve` needs with the same settings, for the devices "
        "of this machine, and keep them in the folder of compiled programs, so that a server starts much "
        "faster. Reads no weights.",
        epilog="Settings come from the same sources as those of `orca serve`: flags, variables, a --config "
        "file. A program is reused for the same code, version of JAX, kind of device and sizes. Exit status: "
        "0; 2 for a mistake in the settings; 130 after Ctrl-C.",
        formatter_class=_wide,
    )
    add_serve_flags(command, COMPILE_OPTIONS)


def _worker(commands: Commands) -> None:
    command = commands.add_parser(
        "worker",
        help="run one stage of a pipeline, for an `orca serve --workers` elsewhere",
        usage="orca worker [MODEL] --stage I --of N --listen HOST:PORT [FLAGS]",
        description="Load stage I of MODEL's N stages and compute its part of each iteration that a server "
        "asks for. Start one for each stage, in any order, and then `orca serve [MODEL] --workers "
        "HOST:PORT,HOST:PORT...` with their addresses.",
        epilog="A lost worker can be restarted at any time: the server waits for it, and requests resume. "
        "Exit status: 0 after SIGTERM or Ctrl-C; 1 if the device hangs; 2 for a mistake in the flags or the "
        "checkpoint.",
        formatter_class=_wide,
    )
    add_flags(command, "worker", title="worker", config=WorkerFlags)


def _plan(commands: Commands) -> None:
    command = commands.add_parser(
        "plan",
        help="show a model's memory and speed on given devices",
        usage="orca plan [MODEL] --device DEVICE [FLAGS]",
        description="Show the memory of each stage's devices (weights, tables, temporaries, and the slots "
        "for keys and values that still fit), the least time of an iteration by batch size and phase, and "
        "the tokens per second at that floor; and what does not fit, and why. Needs neither the devices nor "
        "the weights.",
        epilog="The size of temporaries comes from XLA if its compiler is installed (for GPUs: JAX's CUDA "
        "plugin, the extra `cuda`), which takes minutes for large models; otherwise it is estimated. Floors "
        "use the data sheets' rates; a CPU's are measured. Exit status: 0; 1 if something does not fit; 2 "
        "for a mistake in the flags.",
        formatter_class=_wide,
    )
    add_flags(
        command,
        "plan",
        title="plan",
        config=PlanFlags,
        model_help="a preset's name, a directory or a name on the Hugging Face hub (default: the demo model)",
    )


def _bench(commands: Commands) -> None:
    command = commands.add_parser(
        "bench",
        help="measure a running server of OpenAI's protocol under load",
        usage="orca bench [--url URL] [FLAGS]",
        description="Send requests to a server and measure its throughput, its latencies and their spread, "
        "at one load or at several. Works with any server of OpenAI's completions or chat API.",
        epilog="A closed loop (--concurrency) keeps so many requests running; an open loop (--rate, or the "
        "arrivals of --trace) sends requests whether or not others have ended. Prompts are random tokens, "
        "different at each load, so that no prefix cache helps. The variable OPENAI_API_KEY has the server's "
        "key, if it needs one. Exit status: 0; 1 if a request failed; 2 for a mistake in the flags, or if no "
        "server answers; 130 after Ctrl-C.",
        formatter_class=_wide,
    )
    add_bench_flags(command)


def _route(commands: Commands) -> None:
    command = commands.add_parser(
        "route",
        help="a proxy before servers of the roles prefill and decode",
        usage="orca route --prefill URL --decode URL [FLAGS]",
        description="Let servers with --role prefill compute the prompts of completions and chats, and "
        "servers with --role decode generate from them. Works with any servers that know vLLM's "
        "kv_transfer_params.",
        epilog="If no server computes a prompt, the one that generates does. Give --prefill and --decode "
        "once for each server; they take turns. Exit status: 0 after SIGTERM or Ctrl-C; 2 for a mistake in "
        "the flags.",
        formatter_class=_wide,
    )
    command.add_argument("--prefill", metavar="URL", action="append", required=True, help="of prompts")
    command.add_argument("--decode", metavar="URL", action="append", required=True, help="that generates")
    command.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: 8000)")


def _replay(commands: Commands) -> None:
    command = commands.add_parser(
        "replay",
        help="repeat a recording of `orca serve --record`",
        description="Submit the requests of FILE again, each to the same iteration, on an engine of the same "
        "sizes in this process, and compare all batches and outputs with the recorded ones.",
        epilog="Outputs end at their recorded lengths, so the batches are the same even if tokens differ. "
        "Exit status: 0; 1 if batches or outputs differ, or the engine failed; 2 for a mistake in the flags "
        "or in FILE; 130 after Ctrl-C.",
    )
    command.add_argument("file", metavar="FILE", type=Path, help="a file that `orca serve --record` wrote")
    add_model(command, "where the recorded model is on this machine (default: as recorded)")
    command.add_argument(
        "--simulate",
        action="store_true",
        help="repeat the schedule alone, on a simulated engine: needs neither model nor device",
    )


def _convert(commands: Commands) -> None:
    command = commands.add_parser(
        "convert",
        help="convert a checkpoint from safetensors to Orbax, or back",
        description="Read the checkpoint SRC and write it to DST in the other format: a Hugging Face "
        "directory of safetensors becomes an Orbax checkpoint, and the reverse. Copies the tokenizer and the "
        "other files next to the weights too. `orca serve` takes both formats.",
        epilog="DST appears only when complete. Exit status: 0; 2 for a mistake, also in SRC; 130 after "
        "Ctrl-C.",
    )
    command.add_argument("source", metavar="SRC", help="a directory, or a name on the Hugging Face hub")
    command.add_argument(
        "destination",
        metavar="DST",
        help="a directory that does not exist or is empty; with --suggest a file to write",
    )
    names = command.add_mutually_exclusive_group()
    names.add_argument(
        "--suggest",
        action="store_true",
        help="convert nothing; write to the file DST which arrays of an Orbax checkpoint are which weights",
    )
    names.add_argument(
        "--map",
        metavar="FILE",
        type=Path,
        help="the names of an Orbax checkpoint's arrays, as --suggest writes them (default: SRC's orca.json)",
    )
    command.add_argument(
        "--to",
        choices=FORMATS,
        help="format of the converted weights (default: Orbax from safetensors, safetensors from all others)",
    )
    command.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="data type of the converted weights (default: unchanged)",
    )
    command.add_argument(
        "--quantization",
        choices=get_args(Rounding),
        help="round the matrices of the layers to these numbers, and write compressed-tensors (safetensors)",
    )


def _diff(commands: Commands) -> None:
    command = commands.add_parser(
        "diff",
        help="say in which layer a trainer's forward pass and the engine's differ first",
        description="Run the same tokens through MODEL and through a trainer's forward pass, and show the "
        "gap after each layer and of the log-probabilities.",
        epilog="package.file:function makes the trainer's side, from MODEL if it takes an argument: a module "
        "of your own, or a function of token ids [T] that returns logits [T, V] and hidden_states, the first "
        "layer's input and each layer's output. Exit status: 0; 1 if a layer differs; 2 for a mistake; 130 "
        "after Ctrl-C.",
    )
    add_model(command, "what `orca serve` takes (default: the demo model)")
    command.add_argument(
        "--against", metavar="package.file:function", required=True, help="makes the trainer's side"
    )
    command.add_argument("--prompt", metavar="TEXT", help="the tokens (default: random ones)")
    command.add_argument(
        "--length", metavar="N", type=int, default=64, help="number of random tokens (default: 64)"
    )
    command.add_argument(
        "--dtype", choices=get_args(Dtype), help="the engine's (default: float32 on a CPU, else bfloat16)"
    )
    command.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest relative gap that counts as none (default: 1e-4 in float32, 0.02 in other dtypes)",
    )
    command.add_argument(
        "--clip",
        metavar="X",
        type=float,
        default=0.2,
        help="report the share of tokens whose probability changes by more than this factor (default: 0.2)",
    )


def _completion(commands: Commands) -> None:
    command = commands.add_parser(
        "completion",
        help="print a script that completes commands and flags in a shell",
        description="Print a script with which bash, zsh or fish complete the commands, flags and files of "
        "orca.",
        epilog="For bash: orca completion bash > ~/.local/share/bash-completion/completions/orca. For zsh: "
        "orca completion zsh > DIRECTORY/_orca, where fpath has DIRECTORY. For fish: orca completion fish > "
        "~/.config/fish/completions/orca.fish. Then start the shell again.",
    )
    command.add_argument("shell", choices=SHELLS, help="the shell")


def _wide(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=32)
