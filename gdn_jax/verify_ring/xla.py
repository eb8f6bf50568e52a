"""The verify for every backend: the recurrence's loop over tokens, all rows at once, with records."""

import jax.numpy as jnp

from gdn_jax._ragged import is_live, read_rows, row_bounds, write_rows
from gdn_jax.recurrence.xla import over_tokens
from gdn_jax.verify_ring.scan import make_record


def unsupported(*_) -> str | None:
    return None


def verify_ring(qkv, *args):
    return _verify_ring(qkv, *args, steps=None)


def differentiable_verify_ring(qkv, *args):
    """The same function with static loop bounds, for `jax.jvp` and `jax.vjp`."""
    return list(_verify_ring(qkv, *args, steps=qkv.shape[0]))


def _verify_ring(
    qkv, decay, beta, recurrent_state, ring, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state, *, steps
):
    ring_rows, _, ring_len, _ = ring.shape
    starts, lengths = row_bounds(input_row_offsets, qkv.shape[0])
    live = is_live(slot_idx, recurrent_state.shape[0]) & (lengths > 0)
    is_window = lengths <= ring_len
    records = is_window & is_live(ring_slot_idx, ring_rows)

    def write_record(ring, position, active, key, factor, decay):
        record = make_record(key, factor, decay).astype(ring.dtype)
        ring_row = jnp.where(active & records, ring_slot_idx, ring_rows)
        return ring.at[ring_row, :, position, : record.shape[-1]].set(record, mode="drop")

    S = read_rows(recurrent_state, slot_idx, live & has_initial_state)
    S, out, ring = over_tokens(qkv, decay, beta, S, starts, jnp.where(live, lengths, 0), ring, write_record, steps)
    return out, ring, write_rows(recurrent_state, slot_idx, S, live & ~is_window)
