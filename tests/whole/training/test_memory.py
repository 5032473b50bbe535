"""A process's memory does not grow with the number of updates and sleeps."""

import json
import subprocess
import sys
from pathlib import Path

from tests.places import ROOT

# 17 million parameters: 67 MB in float32.
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 8192,
    "n_embd": 512,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 128,
}
PROGRAM = '''
import sys
import numpy as np
from orca_jax import LLM, SamplingParams

def resident():
    """Without pages of files, such as libraries: the system takes and gives those as it likes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

with LLM(sys.argv[1], load_format="dummy", dtype="float32", max_batch_size=2, n_slots=256) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    stage = llm.service.scheduler.engine._workers.workers[0].stage
    weights = {name: np.array(array) for name, array in stage.parameters.items()}
    sizes = []
    for _ in range(8):
        llm.update_weights(weights)
        sizes.append(resident())
    for _ in range(3):
        llm.sleep(2)
        llm.wake_up()
        sizes.append(resident())
    print(*sizes, sum(array.nbytes for array in weights.values()))
'''


def test_updates_and_sleeps_do_not_grow_the_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *sizes, n_bytes = map(int, done.stdout.split())
    # Three copies or more, if each update or each sleep kept one; what the allocator keeps is about one.
    assert max(sizes[1:]) < sizes[0] + 2 * n_bytes, [size - sizes[0] for size in sizes]
