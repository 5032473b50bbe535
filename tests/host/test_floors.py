"""The floors of the house, held by reading every file's imports: who may know whom, and what a file may be.

The rules are those of CONTRIBUTING.md. A new room gets its place in LAYERS or DEVICE_ROOMS below.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

from tests.places import ROOT

SOURCES = ("orca_jax", "server", "bench", "scripts", "examples", "tests")

FACE = "__init__"  # orca_jax/__init__.py
# What each room may import of the package; a folder is a room, and so is each file beside them. JAX-free
# ones, lowest first. What a room may know, it need not.
HOST_ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "host_memory": set(),
    "checks": {"errors"},
    "options": {"errors"},
    "config": {"errors", "checks", "options"},
    "small_files": set(),
    "gguf_file": {"errors"},
    "request": {"errors", "config", "small_files", "gguf_file"},
    "families": {"errors", "checks", "config", "gguf_file"},
}
HOST_ROOMS["engine_memory"] = {"config"}
HOST_ROOMS["model_files"] = {"errors", "config", "gguf_file", "request", "families"}
HOST_ROOMS["grammar"] = {"errors", "config", "request"}
HOST_ROOMS["speculation"] = {"errors", "checks", "config", "request"}
HOST_ROOMS["iteration"] = {"errors", "checks", "config", "request", "grammar", "speculation"}
HOST_ROOMS["scheduling"] = HOST_ROOMS["iteration"] | {"iteration", "families"}
HOST_ROOMS["control"] = HOST_ROOMS["iteration"] | {"iteration", "families"}
HOST_ROOMS["service"] = HOST_ROOMS["scheduling"] | {"scheduling", "engine_memory"}
HOST_ROOMS["planning"] = HOST_ROOMS["scheduling"] | {"scheduling"}
HOST_ROOMS["workers"] = HOST_ROOMS["planning"] | {"planning", "control"}
HOST_ROOMS["engine"] = HOST_ROOMS["workers"] | {"workers", "engine_memory"}
HOST_ROOMS["simulation"] = HOST_ROOMS["engine"] | {"engine", "service"}
# Those that may know JAX. The model and the kernels do not know each other.
DEVICE_ROOMS: dict[str, set[str]] = {
    "model": {"errors", "config", "families", "request", "grammar", "iteration"},
    "pallas": {"errors", "config", "families"},
    "native": {"families"},
    "cudnn": set(),
}
DEVICE_ROOMS["sharding"] = {"errors", "config", "families", "planning", "model"}
DEVICE_ROOMS["user_model"] = DEVICE_ROOMS["sharding"] | {
    *("checks", "request", "model_files", "sharding"),
}
DEVICE_ROOMS["execution"] = {
    *("errors", "config", "families", "request", "grammar", "iteration", "control", "workers"),
    *("planning", "engine_memory"),
    *DEVICE_ROOMS,
}
DEVICE_ROOMS["aot"] = {"errors", "config", "families", "iteration", "planning", *DEVICE_ROOMS}
DEVICE_ROOMS["checkpoint"] = {
    *("errors", "config", "gguf_file", "request", "families", "model_files", "model", "sharding"),
}
# They know both kinds, and each those before it.
COMPOSITION = ("launch", "llm", "rollout")
LAZY = {"checkpoint", "user_model", "launch", "llm", "rollout"}  # where the face's lazy names are from
# Imported inside a function, by the one file that may: what is slow to import and few need.
ON_DEMAND = {
    "orca_jax/checkpoint/orbax.py": ("orca_jax.checkpoint.orbax_store", "orca_jax.checkpoint.zarr_store"),
    "server/commands/router_view.py": ("server.kv_events.publisher",),
    "server/tracing/tracing.py": ("server.tracing.otlp",),
}

# Functions that import by name, and the files that may call them: a user's own function, a command's module.
HIDES_IMPORTS = {
    "import_module": {"orca_jax/__init__.py"},
    "__import__": set[str](),
    "resolve_name": {
        *("orca_jax/checks.py", "server/cli.py", "server/commands/chat.py"),
        *("server/commands/generate.py", "server/commands/serve.py"),
    },
}

MAY_IMPORT: dict[str, set[str]] = {
    **HOST_ROOMS,
    **DEVICE_ROOMS,
    **{room: {*HOST_ROOMS, *DEVICE_ROOMS, *COMPOSITION[:i]} for i, room in enumerate(COMPOSITION)},
    FACE: {*HOST_ROOMS, *LAZY},  # the latter inside __getattr__ alone
}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
KNOWS_JAX = {*DEVICE_ROOMS, *COMPOSITION}
# Files of such rooms that know no JAX, and begin their work while it is imported.
WITHOUT_JAX = {"orca_jax.native.compiler", "orca_jax.native.operations"}
HOST_LIBRARIES = {"numpy", "tokenizers"}
LIBRARIES_OF = {  # that one or two files of the JAX-free rooms may know besides
    "grammar.grammar": "llguidance",
    "grammar.schema_patterns": "llguidance",
    "grammar.source": "llguidance",
    "model_files.locate": "huggingface_hub",
    "control.adapter_call": "grpc",
    "control.line": "grpc",
    "control.frame": "google",
    "control.start_order": "google",
    "control.port": "grpc",
    "control.worker_pb2": "google",
    "request.chat.chat_template": "jinja2",
    "request.chat.template_sandbox": "jinja2",
}

# The server: its two endpoints do not know each other, and nothing below knows what puts them together.
ENDPOINTS = ("server.http", "server.rpc")
PUTS_TOGETHER = {
    *("server.commands.conversation_lines", "server.commands.jsonl", "server.commands.generating"),
    *("server.commands.endpoints", "server.commands.serving", "server.commands.serving"),
    *("server.ray.app", "server.ray.door", "server.ray.relay", "server.ray.replica", "server.ray.launch"),
    *("server.endpoint_processes.main", "server.endpoint_processes.forwarding"),
    "server.ray.routing.prefix_key",
}

SAYS_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc"}


@dataclass(frozen=True)
class Import:
    """One import statement's target, and where it stands: `inside` names the function or class around it.

    `inside` may also be TYPE_CHECKING, for an `if` of that name.
    """

    target: str
    line: int
    inside: str | None


def imports(tree: ast.AST, modules: Mapping[str, object]) -> Iterator[Import]:
    """Every import of a file; `from a import b` is `a.b` where that is a module of ours, else `a`."""

    def walk(node: ast.AST, inside: str | None) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(name.name, child.lineno, inside)
            elif isinstance(child, ast.ImportFrom):
                base = "." * child.level + (child.module or "")
                for name in child.names:
                    full = f"{base}.{name.name}"
                    yield Import(full if full in modules else base, child.lineno, inside)
            elif isinstance(child, ast.Call) and _name(child.func) in HIDES_IMPORTS:
                yield Import(f"{_name(child.func)}()", child.lineno, inside)
                yield from walk(child, inside)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, inside or "TYPE_CHECKING")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from walk(child, child.name)
            else:
                yield from walk(child, inside)

    return walk(tree, None)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def module_of(path: str) -> str:
    """orca_jax/model/block.py is orca_jax.model.block, orca_jax/model/__init__.py is orca_jax.model."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == FACE else parts)


