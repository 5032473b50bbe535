"""The mathematics of the model, for one device; it knows no mesh.

Start with block.py, one layer; context.py has what surrounds it, transformer.py all layers.

The shape letters, used in every comment and docstring below here:

    T  tokens in the bucket (all requests' query tokens of an iteration, padded)
    R  rows = requests of the batch, padded to min(T, max_bs)
    H  hidden size           F  feed-forward size      E  embedding size (H, but for OPT-350m)
    N  attention heads       K  key/value heads       G  N / K: query heads of each       D  head size
    B  tokens in a block     V  vocabulary             C  keys of one chunk, a few blocks
    Q  query tokens of one tile
"""
