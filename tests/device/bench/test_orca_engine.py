"""The engine without `LLM`, as bench.compare runs it, generates transformers' tokens."""

from bench.device.bare_engine import BareEngine
from bench.peers.child import Asked
from bench.peers.orca_engine import request_of
from orca_jax.config import Sizes
from orca_jax.families.hf_config import read_config
from orca_jax.scheduling.admission import EncoderInputs
from tests.device.model.golden_encoders import load_golden_encoder

MOST = 16  # tokens of an output


def test_an_encoder_reads_the_prompts() -> None:
    golden = load_golden_encoder("t5-gated")
    model = read_config(golden.directory)
    sizes = Sizes(max_batch_size=1, max_batch_tokens=64, n_slots=4096)
    engine = BareEngine(model, sizes, directory=golden.directory, dtype="float32")
    first = [i for i in range(len(golden.inputs)) if len(golden.sure(i)) >= MOST][:2]
    sure = {i: list(golden.sure(i)[:MOST]) for i in first}
    inputs = EncoderInputs(engine.serving, model)
    requests = {i: request_of(str(i), Asked(golden.inputs[i], MOST, 0.0), inputs, "salt") for i in sure}
    engine.run(list(requests.values()))
    assert sure and {i: request.output_ids for i, request in requests.items()} == sure
