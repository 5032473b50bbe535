"""The names that other engines give to flags: taken where they mean the same here, else explained.

The names are those of vLLM, SGLang, text-generation-inference and llama.cpp. They are hidden from `--help`. A
name of one of our own flags is never in these tables.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from server.errors import UsageError
from server.settings.flags import GivenModel

MODEL = "MODEL"  # the positional argument

# The same meaning and the same values: each name of theirs, and ours.
SAME: Mapping[str, str] = {
    "--model": MODEL,
    "-m": MODEL,
    "--model-path": MODEL,
    "--model-id": MODEL,
    "--hf-repo": MODEL,
    "-hf": MODEL,
    "-hfr": MODEL,
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--max-num-seqs": "--max-batch-size",
    "--max-running-requests": "--max-batch-size",
    "--parallel": "--max-batch-size",
    "-np": "--max-batch-size",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--max-batch-total-tokens": "--n-slots",
    "--gpu-memory-utilization": "--memory-fraction",
    "--mem-fraction-static": "--memory-fraction",
    "--cuda-memory-fraction": "--memory-fraction",
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--tp": "--tensor-parallel",
    "--tp-size": "--tensor-parallel",
    "--num-shard": "--tensor-parallel",
    "--pipeline-parallel-size": "--pipeline-parallel",
    "-pp": "--pipeline-parallel",
    "--pp": "--pipeline-parallel",
    "--pp-size": "--pipeline-parallel",
    "--data-parallel-size": "--replicas",
    "-dp": "--replicas",
    "--dp": "--replicas",
    "--dp-size": "--replicas",
    "--random-seed": "--seed",
    "-s": "--seed",
    "--tokenizer-path": "--tokenizer",
    "--ssl-cert-file": "--ssl-certfile",
    "--ssl-key-file": "--ssl-keyfile",
    "--temp": "--temperature",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-n": "--max-tokens",
    "--json-schema": "--guided-json",
    "-j": "--guided-json",
    "--repeat-penalty": "--repetition-penalty",
}

# Switches of theirs, and the value that ours has then.
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

# The same meaning, but other names for the values.
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

_LENGTH = (
    "a request may have as many tokens as the model has positions, and takes room in the KV cache only as it "
    "grows; --n-slots bounds the tokens of all requests together. Leave it out, or give --n-slots"
)
_ALWAYS = "it is always on"
_LAYERS = "all layers run on the devices that JAX finds; with JAX_PLATFORMS=cpu, on the CPU"
_THREADS = "there are as many threads as CPUs that the process may use; taskset gives it fewer"

# Without effect on any answer: said once, and how many values follow the name.
HINTS: Mapping[str, tuple[int, str]] = {
    "--trust-remote-code": (0, "no code of a checkpoint is ever run"),
    "--enable-auto-tool-choice": (0, "tools are on wherever the chat template has them"),
    "--disable-log-requests": (0, "prompts are never logged; --access-log off leaves out all requests"),
    "--no-enable-log-requests": (0, "prompts are never logged; --access-log off leaves out all requests"),
    "--disable-log-stats": (0, "there is no log of statistics; /metrics has them"),
    "--enable-metrics": (0, f"{_ALWAYS}: /metrics"),
    "--metrics": (0, f"{_ALWAYS}: /metrics"),
    "--jinja": (0, _ALWAYS),
    "--cont-batching": (0, _ALWAYS),
    "-cb": (0, _ALWAYS),
    "--embedding": (0, f"{_ALWAYS}: /v1/embeddings"),
    "--embeddings": (0, f"{_ALWAYS}: /v1/embeddings"),
    "--no-mmap": (0, "weights are read shard by shard onto the devices"),
    "--mlock": (0, "weights are read shard by shard onto the devices"),
    "--swap-space": (1, "requests are never swapped out: their keys and values are computed again"),
    "--n-gpu-layers": (1, _LAYERS),
    "--gpu-layers": (1, _LAYERS),
    "-ngl": (1, _LAYERS),
    "--threads": (1, _THREADS),
    "-t": (1, _THREADS),
    "--threads-batch": (1, _THREADS),
    "-tb": (1, _THREADS),
}

_KEYS = (
    "other users of the machine can read a command line; put keys into a file for --api-key-file, or into "
    "the variable ORCA_API_KEYS"
)
_ADAPTERS = "adapters are not applied yet; merge them into the model (peft's merge_and_unload)"
_QUANTIZED = (
    "weights are not quantised here yet; leave it out. FP8 and MXFP4 checkpoints are read as they are, and "
    "--load-format packed keeps experts in MXFP4"
)
_SPECULATION = "speculative decoding is not built yet; leave it out"
_ORIGINS = "--allow-origins takes the origins, with commas between, and allows what their pages need"
_BLOCKS = "--n-slots is the size of the KV cache in tokens"
_GRAPHS = "XLA records kernels into CUDA graphs; XLA_FLAGS=--xla_gpu_enable_command_buffer= turns that off"
_CHUNK = "--prefill-tokens bounds the prompt tokens of an iteration; --no-chunked-prefill turns chunks off"
_EXPERTS = "--tensor-parallel spreads experts too; --expert-exchange says how they get their tokens"
_OFFLOAD = "weights and the KV cache stay on the devices; use more of them with --tensor-parallel"

# With an effect that nothing here has, or has in another form: refused, with what to do.
ADVICE: Mapping[str, str] = {
    "--max-model-len": _LENGTH,
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "--max-seq-len": _LENGTH,
    "--max-input-tokens": _LENGTH,
    "--max-input-length": _LENGTH,
    "--max-total-tokens": _LENGTH,
    "--max-concurrent-requests": "--max-batch-size bounds the running requests, --max-queue the waiting ones",
    "--num-gpu-blocks-override": _BLOCKS,
    "--kv-cache-memory-bytes": f"{_BLOCKS}; orca plan says how many bytes a token takes",
    "--block-size": "a block of the KV cache has 16 tokens; leave it out",
    "--page-size": "a block of the KV cache has 16 tokens; leave it out",
    "--chunked-prefill-size": _CHUNK,
    "--max-prefill-tokens": _CHUNK,
    "--batch-size": "--max-batch-tokens bounds the tokens of an iteration",
    "-b": "--max-batch-tokens bounds the tokens of an iteration",
    "--ubatch-size": "--max-batch-tokens bounds the tokens of an iteration",
    "-ub": "--max-batch-tokens bounds the tokens of an iteration",
    "--enforce-eager": "--no-compile-ahead compiles each program on first use; none runs uncompiled",
    "--disable-cuda-graph": _GRAPHS,
    "--quantization": _QUANTIZED,
    "-q": _QUANTIZED,
    "--quantize": _QUANTIZED,
    "--kv-cache-dtype": "keys and values have the data type of --dtype; leave it out",
    "--cache-type-k": "keys and values have the data type of --dtype; leave it out",
    "-ctk": "keys and values have the data type of --dtype; leave it out",
    "--cache-type-v": "keys and values have the data type of --dtype; leave it out",
    "-ctv": "keys and values have the data type of --dtype; leave it out",
    "--speculative-config": _SPECULATION,
    "--speculative-model": _SPECULATION,
    "--speculative-algorithm": _SPECULATION,
    "--model-draft": _SPECULATION,
    "-md": _SPECULATION,
    "--enable-lora": _ADAPTERS,
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--lora": _ADAPTERS,
    "--api-key": _KEYS,
    "--admin-api-key": _KEYS.replace("api-key-file", "admin-key-file").replace("API_KEYS", "ADMIN_KEYS"),
    "--hf-token": "set the variable HF_TOKEN, or log in with `hf auth login`",
    "--download-dir": "set the variable HF_HOME",
    "--revision": "download that revision (hf download NAME --revision R), and give the directory",
    "--tokenizer-revision": "download that revision (hf download NAME --revision R), and give --tokenizer",
    "--tokenizer-mode": "the tokenizer is the model's tokenizer.json; leave it out",
    "--skip-tokenizer-init": "a request may give token ids in place of text; leave it out",
    "--hf-overrides": "copy the model's config.json and change it there",
    "--rope-scaling": "copy the model's config.json and change it there",
    "--rope-theta": "copy the model's config.json and change it there",
    "--json-model-override-args": "copy the model's config.json and change it there",
    "--override-generation-config": (
        "copy generation_config.json, change it, and give its directory to --generation-config"
    ),
    "--allowed-origins": _ORIGINS,
    "--allowed-methods": _ORIGINS,
    "--allowed-headers": _ORIGINS,
    "--allow-credentials": _ORIGINS,
    "--root-path": "a proxy can remove the path before it passes a request on; leave it out",
    "--uds": "it listens on addresses only: --host and --port",
    "--cpu-offload-gb": _OFFLOAD,
    "--kv-offloading-size": _OFFLOAD,
    "--enable-expert-parallel": _EXPERTS,
    "--ep-size": _EXPERTS,
    "--distributed-executor-backend": "--workers, --worker-processes and --replicas say where stages run",
    "--nnodes": "start `orca worker` on each machine, and give their addresses to --workers",
    "--dist-init-addr": "start `orca worker` on each machine, and give their addresses to --workers",
    "--device": "JAX takes the devices that it finds; JAX_PLATFORMS chooses among cpu and cuda",
    "--attention-backend": "--attention chooses the implementation, by other names (see --help)",
    "--flash-attn": "--attention chooses the implementation; leave it out for the fastest",
    "-fa": "--attention chooses the implementation; leave it out for the fastest",
    "--limit-mm-per-prompt": "only a model's text part is served; leave it out",
    "--mmproj": "only a model's text part is served; leave it out",
    "--task": "the same server generates, embeds, scores and ranks; leave it out",
    "--runner": "the same server generates, embeds, scores and ranks; leave it out",
    "--is-embedding": "the same server generates, embeds, scores and ranks; leave it out",
    "--log-level": "--access-log chooses what is logged about requests",
    "--uvicorn-log-level": "--access-log chooses what is logged about requests",
    "--prompt": "a prompt needs no flag: orca generate 'Once upon a time'",
    "-p": "a prompt needs no flag: orca generate 'Once upon a time'",
    "--file": "--input FILE.jsonl continues a file of prompts; a file's text can be piped in",
    "-f": "--input FILE.jsonl continues a file of prompts; a file's text can be piped in",
    "--grammar": "--guided-grammar takes a grammar, in Lark's syntax",
    "--interactive": "orca chat talks with a model in the terminal",
    "-i": "orca chat talks with a model in the terminal",
    "-cnv": "orca chat talks with a model in the terminal",
}


def add_foreign_flags(command: argparse.ArgumentParser) -> None:
    """Add the foreign names to a command whose own flags are complete.

    `hints` in the namespace has what is to be said of those that have no effect here.
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


def foreign_names() -> Iterator[str]:
    """All names in the tables."""
    for table in (SAME, SWITCHES, TRANSLATED, HINTS, ADVICE):
        yield from table


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
        said: Sequence[str] = getattr(namespace, "hints", ())
        namespace.hints = *said, f"{option_string} has no effect: {self.const}"


class _Refused(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        raise UsageError(f"{option_string} is not a flag of `{parser.prog}`: {self.const}")