def room_of(module: str) -> str:
    """The room of a module of orca_jax: its folder, or itself where it lies in none."""
    return module.removeprefix("orca_jax").removeprefix(".").split(".")[0] or FACE


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """The rules that these files break (path from the repository's root, to text), one line each."""
    modules = {module_of(path): path for path in sources}
    violations = list[str]()
    graph = dict[str, set[str]]()
    for path, text in sorted(sources.items()):
        here = module_of(path)
        edges = graph.setdefault(here, set())
        for item in imports(ast.parse(text), modules):
            where = f"{path}:{item.line}"
            if reason := _why_not(path, here, item):
                violations.append(f"{where}: {reason}")
            lazy = item.inside is not None and path == "orca_jax/__init__.py"
            if not lazy and item.target in modules and item.target != here:
                edges.add(item.target)  # a circle that only the type checker sees is one too
        violations += _about_the_name(path)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        violations.append("import cycle: " + " -> ".join(error.args[1]))
    return violations


def _why_not(path: str, here: str, item: Import) -> str | None:
    top = path.split("/")[0]
    target_top = item.target.split(".")[0]
    if item.target.startswith("."):
        return "relative import"
    if item.target.endswith("()"):
        allowed = path in HIDES_IMPORTS[item.target.removesuffix("()")]
        return f"{item.target} hides an import" if top in ("orca_jax", "server") and not allowed else None
    lazy_face = path == "orca_jax/__init__.py" and item.inside in ("__getattr__", "TYPE_CHECKING")
    lazy = lazy_face or item.target in ON_DEMAND.get(path, ())
    if item.inside not in (None, "TYPE_CHECKING") and not lazy:
        return f"import of {item.target} inside {item.inside}"
    if here in WITHOUT_JAX and _is_device(item.target):
        return f"{here} imports {item.target}, and is to know no JAX"
    if top == "server":
        return (
            f"the server imports {item.target}" if _is_device(item.target) else _why_not_in_server(here, item)
        )
    if path.startswith("tests/host/"):
        return f"a host test imports {item.target}" if _is_device(item.target) else None
    if top != "orca_jax":
        return None
    room = room_of(here)
    if room not in MAY_IMPORT:
        return f"the room {room} has no place yet: give it one in tests/host/test_floors.py"
    if target_top == "orca_jax":
        target = room_of(item.target)
        if target in LAZY and room == FACE and not lazy_face:
            return f"the face of the package imports {target} at once"
        if target != room and target not in MAY_IMPORT[room]:
            return f"{room} must not know {target}"
        return None
    if target_top in SOURCES:
        return f"{room} must not know {target_top}"
    if target_top in JAX and room not in KNOWS_JAX:
        return f"{room} is a room without JAX, and so without {target_top}"
    known = target_top in sys.stdlib_module_names or target_top in HOST_LIBRARIES
    known = known or LIBRARIES_OF.get(here.removeprefix("orca_jax.")) == target_top
    if not known and (room in HOST_ROOMS or room == FACE):
        return f"{room} imports {target_top}, which is no library of the rooms without JAX"
    return None


