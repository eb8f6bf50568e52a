"""The speculative verify in Triton: the rows of the forward, records instead of states."""

import jax

from gdn_jax._compat import triton_call
from gdn_jax._triton import row_launch, run_row, tl, triton, unsupported_head_dims


@triton.jit
def verify_kernel(
    qkv, decay, beta, slot_idx, ring_slot_idx, offsets, has_initial_state, T, B, MAX_SLOTS, RING_ROWS, pool, ring, out,
    pool_again: tl.constexpr, ring_again: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    KD: tl.constexpr, VD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPREAD: tl.constexpr, SCALE: tl.constexpr, AHEAD: tl.constexpr, RING_LEN: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    run_row(
        qkv, decay, beta, slot_idx, offsets, has_initial_state, pool, out, ring, ring_slot_idx, T, B, MAX_SLOTS,
        RING_ROWS, NK, NV, KD, VD, ROWS, COLUMNS, SPREAD, SCALE, AHEAD, RING_LEN, STRIDE,
    )  # fmt: skip


def unsupported(
    qkv, decay, beta, recurrent_state, ring, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del qkv, decay, beta, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state
    if 0 in ring.shape:
        return f"triton does not serve an empty ring; its shape is {ring.shape}"
    return unsupported_head_dims(*recurrent_state.shape[2:])


def verify_ring(
    qkv,
    decay,
    beta,
    recurrent_state,
    ring,
    slot_idx,
    ring_slot_idx,
    input_row_offsets,
    has_initial_state,
):
    """See `gdn_jax.gated_delta_recurrence_verify_ring`."""
    max_slots, nv, _, vd = recurrent_state.shape
    batch = slot_idx.shape[0]
    operands = (qkv, decay, beta, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state)
    (out,), (pool, ring) = triton_call(
        verify_kernel,
        [*operands, qkv.shape[0], batch, max_slots, ring.shape[0]],
        [recurrent_state, ring],
        [jax.ShapeDtypeStruct((qkv.shape[0], nv * vd), qkv.dtype)],
        RING_LEN=ring.shape[2],
        STRIDE=ring.shape[3],
        **row_launch(qkv, recurrent_state, batch),
    )
    return out, ring, pool
