"""The engine master: turns each batch into one iteration of the workers, and waits for its tokens. No JAX.

The scheduler needs only `issue`, which starts an iteration without waiting, and `wait`. The master sends a
control message to worker 1 alone; each worker forwards it to the next one before its own device has finished,
so control runs ahead of the data that flows from device to device, and the master waits for nothing but the
last stage's tokens (ORCA 4.1, Figure 7).

Workers run in this process, or in processes that may be lost. Then an epoch ends: all K/V caches are gone,
and nothing of the old epoch is believed any more, whatever arrives late. The supervisor restarts processes,
the master starts a new epoch on all stages, and the scheduler computes the requests' tokens again.

Start with engine_master.py; remote_workers.py has the epochs, and remote_pipeline.py builds such an engine.
"""
