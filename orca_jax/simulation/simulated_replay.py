"""Repeats a recording on a simulated engine: its schedule alone, without model, weights or device."""

from orca_jax.errors import BadRecording
from orca_jax.planning.sizes import n_rows
from orca_jax.request.request import Request
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.service.recording import Recording
from orca_jax.service.replay import Replay, ReplayReport, recorded_serving
from orca_jax.simulation.engine import SimulatedEngine, VirtualClock


def simulated_replay(recording: Recording) -> ReplayReport:
    """Repeat the batches of a recording, with its tokens. Raises BadRecording."""
    try:
        serving = recorded_serving(recording)
        n_workers = recording.header["n_workers"]
        n_positions = recording.header["n_positions"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecording(f"the recording's first line lacks the engine's sizes: {error!r}") from error
    kv = KVManager(
        n_blocks=serving.n_blocks,
        block_size=serving.block_size,
        n_rows=n_rows(serving.max_batch_size, n_workers=n_workers),
        max_blocks_per_row=-(-n_positions // serving.block_size),
        prefix_caching=serving.scheduling.prefix_caching,
    )

    def token(request: Request, index: int) -> int:
        """The recorded one: the prefix cache finds outputs by their tokens."""
        end = recording.ends.get(request.arrival)
        return end.output_ids[index] if end is not None and index < len(end.output_ids) else 0

    engine = SimulatedEngine(VirtualClock(), n_workers=n_workers, token=token)
    return Replay(recording, engine, kv, config=serving, compares_outputs=False).run()
