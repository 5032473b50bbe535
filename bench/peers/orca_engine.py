"""This engine without `LLM`: for an environment that lacks the libraries of tokenizers, grammars or gRPC.

The caller's thread runs the scheduler's loop. A comparison's checkpoint has no tokenizer, so `LLM` would make
no text either; this leaves out only the service's thread and its Outputs.
"""

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.device.bare_engine import BareEngine
from bench.peers.child import Asked, Play, Playing, serve
from bench.peers.deliveries import delivered, versions
from orca_jax.config import Sizes
from orca_jax.families.hf_config import read_config
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import EncoderInputs


def start(flags: dict[str, Any], closing: ExitStack) -> tuple[Play, dict[str, Any]]:
    """`flags`: checkpoint, dtype, max_batch_size; `arguments` may have more fields of Sizes."""
    arguments = {
        "max_batch_size": flags["max_batch_size"],
        **flags.get("arguments", {}),
    }
    directory = Path(flags["checkpoint"])
    engine = BareEngine(
        read_config(directory),
        Sizes(**arguments),
        directory=directory,
        dtype=flags["dtype"],
        compile_ahead=True,
    )

    inputs = EncoderInputs(engine.serving, engine.model)

    def play(playing: Playing) -> None:
        scheduler, pool = engine.scheduler(on_deliveries=partial(delivered, playing))
        while not playing.is_done:
            for i in playing.arrived():
                pool.add(request_of(str(i), playing.requests[i], inputs, playing.salt))
            if not scheduler.step():
                time.sleep(playing.until_next() or 0.0)

    return play, {
        "versions": versions(),
        "flags": {
            **arguments,
            "dtype": flags["dtype"],
            "n_slots": engine.serving.n_slots,
            "attention": engine.attention,
            "through": "the engine alone",
        },
        "device": engine.device,
    }


def request_of(request_id: str, asked: Asked, inputs: EncoderInputs, salt: str) -> Request:
    """A greedy request; an encoder, if there is one, reads its prompt."""
    sampling = SamplingParams(max_tokens=asked.n_output, temperature=0.0, ignore_eos=True)
    encoder_ids, prompt = inputs.split(asked.prompt, None, sampling)
    return Request(
        request_id,
        tuple(prompt),
        len(prompt) + asked.n_output,
        sampling,
        seed=0,
        encoder_ids=encoder_ids,
        cache_salt=(salt,),
    )


if __name__ == "__main__":
    serve(start)
