"""Properties of the programs that XLA and Mosaic compile; no GPU is needed."""
