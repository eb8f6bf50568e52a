"""Gated DeltaNet for Flax NNX: the layer, its configuration, its caches, Hugging Face weights."""

from gdn_jax.flax.cache import GatedDeltaCache, HeldCache, layer_slots
from gdn_jax.flax.config import GatedDeltaNetConfig
from gdn_jax.flax.layer import HEAD_AXIS, GatedDeltaNet

__all__ = [
    "HEAD_AXIS",
    "GatedDeltaCache",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "HeldCache",
    "layer_slots",
]
