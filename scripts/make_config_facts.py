#!/usr/bin/env python3
"""Make tests/host/families/data/config_fields.json: which fields transformers' code of each model_type reads.

    python scripts/make_config_facts.py

Run it in an environment with torch and transformers. The file has for each language model of transformers the
names that its configuration class declares and that its modeling code takes from a configuration
(`config.NAME`, `getattr(config, "NAME")`), without those that the class of all configurations has.
"""

# pyright: reportMissingImports=false

import ast
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

TARGET = Path(__file__).parents[1] / "tests" / "host" / "families" / "data" / "config_fields.json"
CONFIGS = ("config", "text_config", "decoder_config")
LANGUAGE_MODELS = sorted(
    set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    | set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    | {"gemma3"}
)
METHODS = {"to_dict", "get_text_config", "__setattr__"}


def main() -> None:
    """Write the file and print how many names it has."""
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    families: dict[str, list[str]] = {}
    for model_type in LANGUAGE_MODELS:
        folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
        names = {
            name for path in folder.glob("modeling_*.py") for name in _taken(ast.parse(path.read_text()))
        }
        names |= {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
        families[model_type] = sorted(names - common - METHODS)
    TARGET.parent.mkdir(exist_ok=True)
    facts = {"transformers": transformers.__version__, "families": families}
    TARGET.write_text(json.dumps(facts, separators=(",", ":")).replace('],"', '],\n"') + "\n")
    print(f"{TARGET}: {len(set().union(*families.values()))} names in {len(families)} families")


def _taken(tree: ast.AST) -> Iterator[str]:
    """The names that code takes from an object whose name says that it is a configuration."""
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
