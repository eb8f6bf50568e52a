"""One token over a tile of a state, as all token by token kernels take it, and what rows and records are to them.

Both sums of a token, over the old state with the key and with the query, are taken in one sweep, because

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
    KEY_ROWS,
    along_keys,
    along_values,
    cond,
    is_row_of,
    load_rows,
    load_whole,
    rounded_product,
    row_layout,
    state_layout,
    store,
    store_rows,
    store_whole,
    update,
    vector_layout,
    when,
    zeros,
)

_ZERO_CHUNK = 16
"""Tokens whose cover by rows one program looks at together."""


def add_products(totals, state, keys, queries):
    """Adds `state * key` and `state * query`, lists of chunks, to the running sums of either, one a row of a chunk.

    This and `finish_sums` are the one order of sums that every path keeps.
    """
    against_key, against_query = totals
    for s, key, query in zip(state, keys, queries, strict=True):
        against_key += s * key
        against_query += s * query
    return against_key, against_query


def finish_sums(totals):
    """`S^T k` and `S^T q`."""
    return [jnp.sum(total, axis=0) for total in totals]


def clear_chunks(ref, zero):
    """Clears chunks of a state in shared memory, every lane what it reads itself."""

    def clear(i, _):
        store(ref.at[pl.ds(i * KEY_ROWS, KEY_ROWS)], zero)
        return 0

    lax.fori_loop(0, ref.shape[0] // KEY_ROWS, clear, 0)
    # The bulk copy that overwrites it comes after.
    plgpu.commit_smem()


class Tile:
    """A tile of `width` columns as lists of chunks, and one token's step over it."""

    def __init__(self, width, interpret):
        self.width = width
        self.interpret = interpret
        self.layout = state_layout(width)
        self.key_layout, self.value_layout = self.layout.reduce(1), self.layout.reduce(0)

    def zeros(self, count):
        return [zeros((KEY_ROWS, self.width), self.layout) for _ in range(count)]

    def load(self, ref, exists):
        """The state, zeros where it does not exist yet."""
        # By selection, not by a branch: the loads then do not wait for what decides.
        (zero,) = self.zeros(1)
        return [jnp.where(exists, chunk, zero) for chunk in load_rows(ref, KEY_ROWS, self.layout, self.interpret)]

    def load_shared(self, ref, exists):
        """The same from shared memory that holds anything at all if the state does not exist."""

        @when(jnp.logical_not(exists))
        def _():
            clear_chunks(ref, self.zeros(1)[0])

        return self.shared_chunks(ref)

    def shared_chunks(self, ref):
        return load_rows(ref, KEY_ROWS, self.layout, self.interpret)

    def store(self, ref, state):
        store_rows(ref, state, self.layout, self.interpret)

    def load_keys(self, ref):
        keys = load_rows(ref, KEY_ROWS, self.key_layout, self.interpret)
        return [along_values(key, self.width, self.layout) for key in keys]

    def update(self, state, keys, factor, decay):
        spread = along_keys(factor, KEY_ROWS, self.layout)
        return [update(s, k, spread, decay) for s, k in zip(state, keys, strict=True)]

    def step(self, state, keys, queries, value, gates, needed=None):
        """New state (the old one where `needed` is false), output and delta factor."""
        sums = finish_sums(add_products(self.zeros(2), state, keys, queries))
        out, factor = token_output(sums, value, gates)

        def updated():
            return self.update(state, keys, factor, gates[0])

        state = updated() if needed is None else cond(needed, updated, lambda: state)
        return state, out, factor


class Rows:
    """A tile in whole rows, as memory has them: neighbouring lanes side by side, no bank of shared memory twice.

    The rows of a column are then spread over warps. Each thread's running sums are those of `Tile`, and
    `finish` adds them up in the order of its exchanges.
    """

    def __init__(self, width, itemsize, interpret):
        self.width = width
        self.interpret = interpret
        self.layout = row_layout(width, itemsize)
        self.key_layout, self.factor_layout = self.layout.reduce(1), self.layout.reduce(0)
        self.value_layout = vector_layout(width)

    def zeros(self):
        return zeros((KEY_ROWS, self.width), self.layout)

    def load(self, ref):
        return load_rows(ref, KEY_ROWS, self.layout, self.interpret)

    def load_keys(self, ref):
        keys = load_rows(ref, KEY_ROWS, self.key_layout, self.interpret)
        return [along_values(key, self.width, self.layout) for key in keys]

    def finish(self, totals, partial_s):
        """`S^T k` and `S^T q`, a column a thread, by way of shared memory."""
        for which, total in enumerate(totals):
            store_whole(partial_s.at[which], total, self.layout, self.interpret)
        plgpu.commit_smem()
        sums = []
        for which in range(2):
            lanes = load_rows(partial_s.at[which], 0, self.value_layout, self.interpret)
            while len(lanes) > 1:
                lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
            sums += lanes
        return sums

    def update(self, state, keys, factor, decay):
        """`factor` is repeated over the rows already."""
        return [update(s, k, factor, decay) for s, k in zip(state, keys, strict=True)]


