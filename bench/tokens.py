"""Compares the whole engine's greedy tokens and log-probabilities with model/reference.py.

    python -m bench.tokens [--models demo,gpt2,opt-125m,opt-350m] [--dtype bfloat16] [--buckets 1,8,32,512]

Requests run alone and together, so that prefill and decode iterations fall into each bucket. The demo model
has its trained weights, the others random ones, and all a length of 512 tokens. The reference computes the
whole text at once, in float32, from the same weights. Each of the engine's choices must be the reference's
best one, or so close to it that a different order of summation may change the choice: within a share of the
logits' spread that depends on the dtype. The log-probability of each choice must match within the same share.
Prints a line per bucket of each model and, as the last line, JSON; the exit status is 1 if any is wrong.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from bench.device.bare_engine import BareEngine
from orca_jax.config import Dtype, Sizes
from orca_jax.families.hf_config import read_config
from orca_jax.families.model_config import ModelConfig
from orca_jax.families.presets import PRESETS
from orca_jax.families.trainers.orca_json import GPTOptions
from orca_jax.model import reference
from orca_jax.request.request import Request
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.scheduler import Scheduler

DEMO_MODEL = Path(__file__).parents[1] / "orca_jax" / "demo_model"
LENGTH = 512
_OPT_125M = GPTOptions(
    vocab_size=50272,
    n_positions=2048,
    hidden_size=768,
    n_layers=12,
    n_heads=12,
    ffn_size=3072,
    activation="relu",
    position_offset=2,
).model()
MODELS = {
    "demo": read_config(DEMO_MODEL),
    "gpt2": PRESETS["gpt2"],
    "opt-125m": _OPT_125M,
    # Norms after the layers, projections around them, and no final norm.
    "opt-350m": GPTOptions(
        vocab_size=50272,
        n_positions=2048,
        hidden_size=1024,
        n_layers=24,
        n_heads=16,
        ffn_size=4096,
        embedding_size=512,
        activation="relu",
        norm="post",
        final_norm=False,
        position_offset=2,
    ).model(),
}
# Tolerances, as shares of the logits' standard deviation. A GPU's float32 products have operands of 11 bits
# by default.
SHARES: dict[Dtype, float] = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 8e-2}
CPU_SHARE = 1e-4  # for float32 on a CPU


@dataclass
class Agreement:
    """The comparison of one kind of request: choices, `sure` ones, and the largest errors.

    A choice is sure if no rounding could change it. Errors are shares of the logits' standard deviation.

    `short` is how far a choice's logit is below the reference's best, `off` the error of its log-probability.
    """

    choices: int = 0
    sure: int = 0
    short: float = 0.0
    off: float = 0.0

    def holds(self, share: float) -> bool:
        """Whether all choices were right."""
        return self.choices > 0 and self.short <= share and self.off <= share


def requests_of(bucket: int, n_output: int, vocab_size: int) -> list[list[Request]]:
    """Requests whose iterations fall into a bucket: a prefill of that size alone, and as many rows.

    The sets run one after the other.
    """
    rng = np.random.default_rng(bucket)
    sampling = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True, logprobs=1)

    def request(name: str, n_input: int) -> Request:
        prompt = rng.integers(0, vocab_size, n_input).tolist()
        return Request(name, tuple(prompt), n_input + n_output, sampling, seed=0)

    most = LENGTH - n_output
    sets = [[request("initiation", min(bucket, most))]]
    if bucket <= 32:
        lengths = rng.integers(2, 60, bucket)
        lengths[-1] = most  # with a long one among them, over several pieces or tiles
        sets.append([request(str(i), int(n)) for i, n in enumerate(lengths)])
    return sets


class Reference:
    """The reference with one model's weights."""

    def __init__(self, model: ModelConfig, parameters: Mapping[str, jax.Array]) -> None:
        self._parameters = parameters
        with jax.default_matmul_precision("highest"):
            ids = jax.ShapeDtypeStruct((LENGTH,), jnp.int32)
            lowered = jax.jit(reference.forward, static_argnums=0).lower(model, parameters, ids)
            self._forward = lowered.compile()

    def look(self, request: Request, share: float, into: Agreement) -> None:
        """Compare a request's choices, into `into`. The model is causal, so one pass gives all of them."""
        n, ids = len(request.output_ids), np.zeros(LENGTH, np.int32)
        whole = [*request.prompt_ids, *request.output_ids]
        ids[: len(whole)] = whole
        first = len(request.prompt_ids) - 1
        logits = np.asarray(self._forward(self._parameters, jnp.asarray(ids)))[first : first + n]  # [n, V]
        logits = logits.astype(np.float64)
        spread, best = logits.std(axis=1), logits.max(axis=1)
        second = np.partition(logits, -2, axis=1)[:, -2]
        log_sum = best + np.log(np.exp(logits - best[:, None]).sum(axis=1))
        chosen = logits[np.arange(n), request.output_ids]
        logprobs = np.array([token.logprob for token in request.logprobs])
        assert len(logprobs) == n
        into.choices += n
        into.sure += int((best - second > share * spread).sum())
        into.short = max(into.short, float(((best - chosen) / spread).max()))
        into.off = max(into.off, float((np.abs(logprobs - (chosen - log_sum)) / spread).max()))


