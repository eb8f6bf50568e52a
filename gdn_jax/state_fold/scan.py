"""The fold, record by record: `lax.scan` over layers and requests, a loop over each one's accepted records."""

import jax.numpy as jnp
from jax import lax

from gdn_jax._ragged import is_live, read_rows, write_rows
from gdn_jax.recurrence.scan import update


def unsupported(*_) -> str | None:
    return None


def split_record(record, num_value_heads, key_head_dim, value_head_dim):
    """Keys `[.., nv, KD]`, factors `[.., nv, VD]`, decays `[.., nv]` of the records `[.., nk, record_stride]`."""
    lead, nk = record.shape[:-2], record.shape[-2]
    group_size = num_value_heads // nk
    record = record.astype(jnp.float32)
    key, factor, decay = jnp.split(
        record[..., : key_head_dim + group_size * (value_head_dim + 1)],
        (key_head_dim, key_head_dim + group_size * value_head_dim),
        axis=-1,
    )
    return (
        jnp.repeat(key, group_size, axis=-2),
        factor.reshape(*lead, num_value_heads, value_head_dim),
        decay.reshape(*lead, num_value_heads),
    )


def foldable(recurrent_state, ring, row_ids, ring_row_ids, num_accepted):
    """Which entries `[.., B]` of the row ids are folded at all."""
    return (
        is_live(row_ids, recurrent_state.shape[0])
        & is_live(ring_row_ids, ring.shape[0])
        & (num_accepted > 0)
        & (num_accepted <= ring.shape[2])
    )


def state_fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state):
    heads = recurrent_state.shape[1:]
    num_layers = row_ids.shape[0]

    def request(pool, x):
        slot, ring_row, accepted, has_state = x
        live = foldable(pool, ring, slot, ring_row, accepted)

        def record(i, S):
            return update(S, *split_record(ring[ring_row, :, i], *heads))

        S = read_rows(pool, slot, live & has_state)
        S = lax.fori_loop(0, jnp.where(live, accepted, 0), record, S)
        return write_rows(pool, slot, S, live), None

    per_request = (
        row_ids.reshape(-1),
        ring_row_ids.reshape(-1),
        jnp.tile(num_accepted, num_layers),
        jnp.tile(has_initial_state, num_layers),
    )
    return lax.scan(request, recurrent_state, per_request)[0]
