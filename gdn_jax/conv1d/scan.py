"""The convolution, token by token: `lax.scan` over the rows, a loop over each row's tokens that carries the window."""

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax._ragged import is_live, read_rows, row_bounds, write_rows


def unsupported(*_, **__) -> str | None:
    return None


def activate(x, activation):
    return jax.nn.silu(x) if activation == "silu" else x


def conv1d(qkv, weight, bias, conv_state, slot_idx, input_row_offsets, has_initial_state, *, activation, write_state):
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    starts, lengths = row_bounds(input_row_offsets, qkv.shape[0])

    def row(carry, b):
        pool, out = carry
        slot, live = slot_idx[b], is_live(slot_idx[b], pool.shape[0]) & (lengths[b] > 0)

        def token(t, carry):
            window, out = carry
            inputs = jnp.concatenate([window, qkv[t].astype(jnp.float32)[:, None]], axis=1)
            y = activate(bias + jnp.sum(weight * inputs, axis=1), activation)
            return inputs[:, 1:], out.at[t].set(y.astype(out.dtype))

        window = read_rows(pool, slot, live & has_initial_state[b])
        tokens = jnp.where(live, lengths[b], 0)
        window, out = lax.fori_loop(starts[b], starts[b] + tokens, token, (window, out))
        return (write_rows(pool, slot, window, live & write_state), out), None

    (pool, out), _ = lax.scan(row, (conv_state, jnp.zeros_like(qkv)), jnp.arange(slot_idx.shape[0]))
    return out, pool