def _why_not_in_server(here: str, item: Import) -> str | None:
    mine = next((endpoint for endpoint in ENDPOINTS if here.startswith(endpoint)), None)
    theirs = next((endpoint for endpoint in ENDPOINTS if item.target.startswith(endpoint)), None)
    below = here not in PUTS_TOGETHER
    if below and (item.target in PUTS_TOGETHER or (theirs is not None and theirs != mine)):
        return f"{here} must not know {item.target}"
    return None


def _is_device(target: str) -> bool:
    """Does importing it bring JAX in (the package's face does not: LLM is lazy there)?"""
    top = target.split(".")[0]
    if target in WITHOUT_JAX:
        return False
    return top in JAX or (top == "orca_jax" and room_of(target) in KNOWS_JAX)


def _about_the_name(path: str) -> Iterator[str]:
    for part in PurePosixPath(path).with_suffix("").parts:
        if part in SAYS_NOTHING:
            yield f"{path}: the name {part} says nothing"


def test_the_house_keeps_its_rules() -> None:
    paths = [path for top in SOURCES for path in sorted((ROOT / top).rglob("*.py"))]
    assert paths
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    violations = broken_rules(sources)
    assert not violations, "\n".join(violations)


def rooms() -> dict[str, list[str]]:
    """Each folder of the package that holds Python, and the names of its files."""
    package = ROOT / "orca_jax"
    folders = {path.parent for path in package.rglob("*.py")}
    return {
        folder.relative_to(package).as_posix(): sorted(
            path.stem for path in folder.glob("*.py") if path.stem != FACE
        )
        for folder in folders
    }


