"""Iteration times that DistServe's authors measured, as formulas (OPT-13B on one A100 of 80 GB).

Source: github.com/LLMServe/DistServe at 82831f16 (Apache 2.0), simdistserve/estimators: `profile_data` for
the coefficients and time_estimator.py for their meaning; one for vLLM of early 2024 and one for DistServe's
own engine. Left out: the milliseconds that the authors' simulator adds for Ray. An iteration with prompts and
decodes, which the authors do not give, takes the prompts' time and what the decodes add to a smallest batch.
"""

from dataclasses import dataclass

from orca_jax.planning.cost_model import IterationShape

_MS = 1e-3


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds: `prefill` has a constant, and factors of the prompts' tokens and of the sum of their
    squares; `small` and `large` a constant, and factors of the keys in the context and of the requests, for
    batches of decodes below `threshold` and above. All are multiplied by `slowness`.
    """

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    threshold: int = 95
    slowness: float = 1.0

    def __call__(self, shape: IterationShape) -> float:
        """The seconds of an iteration."""
        prompts = [q for q in shape.input_lengths if q > 1]
        decodes = [k for q, k in zip(shape.input_lengths, shape.kv_lengths, strict=True) if q == 1]
        milliseconds = 0.0
        if prompts:
            constant, per_token, per_pair = self.prefill
            milliseconds += constant + per_token * sum(prompts) + per_pair * sum(q * q for q in prompts)
        if decodes:
            constant, per_key, per_row = self.small if len(decodes) < self.threshold else self.large
            milliseconds += (0 if prompts else constant) + per_key * sum(decodes) + per_row * len(decodes)
        return self.slowness * milliseconds * _MS


VLLM = Profile(
    prefill=(22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
    small=(23.475041008414784, 0.000592934466077393, 0.060726861260369455),
    large=(20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
)
DISTSERVE = Profile(
    prefill=(18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
    small=(19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
    large=(7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
)
