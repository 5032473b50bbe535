"""ORCA (Yu et al., OSDI 2022) in JAX: iteration-level scheduling and selective batching.

The path of a request:

1. `LLM` or an endpoint turns a prompt into token ids (request/tokenizer.py) and submits it to the service
   (service/orca.py).
2. The request waits in the request pool (scheduling/request_pool.py), which numbers arrivals.
3. The scheduler (scheduling/scheduler.py, Algorithm 1) selects a new batch for every iteration. It admits a
   request when slots for all its tokens can be reserved; the K/V manager (scheduling/kv_manager.py) allocates
   its blocks and a row.
4. The engine master (engine/engine_master.py) makes a control message (iteration/message.py) and a flat
   batch (iteration/flat_batch.py).
5. The worker (execution/worker.py) starts the programs of its stage (execution/stage.py, model/) and returns
   at once. Attention processes each request separately, every other operation all tokens together.
6. The engine master waits for the tokens; the scheduler ends finished requests and releases their slots.
7. The pool delivers an iteration's tokens; each becomes text (request/tokenizer.py) in its request's
   `Generation` (service/generation.py), which the user holds.
8. Back to 3 for the next iteration. scheduling/timeline.py records the time of each event.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orca_jax.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from orca_jax.checkpoint.convert import convert_checkpoint
    from orca_jax.checkpoint.suggested_names import suggest_names
    from orca_jax.launch.precompile import compile_engine, compile_model
    from orca_jax.launch.replay_recording import replay
    from orca_jax.launch.worker_process import run_worker
    from orca_jax.llm import LLM
    from orca_jax.model_files.found_model import find_config
    from orca_jax.rollout.layer_gaps import layer_gaps
    from orca_jax.user_model.functions import FunctionModel

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "FunctionModel",
    "SamplingParams",
    "__version__",
    "compile_engine",
    "compile_model",
    "convert_checkpoint",
    "find_config",
    "layer_gaps",
    "replay",
    "run_worker",
    "suggest_names",
]


# Where these names are. They import JAX, which is slow, so importing the package must not import them.
_LAZY = {
    "LLM": "orca_jax.llm",
    "FunctionModel": "orca_jax.user_model.functions",
    "compile_engine": "orca_jax.launch.precompile",
    "compile_model": "orca_jax.launch.precompile",
    "convert_checkpoint": "orca_jax.checkpoint.convert",
    "find_config": "orca_jax.model_files.found_model",
    "layer_gaps": "orca_jax.rollout.layer_gaps",
    "replay": "orca_jax.launch.replay_recording",
    "run_worker": "orca_jax.launch.worker_process",
    "suggest_names": "orca_jax.checkpoint.suggested_names",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