def buckets_used(scheduler: Scheduler) -> set[int]:
    """The buckets that its iterations were padded to."""
    return {iteration.bucket for iteration in scheduler.timeline.iterations}


def check_model(
    name: str, dtype: Dtype, buckets: Sequence[int], n_output: int, share: float, attention: Any = None
) -> dict[str, Any]:
    """Every bucket of one model; a line for each."""
    model = replace(MODELS[name], n_positions=LENGTH)
    sizes = Sizes(max_batch_size=32, n_slots=33 * LENGTH, max_batch_tokens=LENGTH)
    directory = DEMO_MODEL if name == "demo" else None
    engine = BareEngine(
        model, sizes, directory=directory, dtype=dtype, buckets=tuple(buckets), attention=attention
    )
    (parameters,) = engine.parameters
    truth = Reference(model, parameters)
    result: dict[str, Any] = {"model": name, "attention": engine.attention, "buckets": {}}
    for bucket in buckets:
        agreement, used = Agreement(), set[int]()
        for requests in requests_of(bucket, n_output, model.vocab_size):
            used |= buckets_used(engine.run(requests))
            for request in requests:
                truth.look(request, share, agreement)
        right = agreement.holds(share) and bucket in used
        print(
            f"{name} {dtype}, bucket {bucket}: {agreement.choices} choices, {agreement.sure} of them sure; "
            f"the worst {agreement.short:.1e} below the best, log-probabilities off by {agreement.off:.1e}, "
            f"of {share:g}"
            f"{'' if right else ': WRONG'}; iterations in {sorted(used)}; {engine.attention}",
            flush=True,
        )
        result["buckets"][bucket] = asdict(agreement) | {"right": right}
    return result


def main() -> None:
    """Check every model and print one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.tokens", description=__doc__)
    parser.add_argument(
        "--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)} (default: all)"
    )
    parser.add_argument("--dtype", choices=get_args(Dtype), help="default: float32 on a CPU, bfloat16 else")
    parser.add_argument("--buckets", default="1,8,32,512", help="the last one 512 (default: 1,8,32,512)")
    parser.add_argument("--output", type=int, default=6, help="tokens of each request (default: 6)")
    parser.add_argument("--attention", help="which attention to run (default: the device's)")
    flags = parser.parse_args()
    models, buckets = flags.models.split(","), sorted(int(n) for n in flags.buckets.split(","))
    if unknown := sorted(set(models) - set(MODELS)):
        parser.error(f"--models got {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if buckets[0] < 1 or buckets[-1] != LENGTH:
        parser.error(f"--buckets are sizes from 1 up, the last one {LENGTH}")
    on_cpu = jax.default_backend() == "cpu"
    dtype = cast(Dtype, flags.dtype or ("float32" if on_cpu else "bfloat16"))
    share = CPU_SHARE if on_cpu and dtype == "float32" else SHARES[dtype]
    results = [check_model(name, dtype, buckets, flags.output, share, flags.attention) for name in models]
    wrong = sum(not one["right"] for result in results for one in result["buckets"].values())
    report = {"bench": "tokens", "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(json.dumps(report | {"dtype": dtype, "share": share, "wrong": wrong, "models": results}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
