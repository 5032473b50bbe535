"""`python -m bench.kernel`: the split-attention kernel on a GPU, relative to its floor and its peers."""