class KeyVectors:
    """How whole keys and queries are read: the lanes of a warp side by side, up to four neighbours a lane.

    Attributes:
        layout: of the pieces [piece] of one token or, with `tokens` (4,), [window, piece] of a window, a token a warp;
            with (1, 4), [heads, window, piece] of several heads.
        pieces: slices of the key dimension.
    """

    def __init__(self, key_dim: int, interpret, tokens: tuple[int, ...] = ()):
        lanes = math.gcd(key_dim, 32)
        vector = math.gcd(key_dim // lanes, 4)
        piece = lanes * vector
        lane_dims = (-2,) if lanes == 32 else (plgpu.Replicated(32 // lanes), -2)
        tiling, warp_dims = plgpu.Tiling(((*tokens, piece), (vector,))), (-3,) if tokens else (plgpu.Replicated(4),)
        self.interpret = interpret
        self.layout = plgpu.Layout.TILED(tiling, warp_dims, lane_dims, -1)
        self.pieces = [pl.ds(i, piece) for i in range(0, key_dim, piece)]
        self.query_scale = key_dim**-0.5

    def load(self, ref) -> list[jax.Array]:
        return [load_whole(ref.at[..., piece], self.layout, self.interpret) for piece in self.pieces]

    def store(self, ref, pieces) -> None:
        for piece, value in zip(self.pieces, pieces, strict=True):
            store_whole(ref.at[..., piece], value, self.layout, self.interpret)

    def scales(self, key, query):
        """`1/|k|`, `key_head_dim**-0.5 / |q|` and `k . q`, in the one order of sums that every path keeps."""

        def dot(x, y):
            total, *products = (rounded_product(a, b) for a, b in zip(x, y, strict=True))
            return jnp.sum(sum(products, start=total), axis=-1)

        key_scale = lax.rsqrt(dot(key, key) + EPS)
        query_scale = lax.rsqrt(dot(query, query) + EPS) * self.query_scale
        return key_scale, query_scale, dot(key, query)


def token_factor(against_key, value, gates):
    """Delta factor of one token, what the raw key is multiplied by in the update, from `S^T k` and `gates`.

    These are decay, beta and `scales`.
    """
    decay, beta, key_scale, _, _ = gates
    return (value - against_key * (decay * key_scale)) * (beta * key_scale)


def output_of(against_query, factor, gates):
    """Output of one token from `S^T q`, its delta factor and its gates."""
    decay, _, _, query_scale, key_query = gates
    # The barrier fixes which of the two products is fused into the sum.
    return (lax.optimization_barrier(against_query * decay) + key_query * factor) * query_scale


def token_output(sums, value, gates):
    """Output and delta factor of one token, from `S^T k`, `S^T q`, and its gates."""
    factor = token_factor(sums[0], value, gates)
    return output_of(sums[1], factor, gates), factor


def row_bounds(offsets, b, num_tokens):
    start = jnp.clip(offsets[b], 0, num_tokens)
    return start, jnp.clip(offsets[b + 1], start, num_tokens)


def zero_tokens(out, start, end, columns, layout, interpret):
    def zero(t, _):
        store_whole(out.at[t, columns], zeros((columns.size,), layout), layout, interpret)
        return 0

    lax.fori_loop(start, end, zero, 0)


def zero_uncovered(offsets, ends, out, columns, layout, b, batch, interpret):
    """Zeroes, in `columns`, the tokens of no row among the chunks `b, b + batch, ..` of the token array.

    If the offsets begin at the first token and end at the last, every token lies in a row, however they run
    between; the search is for the other case.
    """
    num_tokens = out.shape[0]
    first, last = ends

    @when((first > 0) | (last < num_tokens))
    def _():
        def chunk(i, _):
            begin = (b + i * batch) * _ZERO_CHUNK
            end = jnp.minimum(begin + _ZERO_CHUNK, num_tokens)

            @when((begin < first) | (end > last))
            def _():
                def cover(row, mask):
                    # Clipped first: an offset may lie so far out that its distance overflows.
                    lo, hi = (jnp.clip(offsets[row + i], begin, begin + _ZERO_CHUNK) - begin for i in (0, 1))
                    return mask | jnp.where(hi > lo, (1 << hi) - (1 << lo), 0)

                covered = lax.fori_loop(0, batch, cover, jnp.int32(0))

                def token(t, _):
                    @when((covered >> (t - begin)) & 1 == 0)
                    def _():
                        zero_tokens(out, t, t + 1, columns, layout, interpret)

                    return 0

                lax.fori_loop(begin, end, token, 0)

            return 0

        chunks = (num_tokens + _ZERO_CHUNK - 1) // _ZERO_CHUNK
        lax.fori_loop(0, lax.div(chunks - b + batch - 1, batch), chunk, 0)


def ring_row(ring, ring_slot, length):
    """The ring row that the records of a row of `length` tokens go to, or -1."""
    return jnp.where(is_row_of(ring_slot, ring.shape[0]) & (length <= ring.shape[2]), ring_slot, -1)


def write_record(record, member, group, v0, key, factor, value_dim, decay, interpret):
    """One program's part of a record: its columns of the delta factor, and what only the first of its kind writes.

    Key and factor come from shared memory, so that the accesses can be as narrow as the record's alignment asks.
    """
    key_dim = key.shape[0]

    def copy(source, at):
        (size,) = source.shape
        layout = vector_layout(size)
        store_whole(record.at[pl.ds(at, size)], load_whole(source, layout, interpret), layout, interpret)

    copy(factor, key_dim + member * value_dim + v0)

    @when(v0 == 0)
    def _():
        record[key_dim + group * value_dim + member] = decay.astype(record.dtype)

        @when(member == 0)
        def _():
            copy(key, 0)
