"""The fold for every backend: all layers and requests advance by one record at a time."""

import jax.numpy as jnp
from jax import lax

from gdn_jax._ragged import read_rows, write_rows
from gdn_jax.recurrence.scan import update
from gdn_jax.state_fold.scan import foldable, split_record


def unsupported(*_) -> str | None:
    return None


def state_fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state):
    return _fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state, differentiable=False)


def differentiable_state_fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state):
    """The same function with static loop bounds, for `jax.jvp` and `jax.vjp`."""
    state = _fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state, differentiable=True)
    return [state]


def _fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state, *, differentiable):
    heads = recurrent_state.shape[1:]
    num_layers = row_ids.shape[0]
    slots, ring_rows = row_ids.reshape(-1), ring_row_ids.reshape(-1)
    accepted = jnp.tile(num_accepted, num_layers)
    live = foldable(recurrent_state, ring, slots, ring_rows, accepted)
    ring_rows = jnp.where(live, ring_rows, 0)

    def record(i, S):
        active = live & (i < accepted)
        # Selected before it is used: in a derivative, zero times NaN would be NaN.
        key, factor, decay = split_record(jnp.where(active[:, None, None], ring[ring_rows, :, i], 0), *heads)
        return jnp.where(active[:, None, None, None], update(S, key, factor, decay), S)

    S = read_rows(recurrent_state, slots, live & jnp.tile(has_initial_state, num_layers))
    records = ring.shape[2] if differentiable else jnp.max(jnp.where(live, accepted, 0))
    S = lax.fori_loop(0, records, record, S)
    return write_rows(recurrent_state, slots, S, live)
