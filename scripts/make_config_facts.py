#!/usr/bin/env python3
"""Make tests/host/families/data: fields of configurations that transformers reads and saves.

    python -m scripts.make_config_facts

Run it in an environment with torch and transformers. config_fields.json has for each language model of
transformers the names that its configuration class declares and that its modeling code takes from a
configuration (`config.NAME`, `getattr(config, "NAME")`), without those that every configuration has.
saved_again.json has each configuration of published_checkpoints.py as transformers saves it after reading it.
"""

# pyright: reportMissingImports=false

import ast
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from tests.host.families.published_checkpoints import PUBLISHED

TARGET = Path(__file__).parents[1] / "tests" / "host" / "families" / "data"
CONFIGS = ("config", "text_config", "decoder_config")
LANGUAGE_MODELS = sorted(
    set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    | set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    | {"gemma3", "kimi_k25", "mistral3", "mistral4", "modernbert"}
)
METHODS = {"to_dict", "get_text_config", "__setattr__"}


def main() -> None:
    """Write the files and print their sizes."""
    TARGET.mkdir(exist_ok=True)
    families = {model_type: _fields(model_type) for model_type in LANGUAGE_MODELS}
    _write("config_fields.json", {"transformers": transformers.__version__, "families": families})
    names = set().union(*families.values())
    saved = {name: _saved(published.config) for name, published in PUBLISHED.items()}
    _write("saved_again.json", saved)
    print(f"{TARGET}: {len(names)} names in {len(families)} families, {len(saved)} configurations")


def _write(name: str, values: dict[str, Any]) -> None:
    """Write one entry a line."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    (TARGET / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _fields(model_type: str) -> list[str]:
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    folder = Path(str(transformers.__file__)).parent / "models" / model_type_to_module_name(model_type)
    names = {name for path in folder.glob("modeling_*.py") for name in _taken(ast.parse(path.read_text()))}
    names |= {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    return sorted(names - common - METHODS)


def _saved(config: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder)
        return json.loads(path.read_text())


def _taken(tree: ast.AST) -> Iterator[str]:
    """The attribute names that code reads from an object named like a configuration."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            of, name = node.args[:2]
            if node.func.id in ("getattr", "hasattr") and _is_config(of) and isinstance(name, ast.Constant):
                yield str(name.value)


def _is_config(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in CONFIGS


if __name__ == "__main__":
    main()
