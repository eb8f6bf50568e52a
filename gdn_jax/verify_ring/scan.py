"""The verify, token by token: the loops of the recurrence's reference, with a record for every token."""

import jax.numpy as jnp
from jax import lax

from gdn_jax._ragged import is_live, read_rows, row_bounds, write_rows
from gdn_jax.recurrence.scan import split_heads, token_step


def unsupported(*_) -> str | None:
    return None


def make_record(key, factor, decay):
    """The records `[.., nk, KD + group_size * (VD + 1)]` of one token; key `[.., nk, KD]`, factor `[.., nv, VD]`, decay
    `[.., nv]`."""
    lead = key.shape[:-1]
    return jnp.concatenate([key, factor.reshape(*lead, -1), decay.reshape(*lead, -1)], axis=-1)


def verify_ring(qkv, decay, beta, recurrent_state, ring, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state):
    _, nv, kd, vd = recurrent_state.shape
    ring_rows, nk, ring_len, _ = ring.shape
    elements = kd + nv // nk * (vd + 1)
    starts, lengths = row_bounds(input_row_offsets, qkv.shape[0])

    def row(carry, b):
        pool, ring, out = carry
        slot, live = slot_idx[b], is_live(slot_idx[b], pool.shape[0]) & (lengths[b] > 0)
        is_window = lengths[b] <= ring_len
        ring_row = jnp.where(is_window & is_live(ring_slot_idx[b], ring_rows), ring_slot_idx[b], ring_rows)

        def token(t, carry):
            S, ring, out = carry
            q, k, v = split_heads(qkv[t], nv, kd, vd)
            S, o, factor = token_step(S, q, k, v, decay[t], beta[t])
            record = make_record(k, factor, decay[t]).astype(ring.dtype)
            if ring.size:
                ring = ring.at[ring_row, :, t - starts[b], :elements].set(record, mode="drop")
            return S, ring, out.at[t].set(o.reshape(-1).astype(out.dtype))

        S = read_rows(pool, slot, live & has_initial_state[b])
        S, ring, out = lax.fori_loop(starts[b], starts[b] + jnp.where(live, lengths[b], 0), token, (S, ring, out))
        return (write_rows(pool, slot, S, live & ~is_window), ring, out), None

    out = jnp.zeros((qkv.shape[0], nv * vd), qkv.dtype)
    (pool, ring, out), _ = lax.scan(row, (recurrent_state, ring, out), jnp.arange(slot_idx.shape[0]))
    return out, ring, pool
