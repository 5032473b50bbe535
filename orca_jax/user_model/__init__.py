"""A model that a user wrote, as an nnx module or as functions of pytrees (docs/training.md).

find.py takes it and puts its weights on devices; decoder.py runs its layers in the place of the Transformer;
functions.py makes such a module of three functions. It knows no request and no engine.
"""
