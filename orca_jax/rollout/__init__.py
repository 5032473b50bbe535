"""Rollouts for trainers by reinforcement: groups of samples from an engine that has the trainer's weights.

Read first: sample.py, which says what a sample is, then rollout.py, the interface of six methods.

A file with a trainer's name, such as tunix.py, adapts it to that trainer's library and imports it; no other
file does, so the package works without it.
"""

from orca_jax.rollout.agreement import Agreement, agreement
from orca_jax.rollout.layer_gaps import LayerGap, LayerReport, layer_gaps
from orca_jax.rollout.rollout import Rollout
from orca_jax.rollout.sample import Group, Sample

__all__ = [
    "Agreement",
    "Group",
    "LayerGap",
    "LayerReport",
    "Rollout",
    "Sample",
    "agreement",
    "layer_gaps",
]
