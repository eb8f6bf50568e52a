"""The equations, token by token: `lax.scan` over the rows, a loop over each row's tokens."""

import jax.numpy as jnp
from jax import lax

from gdn_jax._ragged import is_live, read_rows, row_bounds, write_rows
from gdn_jax._rounding import inverse_sqrt, rounded, sum_by_halves

EPS = 1e-6


def unsupported(*_, algorithm, precision) -> str | None:
    del precision  # everything here is float32 already
    if algorithm == "chunked":
        return 'goes token by token; algorithm="chunked" needs another implementation'
    return None


def split_heads(qkv, num_value_heads, key_head_dim, value_head_dim):
    """Fused rows `[.., conv_dim]` as float32 q, k `[.., num_key_heads, KD]` and v `[.., num_value_heads, VD]`."""
    value_dim = num_value_heads * value_head_dim
    key_dim = (qkv.shape[-1] - value_dim) // 2
    q, k, v = jnp.split(qkv.astype(jnp.float32), (key_dim, 2 * key_dim), axis=-1)
    lead = qkv.shape[:-1]
    return (
        q.reshape(*lead, -1, key_head_dim),
        k.reshape(*lead, -1, key_head_dim),
        v.reshape(*lead, num_value_heads, value_head_dim),
    )


def update(S, key, factor, decay):
    """`fma(key, factor^T, S * decay)`, S `[.., KD, VD]`: the step that the forward and the fold share."""
    return key[..., :, None] * factor[..., None, :] + rounded(S * decay[..., None, None], S)


def token_step(S, q, k, v, decay, beta):
    """One token of every head. S `[.., nv, KD, VD]`; q, k `[.., nk, KD]`; v `[.., nv, VD]`; decay, beta `[.., nv]`.

    Returns the new state, the output `[.., nv, VD]`, and the delta factor `[.., nv, VD]`: what the raw key is
    multiplied by. The norms are scalars factored out of the sums over KD.
    """
    group_size = v.shape[-2] // k.shape[-2]
    k_norm = jnp.repeat(_inverse_norm(k), group_size, axis=-1)[..., None]
    q_norm = jnp.repeat(_inverse_norm(q), group_size, axis=-1)[..., None] * q.shape[-1] ** -0.5
    k, q = jnp.repeat(k, group_size, axis=-2), jnp.repeat(q, group_size, axis=-2)

    kv = decay[..., None] * k_norm * _times_state(S, k)
    # The barrier has the factor computed once, and not anew for every row of the state that it enters.
    factor = lax.optimization_barrier(beta[..., None] * (v - rounded(kv, v)) * k_norm)
    S = update(S, k, factor, decay)
    return S, q_norm * _times_state(S, q), factor


def _inverse_norm(x):
    return inverse_sqrt(sum_by_halves(rounded(x * x, x), -1) + EPS)


def _times_state(S, x):
    """`S^T x`."""
    return sum_by_halves(rounded(S * x[..., None], S), -2)


def recurrence(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, *, algorithm, precision
):
    del algorithm, precision
    _, nv, kd, vd = recurrent_state.shape
    starts, lengths = row_bounds(input_row_offsets, qkv.shape[0])

    def row(carry, b):
        pool, out = carry
        slot, live = slot_idx[b], is_live(slot_idx[b], pool.shape[0]) & (lengths[b] > 0)

        def token(t, carry):
            S, out = carry
            S, o, _ = token_step(S, *split_heads(qkv[t], nv, kd, vd), decay[t], beta[t])
            return S, out.at[t].set(o.reshape(-1).astype(out.dtype))

        S = read_rows(pool, slot, live & has_initial_state[b])
        S, out = lax.fori_loop(starts[b], starts[b] + jnp.where(live, lengths[b], 0), token, (S, out))
        return (write_rows(pool, slot, S, live), out), None

    out = jnp.zeros((qkv.shape[0], nv * vd), qkv.dtype)
    (pool, out), _ = lax.scan(row, (recurrent_state, out), jnp.arange(slot_idx.shape[0]))
    return out, pool
