"""The speculative verify in Pallas Mosaic GPU: the rows of the forward, records instead of states."""

import jax
import jax.numpy as jnp

from gdn_jax.recurrence.mosaic_gpu import run_rows, unsupported_operands

_MAX_RING_LEN = 64


def unsupported(
    qkv, decay, beta, recurrent_state, ring, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del decay, beta, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state
    if 0 in ring.shape:
        return f"mosaic_gpu does not serve an empty ring; its shape is {ring.shape}."
    if ring.dtype not in (jnp.float32, jnp.bfloat16):
        return f"mosaic_gpu does not serve a ring of {ring.dtype}."
    if ring.shape[2] > _MAX_RING_LEN:
        return f"mosaic_gpu serves a RING_LEN of at most {_MAX_RING_LEN}; it is {ring.shape[2]}."
    return unsupported_operands(qkv, recurrent_state)


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
    *,
    interpret=None,
):
    """See `gdn_jax.gated_delta_recurrence_verify_ring`."""
    pool, records = jax.new_ref(recurrent_state), jax.new_ref(ring)
    out = run_rows(
        (qkv, decay, beta),
        (slot_idx, input_row_offsets, has_initial_state),
        pool,
        records,
        ring_slot_idx,
        interpret=interpret,
    )
    return out, jax.freeze(records), jax.freeze(pool)
