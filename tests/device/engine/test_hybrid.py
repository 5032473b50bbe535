"""Models of attention and recurrent layers: whatever the schedule, the tokens are the reference's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.families.attention_config import Attention
from orca_jax.families.model_config import Embedding, FeedForward, Layer, ModelConfig
from orca_jax.families.norm_config import Norm
from orca_jax.families.recurrence_config import ShortConvolution
from orca_jax.families.rotary import Rotary
from tests.device.model.any_model import any_model, check

NORM = Norm(kind="rms_norm", eps=1e-5)
ATTENTION = Attention(
    n_heads=4, n_kv_heads=2, head_size=8, qkv_bias=False, out_bias=False, rotary=Rotary(size=8)
)
FEED_FORWARD = FeedForward(size=24, activation="silu", gated=True, bias=False)


def attending() -> Layer:
    return Layer(attention=ATTENTION, feed_forward=FEED_FORWARD, norm=NORM)


def convolving(width: int = 3, *, bias: bool = False) -> Layer:
    own = ShortConvolution(channels=20, width=width, bias=bias)
    return Layer(attention=None, recurrence=own, feed_forward=FEED_FORWARD, norm=NORM)


def hybrid(*layers: Layer) -> ModelConfig:
    return ModelConfig(
        vocab_size=53,
        n_positions=40,
        hidden_size=20,
        layers=layers,
        embedding=Embedding(size=20),
        positions=None,
        final_norm=NORM,
    )


# The last layer is a recurrence, and the last one attends.
RECURRENT_LAST = hybrid(convolving(), attending(), convolving(4, bias=True))
ATTENDING_LAST = hybrid(convolving(), attending())


@settings(any_model, max_examples=2)
@given(model=st.sampled_from([RECURRENT_LAST, ATTENDING_LAST]), seed=st.integers(0, 99))
def test_the_tokens_are_the_references(model: ModelConfig, seed: int) -> None:
    check(model, seed)
