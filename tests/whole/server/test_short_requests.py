"""Short requests among long ones over HTTP, on the real engine with the demo model."""

import pytest

from orca_jax import LLM
from tests.endpoint.harness import serving_model
from tests.endpoint.short_requests import Traffic, check


@pytest.mark.long
def test_a_short_request_overtakes_long_ones_on_the_real_engine() -> None:
    with LLM(max_batch_size=8) as llm:
        longest = llm.config.n_positions - 8
        llm.generate([[5, 6]] * 5)  # compiles what the batches below need
        with serving_model(llm.service, llm.config, llm.serving, tokenizer=llm.tokenizer) as server:
            check(
                server.url, "test", llm.service.timeline, Traffic(n_long=4, long=longest, n_short=5, short=3)
            )
