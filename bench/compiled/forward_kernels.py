"""Lists the kernels of one layer of the forward program, in order, as XLA compiled it for an H200.

    JAX_PLATFORMS=cpu python -m bench.compiled.forward_kernels \
        [--preset gpt3-13b] [--layers 4] [--buckets 1,2,32,2048]

Needs the CUDA plugin (the extra `cuda`), no GPU. Shows a layer in the middle of the model, from
one attention call to the next. What a kernel computes is identified by the functions of `orca_jax` that its
operations come from. Nothing is autotuned: on a GPU, XLA measures, and may choose other kernels for the
matrix products.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.compiled.compile_for_gpu import compile_forward
from orca_jax.families.presets import PRESETS

# What each function computes; other names speak for themselves.
_COMPUTES = {
    "_rows_first": "product",
    "Linear.__call__": "bias",
    "activate": "activation",
    "LayerNorm.__call__": "LayerNorm",
    "Block.__call__": "residual",
    "Block.__call__.<locals>.attention": "q, k, v apart",
    "Stage.__init__.<locals>.one_part": "batch apart",
    "FlatLayout.split": "batch apart",
    "write": "K/V write",
}
_ATTENTION = "attention"
_INNER = re.compile(r"(\.<locals>)?\.<\w+>$")  # a comprehension or a lambda, replaced by its function
# Operations without a launch, and operations without computation.
_NO_LAUNCH = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
_NO_WORK = _NO_LAUNCH | {"broadcast", "convert", "reshape", "iota"}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\(")


@dataclass(frozen=True)
class Kernel:
    """One launch: XLA's name for it, its kind, what it computes, the shapes of its results.

    `sliced` is a custom call that gets a slice of an array in place instead of a copy.
    """

    name: str
    kind: str
    computes: tuple[str, ...]
    shape: str
    sliced: bool = False

    @property
    def is_attention(self) -> bool:
        """Whether it is the split-attention kernel."""
        return self.computes == (_ATTENTION,)


class Program:
    """The text of a compiled program, and the source functions of its operations."""

    def __init__(self, text: str) -> None:
        self._functions = _functions_of_frames(text)
        self._bodies: dict[str, list[str]] = {}
        name = ""
        for line in text.splitlines():
            if begins := re.match(r"^(ENTRY )?%(\S+) \(", line):
                name = "ENTRY" if begins[1] else begins[2]
                self._bodies[name] = []
            elif line.startswith("  ") and name:
                self._bodies[name].append(line)

    def kernels(self) -> Iterator[Kernel]:
        """Every launch of the entry computation, in order."""
        for line in self._bodies["ENTRY"]:
            match = _INSTRUCTION.match(line)
            if not match or match[3] in _NO_LAUNCH or match[3].endswith("-done"):
                continue
            kind, computes = match[3], tuple(dict.fromkeys(self._computes(line)))
            folded = self._folded_call(line)
            if target := re.search(r'custom_call_target="([^"]+)"', folded or line):
                kind = target[1]
                # The instruction contains the kernel's name.
                if kind.startswith("mosaic_gpu") and "split_attention" in (folded or line):
                    computes = (_ATTENTION,)
                elif "/place/pallas_call" in line:
                    computes = ("K/V write",)
            elif kind == "fusion":
                triton = re.search(r'"kind":"(__triton\w*)"', line)
                kind = triton[1].removeprefix("__") if triton else _after("kind=", line)
            yield Kernel(match[1], kind, computes, _shape(match[2]), sliced=folded is not None)

    def _folded_call(self, line: str) -> str | None:
        """The custom call inside a fusion that also contains its slices."""
        inner = self._bodies.get(_after("calls=%", line), []) if " fusion(" in line else []
        return next((one for one in inner if " custom-call(" in one), None)

    def _computes(self, line: str) -> Iterator[str]:
        """Name the computation of an instruction, or of the computation that it calls."""
        match = _INSTRUCTION.match(line)
        if not match or match[3] in _NO_WORK:
            return
        if called := _after("calls=%", line):
            for inner in self._bodies[called]:
                yield from self._computes(inner)
        elif match[3] == "dot":
            yield "product"
        elif match[3] == "reduce" and _after("to_apply=%", line).startswith("dot"):
            yield "sum of a product"  # for few rows: split along the sum, another kernel adds the parts
        elif frame := _after("stack_frame_id=", line):
            function = _INNER.sub("", self._functions[int(frame)])
            yield _COMPUTES.get(function, function)


def layers(kernels: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of each layer but the last, from its attention call to the next layer's."""
    calls = [i for i, kernel in enumerate(kernels) if kernel.is_attention]
    return [kernels[a:b] for a, b in pairwise(calls)]


