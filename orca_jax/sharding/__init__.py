"""The model laid over devices: programs, workers, checkpoints."""
