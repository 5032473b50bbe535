"""The paper's end-to-end evaluation on a simulated engine, and questions beyond it; without JAX."""
