"""The paper's Figures 9 to 11 on this engine: `python -m bench.paper.engine`, `bench.paper.end_to_end`."""
