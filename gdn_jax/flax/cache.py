"""The state of Gated DeltaNet layers between calls: one pool row per request."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from gdn_jax._checks import Arguments
from gdn_jax._ragged import is_live


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatedDeltaCache:
    """The two pools of a layer, as a pytree. `GatedDeltaNet.init_cache` makes one.

    A layer called with a cache returns a new one. Under `jax.jit` with the cache donated, both are
    one and the same memory.

    Attributes:
        conv_state: `[max_slots, conv_dim, conv_kernel_size - 1]`: the last inputs of the
            convolution, oldest first.
        recurrent_state: `[max_slots, num_value_heads, key_head_dim, value_head_dim]`.
    """

    conv_state: Any
    recurrent_state: Any


class HeldCache(nnx.Module):
    """A `GatedDeltaCache` held as `nnx.Cache` variables, for decode loops that mutate modules.

    `y = layer(x, held, slot_idx=..., ...)` returns the output alone and leaves the new state in
    `held`. Under `nnx.jit` with `held` donated, the pools are updated in their own memory.
    """

    def __init__(self, cache: GatedDeltaCache):
        self.conv_state = nnx.Cache(cache.conv_state)
        self.recurrent_state = nnx.Cache(cache.recurrent_state)

    def read(self) -> GatedDeltaCache:
        """The pools as they are now."""
        return GatedDeltaCache(self.conv_state[...], self.recurrent_state[...])

    def write(self, cache: GatedDeltaCache) -> None:
        """Hold these pools from now on."""
        self.conv_state.set_value(cache.conv_state)
        self.recurrent_state.set_value(cache.recurrent_state)


def layer_slots(slot_idx: ArrayLike, layer: ArrayLike, num_layers: int, rows: int) -> jax.Array:
    """The rows of one layer in pools that several layers share.

    A shared pool of `max_slots * num_layers` rows holds the states of a slot side by side, layer l
    of slot s in row `s * num_layers + l`, so a pool grows at its end and a slot is one block. As
    the carry of a scan over layers such a pool is updated in place, and one
    `gated_delta_state_fold` commits all layers.

    Args:
        slot_idx: `[batch_size]` int32 or uint32 slots of requests; foreign ones stay foreign.
        layer: which of the layers, 0 to num_layers - 1; may be traced.
        num_layers: how many layers share the pools.
        rows: rows of the pools, `max_slots * num_layers`.

    Returns:
        `[batch_size]` int32: what to pass to the layer as `slot_idx`; -1 where the slot is foreign.

    Raises:
        ValueError: rows is not a multiple of num_layers, or a layer that is a Python int is not one of them.
    """
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(f"layer is {layer}, must be from 0 to {num_layers - 1}")
    if rows % num_layers:
        raise ValueError(f"rows is {rows}, must be a multiple of num_layers = {num_layers}")
    slot_idx = Arguments("layer_slots").indices("slot_idx", slot_idx, ("batch_size",))
    return jnp.where(is_live(slot_idx, rows // num_layers), slot_idx * num_layers + layer, -1)
