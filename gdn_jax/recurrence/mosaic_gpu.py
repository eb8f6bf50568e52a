"""The recurrent gated delta rule in Pallas Mosaic GPU: ragged rows, the pool updated in place.

A program takes one tile of value columns of one state `[key_head_dim, tile]` through the tokens of its
row, the tile in float32 registers. Both sums of a token, over the old state with the key and with the
query, are taken in one sweep, because

    S'^T q = decay * S^T q + (k . q) * factor        where        S' = decay * S + k factor^T

so a token costs one round of shuffles, and the new state is off the path to its output.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import (
    EPS,
    KEY_LANES,
    along_keys,
    along_values,
    compiler_params,
    is_row_of,
    load,
    state_layout,
    store,
    update,
    value_tile,
    zeros,
)

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_ZERO_CHUNK = 16
"""Tokens whose cover by rows one program looks at together."""
_TILE_ELEMENTS = 64 * 128
"""State elements that one program holds in registers, 64 a thread."""


def unsupported(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, *, algorithm, precision
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del decay, beta, slot_idx, input_row_offsets, has_initial_state, precision
    if algorithm != "recurrent":
        return f"mosaic_gpu serves algorithm='recurrent' here, not {algorithm!r}."
    return unsupported_operands(qkv, recurrent_state)


def unsupported_operands(qkv, recurrent_state) -> str | None:
    """What the forward and the verify both refuse."""
    for name, dim in zip(("key_head_dim", "value_head_dim"), recurrent_state.shape[2:], strict=True):
        if dim % 16 or not 16 <= dim <= 256:
            return f"mosaic_gpu serves head dims that are multiples of 16 from 16 to 256; {name} is {dim}."
    for name, dtype in (("qkv_conv_output", qkv.dtype), ("recurrent_state", recurrent_state.dtype)):
        if dtype not in _DTYPES:
            return f"mosaic_gpu does not serve a {name} of {dtype}."
    return None


def recurrence(
    qkv,
    decay,
    beta,
    recurrent_state,
    slot_idx,
    input_row_offsets,
    has_initial_state,
    *,
    algorithm,
    precision,
    interpret=None,
):
    """See `gdn_jax.gated_delta_recurrence_fwd`."""
    del algorithm, precision
    pool = jax.new_ref(recurrent_state)
    tokens = (qkv, decay, beta)
    rows = (slot_idx, input_row_offsets, has_initial_state)
    out = run_rows(tokens, rows, pool, interpret=interpret)
    return out, jax.freeze(pool)


def sum_over_keys(x, y, axis) -> jax.Array:
    """`sum(x * y)` over the key dimension, x and y lists of chunks whose key lanes lie along `axis`.

    The one order that every path keeps: four running sums over the chunks of a lane, their pairs, the lanes.
    """
    totals = []
    for c, (xc, yc) in enumerate(zip(x, y, strict=True)):
        if c < 4:
            totals.append(xc * yc)
        else:
            totals[c % 4] += xc * yc
    while len(totals) > 1:
        totals = [a + b for a, b in zip(totals[::2], totals[1::2], strict=True)]
    return jnp.sum(totals[0], axis=axis)


def token_step(state, keys, queries, value, gates, tile, layout):
    """One token. `state`, `keys` and `queries` are lists of chunks; keys and queries raw.

    `gates` holds decay, beta, 1/|k|, scale/|q| and k . q (raw). Returns the new state, the output and the
    delta factor, what the raw key is multiplied by in the update.
    """
    decay, beta, key_norm, query_norm, key_query = gates
    keys = [along_values(k, tile, layout) for k in keys]
    queries = [along_values(q, tile, layout) for q in queries]
    against_key = sum_over_keys(state, keys, axis=0)
    against_query = sum_over_keys(state, queries, axis=0)
    factor = (value - against_key * (decay * key_norm)) * (beta * key_norm)
    out = (lax.optimization_barrier(against_query * decay) + key_query * factor) * query_norm
    spread = along_keys(factor, KEY_LANES, layout)
    return [update(s, k, spread, decay) for s, k in zip(state, keys)], out, factor


def token_layout(window: int) -> plgpu.Layout:
    """Layout of [window, 8]: the keys of a chunk over eight lanes, tokens over warps and lanes where they fill them."""
    if window % 16 == 0:
        return plgpu.Layout.TILED(plgpu.Tiling(((16, 8), (4, 8), (1,))), (-5,), (-3, -2), -1)
    if window % 4 == 0:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 8), (1,))), (-3,), (plgpu.Replicated(4), -2), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((1, 8), (1,))), (plgpu.Replicated(4),), (plgpu.Replicated(4), -2), -1)


def row_bounds(offsets, b, num_tokens):
    start = jnp.clip(offsets[b], 0, num_tokens)
    return start, jnp.clip(offsets[b + 1], start, num_tokens)


def zero_uncovered(offsets, out, columns, layout, b, batch):
    """Zeroes, in `columns`, the tokens of no row among the chunks `b, b + batch, ..` of the token array.

    If the offsets begin at the first token and end at the last, every token lies in a row, however they run
    between; the search is for the other case.
    """
    num_tokens = out.shape[0]
    first, last = offsets[0], offsets[batch]

    @pl.when((first > 0) | (last < num_tokens))
    def _():
        def chunk(i, _):
            begin = (b + i * batch) * _ZERO_CHUNK
            end = jnp.minimum(begin + _ZERO_CHUNK, num_tokens)

            @pl.when((begin < first) | (end > last))
            def _():
                def cover(row, mask):
                    lo, hi = (jnp.clip(offsets[row + i] - begin, 0, _ZERO_CHUNK) for i in (0, 1))
                    return mask | jnp.where(hi > lo, (1 << hi) - (1 << lo), 0)

                covered = lax.fori_loop(0, batch, cover, jnp.int32(0))

                def token(t, _):
                    @pl.when((covered >> (t - begin)) & 1 == 0)
                    def _():
                        store(out.at[t, columns], zeros((columns.size,), layout))

                    return 0

                lax.fori_loop(begin, end, token, 0)

            return 0

        chunks = (num_tokens + _ZERO_CHUNK - 1) // _ZERO_CHUNK
        lax.fori_loop(0, lax.div(chunks - b + batch - 1, batch), chunk, 0)


def run_rows(tokens, rows, pool, ring=None, ring_slot_idx=None, *, interpret=None):
    """Runs every row over `pool`, a Ref, and returns the outputs `[T, num_value_heads * value_head_dim]`.

    `tokens` are qkv, decay and beta, `rows` are slot_idx, input_row_offsets and has_initial_state. With `ring`, a
    Ref, rows of at most RING_LEN tokens leave the pool alone and write one record a token and key head instead.
    """
    qkv = tokens[0]
    num_tokens, conv_dim = qkv.shape
    max_slots, num_value_heads, key_dim, value_dim = pool.shape
    batch = rows[0].shape[0]
    num_key_heads = (conv_dim - num_value_heads * value_dim) // (2 * key_dim)
    group = num_value_heads // num_key_heads

    tile = value_tile(value_dim, _TILE_ELEMENTS // key_dim)
    num_tiles = value_dim // tile
    layout = state_layout(tile, min(tile // 16, 16 // pool.dtype.itemsize))
    key_layout, value_layout = layout.reduce(1), layout.reduce(0)
    scale = key_dim**-0.5
    chunks = [pl.ds(c * KEY_LANES, KEY_LANES) for c in range(key_dim // KEY_LANES)]
    windowed = num_tokens > batch and num_tokens >= 4
    window = (16 if num_tokens >= max(16, 8 * batch) else 4) if windowed else 1
    by_token = token_layout(window)
    gate_layout = by_token.reduce(1)

    def norms(k, q, axis):
        """1/|k|, scale/|q| and k . q of lists of chunks."""
        kk, qq, kq = (sum_over_keys(x, y, axis) for x, y in ((k, k), (q, q), (k, q)))
        return lax.rsqrt(kk + EPS), lax.rsqrt(qq + EPS) * scale, kq

    def body(qkv_g, decay_g, beta_g, slot_g, offset_g, has_g, *refs):
        if ring is None:
            pool_g, out_g, *scratch = refs
        else:
            ring_slot_g, pool_g, ring_g, out_g, factors, *scratch = refs

        i = lax.axis_index("tile")
        v0 = lax.rem(i, num_tiles) * tile
        h = lax.rem(lax.div(i, num_tiles), num_value_heads)
        b = lax.div(i, num_tiles * num_value_heads)
        hk = lax.div(h, group)
        slot = slot_g[b]
        start, end = row_bounds(offset_g, b, num_tokens)
        live = is_row_of(slot, max_slots)
        out_columns = pl.ds(h * value_dim + v0, tile)
        query_columns = pl.ds(hk * key_dim, key_dim)
        key_columns = pl.ds((num_key_heads + hk) * key_dim, key_dim)
        value_columns = pl.ds(2 * num_key_heads * key_dim + h * value_dim + v0, tile)
        state_g = [pool_g.at[slot, h, c, pl.ds(v0, tile)] for c in chunks]

        def advance(state, p, t, keys, queries, value, gates):
            """One token: position p of its window, token t of the array."""
            state, out, factor = token_step(state, keys, queries, value, gates, tile, layout)
            store(out_g.at[t, out_columns], out)
            if ring is not None:
                store(factors.at[p], factor)
            return state

        def record(first, count, key_of, decay_of):
            """Writes the records of the window of `count` tokens that begins at token `first`."""
            if ring is None:
                return
            plgpu.commit_smem()
            ring_row = ring_slot_g[b]

            @pl.when((end - start <= ring_g.shape[2]) & is_row_of(ring_row, ring_g.shape[0]))
            def _():
                def write(p, _):
                    to = ring_g.at[ring_row, hk, first - start + p]
                    member = lax.rem(h, group)
                    write_record(to, member, group, v0, key_of(p), factors.at[p], decay_of(p), value_dim)
                    return 0

                lax.fori_loop(0, count, write, 0)

            plgpu.commit_smem()

        def by_one(state):
            """The row token by token, straight from global memory."""

            def step(t, state):
                keys = [load(qkv_g.at[t, key_columns].at[c], key_layout) for c in chunks]
                queries = [load(qkv_g.at[t, query_columns].at[c], key_layout) for c in chunks]
                value = load(qkv_g.at[t, value_columns], value_layout)
                decay = decay_g[t, h]
                gates = decay, beta_g[t, h], *norms(keys, queries, 0)
                state = advance(state, 0, t, keys, queries, value, gates)
                record(t, 1, lambda _: qkv_g.at[t, key_columns], lambda _: decay)
                return state

            return lax.fori_loop(start, end, step, state)

        def by_window(state):
            """The row by windows of tokens, each brought to shared memory while the one before is computed."""
            raw_keys, raw_queries, raw_values, keys, queries, gates, arrived = scratch

            def fetch(first, stage):
                at = pl.ds(first, window)
                for columns, raw in (
                    (key_columns, raw_keys),
                    (query_columns, raw_queries),
                    (value_columns, raw_values),
                ):
                    plgpu.copy_gmem_to_smem(qkv_g.at[at, columns], raw.at[stage], arrived.at[stage])

            def gates_from(first):
                """First token whose gates are loaded: earlier than `first` where the array would end too soon."""
                return jnp.minimum(first, num_tokens - window)

            def fetch_gates(first):
                at = pl.ds(gates_from(first), window)
                return [load(g.at[at, h], gate_layout) for g in (decay_g, beta_g)]

            def prepare(stage, decay, beta):
                k = [load(raw_keys.at[stage, :, c], by_token) for c in chunks]
                q = [load(raw_queries.at[stage, :, c], by_token) for c in chunks]
                for c, kc, qc in zip(chunks, k, q, strict=True):
                    store(keys.at[:, c], kc)
                    store(queries.at[:, c], qc)
                for n, gate in enumerate((decay, beta, *norms(k, q, 1))):
                    store(gates.at[n], gate)

            def block(j, carry):
                state, decay, beta = carry
                first = start + j * window
                stage = lax.rem(j, 2)
                count = jnp.minimum(end - first, window)
                gate_shift = first - gates_from(first)
                plgpu.commit_smem()

                @pl.when(first + window < end)
                def _():
                    fetch(first + window, 1 - stage)

                plgpu.barrier_wait(arrived.at[stage])
                prepare(stage, decay, beta)
                decay, beta = fetch_gates(first + window)
                plgpu.commit_smem()

                def step(p, state):
                    return advance(
                        state,
                        p,
                        first + p,
                        [load(keys.at[p, c], key_layout) for c in chunks],
                        [load(queries.at[p, c], key_layout) for c in chunks],
                        load(raw_values.at[stage, p], value_layout),
                        [gates[n, p + gate_shift if n < 2 else p] for n in range(5)],
                    )

                state = lax.fori_loop(0, count, step, state)
                record(first, count, lambda p: keys.at[p], lambda p: gates[0, p + gate_shift])
                return state, decay, beta

            fetch(start, 0)
            num_blocks = lax.div(end - start + (window - 1), window)
            return lax.fori_loop(0, num_blocks, block, (state, *fetch_gates(start)))[0]

        @pl.when(live & (end > start))
        def _():
            state = lax.cond(
                has_g[b],
                lambda: [load(ref, layout) for ref in state_g],
                lambda: [zeros((KEY_LANES, tile), layout) for _ in state_g],
            )
            state = (by_window if windowed else by_one)(state)

            @pl.when((end - start > ring_g.shape[2]) if ring is not None else True)
            def _():
                for ref, s in zip(state_g, state, strict=True):
                    store(ref, s)

        @pl.when(jnp.logical_not(live))
        def _():
            def clear(t, _):
                store(out_g.at[t, out_columns], zeros((tile,), value_layout))
                return 0

            lax.fori_loop(start, end, clear, 0)

        zero_uncovered(offset_g, out_g, out_columns, value_layout, b, batch)

    scratch = []
    if ring is not None:
        scratch += [plgpu.SMEM((window, tile), jnp.float32)]
    if windowed:
        scratch += [
            plgpu.SMEM((2, window, key_dim), qkv.dtype),
            plgpu.SMEM((2, window, key_dim), qkv.dtype),
            plgpu.SMEM((2, window, tile), qkv.dtype),
            plgpu.SMEM((window, key_dim), jnp.float32),
            plgpu.SMEM((window, key_dim), jnp.float32),
            plgpu.SMEM((5, window), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=2),
        ]
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_value_heads * value_dim), qkv.dtype),
        grid=(batch * num_value_heads * num_tiles,),
        grid_names=("tile",),
        scratch_types=scratch,
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    if ring is None:
        return kernel(*tokens, *rows, pool)
    return kernel(*tokens, *rows, ring_slot_idx, pool, ring)


def write_record(record, member, group, v0, key, factor, decay, value_dim):
    """One program's part of a record: its columns of the delta factor, and what only the first of its kind writes.

    Key and factor come from shared memory, so that the accesses can be as narrow as the record's alignment asks.
    """
    (key_dim,), (tile,) = key.shape, factor.shape
    stride = record.shape[-1]

    def copy(source, at):
        (size,) = source.shape
        unit = math.gcd(size, 128)
        layout = state_layout(unit, math.gcd(unit // 16, stride, 4)).reduce(0)
        store(record.at[pl.ds(at, size)], load(source, layout))

    copy(factor, key_dim + member * value_dim + v0)

    @pl.when(v0 == 0)
    def _():
        record[key_dim + group * value_dim + member] = decay.astype(record.dtype)

        @pl.when(member == 0)
        def _():
            copy(key, 0)
