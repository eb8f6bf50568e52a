"""Pass 2 over a speculative window: the outputs of the forward, and a ring of records in place of new states.

A record holds what one token does to the states of one key head's group, with nothing left in it that depends on a
state:

    raw key [key_head_dim] | per value head: delta factor [value_head_dim] | per value head: decay

The delta factor is `beta * (v - kv) * rsqrt(sum(k*k) + 1e-6)`: what the raw key is multiplied by. `state_fold` applies
the records of the accepted tokens; the others are forgotten, so nothing has to be rolled back.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gdn_jax._checks import Arguments
from gdn_jax._primitive import Implementation, Operation, hopper_kernel, triton_kernel
from gdn_jax._ragged import fold_rows, fold_slots
from gdn_jax.recurrence import empty_output, own_heads, token_operands
from gdn_jax.verify_ring.xla import differentiable_verify_ring

RING_DIMS = ("ring_rows", "num_key_heads", "RING_LEN", "record_stride")
RING_DTYPES = ("float32", "bfloat16")


def gated_delta_ring_record_elements(key_head_dim: int, value_head_dim: int, group_size: int) -> int:
    """Elements of one ring record: `key_head_dim + group_size * (value_head_dim + 1)`.

    Args:
        key_head_dim, value_head_dim: elements of a key and of a value head.
        group_size: value heads of one key head, `num_value_heads // num_key_heads`.

    Raises:
        TypeError: an argument is not an int. ValueError: it is not positive.
    """
    sizes = {"key_head_dim": key_head_dim, "value_head_dim": value_head_dim, "group_size": group_size}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"gated_delta_ring_record_elements: {name} is {size!r}, must be a Python int")
        if size <= 0:
            raise ValueError(f"gated_delta_ring_record_elements: {name} is {size}, must be positive")
    return key_head_dim + group_size * (value_head_dim + 1)


def check_record_stride(args: Arguments, ring: jax.Array) -> None:
    """The heads of a ring must be those of the pool, and a record must fit into its stride."""
    sizes = args.sizes
    nv, nk = sizes["num_value_heads"], sizes["num_key_heads"]
    if nk == 0 or nv % nk:
        raise args.wrong_shape(
            "ring", ring.shape, f"[{', '.join(RING_DIMS)}] with num_key_heads a divisor of num_value_heads = {nv}"
        )
    if 0 in (nv, sizes["key_head_dim"], sizes["value_head_dim"]):
        return
    needed = gated_delta_ring_record_elements(sizes["key_head_dim"], sizes["value_head_dim"], nv // nk)
    if sizes["record_stride"] < needed:
        raise args.wrong_shape("ring", ring.shape, f"[{', '.join(RING_DIMS)}] with record_stride at least {needed}")


def _out_avals(qkv, decay, beta, recurrent_state, ring, *_):
    _, nv, _, vd = recurrent_state.shape
    out = qkv.update(shape=(qkv.shape[0], nv * vd), weak_type=False)
    return [out, ring.update(weak_type=False), recurrent_state.update(weak_type=False)]


def _batch(bind, lanes, args, is_batched):
    qkv, decay, beta, state, ring, slot_idx, ring_slot_idx, offsets, has_state = (
        x if m else jnp.broadcast_to(x, (lanes, *x.shape)) for x, m in zip(args, is_batched, strict=True)
    )
    total_seq_len = qkv.shape[1]
    offsets, slot_idx, ring_slot_idx, has_state = fold_rows(
        offsets,
        total_seq_len,
        (fold_slots(slot_idx, state.shape[1]), -1),
        (fold_slots(ring_slot_idx, ring.shape[1]), -1),
        (has_state, True),
    )
    out, new_ring, new = bind(
        *(x.reshape(-1, *x.shape[2:]) for x in (qkv, decay, beta, state, ring)),
        slot_idx,
        ring_slot_idx,
        offsets,
        has_state,
    )
    return [out.reshape(lanes, total_seq_len, -1), new_ring.reshape(ring.shape), new.reshape(state.shape)]


verify_ring = Operation(
    "verify_ring",
    public_name="gated_delta_recurrence_verify_ring",
    out_avals=_out_avals,
    implementations=[
        hopper_kernel("gdn_jax.verify_ring.mosaic_gpu"),
        triton_kernel("gdn_jax.verify_ring.triton"),
        Implementation("xla", "gdn_jax.verify_ring.xla"),
        Implementation("scan", "gdn_jax.verify_ring.scan"),
    ],
    batch=_batch,
    differentiable=differentiable_verify_ring,
    head_axes=(
        {
            "qkv_conv_output": None,
            "decay_per_token": 1,
            "beta_per_token": 1,
            "recurrent_state": 1,
            "ring": 1,
            "slot_idx": None,
            "ring_slot_idx": None,
            "input_row_offsets": None,
            "has_initial_state": None,
        },
        (1, 1, 1),
    ),
    own_heads=own_heads,
)


def gated_delta_recurrence_verify_ring(
    qkv_conv_output: ArrayLike,
    decay_per_token: ArrayLike,
    beta_per_token: ArrayLike,
    recurrent_state: ArrayLike,
    ring: ArrayLike,
    slot_idx: ArrayLike,
    ring_slot_idx: ArrayLike,
    input_row_offsets: ArrayLike,
    *,
    has_initial_state: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the outputs of draft tokens and record their state updates, leaving the states as they are.

    The outputs equal, bit for bit, those of `gated_delta_recurrence_fwd` with `algorithm="recurrent"`. Position p of
    row b writes one record per key head at `ring[ring_slot_idx[b], key_head, p, :]`. Inside `jax.jit`, donate `ring`
    and `recurrent_state`: both are updated in their own buffers.

    Args:
        qkv_conv_output, decay_per_token, beta_per_token, recurrent_state: as in `gated_delta_recurrence_fwd`.
        slot_idx, input_row_offsets, has_initial_state, implementation: as in `gated_delta_recurrence_fwd`.
        ring: `[ring_rows, num_key_heads, RING_LEN, record_stride]`, with `record_stride` at least
            `gated_delta_ring_record_elements(..)`. float32, or bfloat16, with which the fold is not bit-exact. Elements
            past a record, and ring rows that the batch does not name, keep their bits.
        ring_slot_idx: `[batch_size]` int32 or uint32: ring row of each batch row. One outside the ring drops that row's
            records and nothing else.

    A row longer than RING_LEN records nothing and commits its own state, as the forward would.

    Returns:
        `(recurrence_output [total_seq_len, num_value_heads * value_head_dim], ring, recurrent_state)`.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it, before anything runs.
        NotImplementedError: the named implementation cannot serve this call; the message says why.
    """
    args = Arguments("gated_delta_recurrence_verify_ring")
    args.implementation(implementation)
    qkv, decay, beta, state, slot_idx, offsets = token_operands(
        args, qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets
    )
    ring = args.array("ring", ring, RING_DIMS, RING_DTYPES)
    check_record_stride(args, ring)
    ring_slot_idx = args.indices("ring_slot_idx", ring_slot_idx, ("batch_size",))
    has_state = args.flags("has_initial_state", has_initial_state, args.sizes["batch_size"])
    operands = (qkv, decay, beta, state, ring, slot_idx, ring_slot_idx, offsets, has_state)
    verify_ring.check_implementation(*operands, implementation=implementation)
    if 0 in (*qkv.shape, *state.shape, args.sizes["batch_size"]):
        return empty_output(args, qkv), ring, state
    out, ring, state = verify_ring(*operands, implementation=implementation)
    return out, ring, state
