"""Two replicas of the demo model behind one address, as OpenAI's client sees them."""

import pytest

from tests.ray.conftest import Serve, Served


@pytest.fixture(scope="module")
def served(run_app: Serve) -> Served:
    return run_app(num_replicas=2)


def test_it_answers(served: Served) -> None:
    with served.client() as client:
        chunks = client.completions.create(
            model="demo", prompt="In the beginning", max_tokens=20, temperature=0, stream=True
        )
        assert len("".join(chunk.choices[0].text for chunk in chunks)) > 20
