"""The names that other engines give to flags: taken where they mean the same here, else explained.

The names are those of vLLM, SGLang, text-generation-inference and llama.cpp. They are hidden from `--help`. A
name of one of our own flags is never in these tables.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from server.errors import UsageError
from server.settings.flags import GivenModel

T = TypeVar("T")
MODEL = "MODEL"  # the positional argument


def _by_name(groups: Iterable[tuple[str, T]]) -> Mapping[str, T]:
    """The value of each name, from pairs of several names and their value."""
    pairs = [(name, value) for names, value in groups for name in names.split()]
    assert len(dict(pairs)) == len(pairs), "a name comes once"
    return dict(pairs)


# Names for the same meaning and the same values, by our own.
_SAME = {
    MODEL: "--model -m --model-path --model-id --hf-repo -hf -hfr",
    "--served-model-name": "--alias -a",
    "--max-batch-size": "--max-num-seqs --max-running-requests --parallel -np",
    "--max-batch-tokens": "--max-num-batched-tokens",
    "--n-slots": "--max-batch-total-tokens",
    "--memory-fraction": "--gpu-memory-utilization --mem-fraction-static --cuda-memory-fraction",
    "--tensor-parallel": "--tensor-parallel-size -tp --tp --tp-size --num-shard",
    "--pipeline-parallel": "--pipeline-parallel-size -pp --pp --pp-size",
    "--replicas": "--data-parallel-size -dp --dp --dp-size",
    "--seed": "--random-seed -s",
    "--tokenizer": "--tokenizer-path",
    "--ssl-certfile": "--ssl-cert-file",
    "--ssl-keyfile": "--ssl-key-file",
    "--temperature": "--temp",
    "--max-tokens": "--predict --n-predict -n",
    "--guided-json": "--json-schema -j",
    "--repetition-penalty": "--repeat-penalty",
}
SAME = _by_name((names, ours) for ours, names in _SAME.items())

# Switches, and the value of our flag that each stands for.
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--enable-prefix-caching": ("--prefix-caching", True),
    "--no-enable-prefix-caching": ("--prefix-caching", False),
    "--disable-radix-cache": ("--prefix-caching", False),
    "--enable-chunked-prefill": ("--chunked-prefill", True),
    "--no-enable-chunked-prefill": ("--chunked-prefill", False),
    "--async-scheduling": ("--overlap", True),
    "--no-async-scheduling": ("--overlap", False),
    "--disable-overlap-schedule": ("--overlap", False),
    "--enable-deterministic-inference": ("--deterministic", True),
}

# Names for the same meaning, with other names for the values.
TRANSLATED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "--tool-call-parser": (
        "--tool-format",
        {
            "hermes": "hermes",
            "llama3_json": "llama3",
            "llama3": "llama3",
            "mistral": "mistral",
            "deepseek_v3": "deepseek_v3",
            "deepseek_v31": "deepseek_v31",
            "openai": "gpt_oss",
            "gpt-oss": "gpt_oss",
        },
    ),
    "--reasoning-parser": (
        "--reasoning-format",
        {
            "deepseek_r1": "think",
            "deepseek-r1": "think",
            "qwen3": "think",
            "mistral": "mistral",
            "granite": "granite",
            "openai_gptoss": "gpt_oss",
            "gpt-oss": "gpt_oss",
        },
    ),
    "--schedule-policy": ("--scheduling-policy", {"fcfs": "fcfs", "lpm": "longest-prefix"}),
}

# Names of what has no effect on any answer here; how many values follow each, and why it has none.
_HINTS = (
    ("--trust-remote-code", 0, "no code of a checkpoint is ever run"),
    ("--enable-auto-tool-choice", 0, "tools are on wherever the chat template has them"),
    (
        "--disable-log-requests --no-enable-log-requests",
        0,
        ("prompts are never logged; --access-log off leaves out all requests"),
    ),
    ("--disable-log-stats", 0, "there is no log of statistics; /metrics has them"),
    ("--enable-metrics --metrics", 0, "it is always on: /metrics"),
    ("--jinja --cont-batching -cb", 0, "it is always on"),
    ("--enable-lora", 0, "--lora and --max-loras turn adapters on"),
    ("--embedding --embeddings", 0, "it is always on: /v1/embeddings"),
    ("--no-mmap --mlock", 0, "weights are read shard by shard onto the devices"),
    ("--swap-space", 1, "requests are never swapped out: their keys and values are computed again"),
    (
        "--n-gpu-layers --gpu-layers -ngl",
        1,
        ("all layers run on the devices that JAX finds; with JAX_PLATFORMS=cpu, on the CPU"),
    ),
    (
        "--threads -t --threads-batch -tb",
        1,
        ("there are as many threads as CPUs that the process may use; taskset gives it fewer"),
    ),
)
HINTS = _by_name((names, (n_values, text)) for names, n_values, text in _HINTS)

# Names of what is not here, or is here in another form: refused, with what to do.
_ADVICE = {
    (
        "--max-model-len --context-length --ctx-size -c --max-seq-len --max-input-tokens "
        "--max-input-length --max-total-tokens"
    ): (
        "a request may have as many tokens as the model has positions, and takes room in the KV cache"
        " only as it grows; --n-slots bounds the tokens of all requests together. Leave it out, or "
        "give --n-slots"
    ),
    "--max-concurrent-requests": (
        "--max-batch-size bounds the running requests, --max-queue the waiting ones"
    ),
    "--num-gpu-blocks-override": "--n-slots is the size of the KV cache in tokens",
    "--kv-cache-memory-bytes": (
        "--n-slots is the size of the KV cache in tokens; orca plan says how many bytes a token takes"
    ),
    "--block-size --page-size": "a block of the KV cache has 16 tokens; leave it out",
    "--chunked-prefill-size --max-prefill-tokens": (
        "--prefill-tokens bounds the prompt tokens of an iteration; --no-chunked-prefill turns chunks off"
    ),
    "--batch-size -b --ubatch-size -ub": "--max-batch-tokens bounds the tokens of an iteration",
    "--enforce-eager": "--no-compile-ahead compiles each program on first use; none runs uncompiled",
    "--disable-cuda-graph": (
        "XLA records kernels into CUDA graphs; XLA_FLAGS=--xla_gpu_enable_command_buffer= turns that off"
    ),
    "-q --quantize": (
        "--quantization int8, int4 or fp8 rounds the weights of any checkpoint; quantized ones need no flag"
    ),
    "--cache-type-k -ctk --cache-type-v -ctv": (
        "--kv-cache-dtype int8 or fp8 holds keys and values in eight bits; otherwise they have the data type"
        " of --dtype"
    ),
    "--speculative-config --speculative-model --speculative-algorithm --model-draft -md": (
        "--speculative draft:MODEL has a smaller model draft, ngram drafts from prompt and output, suffix "
        "from earlier outputs too, mtp by the checkpoint's own head, eagle3:DIRECTORY by an EAGLE-3 head; at "
        "most --speculative-tokens at a time"
    ),
    "--lora-modules --lora-paths": "--lora NAME=DIRECTORY takes a LoRA adapter; give it once for each",
    "--api-key": (
        "other users of the machine can read a command line; put keys into a file for "
        "--api-key-file, or into the variable ORCA_API_KEYS"
    ),
    "--admin-api-key": (
        "other users of the machine can read a command line; put keys into a file for "
        "--admin-key-file, or into the variable ORCA_ADMIN_KEYS"
    ),
    "--hf-token": "set the variable HF_TOKEN, or log in with `hf auth login`",
    "--download-dir": "set the variable HF_HOME",
    "--revision": "download that revision (hf download NAME --revision R), and give the directory",
    "--tokenizer-revision": ("download that revision (hf download NAME --revision R), and give --tokenizer"),
    "--tokenizer-mode": "the tokenizer is the model's tokenizer.json; leave it out",
    "--skip-tokenizer-init": "a request may give token ids in place of text; leave it out",
    "--hf-overrides --rope-scaling --rope-theta --json-model-override-args": (
        "copy the model's config.json and change it there"
    ),
    "--override-generation-config": (
        "copy generation_config.json, change it, and give its directory to --generation-config"
    ),
    "--allowed-origins --allowed-methods --allowed-headers --allow-credentials": (
        "--allow-origins takes the origins, with commas between, and allows what their pages need"
    ),
    "--root-path": "a proxy can remove the path before it passes a request on; leave it out",
    "--uds": "it listens on addresses only: --host and --port",
    "--cpu-offload-gb --kv-offloading-size": (
        "weights and the KV cache stay on the devices; use more of them with --tensor-parallel"
    ),
    "--enable-expert-parallel --ep-size": (
        "--tensor-parallel spreads experts too; --expert-exchange says how they get their tokens"
    ),
    "--distributed-executor-backend": ("--workers, --worker-processes and --replicas say where stages run"),
    "--nnodes --dist-init-addr": (
        "start `orca worker` on each machine, and give their addresses to --workers"
    ),
    "--device": "JAX takes the devices that it finds; JAX_PLATFORMS chooses among cpu and cuda",
    "--attention-backend": "--attention chooses the implementation, by other names (see --help)",
    "--flash-attn -fa": "--attention chooses the implementation; leave it out for the fastest",
    "--limit-mm-per-prompt --mmproj": "only a model's text part is served; leave it out",
    "--task --runner --is-embedding": ("the same server generates, embeds, scores and ranks; leave it out"),
    "--pooler-config --override-pooler-config": (
        "--pooling is its pooling type, in lower case; a request says its dimensions and normalize"
    ),
    "--log-level --uvicorn-log-level": "--access-log chooses what is logged about requests",
    "--prompt -p": "a prompt needs no flag: orca generate 'Once upon a time'",
    "--file -f": "--input FILE.jsonl continues a file of prompts; a file's text can be piped in",
    "--grammar": "--guided-grammar takes a grammar, in Lark's syntax",
    "--interactive -i -cnv": "orca chat talks with a model in the terminal",
}
ADVICE = _by_name(_ADVICE.items())


def add_foreign_flags(command: argparse.ArgumentParser) -> None:
    """Add the foreign names to a command whose own flags are complete.

    `hints` in the namespace has a line for each name that has no effect here.
    """
    by_name = {name: action for action in command._actions for name in action.option_strings}
    model = next((action for action in command._actions if action.dest == "model"), None)
    for theirs, ours in SAME.items():
        action = model if ours == MODEL else by_name.get(ours)
        if action is not None and theirs not in by_name:
            kind = GivenModel if ours == MODEL else "store"
            options = {"dest": action.dest, "type": action.type, "metavar": action.metavar}
            _add_hidden(command, theirs, action=kind, **options)
    for theirs, (ours, value) in SWITCHES.items():
        action = by_name.get(ours)
        if action is not None and theirs not in by_name:
            _add_hidden(command, theirs, action="store_const", const=value, dest=action.dest)
    for theirs, (ours, values) in TRANSLATED.items():
        action = by_name.get(ours)
        if action is not None and theirs not in by_name:
            _add_hidden(command, theirs, action=_Translated, const=(ours, values), dest=action.dest)
    for theirs, (n_values, text) in HINTS.items():
        if model is not None and theirs not in by_name:
            _add_hidden(command, theirs, action=_Hint, const=text, dest="hints", nargs=n_values)
    for theirs, text in ADVICE.items():
        if model is not None and theirs not in by_name:
            _add_hidden(command, theirs, action=_Refused, const=text, dest="hints", nargs="?")


def about(name: str) -> str:
    """The end of a message about an unknown setting `name`, as in a file; empty if no engine has it."""
    flag = f"--{name.replace('_', '-')}"
    ours = SAME.get(flag) or next((table[flag][0] for table in (SWITCHES, TRANSLATED) if flag in table), None)
    if ours is not None:
        return f"; here it is {ours.lower().removeprefix('--').replace('-', '_')}"
    text = ADVICE.get(flag) or HINTS.get(flag, (0, ""))[1]
    return f": {text}" if text else ""


def _add_hidden(command: argparse.ArgumentParser, name: str, **options: Any) -> None:
    command.add_argument(name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)


class _Translated(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        ours, names = self.const
        if values not in names:
            parser.error(f"{option_string} {values}: here the flag is {ours}, with other values (see --help)")
        setattr(namespace, self.dest, names[values])


class _Hint(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        earlier: Sequence[str] = getattr(namespace, "hints", ())
        namespace.hints = *earlier, f"{option_string} has no effect: {self.const}"


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        raise UsageError(f"{option_string} is not a flag of `{parser.prog}`: {self.const}")
