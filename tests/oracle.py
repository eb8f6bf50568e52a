"""What every implementation is measured against: NumPy, float64, one token at a time.

Nothing here is shared with the package, and nothing is clever: a row is two integers, a slot is an
index that is either inside the pool or is not, and a state is one ``[nv, KD, VD]`` array that a
Python loop carries from token to token. Inputs of any dtype are taken as the numbers they hold, so
an implementation is judged against the exact result for its own (already rounded) inputs.
"""

from __future__ import annotations

import itertools

import numpy as np

EPSILON = 1e-6


def exact(array) -> np.ndarray:
    """The same numbers in float64 (bfloat16 included)."""
    with np.errstate(invalid="ignore"):  # Signalling NaNs are numbers like any other here.
        return np.asarray(array).astype(np.float64)


def row_bounds(offsets, num_tokens: int) -> list[tuple[int, int]]:
    """``(start, end)`` of every row; a row that ends before it starts is empty."""
    inside = [min(max(int(offset), 0), num_tokens) for offset in np.asarray(offsets)]
    return [(start, max(start, end)) for start, end in itertools.pairwise(inside)]


def owners(slot_idx, offsets, num_slots: int, num_tokens: int) -> np.ndarray:
    """How many rows with a live slot hold each token, ``[num_tokens]``.

    0 means that the token's output is zero; more than 1, that malformed offsets made rows overlap
    and that the token's output is not specified.
    """
    count = np.zeros(num_tokens, int)
    for slot, (start, end) in zip(np.asarray(slot_idx), row_bounds(offsets, num_tokens), strict=False):
        if 0 <= int(slot) < num_slots:
            count[start:end] += 1
    return count


def head_counts(conv_dim: int, pool_shape) -> tuple[int, int, int, int]:
    """``(nk, nv, KD, VD)`` of fused rows of ``conv_dim`` channels over a state pool."""
    _, nv, key_dim, value_dim = pool_shape
    nk, rest = divmod(conv_dim - nv * value_dim, 2 * key_dim)
    assert rest == 0, (conv_dim, pool_shape)
    assert nk > 0, (conv_dim, pool_shape)
    assert nv % nk == 0, (conv_dim, pool_shape)
    return nk, nv, key_dim, value_dim