def forward_kernels(preset: str, n_layers: int, bucket: int, max_bs: int = 32) -> list[Kernel]:
    """The launches of one bucket's forward program in bfloat16, compiled for one H200."""
    model = PRESETS[preset]
    shallow = replace(model, layers=model.layers[:1] * n_layers)
    text = compile_forward(shallow, bucket, max_bs).program.as_text()
    assert text is not None
    return list(Program(text).kernels())


def _functions_of_frames(text: str) -> dict[int, str]:
    """The innermost function of each stack frame, from the tables at the beginning of the text."""

    def table(name: str) -> list[str]:
        return re.findall(r"^\d+ (.*)$", text.split(f"\n{name}\n", 1)[1].split("\n\n", 1)[0], re.MULTILINE)

    names = [name.strip('"') for name in table("FunctionNames")]
    places = [names[int(_after("function_name_id=", line)) - 1] for line in table("FileLocations")]
    frames = table("StackFrames")
    return {i: places[int(_after("file_location_id=", line)) - 1] for i, line in enumerate(frames, 1)}


def _after(mark: str, line: str) -> str:
    match = re.search(re.escape(mark) + r"([^\s,})]+)", line)
    return match[1] if match else ""


def _shape(text: str) -> str:
    return ", ".join(re.findall(r"\w+\[[\d,]*\]", text))


def main() -> None:
    """Compile, print a table per bucket and, as the last line, JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled.forward_kernels", description=__doc__)
    parser.add_argument("--preset", default="gpt3-13b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=4, help="layers to compile, 3 or more (default: 4)")
    parser.add_argument("--buckets", default="1,2,32,2048", help="token counts (default: 1,2,32,2048)")
    parser.add_argument("--max-batch-size", type=int, default=32)
    flags = parser.parse_args()
    if flags.layers < 3:
        parser.error(f"--layers is {flags.layers}; the middle of a model takes 3 or more")
    programs = []
    for bucket in track(
        [int(n) for n in flags.buckets.split(",")], "compiling", console=Console(stderr=True)
    ):
        kernels = forward_kernels(flags.preset, flags.layers, bucket, flags.max_batch_size)
        counts = [len(layer) for layer in layers(kernels)]
        if not counts:
            sys.exit(f"the program of {bucket} tokens has no split-attention kernel in it")
        layer = layers(kernels)[len(counts) // 2]
        made = Table(
            title=f"{flags.preset}, {bucket} tokens: {len(layer)} kernels a layer, {len(kernels)} in all"
        )
        for column in ("", "kind", "computes", "result"):
            made.add_column(column)
        for i, kernel in enumerate(layer, 1):
            made.add_row(str(i), kernel.kind, " + ".join(kernel.computes), kernel.shape)
        Console(width=120).print(made)
        programs.append(
            {
                "bucket": bucket,
                "in_all": len(kernels),
                "attention_calls": sum(kernel.is_attention for kernel in kernels),
                "sliced_calls": sum(kernel.sliced for kernel in kernels),
                "of_layers": counts,
                "layer": [asdict(k) for k in layer],
            }
        )
    print(
        json.dumps(
            {"preset": flags.preset, "layers": flags.layers, "jax": jax.__version__, "programs": programs}
        )
    )


if __name__ == "__main__":
    main()
