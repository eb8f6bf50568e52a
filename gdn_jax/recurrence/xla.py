"""The rule in array operations that every backend compiles.

`recurrent` advances all rows of the batch by one token at a time. `chunked` walks over the chunks of all rows one after
the other, every head at once. Both read and write only the slots that the batch names.
"""

import jax
import jax.numpy as jnp
from jax import lax

from gdn_jax._ragged import is_live, read_rows, row_bounds, token_rows, write_rows
from gdn_jax.recurrence.scan import EPS, split_heads, token_step

CHUNK = 32
# Average tokens of a row from which "auto" goes in chunks. Measured on a CPU, 16/32 heads of 128 x 128, one and four
# rows: at 8 tokens chunks are 11 to 18 percent slower, at 16 a third faster.
CHUNKED_FROM = 16
_HIGHEST = lax.Precision.HIGHEST


def unsupported(*_, **__) -> str | None:
    return None


def recurrence(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, *, algorithm, precision
):
    del precision  # everything here is float32 at the highest precision already
    args = qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state
    if _is_chunked(algorithm, qkv.shape[0], slot_idx.shape[0]):
        return _over_chunks(*args, chunk_step, differentiable=False)
    return _recurrent(*args)


def differentiable_recurrence(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, *, algorithm, precision
):
    """The same function with static loop bounds, for `jax.jvp` and `jax.vjp`."""
    del precision
    step = chunk_step if _is_chunked(algorithm, qkv.shape[0], slot_idx.shape[0]) else _chunk_of_tokens
    # Offsets that are constants make XLA for CUDA (jaxlib 0.11.2) fail when it compiles the derivative: it cannot
    # evaluate the loop that it has moved them into.
    input_row_offsets = lax.optimization_barrier(input_row_offsets)
    return _over_chunks(
        qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, step, differentiable=True
    )


def _is_chunked(algorithm, total_seq_len, batch_size):
    return algorithm == "chunked" or (algorithm == "auto" and total_seq_len >= CHUNKED_FROM * batch_size)


def _recurrent(qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state):
    starts, lengths = row_bounds(input_row_offsets, qkv.shape[0])
    live = is_live(slot_idx, recurrent_state.shape[0]) & (lengths > 0)
    S = read_rows(recurrent_state, slot_idx, live & has_initial_state)
    S, out, _ = over_tokens(qkv, decay, beta, S, starts, jnp.where(live, lengths, 0), (), lambda extra, *_: extra)
    return out, write_rows(recurrent_state, slot_idx, S, live)


def over_tokens(qkv, decay, beta, S, starts, lengths, extra, visit, steps=None):
    """Advance every row through its tokens. `S [B, nv, KD, VD]`; starts, lengths `[B]`; `steps` a static bound on the
    lengths, for reverse-mode differentiation.

    `visit(extra, position, active, key, factor, decay)` sees each step of every row and returns the new `extra`.
    Returns the states, the outputs `[T, nv * VD]`, and the last `extra`.
    """
    total_seq_len = qkv.shape[0]
    batch_size, nv, kd, vd = S.shape
    owner = token_rows(starts, lengths, total_seq_len)

    def step(position, carry):
        S, out, extra = carry
        active = position < lengths
        token = jnp.where(active, starts + position, total_seq_len)
        read = lambda x: x.at[token].get(mode="fill", fill_value=0)  # noqa: E731
        q, k, v = split_heads(read(qkv), nv, kd, vd)
        token_decay = read(decay)
        S_new, o, factor = token_step(S, q, k, v, token_decay, read(beta))
        S = jnp.where(active[:, None, None, None], S_new, S)
        # Where malformed offsets give a token to two rows, the last of them has the output.
        is_owner = active & (owner.at[token].get(mode="clip") == jnp.arange(batch_size))
        target = jnp.where(is_owner, token, total_seq_len)
        out = out.at[target].set(o.reshape(-1, nv * vd).astype(out.dtype), mode="drop")
        return S, out, visit(extra, position, active, k, factor, token_decay)

    out = jnp.zeros((total_seq_len, nv * vd), qkv.dtype)
    return lax.fori_loop(0, jnp.max(lengths) if steps is None else steps, step, (S, out, extra))