def split_heads(qkv, pool_shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw ``q``, ``k`` ``[T, nk, KD]`` and ``v`` ``[T, nv, VD]`` of fused rows, in float64."""
    x = exact(qkv)
    nk, nv, key_dim, value_dim = head_counts(x.shape[1], pool_shape)
    q = x[:, : nk * key_dim].reshape(-1, nk, key_dim)
    k = x[:, nk * key_dim : 2 * nk * key_dim].reshape(-1, nk, key_dim)
    v = x[:, 2 * nk * key_dim :].reshape(-1, nv, value_dim)
    return q, k, v


def inverse_norm(x: np.ndarray) -> np.ndarray:
    """``1 / sqrt(sum(x*x) + epsilon)`` over the last axis, kept as an axis of size 1."""
    return 1.0 / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def token_step(state, q, k, v, decay, beta, *, normalise=True, scale=None):
    """One token through every head.

    ``state [nv, KD, VD]``, ``q``/``k`` ``[nk, KD]``, ``v [nv, VD]``, ``decay``/``beta`` ``[nv]``.
    Returns ``(output [nv, VD], new state, delta factor [nv, VD])``, the factor being what the raw
    key is multiplied by.
    """
    group = state.shape[0] // k.shape[0]
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    k_norm = inverse_norm(k) if normalise else np.ones((k.shape[0], 1))
    q_norm = inverse_norm(q) if normalise else np.ones((q.shape[0], 1))
    k_hat = np.repeat(k * k_norm, group, axis=0)
    q_hat = np.repeat(q * q_norm * scale, group, axis=0)
    state = decay[:, None, None] * state
    kv = np.einsum("hkv,hk->hv", state, k_hat)
    delta = beta[:, None] * (v - kv)
    state = state + k_hat[:, :, None] * delta[:, None, :]
    output = np.einsum("hkv,hk->hv", state, q_hat)
    return output, state, delta * np.repeat(k_norm, group, axis=0)


def first_state(pool: np.ndarray, slot: int, has_initial_state, b: int) -> np.ndarray:
    if has_initial_state is None or bool(np.asarray(has_initial_state)[b]):
        return pool[slot]
    return np.zeros(pool.shape[1:])


def recurrence(qkv, decay, beta, pool, slot_idx, offsets, has_initial_state=None):
    """``(outputs [T, nv*VD], new pool)`` in float64."""
    q, k, v = split_heads(qkv, pool.shape)
    decay, beta, pool = exact(decay), exact(beta), exact(pool)
    num_tokens = q.shape[0]
    outputs = np.zeros((num_tokens, pool.shape[1], pool.shape[3]))
    new_pool = pool.copy()
    for b, (start, end) in enumerate(row_bounds(offsets, num_tokens)):
        slot = int(np.asarray(slot_idx)[b])
        if start == end or not 0 <= slot < pool.shape[0]:
            continue
        state = first_state(pool, slot, has_initial_state, b)
        for t in range(start, end):
            outputs[t], state, _ = token_step(state, q[t], k[t], v[t], decay[t], beta[t])
        new_pool[slot] = state
    return outputs.reshape(num_tokens, -1), new_pool


def verify_ring(qkv, decay, beta, pool, ring, slot_idx, ring_slot_idx, offsets, has_initial_state=None):
    """``(outputs, new ring, new pool)`` in float64."""
    q, k, v = split_heads(qkv, pool.shape)
    decay, beta, pool, ring = exact(decay), exact(beta), exact(pool), exact(ring)
    num_tokens, nk, key_dim = k.shape
    nv, value_dim = v.shape[1:]
    group = nv // nk
    ring_rows, _, ring_len, _ = ring.shape
    outputs = np.zeros((num_tokens, nv, value_dim))
    new_pool, new_ring = pool.copy(), ring.copy()
    for b, (start, end) in enumerate(row_bounds(offsets, num_tokens)):
        slot, ring_slot = int(np.asarray(slot_idx)[b]), int(np.asarray(ring_slot_idx)[b])
        if start == end or not 0 <= slot < pool.shape[0]:
            continue
        short = end - start <= ring_len
        state = first_state(pool, slot, has_initial_state, b)
        for p, t in enumerate(range(start, end)):
            outputs[t], state, factor = token_step(state, q[t], k[t], v[t], decay[t], beta[t])
            if not short or not 0 <= ring_slot < ring_rows:
                continue
            for head in range(nk):
                members = slice(head * group, (head + 1) * group)
                record = np.concatenate([k[t, head], factor[members].ravel(), decay[t, members]])
                assert record.size == key_dim + group * (value_dim + 1)
                new_ring[ring_slot, head, p, : record.size] = record
        if not short:
            new_pool[slot] = state
    return outputs.reshape(num_tokens, -1), new_ring, new_pool


def state_fold(pool, ring, row_ids, ring_row_ids, num_accepted, has_initial_state=None):
    """The pool after every (layer, request) has taken its accepted records, in float64."""
    pool, ring = exact(pool), exact(ring)
    rows, nv, key_dim, value_dim = pool.shape
    ring_rows, nk, ring_len, _ = ring.shape
    group = nv // nk
    new_pool = pool.copy()
    row_ids, ring_row_ids = np.asarray(row_ids), np.asarray(ring_row_ids)
    for layer, b in np.ndindex(row_ids.shape):
        row, ring_row = int(row_ids[layer, b]), int(ring_row_ids[layer, b])
        accepted = int(np.asarray(num_accepted)[b])
        if not (0 <= row < rows and 0 <= ring_row < ring_rows and 0 < accepted <= ring_len):
            continue
        state = first_state(pool, row, has_initial_state, b)
        for p in range(accepted):
            for head in range(nk):
                record = ring[ring_row, head, p]
                key = record[:key_dim]
                for member in range(group):
                    at = key_dim + member * value_dim
                    factor = record[at : at + value_dim]
                    decay = record[key_dim + group * value_dim + member]
                    h = head * group + member
                    state[h] = state[h] * decay + key[:, None] * factor[None, :]
        new_pool[row] = state
    return new_pool


def conv1d(
    x,
    weight,
    pool,
    slot_idx,
    offsets,
    *,
    bias=None,
    activation=None,
    has_initial_state=None,
    write_state=True,
):
    """``(outputs [T, conv_dim], new pool)``: causal depthwise, the window oldest input first."""
    x, weight, pool = exact(x), exact(weight), exact(pool)
    num_tokens, conv_dim = x.shape
    taps = weight.shape[1]
    bias = np.zeros(conv_dim) if bias is None else exact(bias)
    outputs = np.zeros((num_tokens, conv_dim))
    new_pool = pool.copy()
    for b, (start, end) in enumerate(row_bounds(offsets, num_tokens)):
        slot = int(np.asarray(slot_idx)[b])
        if start == end or not 0 <= slot < pool.shape[0]:
            continue
        window = first_state(pool, slot, has_initial_state, b)
        for t in range(start, end):
            window = np.concatenate([window, x[t][:, None]], axis=1)
            assert window.shape == (conv_dim, taps)
            outputs[t] = np.sum(window * weight, axis=1) + bias
            window = window[:, 1:]
        if write_state:
            new_pool[slot] = window
        if activation == "silu":
            y = outputs[start:end]
            outputs[start:end] = y * sigmoid(y)
    return outputs, new_pool


def gates(a, b, a_log, dt_bias):
    """``(decay, beta)``."""
    a, b, a_log, dt_bias = exact(a), exact(b), exact(a_log), exact(dt_bias)
    return np.exp(-np.exp(a_log) * np.logaddexp(0.0, a + dt_bias)), sigmoid(b)


def delta_rule(q, k, v, g, beta, *, scale=None, initial_state=None, offsets=None, normalise=True):
    """``(o [B, T, nv, VD], final states [N, nv, KD, VD])`` of the ``[B, T, H, D]`` call.

    With ``offsets`` (cumulative lengths) B is 1 and N is the number of sequences, else N is B.
    """
    q, k, v, g, beta = exact(q), exact(k), exact(v), exact(g), exact(beta)
    batch, num_tokens, nv, value_dim = v.shape
    if offsets is None:
        spans = [(b, 0, num_tokens) for b in range(batch)]
    else:
        spans = [(0, start, end) for start, end in row_bounds(offsets, num_tokens)]
    o = np.zeros(v.shape)
    finals = np.zeros((len(spans), nv, q.shape[-1], value_dim))
    for n, (b, start, end) in enumerate(spans):
        state = np.zeros(finals.shape[1:]) if initial_state is None else exact(initial_state)[n]
        for t in range(start, end):
            o[b, t], state, _ = token_step(
                state,
                q[b, t],
                k[b, t],
                v[b, t],
                np.exp(g[b, t]),
                beta[b, t],
                normalise=normalise,
                scale=scale,
            )
        finals[n] = state
    return o, finals
