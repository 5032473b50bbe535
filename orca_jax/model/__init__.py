"""The mathematics of the model, as one device computes it.

An iteration's batch is flat: the tokens of all requests side by side, [T, H], whatever their phase and
length. Norms, projections and feed-forward layers treat tokens alike and never ask which request a token is
from; attention alone does, through the block tables that are bound to `Attend` (selective batching,
ORCA 3.2). So one function computes prefill, decode and any mixture of the two.

A layer takes a hidden state and a Context, which has what surrounds it: its cache, the slots to write, the
wanted tokens, the split over devices. The model knows no mesh: a Shard says which part of the heads and
columns it computes and how parts are summed. Kernels are handed in (`Attend`, `Matmul`), so that this folder
knows none. A weight may be in a form other than a dense array; `Matmul` is the one place that computes with
it.

Start with block.py, one layer; then context.py, and transformer.py for all layers. reference.py is the same
model for one request in plain terms, which tests compare against.

The shape letters of all comments and docstrings below:

    T  tokens in the bucket (all requests' query tokens of an iteration, padded)
    R  rows = requests of the batch, padded to min(T, max_bs)
    H  hidden size           F  feed-forward size      E  embedding size (H, but for OPT-350m)
    N  attention heads       K  key/value heads       G  N / K: query heads of each       D  head size
    B  tokens in a block     V  vocabulary             C  keys of one chunk, a few blocks
    Q  query tokens of one tile
"""