def test_every_room_has_a_description() -> None:
    for room in rooms():
        text = ast.get_docstring(ast.parse((ROOT / "orca_jax" / room / "__init__.py").read_text("utf-8")))
        assert text, room


def test_rooms_without_jax_import_where_there_is_none() -> None:
    names = ["orca_jax", "orca_jax.config", "orca_jax.errors"]
    names += [
        f"orca_jax.{room}.{file}" for room, files in rooms().items() if room in HOST_ROOMS for file in files
    ]
    assert len(names) > 60
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(JAX)})); import {', '.join(names)}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        # floors
        ("orca_jax/scheduling/scheduler.py", "import jax.numpy as jnp", "scheduling is a room without JAX"),
        ("orca_jax/scheduling/scheduler.py", "from flax import nnx", "scheduling is a room without JAX"),
        (
            "orca_jax/scheduling/scheduler.py",
            "try:\n    import orbax\nexcept ImportError:\n    pass",
            "a room without JAX",
        ),
        ("orca_jax/scheduling/scheduler.py", "import requests", "no library of the rooms without JAX"),
        ("orca_jax/engine/grpc_channel.py", "import grpc", "no library of the rooms without JAX"),
        ("orca_jax/__init__.py", "import jax", "__init__ is a room without JAX"),
        ("orca_jax/families/presets.py", "import jax", "families is a room without JAX"),
        ("orca_jax/native/compiler.py", "import jax", "is to know no JAX"),
        ("server/cli.py", "import jax", "the server imports jax"),
        ("server/cli.py", "from orca_jax.sharding import worker", "the server imports orca_jax.sharding"),
        ("tests/host/test_x.py", "from orca_jax.model.transformer import forward", "a host test imports"),
        # downward
        (
            "server/gateway/gateway.py",
            "from server.http.app import create_app",
            "must not know server.http.app",
        ),
        ("server/http/app.py", "from server.rpc import messages", "must not know server.rpc"),
        (
            "server/rpc/server.py",
            "from server.commands.endpoints import Endpoints",
            "must not know server.commands.endpoints",
        ),
        ("orca_jax/errors.py", "from orca_jax.config import ServingConfig", "errors must not know config"),
        (
            "orca_jax/config.py",
            "from orca_jax.request.request import Request",
            "config must not know request",
        ),
        (
            "orca_jax/scheduling/scheduler.py",
            "from orca_jax.engine import engine_master",
            "must not know engine",
        ),
        ("orca_jax/scheduling/scheduler.py", "from orca_jax import LLM", "scheduling must not know __init__"),
        (
            "orca_jax/iteration/shape.py",
            "from orca_jax.control import frame",
            "iteration must not know control",
        ),
        ("orca_jax/planning/sizes.py", "import orca_jax.control.frame", "planning must not know control"),
        ("orca_jax/service/orca.py", "import orca_jax.execution.worker", "service must not know execution"),
        (
            "orca_jax/model/transformer.py",
            "import orca_jax.pallas.split_attention",
            "model must not know pallas",
        ),
        ("orca_jax/pallas/kernel.py", "import orca_jax.model.transformer", "pallas must not know model"),
        ("orca_jax/model/transformer.py", "import orca_jax.sharding.mesh", "model must not know sharding"),
        ("orca_jax/execution/stage.py", "import orca_jax.service.orca", "execution must not know service"),
        ("orca_jax/llm.py", "from server.cli import main", "llm must not know server"),
        ("orca_jax/model/transformer.py", "import bench.kernels", "model must not know bench"),
        ("orca_jax/novelty/new.py", "import math", "novelty has no place yet"),
        # no dodging
        ("orca_jax/llm.py", "def f():\n    import jax", "import of jax inside f"),
        ("orca_jax/llm.py", "class A:\n    async def f(self):\n        import jax", "inside f"),
        ("server/cli.py", "class A:\n    from math import pi", "import of math inside A"),
        (
            "orca_jax/checkpoint/load.py",
            "def f():\n    import orca_jax.checkpoint.orbax_store",
            "import of orca_jax.checkpoint.orbax_store inside f",
        ),
        ("orca_jax/checkpoint/orbax.py", "def f():\n    import jax", "import of jax inside f"),
        ("orca_jax/__init__.py", "from orca_jax.llm import LLM", "imports llm at once"),
        ("orca_jax/__init__.py", "from orca_jax.checkpoint import load", "imports checkpoint at once"),
        ("orca_jax/__init__.py", "def g():\n    from orca_jax.llm import LLM", "inside g"),
        ("orca_jax/errors.py", "if TYPE_CHECKING:\n    import orca_jax.config", "must not know config"),
        (
            "orca_jax/scheduling/scheduler.py",
            "importlib.import_module('jax')",
            "import_module() hides an import",
        ),
        ("orca_jax/scheduling/scheduler.py", "x = __import__('jax')", "__import__() hides an import"),
        ("server/http/app.py", "pkgutil.resolve_name('jax:jit')", "resolve_name() hides an import"),
        ("orca_jax/model/transformer.py", "from . import layers", "relative import"),
        ("orca_jax/model/transformer.py", "from ..config import ServingConfig", "relative import"),
        # files
        ("orca_jax/model/utils.py", "", "the name utils says nothing"),
        ("bench/common/tables.py", "", "the name common says nothing"),
    ],
)
def test_a_broken_rule_is_found(path: str, text: str, complaint: str) -> None:
    modules = (
        "config",
        "engine/engine_master",
        "request/request",
        "model/transformer",
        "checkpoint/load",
        "sharding/mesh",
    )
    around = {f"orca_jax/{name}.py": "" for name in modules}
    result = broken_rules({**around, path: text})
    assert len(result) == 1, result
    assert complaint in result[0]


