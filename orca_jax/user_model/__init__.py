"""A model that a user wrote, as an nnx module or as functions of pytrees (docs/training.md).

find.py finds the model and puts its weights on devices; decoder.py runs its layers in place of a Transformer;
functions.py makes such a module of three functions. The room knows no request and no engine.
"""
