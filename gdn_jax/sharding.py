"""Many devices: the operations over a mesh, and the order of fused rows that each device needs.

A mesh has up to two axes for these operations. Along the axis of heads, every device has its heads of the pools, the
ring, the gates and the weights, and its channels of the fused rows. Along the axis of requests, every device has slots
and a ragged batch of its own. Neither needs a collective.

Fused rows are `[Q | K | V]`. Cut into equal pieces, they would hand the first device queries and the last one values.
In the order of `fused_channel_order` the piece of each device is the `[Q | K | V]` of its own heads. Weights take that
order once, when they are loaded; everything that is computed from them then has it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

# Which dimension of an argument runs over requests (or their tokens, slots, offsets), and which over heads.
_DIMENSIONS = {
    "qkv_input_ragged": ("data", "heads"),
    "qkv_conv_output": ("data", "heads"),
    "conv_weight": ("heads",),
    "bias": ("heads",),
    "conv_state": ("data", "heads"),
    "decay_per_token": ("data", "heads"),
    "beta_per_token": ("data", "heads"),
    "recurrent_state": ("data", "heads"),
    "ring": ("data", "heads"),
    "slot_idx": ("data",),
    "ring_slot_idx": ("data",),
    "input_row_offsets": ("data",),
    "has_initial_state": ("data",),
    "row_ids": (None, "data"),
    "ring_row_ids": (None, "data"),
    "num_accepted": ("data",),
}


def fused_channel_order(
    num_key_heads: int, num_value_heads: int, key_head_dim: int, value_head_dim: int, *, head_shards: int
) -> np.ndarray:
    """Which channel of `[Q | K | V]` stands at each place, for rows that are cut into shards of heads.

        order = fused_channel_order(16, 32, 128, 128, head_shards=2)
        weight = weight[order]                   # once: [conv_dim, ..], of the projection and of the convolution
        tokens = tokens[:, order]                # tokens that were projected in the usual order
        tokens[:, np.argsort(order)]             # and back

    Args:
        num_key_heads, num_value_heads, key_head_dim, value_head_dim: geometry of the layer.
        head_shards: in how many pieces the heads are cut.

    Returns:
        `[conv_dim]` int: for each shard its queries, its keys, its values.

    Raises:
        ValueError: head_shards is not positive, or does not divide num_key_heads or num_value_heads.
        TypeError: head_shards is no integer.
    """
    if not isinstance(head_shards, int | np.integer):
        raise TypeError(f"fused_channel_order: head_shards is {head_shards!r}, must be an int")
    for name, heads in (("num_key_heads", num_key_heads), ("num_value_heads", num_value_heads)):
        if head_shards < 1 or heads % head_shards:
            raise ValueError(f"fused_channel_order: head_shards is {head_shards}, must divide {name} = {heads}")
    key_dim, value_dim = num_key_heads * key_head_dim, num_value_heads * value_head_dim
    blocks = np.split(np.arange(2 * key_dim + value_dim), [key_dim, 2 * key_dim])
    return np.concatenate([block.reshape(head_shards, -1) for block in blocks], axis=1).reshape(-1)


def over_devices(operation: Callable, *, heads: str | None = None, data: str | None = None) -> Callable:
    """An operation of this package with its arguments split over the mesh in force; no collective is in it.

        with jax.set_mesh(mesh):
            step = over_devices(gdn_jax.gated_delta_recurrence_fwd, heads="model", data="data")
            out, pool = jax.jit(step, donate_argnames="recurrent_state")(qkv, decay, beta, recurrent_state=pool, ...)

    It is `jax.shard_map` with the right specifications, so it works on automatic and on explicit axes, and inside
    another `jax.shard_map` that has made other axes manual.

    Args:
        operation: `gated_delta_conv1d_fwd`, `gated_delta_recurrence_fwd`, `gated_delta_recurrence_verify_ring` or
            `gated_delta_state_fold`.
        heads: mesh axis over which the heads are split, or None. Channels of fused rows are then in the order of
            `fused_channel_order`, with the size of that axis as `head_shards`.
        data: mesh axis over which requests are split, or None. Along it, pools, ring and batch arrays are those of
            the devices end to end: `slot_idx`, `ring_slot_idx`, `row_ids` and `ring_row_ids` count from the device's
            first row, `input_row_offsets` holds the `batch_size + 1` offsets of each device, counted from its first
            token.

    Returns:
        A function with the operation's signature. Results are split as the pools are.

    Raises:
        ValueError: when called, if the mesh in force lacks an axis, or a size does not divide; the message names the
            argument. JAX's own: on explicit axes, for an array that is not split that way yet.
        TypeError: the operation is none of the four.
    """
    signature = inspect.signature(operation)
    name = getattr(operation, "__name__", repr(operation))
    arrays = [parameter for parameter in signature.parameters if parameter in _DIMENSIONS]
    if not {"conv_state", "recurrent_state"} & set(arrays):
        raise TypeError(f"over_devices: operation is {name}, must be one that takes a pool")
    axes = {"heads": heads, "data": data}

    def split(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        mesh = jax.sharding.get_abstract_mesh()
        for role, axis in axes.items():
            if axis is not None and axis not in mesh.axis_names:
                raise ValueError(f"{name}: {role} is {axis!r}, must be an axis of the mesh in force, {mesh.axis_names}")
        present = {key: jnp.asarray(given.pop(key)) for key in arrays if given.get(key) is not None}
        _check_sizes(name, present, {role: (axis, mesh.shape[axis]) for role, axis in axes.items() if axis is not None})
        specs = {key: PartitionSpec(*(axes.get(role) for role in _DIMENSIONS[key])) for key in present}

        def shard(present):
            return operation(**present, **given)

        # Devices along any other axis hold the same, which check_vma would want to be told.
        by_pool = PartitionSpec(data, heads)
        return jax.shard_map(shard, in_specs=(specs,), out_specs=by_pool, check_vma=False)(present)

    split.__signature__ = signature  # so that jax.jit knows the arguments by their names
    split.__name__ = name
    return split


def _check_sizes(operation: str, arrays: dict[str, jax.Array], axes: dict[str, tuple[str, int]]) -> None:
    """A `ValueError` by name where an argument lacks what is split, or a mesh axis does not divide it."""
    shapes: dict[str, tuple[int, ...]] = {key: np.shape(value) for key, value in arrays.items()}
    counts: list[tuple[str, str, int, str]] = []  # argument, what is split, how many there are, the role of the axis
    for key, shape in shapes.items():
        if len(shape) < len(_DIMENSIONS[key]):
            at_least = f"at least {len(_DIMENSIONS[key])} dimensions"
            raise ValueError(f"{operation}: {key} has shape {shape}, must have {at_least} to be split over a mesh")
        for dimension, role in enumerate(_DIMENSIONS[key]):
            if role in axes:
                counts.append((key, _counted(key, dimension), shape[dimension], role))
    state = shapes.get("recurrent_state", ())
    qkv: Any = shapes.get("qkv_conv_output", ())
    if "heads" in axes and len(state) == 4 and state[2] > 0 and len(qkv) == 2:
        # Value heads may divide where their key heads do not. It comes first: fused rows have channels, not heads.
        key_heads = (qkv[1] - state[1] * state[3]) // (2 * state[2])
        counts.insert(0, ("qkv_conv_output", "num_key_heads", key_heads, "heads"))
    for key, what, count, role in counts:
        axis, size = axes[role]
        if count % size:
            raise ValueError(
                f"{operation}: {key} of shape {shapes[key]} has {what} = {count}, must be a multiple of {size}, the "
                f"size of mesh axis {axis!r}"
            )


def _counted(argument: str, dimension: int) -> str:
    heads = {"ring": "num_key_heads", "recurrent_state": "num_value_heads"}
    heads |= dict.fromkeys(("decay_per_token", "beta_per_token"), "num_value_heads")
    by_role = {"heads": heads.get(argument, "conv_dim"), "data": f"dimension {dimension}"}
    return by_role[_DIMENSIONS[argument][dimension] or "data"]