def test_a_cycle_is_found() -> None:
    circle = {
        "orca_jax/model/a.py": "import orca_jax.model.b",
        "orca_jax/model/b.py": "if TYPE_CHECKING:\n    from orca_jax.model import c",
        "orca_jax/model/c.py": "from orca_jax.model.a import x",
    }
    (result,) = broken_rules(circle)
    assert result.startswith("import cycle")
    assert broken_rules({**circle, "orca_jax/model/c.py": ""}) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("orca_jax/__init__.py", "def __getattr__(name):\n    from orca_jax.llm import LLM\n    return LLM"),
        ("orca_jax/__init__.py", "if TYPE_CHECKING:\n    from orca_jax.llm import LLM"),
        (
            "orca_jax/scheduling/scheduler.py",
            "import numpy as np\nfrom orca_jax.request.request import Request",
        ),
        ("orca_jax/control/line.py", "import grpc"),
        ("orca_jax/llm.py", "import jax\nfrom orca_jax.execution.worker import Worker"),
        ("orca_jax/model/transformer.py", "import jax\nfrom orca_jax.model.layers import linear"),
        ("orca_jax/execution/stage.py", "from orca_jax.pallas.split_attention import split_attention"),
        ("server/cli.py", "if typing.TYPE_CHECKING:\n    from orca_jax import LLM"),
        ("server/cli.py", "import rich\nfrom orca_jax import LLM, SamplingParams"),
        ("server/commands/endpoints.py", "import server.http.app\nimport server.rpc.server"),
        (
            "server/http/generation/chat.py",
            "from server.http.bodies.errors import x\nfrom server.gateway.gateway import Gateway",
        ),
        ("tests/host/test_x.py", "from orca_jax.families.presets import PRESETS"),
        ("bench/iteration.py", "import jax\nimport orca_jax.model.transformer"),
        ("orca_jax/checkpoint/orbax.py", "def f():\n    import orca_jax.checkpoint.orbax_store"),
        ("orca_jax/scheduling/scheduler.py", "x = 1\n" * 400),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert broken_rules({path: text, "orca_jax/model/layers.py": ""}) == []
