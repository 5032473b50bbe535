"""Imports Tunix, if it is there, before the tests do: that warns, and warnings are errors in a test."""

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in (
        "tunix.rl.grpo.grpo_learner",
        *(f"tunix.models.{m}.model" for m in ("llama3", "qwen2", "qwen3")),
    ):
        try:
            importlib.import_module(_name)
        except ImportError:
            break