def _over_chunks(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, chunk_function, *, differentiable
):
    total_seq_len, batch_size = qkv.shape[0], slot_idx.shape[0]
    max_slots, nv, kd, vd = recurrent_state.shape
    starts, lengths = row_bounds(input_row_offsets, total_seq_len)
    chunks = jnp.where(is_live(slot_idx, max_slots), (lengths + CHUNK - 1) // CHUNK, 0)
    ends = jnp.cumsum(chunks)

    def step(item, carry):
        S, pool, out = carry
        row = jnp.minimum(jnp.searchsorted(ends, item, side="right"), batch_size - 1)
        index = item - (ends[row] - chunks[row])
        S = lax.cond(
            index == 0, lambda: read_rows(pool, slot_idx[row], has_initial_state[row] & (chunks[row] > 0)), lambda: S
        )
        position = index * CHUNK + jnp.arange(CHUNK)
        valid = (position < lengths[row]) & (item < ends[-1])
        token = jnp.where(valid, starts[row] + position, total_seq_len)
        read = lambda x, fill: x.at[token].get(mode="fill", fill_value=fill)  # noqa: E731
        # A token past the row's end keeps the state (decay 1) and writes nothing (beta 0).
        S, o = chunk_function(S, *split_heads(read(qkv, 0), nv, kd, vd), read(decay, 1), read(beta, 0))
        out = out.at[token].set(o.reshape(CHUNK, nv * vd).astype(out.dtype), mode="drop")
        is_last = (index == chunks[row] - 1) & (item < ends[-1])
        return S, write_rows(pool, slot_idx[row], S, is_last), out

    S = jnp.zeros((nv, kd, vd), jnp.float32)
    out = jnp.zeros((total_seq_len, nv * vd), qkv.dtype)
    # Reverse-mode differentiation needs the number of chunks before it is known: this is the most there can be.
    items = total_seq_len // CHUNK + batch_size if differentiable else ends[-1]
    _, pool, out = lax.fori_loop(0, items, step, (S, recurrent_state, out))
    return out, pool


@jax.checkpoint
def _chunk_of_tokens(S, q, k, v, decay, beta):
    """A chunk token by token: the same arguments and results as `chunk_step`."""

    def token(S, x):
        S, out, _ = token_step(S, *x)
        return S, out

    return lax.scan(token, S, (q, k, v, decay, beta))


def chunk_step(S, q, k, v, decay, beta):
    """One chunk of C tokens of every head in the WY form. S `[nv, KD, VD]`; q, k `[C, nk, KD]`; v `[C, nv, VD]`;
    decay, beta `[C, nv]`. Returns the state after the chunk and the outputs `[C, nv, VD]`.

    With gamma the cumulative decay inside the chunk, K and Q normalised, and G[i, j] = gamma_i / gamma_j for i >= j,
    taken as the product of the decays in between (the quotient would underflow, and a decay of 0 is a reset):

        delta = (I + tril(beta K K^T * G, -1))^-1 beta (V - gamma K S)
        out   = gamma Q S + (Q K^T * G) delta
        S     = gamma_end S + (gamma_end / gamma K)^T delta
    """
    group_size = v.shape[1] // k.shape[1]
    per_value_head = lambda x: jnp.repeat(x, group_size, axis=0)  # noqa: E731
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    decay, beta = decay.T, beta.T
    k = k * lax.rsqrt(jnp.sum(k * k, -1, keepdims=True) + EPS)
    q = q * lax.rsqrt(jnp.sum(q * q, -1, keepdims=True) + EPS) * q.shape[-1] ** -0.5

    row, column = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)[None, :]
    after = jnp.where(row > column, decay[:, :, None], 1.0)
    G = jnp.where(row >= column, lax.cumprod(after, axis=1), 0.0)
    gamma = lax.cumprod(decay, axis=1)[..., None]
    to_end = G[:, -1, :, None]

    kk = per_value_head(_dot(k, k.swapaxes(1, 2)))
    qk = per_value_head(_dot(q, k.swapaxes(1, 2)))
    k, q = per_value_head(k), per_value_head(q)
    inverse = _unit_lower_inverse(jnp.where(row > column, beta[..., None] * kk * G, 0.0))
    delta = _dot(inverse, beta[..., None] * (v - gamma * _dot(k, S)))
    out = gamma * _dot(q, S) + _dot(qk * G, delta)
    S = gamma[:, -1:] * S + _dot((to_end * k).swapaxes(1, 2), delta)
    return S, out.swapaxes(0, 1)


def _dot(a, b):
    return jnp.matmul(a, b, precision=_HIGHEST)


def _unit_lower_inverse(L):
    """(I + L)^-1 for strictly lower triangular `L [.., C, C]`, C a power of two.

    Blocks on the diagonal double in size: X <- X - X L' X with L' the part of L between two halves of a block. No power
    of L is formed, which would overflow on repeated keys.
    """
    size = L.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    X = jnp.broadcast_to(jnp.eye(size, dtype=L.dtype), L.shape)
    half = 1
    while half < size:
        between = (row // (2 * half) == column // (2 * half)) & (row // half != column // half)
        X = X - _dot(X, _dot(jnp.where(between, L, 0.0), X))
        half *= 2
    return X
