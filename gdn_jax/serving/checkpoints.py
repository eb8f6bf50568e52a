"""Copies of slots: to keep a prefix for other requests, to preempt one and resume it, to fork one.

A checkpoint is arrays of its own. Later steps update the pools in place and never touch it.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gdn_jax._checks import Arguments
from gdn_jax._ragged import is_live


def save_slots[Tree](cache: Tree, slot_idx: ArrayLike, *, num_layers: int = 1) -> Tree:
    """Copy slots out of the pools.

    Args:
        cache: a `GatedDeltaCache`, or any pytree of arrays `[max_slots * num_layers, ..]`.
        slot_idx: `[N]` int32 or uint32. What is saved for a slot outside the pools is zeros.
        num_layers: how many layers share the pools; see `gdn_jax.flax.layer_slots`.

    Returns:
        A checkpoint: the same pytree with arrays `[N, num_layers, ..]` in the pools' dtypes, bit for bit.

    Raises:
        ValueError, TypeError: a pool's rows are no multiple of num_layers, or slot_idx is not as above.
    """

    def save(pool):
        by_slot, slots = _by_slot("save_slots", pool, slot_idx, num_layers)
        return by_slot.at[slots].get(mode="fill", fill_value=0)

    return jax.tree.map(save, cache)


def restore_slots[Tree](cache: Tree, checkpoint: Tree, slot_idx: ArrayLike, *, num_layers: int = 1) -> Tree:
    """Copy a checkpoint into slots of the pools, those it came from or others.

    Inside `jax.jit` with the cache donated, the pools are updated in place. The request must be called with
    `has_initial_state` from then on (`SlotPool.mark_started`).

    Args:
        cache: a `GatedDeltaCache`, or any pytree of arrays `[max_slots * num_layers, ..]`.
        checkpoint: from `save_slots`, for N slots.
        slot_idx: `[N]` int32 or uint32. For a slot outside the pools nothing is written.
        num_layers: how many layers share the pools.

    Returns:
        The cache with those slots overwritten; all others keep their bits.

    Raises:
        ValueError, TypeError: the checkpoint is not of such a cache, or slot_idx is not as above.
    """

    def restore(pool, saved):
        by_slot, slots = _by_slot("restore_slots", pool, slot_idx, num_layers)
        if saved.shape != (*slots.shape, *by_slot.shape[1:]) or saved.dtype != pool.dtype:
            raise ValueError(
                f"restore_slots: checkpoint has an array {saved.dtype}{list(saved.shape)}, must be "
                f"{pool.dtype}{[*slots.shape, *by_slot.shape[1:]]}"
            )
        return by_slot.at[slots].set(saved, mode="drop").reshape(pool.shape)

    return jax.tree.map(restore, cache, checkpoint)


def fork_slots[Tree](cache: Tree, source_idx: ArrayLike, target_idx: ArrayLike, *, num_layers: int = 1) -> Tree:
    """Copy slots onto others of the same pools, for requests that go on from a common beginning.

    Inside `jax.jit` with the cache donated, the pools are updated in place.

    Args:
        cache: a `GatedDeltaCache`, or any pytree of arrays `[max_slots * num_layers, ..]`.
        source_idx: `[N]` int32 or uint32: what to copy; one slot may be named many times.
        target_idx: `[N]` int32 or uint32: where to; nothing is written where either is outside the pools.
        num_layers: how many layers share the pools.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it.
    """
    args = Arguments("fork_slots")
    source = args.indices("source_idx", source_idx, ("num_copies",))
    target = args.indices("target_idx", target_idx, ("num_copies",))
    max_slots = jax.tree.leaves(cache)[0].shape[0] // num_layers
    target = jnp.where(is_live(source, max_slots), target, -1)
    return restore_slots(cache, save_slots(cache, source, num_layers=num_layers), target, num_layers=num_layers)


def _by_slot(operation, pool, slot_idx, num_layers):
    """The pool as `[max_slots, num_layers, ..]`, and the slots with every foreign one out of bounds."""
    slot_idx = Arguments(operation).indices("slot_idx", slot_idx, ("num_slots",))
    if pool.shape[0] % num_layers:
        raise ValueError(
            f"{operation}: cache has {pool.shape[0]} rows, must be a multiple of num_layers = {num_layers}"
        )
    by_slot = pool.reshape(-1, num_layers, *pool.shape[1:])
    return by_slot, jnp.where(is_live(slot_idx, by_slot.shape[0]), slot_idx, by_slot.shape[0])
