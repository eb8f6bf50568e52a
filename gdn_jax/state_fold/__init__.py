"""Committing what a speculative step accepted: the first records of a ring, applied to the pool of every layer at once.

Per record `S <- fma(raw_key, delta_factor, S * decay)`: the state update of the recurrence, with everything that needs
the state already inside the delta factor. `verify_ring` writes the records and says how one is laid out.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gdn_jax._checks import FLOATS, Arguments
from gdn_jax._primitive import Implementation, Operation, hopper_kernel, triton_kernel
from gdn_jax._ragged import fold_slots
from gdn_jax.state_fold.xla import differentiable_state_fold
from gdn_jax.verify_ring import RING_DIMS, RING_DTYPES, check_record_stride


def _batch(bind, lanes, args, is_batched):
    state, ring, row_ids, ring_row_ids, num_accepted, has_state = (
        x if m else jnp.broadcast_to(x, (lanes, *x.shape)) for x, m in zip(args, is_batched, strict=True)
    )

    def layers_first(slots, rows):  # [lanes, L, B] -> [L, lanes * B]
        return fold_slots(slots, rows).swapaxes(0, 1).reshape(slots.shape[1], -1)

    (new,) = bind(
        *(x.reshape(-1, *x.shape[2:]) for x in (state, ring)),
        layers_first(row_ids, state.shape[1]),
        layers_first(ring_row_ids, ring.shape[1]),
        num_accepted.reshape(-1),
        has_state.reshape(-1),
    )
    return [new.reshape(state.shape)]


state_fold = Operation(
    "state_fold",
    public_name="gated_delta_state_fold",
    out_avals=lambda state, *_: [state.update(weak_type=False)],
    implementations=[
        hopper_kernel("gdn_jax.state_fold.mosaic_gpu"),
        triton_kernel("gdn_jax.state_fold.triton"),
        Implementation("xla", "gdn_jax.state_fold.xla"),
        Implementation("scan", "gdn_jax.state_fold.scan"),
    ],
    batch=_batch,
    differentiable=differentiable_state_fold,
    head_axes=(
        {
            "recurrent_state": 1,
            "ring": 1,
            "row_ids": None,
            "ring_row_ids": None,
            "num_accepted": None,
            "has_initial_state": None,
        },
        (1,),
    ),
)


def gated_delta_state_fold(
    recurrent_state: ArrayLike,
    ring: ArrayLike,
    row_ids: ArrayLike,
    ring_row_ids: ArrayLike,
    num_accepted: ArrayLike,
    *,
    has_initial_state: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Apply the accepted records of every layer and request to their states, in one call.

    With a float32 ring that `gated_delta_recurrence_verify_ring` wrote, the result equals, bit for bit, the recurrent
    forward over the accepted prefix, for float32 and for rounded pools (a state is rounded once, at the end). Inside
    `jax.jit` with `recurrent_state` donated, the pool is updated in its own buffer.

    Args:
        recurrent_state: `[max_slots, num_value_heads, key_head_dim, value_head_dim]`, float32, bfloat16 or float16.
        ring: `[ring_rows, num_key_heads, RING_LEN, record_stride]`, float32, or bfloat16, whose rounding the fold
            inherits. Only the first `num_accepted` records of a row are used; what the others hold has no influence.
        row_ids: `[L, batch_size]` int32 or uint32: pool row of each layer and request. An entry outside the pool, or
            one of `ring_row_ids` outside the ring, leaves that layer and request unfolded.
        ring_row_ids: `[L, batch_size]` int32 or uint32: ring row of each layer and request.
        num_accepted: `[batch_size]` int32 or uint32: records to apply. 0, negative, or more than RING_LEN: the row
            keeps its bits.
        has_initial_state: `[batch_size]` bool: False where the request was fresh in the verify. Its rows start from
            zeros, not from what the slot holds.
        implementation: a name from the table in the README, or None for the best that serves the call.

    Returns:
        The pool after the fold.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it, before anything runs.
        NotImplementedError: the named implementation cannot serve this call; the message says why.
    """
    args = Arguments("gated_delta_state_fold")
    args.implementation(implementation)
    state_dims = ("max_slots", "num_value_heads", "key_head_dim", "value_head_dim")
    state = args.array("recurrent_state", recurrent_state, state_dims, FLOATS)
    ring = args.array("ring", ring, RING_DIMS, RING_DTYPES)
    check_record_stride(args, ring)
    row_ids = args.indices("row_ids", row_ids, ("num_layers", "batch_size"))
    ring_row_ids = args.indices("ring_row_ids", ring_row_ids, ("num_layers", "batch_size"))
    num_accepted = args.indices("num_accepted", num_accepted, ("batch_size",))
    has_state = args.flags("has_initial_state", has_initial_state, args.sizes["batch_size"])
    operands = (state, ring, row_ids, ring_row_ids, num_accepted, has_state)
    state_fold.check_implementation(*operands, implementation=implementation)
    if 0 in (*state.shape, *ring.shape, *row_ids.shape):
        return state
    (state,) = state_fold(*operands, implementation=implementation)
    return state
