"""`python -m bench.kernel`: the split-attention kernel on a GPU, beside its floor and its peers."""
