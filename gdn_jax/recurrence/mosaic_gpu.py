"""The recurrent gated delta rule in Pallas Mosaic GPU: ragged rows, the pool updated in place.

A program takes one tile of value columns of one state `[key_head_dim, tile]` through the tokens of its
row, the tile in float32 registers. Both sums of a token, over the old state with the key and with the
query, are taken in one sweep, because

    S'^T q = decay * S^T q + (k . q) * factor        where        S' = decay * S + k factor^T

so a token costs one round of shuffles, and the new state is off the path to its output.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import (
    EPS,
    KEY_ROWS,
    after_previous,
    along_keys,
    along_values,
    compiler_params,
    fetch_to_keep,
    is_row_of,
    load,
    load_chunks,
    rounded_product,
    row_layout,
    state_layout,
    store,
    store_chunks,
    update,
    value_tile,
    vector_layout,
    warp_barrier,
    warpgroup_barrier,
    widen,
    zeros,
)

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_ZERO_CHUNK = 16
"""Tokens whose cover by rows one program looks at together."""
_TILE_ELEMENTS = 64 * 128
"""State elements that one program holds in registers, 64 a thread."""
_PROGRAMS = 128
"""Tiles are halved until there are this many: about one for each multiprocessor of a Hopper GPU (132)."""
_MULTIPROCESSORS = 132
_SHARED_BYTES = 227 * 1024
"""Shared memory that one thread block can have."""
_SHARED_UNIT = 1024
"""What Mosaic aligns every buffer in shared memory to."""
_SHARED_RESERVED = 4096
"""Enough for what Mosaic adds to the buffers: 2048 bytes for reductions, and barriers."""
_SHORT_WINDOW, _LONG_WINDOW = 4, 16
"""Tokens of a row that are handled together where rows are short on average, and where they are not."""
_SHORT_WARPGROUPS, _WIDE_WARPGROUPS = 4, 2
"""Warpgroups of a thread block with short windows: they get 128 registers a thread, of which a tile takes 64, or
255 for a tile of twice the width."""
_ROWS_PROGRAMS = 256
"""Programs from which on states are read in whole rows."""
_ROWS_BYTES = 32 * 1024
"""Size of such a tile, in registers or in shared memory: four or five fit on a multiprocessor."""
_UNROLL = 4
"""Chunks of a state in shared memory that are in registers together."""
_PIECES = 4
"""Bulk copies that a tile comes in, if its rows can be cut so."""


def unsupported(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, *, algorithm, precision
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del decay, beta, slot_idx, input_row_offsets, has_initial_state, precision
    if algorithm == "chunked":
        return "this kernel goes token by token."
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is cut into programs; follows from shapes alone.

    Attributes:
        tile: value columns of a program's tile.
        window: tokens that come to shared memory together; 0 if rows go token by token.
        rows: with `window` 0, whether a tile is read in whole rows.
        warpgroups: with a window, warpgroups of a thread block, each a program of its own; together they may use all
            registers of a multiprocessor, so their number bounds what the compiler gives to one.
        run: with the short window, tiles of one key head that a program takes one after the other.
    """

    tile: int
    window: int = 0
    rows: bool = False
    warpgroups: int = 3
    run: int = 1


class RunRow(NamedTuple):
    """What a program with a short window knows ahead of the row of a run.

    Attributes:
        slot: of the pool.
        start, end: tokens.
        busy: whether there is anything to compute; not beyond the program's last run.
        has_state: whether the row begins with what its slot holds.
        ring_slot: where its records go, if there is a ring.
    """

    slot: jax.Array
    start: jax.Array
    end: jax.Array
    busy: jax.Array
    has_state: jax.Array
    ring_slot: jax.Array | None


def plan_rows(num_tokens, batch, num_key_heads, num_value_heads, key_dim, value_dim, dtypes, records) -> Plan:
    """`dtypes` are those of tokens and pool; `records` says whether rows write records, as in a verify."""

    def programs(tile):
        return batch * num_value_heads * (value_dim // tile)

    tile = value_tile(value_dim, _TILE_ELEMENTS // key_dim)
    while tile > 16 and programs(tile) < _PROGRAMS:
        tile //= 2
    if num_tokens <= batch or num_tokens < 4:
        if records or programs(tile) < _ROWS_PROGRAMS:
            return Plan(tile)
        wide = value_tile(value_dim, _ROWS_BYTES // (key_dim * dtypes[1].itemsize))
        return Plan(wide if programs(wide) >= _ROWS_PROGRAMS else tile, rows=True)
    group = num_value_heads // num_key_heads
    # A row of several short windows loads keys and gates once a tile, which costs less if its state is not written.
    if num_tokens <= 16 * batch if records else num_tokens < max(16, 8 * batch):
        most = _SHORT_WARPGROUPS
        wide = value_tile(value_dim, 2 * _TILE_ELEMENTS // key_dim)
        if wide > tile and programs(wide) >= 2 * _PROGRAMS:
            tile, most = wide, _WIDE_WARPGROUPS
        of_key_head = group * (value_dim // tile)
        runs = [n for n in range(of_key_head, 0, -1) if of_key_head % n == 0]

        def short(warpgroups):
            workers = warpgroups * _MULTIPROCESSORS
            # The longest run that leaves the busiest worker with no more tiles than runs of one would.
            run = min(runs, key=lambda n: -(-programs(tile) // (n * workers)) * n)
            return Plan(tile, window=_SHORT_WINDOW, warpgroups=warpgroups, run=run)

        plans = [short(n) for n in range(min(most, -(-programs(tile) // _MULTIPROCESSORS)), 0, -1)]
    else:
        most = 1 if programs(tile) <= _MULTIPROCESSORS else 3
        plans = [Plan(tile, window=_LONG_WINDOW, warpgroups=n) for n in range(most, 0, -1)]
    return next(plan for plan in plans if shared_bytes(plan, key_dim, group, dtypes, records) <= _SHARED_BYTES)


def window_buffers(plan, key_dim, group, dtypes, records) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    """Shapes and dtypes of what a program with a window keeps in shared memory."""
    token, pool, f32 = *dtypes, jnp.dtype(jnp.float32)
    window, tile = plan.window, plan.tile
    buffers = [((key_dim, tile), pool), ((window, key_dim), f32), ((window, key_dim), f32)]
    if window == _SHORT_WINDOW:
        buffers += [((3, window), f32), ((2, window, key_dim), token)]
    else:
        buffers += [((5, window), f32), ((2, window, key_dim), token), ((2, window, key_dim), token)]
    buffers.append(((2, window, tile), token))
    if records:
        buffers.append(((window, tile), f32))
    if window == _SHORT_WINDOW:
        buffers += [((2, window, group), f32), ((2, 5 if records else 4), jnp.dtype(jnp.int32))]
    return buffers


def shared_bytes(plan, key_dim, group, dtypes, records) -> int:
    """Bytes of shared memory of a thread block with a window."""
    sizes = [
        plan.warpgroups * math.prod(shape) * dtype.itemsize
        for shape, dtype in window_buffers(plan, key_dim, group, dtypes, records)
    ]
    return sum(-(-size // _SHARED_UNIT) * _SHARED_UNIT for size in sizes) + _SHARED_RESERVED


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


class KeyVectors:
    """How whole keys and queries are read: the lanes of a warp side by side, up to four neighbours a lane.

    Attributes:
        layout: of the pieces [piece] of one token or, for a window of several, [window, piece], a token a warp.
        pieces: slices of the key dimension.
    """

    def __init__(self, key_dim: int, window: int = 1):
        lanes = math.gcd(key_dim, 32)
        vector = math.gcd(key_dim // lanes, 4)
        piece = lanes * vector
        lane_dims = (-2,) if lanes == 32 else (plgpu.Replicated(32 // lanes), -2)
        if window == 1:
            tiling, warp_dims = plgpu.Tiling(((piece,), (vector,))), (plgpu.Replicated(4),)
        else:
            tiling, warp_dims = plgpu.Tiling(((4, piece), (vector,))), (-3,)
        self.layout = plgpu.Layout.TILED(tiling, warp_dims, lane_dims, -1)
        self.pieces = [pl.ds(i, piece) for i in range(0, key_dim, piece)]
        self.query_scale = key_dim**-0.5

    def load(self, ref) -> list[jax.Array]:
        return [load(ref.at[..., piece], self.layout) for piece in self.pieces]

    def store(self, ref, pieces) -> None:
        for piece, value in zip(self.pieces, pieces, strict=True):
            store(ref.at[..., piece], value)

    def scales(self, key, query):
        """`1/|k|`, `key_head_dim**-0.5 / |q|` and `k . q`, in the one order of sums that every path keeps."""

        def dot(x, y):
            total, *products = (rounded_product(a, b) for a, b in zip(x, y, strict=True))
            return jnp.sum(sum(products, start=total), axis=-1)

        key_scale = lax.rsqrt(dot(key, key) + EPS)
        query_scale = lax.rsqrt(dot(query, query) + EPS) * self.query_scale
        return key_scale, query_scale, dot(key, query)


def token_rows_layout(size: int):
    """Layout of [window, size], windows of four: a token a warp, one element a lane."""
    lanes = math.gcd(size, 32)
    repeat = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    if lanes == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 1),)), (-2,), repeat, -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((4, lanes), (1,))), (-3,), (*repeat, -2), -1)


def token_columns_layout(size: int):
    """Layout of [window, size], windows of four: a warp has a quarter of the columns of every token, as of a tile."""
    columns = size // 4
    repeat = () if columns == 32 else (plgpu.Replicated(32 // columns),)
    return plgpu.Layout.TILED(plgpu.Tiling(((4, size), (4, columns), (1,))), (-4,), (*repeat, -2), -1)


def token_output(sums, value, gates):
    """Output and delta factor of one token, from `S^T k`, `S^T q`, and decay, beta and `scales`.

    The factor is what the raw key is multiplied by in the update.
    """
    against_key, against_query = sums
    decay, beta, key_scale, query_scale, key_query = gates
    factor = (value - against_key * (decay * key_scale)) * (beta * key_scale)
    # The barrier fixes which of the two products is fused into the sum.
    out = (lax.optimization_barrier(against_query * decay) + key_query * factor) * query_scale
    return out, factor


def divided(x, n: int):
    """`x // n` and `x % n` of an int32 that is not negative, in fewer operations than a signed division takes."""
    parts = (op(jnp.asarray(x).astype(jnp.uint32), jnp.uint32(n)) for op in (lax.div, lax.rem))
    return tuple(part.astype(jnp.int32) for part in parts)


def row_bounds(offsets, b, num_tokens):
    start = jnp.clip(offsets[b], 0, num_tokens)
    return start, jnp.clip(offsets[b + 1], start, num_tokens)


def zero_tokens(out, start, end, columns, layout):
    def zero(t, _):
        store(out.at[t, columns], zeros((columns.size,), layout))
        return 0

    lax.fori_loop(start, end, zero, 0)


def zero_uncovered(offsets, ends, out, columns, layout, b, batch):
    """Zeroes, in `columns`, the tokens of no row among the chunks `b, b + batch, ..` of the token array.

    If the offsets begin at the first token and end at the last, every token lies in a row, however they run
    between; the search is for the other case.
    """
    num_tokens = out.shape[0]
    first, last = ends

    @pl.when((first > 0) | (last < num_tokens))
    def _():
        def chunk(i, _):
            begin = (b + i * batch) * _ZERO_CHUNK
            end = jnp.minimum(begin + _ZERO_CHUNK, num_tokens)

            @pl.when((begin < first) | (end > last))
            def _():
                def cover(row, mask):
                    # Clipped first: an offset may lie so far out that its distance overflows.
                    lo, hi = (jnp.clip(offsets[row + i], begin, begin + _ZERO_CHUNK) - begin for i in (0, 1))
                    return mask | jnp.where(hi > lo, (1 << hi) - (1 << lo), 0)

                covered = lax.fori_loop(0, batch, cover, jnp.int32(0))

                def token(t, _):
                    @pl.when((covered >> (t - begin)) & 1 == 0)
                    def _():
                        zero_tokens(out, t, t + 1, columns, layout)

                    return 0

                lax.fori_loop(begin, end, token, 0)

            return 0

        chunks = (num_tokens + _ZERO_CHUNK - 1) // _ZERO_CHUNK
        lax.fori_loop(0, lax.div(chunks - b + batch - 1, batch), chunk, 0)


def run_rows(tokens, rows, pool, ring=None, ring_slot_idx=None, *, plan=None, interpret=None):
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
    dtypes = (qkv.dtype, pool.dtype)
    if plan is None:
        plan = plan_rows(
            num_tokens, batch, num_key_heads, num_value_heads, key_dim, value_dim, dtypes, ring is not None
        )
    tile, window = plan.tile, plan.window
    num_tiles = value_dim // tile
    num_programs = batch * num_value_heads * num_tiles
    chunks = [pl.ds(c, KEY_ROWS) for c in range(0, key_dim, KEY_ROWS)]
    num_pieces = math.gcd(len(chunks), _PIECES)
    one_key = KeyVectors(key_dim)

    class Tile:
        """A tile of `width` columns as lists of chunks, and one token's step over it."""

        def __init__(self, width):
            self.width = width
            self.layout = state_layout(width)
            self.key_layout, self.value_layout = self.layout.reduce(1), self.layout.reduce(0)

        def zeros(self, count):
            return [zeros((KEY_ROWS, self.width), self.layout) for _ in range(count)]

        def load(self, refs, exists):
            """The state, zeros where it does not exist yet."""
            # By selection, not by a branch: the loads then do not wait for what decides.
            (zero,) = self.zeros(1)
            return [jnp.where(exists, load(ref, self.layout), zero) for ref in refs]

        def load_shared(self, refs, exists):
            """The same from shared memory that holds anything at all if the state does not exist."""

            @pl.when(jnp.logical_not(exists))
            def _():
                # Every lane clears what it reads itself.
                self.store(refs, self.zeros(len(refs)))
                # The bulk copy that overwrites it comes after.
                plgpu.commit_smem()

            return [widen(plgpu.load(r, layout=self.layout, optimized=False), self.layout, interpret) for r in refs]

        def store(self, refs, state):
            for ref, s in zip(refs, state, strict=True):
                store(ref, s)

        def load_keys(self, refs):
            return [along_values(load(ref, self.key_layout), self.width, self.layout) for ref in refs]

        def update(self, state, keys, factor, decay):
            spread = along_keys(factor, KEY_ROWS, self.layout)
            return [update(s, k, spread, decay) for s, k in zip(state, keys, strict=True)]

        def step(self, state, keys, queries, value, gates, needed=None):
            """New state (the old one where `needed` is false), output and delta factor."""
            sums = finish_sums(add_products(self.zeros(2), state, keys, queries))
            out, factor = token_output(sums, value, gates)

            def updated():
                return self.update(state, keys, factor, gates[0])

            state = updated() if needed is None else lax.cond(needed, updated, lambda: state)
            return state, out, factor

    class Rows:
        """A tile in whole rows, as memory has them: neighbouring lanes side by side, no bank of shared memory twice.

        The rows of a column are then spread over warps. Each thread's running sums are those of `Tile`, and
        `finish` adds them up in the order of its exchanges.
        """

        def __init__(self, width):
            self.width = width
            self.layout = row_layout(width, pool.dtype.itemsize)
            self.key_layout, self.factor_layout = self.layout.reduce(1), self.layout.reduce(0)
            self.value_layout = vector_layout(width)

        def zeros(self):
            return zeros((KEY_ROWS, self.width), self.layout)

        def load(self, refs):
            parts = [plgpu.load(ref, layout=self.layout, optimized=False) for ref in refs]
            return [widen(part, self.layout, interpret) for part in parts]

        def load_keys(self, refs):
            return [along_values(load(ref, self.key_layout), self.width, self.layout) for ref in refs]

        def finish(self, totals, partial_s):
            """`S^T k` and `S^T q`, a column a thread, by way of shared memory."""
            for which, total in enumerate(totals):
                store(partial_s.at[which], total)
            plgpu.commit_smem()
            sums = []
            for which in range(2):
                lanes = [load(partial_s.at[which, i], self.value_layout) for i in range(KEY_ROWS)]
                while len(lanes) > 1:
                    lanes = [a + b for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
                sums += lanes
            return sums

        def update(self, state, keys, factor, decay):
            """`factor` is repeated over the rows already."""
            return [update(s, k, factor, decay) for s, k in zip(state, keys, strict=True)]

    whole = Tile(tile)

    def where(i):
        """Row, value head and first value column of tile i."""
        v0 = lax.rem(i, num_tiles) * tile
        i = lax.div(i, num_tiles)
        return lax.div(i, num_value_heads), lax.rem(i, num_value_heads), v0

    def token_columns(h):
        """Where the fused rows hold the head's key, query and value."""
        hk = lax.div(h, group)
        return (
            pl.ds((num_key_heads + hk) * key_dim, key_dim),
            pl.ds(hk * key_dim, key_dim),
            2 * num_key_heads * key_dim + h * value_dim,
        )

    def stage_token(qkv_g, decay_g, beta_g, t, h, keys_s, queries_s, gates_s):
        """Puts key and query into shared memory in float32 and returns the gates; ends at a barrier.

        The compilers move a load down to its use, which for the gates is behind the barrier. Their way through shared
        memory holds them back, so that all loads of a token are on their way together.
        """
        key_columns, query_columns, _ = token_columns(h)
        key = one_key.load(qkv_g.at[t, key_columns])
        query = one_key.load(qkv_g.at[t, query_columns])
        one_key.store(keys_s, key)
        one_key.store(queries_s, query)
        for i, gate in enumerate((decay_g, beta_g)):
            gates_s[i] = gate[t, h]
        scales = one_key.scales(key, query)
        plgpu.commit_smem()
        return gates_s[0], gates_s[1], *scales

    def direct(qkv_g, decay_g, beta_g, slot_g, offset_g, has_g, *refs):
        """A tile a program, rows token by token."""
        if ring is None:
            pool_g, out_g, token_s, gates_s, *scratch = refs
        else:
            ring_slot_g, pool_g, ring_g, out_g, token_s, gates_s, *scratch = refs
        keys_s, queries_s = (token_s.at[i, pl.ds(0, key_dim)] for i in range(2))
        b, h, v0 = where(lax.axis_index("block"))
        # All indices at once: each is a trip to memory.
        slot, has_state = slot_g[b], has_g[b]
        start, end = row_bounds(offset_g, b, num_tokens)
        live = is_row_of(slot, max_slots)
        value_at = token_columns(h)[2]
        out_columns = pl.ds(h * value_dim + v0, tile)

        def by_token(part, state, at):
            """The row over a part of the tile in registers, `at` columns from its left."""

            def step(t, state):
                # By shared memory, for the same reason as the gates.
                value_s = token_s.at[2, pl.ds(0, part.width)]
                store(value_s, load(qkv_g.at[t, pl.ds(value_at + v0 + at, part.width)], part.value_layout))
                gates = stage_token(qkv_g, decay_g, beta_g, t, h, keys_s, queries_s, gates_s)
                value = load(value_s, part.value_layout)
                keys = part.load_keys([keys_s.at[c] for c in chunks])
                queries = part.load_keys([queries_s.at[c] for c in chunks])
                state, out, factor = part.step(state, keys, queries, value, gates)
                store(out_g.at[t, pl.ds(h * value_dim + v0 + at, part.width)], out)
                if ring is not None:
                    store(scratch[0], factor)
                plgpu.commit_smem()
                if ring is not None:
                    to = ring_row(ring_g, ring_slot_g[b], end - start)

                    @pl.when(to >= 0)
                    def _():
                        record = ring_g.at[to, lax.div(h, group), t - start]
                        write_record(record, lax.rem(h, group), group, v0, keys_s, scratch[0], value_dim, gates[0])

                    plgpu.commit_smem()
                return state

            return lax.fori_loop(start, end, step, state)

        def plain():
            state_g = [pool_g.at[slot, h, c, pl.ds(v0, tile)] for c in chunks]
            state = by_token(whole, whole.load(state_g, has_state), 0)

            @pl.when(True if ring is None else end - start > ring_g.shape[2])
            def _():
                whole.store(state_g, state)

        def whole_rows():
            """One token: a float32 tile in registers, one of 16 bits, which has more elements, in shared memory."""
            part = Rows(tile)
            columns = pl.ds(v0, tile)
            block = pool_g.at[slot, h, :, columns]
            states_bytes = batch * num_value_heads * key_dim * value_dim * pool.dtype.itemsize
            partial_s, *scratch_of_16_bit = scratch

            def begin():
                value = load(qkv_g.at[start, pl.ds(value_at + v0, tile)], part.value_layout)
                return value, stage_token(qkv_g, decay_g, beta_g, start, h, keys_s, queries_s, gates_s)

            def finish(sums, value, gates):
                """Writes the output, and returns the delta factor repeated over the rows of a chunk."""
                out, factor = token_output(part.finish(sums, partial_s), value, gates)
                # The query has been read by all.
                factor_s = token_s.at[1, pl.ds(0, tile)]
                store(factor_s, factor)
                store(out_g.at[start, out_columns], out)
                plgpu.commit_smem()
                return along_keys(load(factor_s, part.factor_layout), KEY_ROWS, part.layout)

            def in_registers():
                """All loads are issued at once, with the policy that bulk copies cannot be given."""
                state = load_chunks(block, part.layout, has_state, interpret)
                value, gates = begin()
                keys, queries = (part.load_keys([ref.at[c] for c in chunks]) for ref in (keys_s, queries_s))
                spread = finish(add_products((part.zeros(), part.zeros()), state, keys, queries), value, gates)
                keys = part.load_keys([keys_s.at[c] for c in chunks])
                state = part.update(state, keys, spread, gates[0])
                store_chunks(block, part.layout, state, states_bytes, interpret)

            def in_shared_memory():
                """Two passes over the tile, so that few registers hold many programs.

                It comes in pieces, the first of which are read before the last are there, and goes home from registers.
                """
                state_s, arrived = scratch_of_16_bit
                size = key_dim // num_pieces
                pieces = [pl.ds(i * size, size) for i in range(num_pieces)]
                unroll = math.gcd(size // KEY_ROWS, _UNROLL)
                rounds = size // KEY_ROWS // unroll
                fetch_to_keep(block, states_bytes, interpret)
                for i, piece in enumerate(pieces):
                    plgpu.copy_gmem_to_smem(pool_g.at[slot, h, piece, columns], state_s.at[piece], arrived.at[i])
                value, gates = begin()

                def some(i, r):
                    first = (i * rounds + r) * unroll
                    return [pl.ds((first + u) * KEY_ROWS, KEY_ROWS) for u in range(unroll)]

                sums = part.zeros(), part.zeros()
                for i in range(num_pieces):
                    plgpu.barrier_wait(arrived.at[i])

                    @pl.when(jnp.logical_not(has_state))
                    def _(i=i):
                        # Every lane clears what it reads itself.
                        for r in range(rounds):
                            for c in some(i, r):
                                store(state_s.at[c], part.zeros())

                    def read(r, sums, i=i):
                        at = some(i, r)
                        return add_products(
                            sums,
                            part.load([state_s.at[c] for c in at]),
                            part.load_keys([keys_s.at[c] for c in at]),
                            part.load_keys([queries_s.at[c] for c in at]),
                        )

                    sums = lax.fori_loop(0, rounds, read, sums)
                spread = finish(sums, value, gates)

                def write(r, _):
                    at = some(0, r)
                    keys = part.load_keys([keys_s.at[c] for c in at])
                    state = part.update(part.load([state_s.at[c] for c in at]), keys, spread, gates[0])
                    home = pool_g.at[slot, h, pl.ds(at[0].start, unroll * KEY_ROWS), columns]
                    store_chunks(home, part.layout, state, states_bytes, interpret)
                    return 0

                lax.fori_loop(0, num_pieces * rounds, write, 0)

            pl.when(end - start == 1)(in_registers if pool.dtype == jnp.float32 else in_shared_memory)

            @pl.when(end - start > 1)
            def _():
                narrow = Tile(16)

                def slab(j, _):
                    refs = [pool_g.at[slot, h, c, pl.ds(v0 + j * 16, 16)] for c in chunks]
                    narrow.store(refs, by_token(narrow, narrow.load(refs, has_state), j * 16))
                    return 0

                lax.fori_loop(0, tile // 16, slab, 0)

        # First: what it looks at is then one trip to memory with the other indices.
        zero_uncovered(offset_g, (offset_g[0], offset_g[batch]), out_g, out_columns, whole.value_layout, b, batch)
        pl.when(live & (end > start))(whole_rows if plan.rows else plain)

        @pl.when(jnp.logical_not(live))
        def _():
            zero_tokens(out_g, start, end, out_columns, whole.value_layout)

    num_blocks = min(_MULTIPROCESSORS * max(3 // plan.warpgroups, 1), -(-num_programs // plan.warpgroups))
    num_workers = num_blocks * plan.warpgroups

    def windowed(qkv_g, decay_g, beta_g, slot_g, offset_g, has_g, *refs):
        """Tiles one after the other, each in registers; the next one's state and values are on their way meanwhile.

        The tiles of a run have one row and one key head: if the row is one window, its keys, queries, norms and gates
        are computed once for all of them. The values of one window are in one of two stages while those of the next
        arrive in the other. Keys and queries that are needed next arrive as soon as the last ones are in use, the gates
        of the next run are in registers a run ahead, and what its row is is known two runs ahead.
        """
        *refs, state_arrived, values_arrived, keys_arrived = refs
        if ring is None:
            pool_g, out_g, *scratch = refs
        else:
            ring_slot_g, pool_g, ring_g, out_g, *scratch = refs
        warpgroup = lax.axis_index("warpgroup")
        # A block's workers are far apart, so that the last round of runs is spread over all multiprocessors.
        worker = warpgroup * num_blocks + lax.axis_index("block")
        scratch = [ref.at[warpgroup] for ref in scratch]
        state_s, keys_s, queries_s, scales_s, raw_s, values_s, *scratch, gates_s, rows_s = scratch
        if ring is not None:
            (factors_s,) = scratch
        vectors = KeyVectors(key_dim, window)
        num_runs = num_programs // plan.run

        runs_a_head = group * num_tiles // plan.run
        runs_a_row = num_key_heads * runs_a_head
        # Where there are runs enough to make up for it, the first program of a block has the memory for itself first.
        staggered = pool.dtype.itemsize == 2 and plan.warpgroups > 1 and num_runs > 2 * num_workers

        def place(n):
            """Row, key head, first tile among those of the key head, and first value column of the worker's run n.

            For one past its last, those of some run that exists.
            """
            b, run = divided(jnp.minimum(worker + n * num_workers, num_runs - 1), runs_a_row)
            hk, part = divided(run, runs_a_head)
            return b, hk, part * plan.run, run * (plan.run * tile)

        def row_indices(n):
            """What memory says about the row of the worker's run n, as int32."""
            b = place(n)[0]
            indices = [slot_g[b], offset_g[b], offset_g[b + 1], has_g[b].astype(jnp.int32)]
            return indices if ring is None else [*indices, ring_slot_g[b]]

        def row_of(n, indices):
            """Row of the worker's run n."""
            slot, start, end, has_state, *ring_slot = indices
            start, end = row_bounds((start, end), 0, num_tokens)
            busy = is_row_of(slot, max_slots) & (end > start) & (worker + n * num_workers < num_runs)
            return RunRow(slot, start, end, busy, has_state != 0, ring_slot[0] if ring_slot else None)

        def fetch_state(slot, column):
            """The tile of a state that begins at a value column, counted through all heads."""
            h, v0 = divided(column, value_dim)
            plgpu.copy_gmem_to_smem(pool_g.at[slot, h, :, pl.ds(v0, tile)], state_s, state_arrived.at[warpgroup])

        def fetch_values(first, column, stage):
            """The values of a tile in the window that begins at token `first`."""
            columns = pl.ds(2 * num_key_heads * key_dim + column, tile)
            source = qkv_g.at[pl.ds(first, window), columns]
            plgpu.copy_gmem_to_smem(source, values_s.at[stage], values_arrived.at[warpgroup])

        def fetch_keys(first, hk):
            """Keys and queries of a key head in the window that begins at token `first`."""
            for which, head in enumerate((num_key_heads + hk, hk)):
                source = qkv_g.at[pl.ds(first, window), pl.ds(head * key_dim, key_dim)]
                plgpu.copy_gmem_to_smem(source, raw_s.at[which], keys_arrived.at[warpgroup])

        def load_gates(first, n):
            """Decay and beta of all value heads of the key head of the worker's run n, a window from `first` on."""
            # The array may end before the window does.
            rows = pl.ds(jnp.minimum(first, num_tokens - window), window)
            columns = pl.ds(place(n)[1] * group, group)
            return [load(g.at[rows, columns], token_rows_layout(group)) for g in (decay_g, beta_g)]

        def fetch_run(n, row, stage, with_state: bool | jax.Array = True):
            """What the worker's run n begins with."""

            @pl.when(row.busy)
            def _():
                hk, column = place(n)[1::2]
                fetch_keys(row.start, hk)
                fetch_values(row.start, column, stage)
                pl.when(with_state)(lambda: fetch_state(row.slot, column))

        def run_of(n, carry):
            row, next_row, first_gates, stage = carry
            b, hk, part, column = place(n)
            next_hk, next_column = place(n + 1)[1::2]
            slot, start, end, busy, has_state, ring_slot = row
            indices_after = row_indices(n + 2)
            next_gates = load_gates(next_row.start, n + 1)
            one_window = end - start <= window
            if ring is None:
                commits = True
            else:
                to = ring_row(ring_g, ring_slot, end - start)
                commits = end - start > ring_g.shape[2]

            def prepare(i, first, gates):
                """Keys, queries, scales and gates of the run's tile i in the window that begins at token `first`."""
                plgpu.barrier_wait(keys_arrived.at[warpgroup])
                keys, queries = (vectors.load(raw_s.at[which]) for which in range(2))
                vectors.store(keys_s, keys)
                vectors.store(queries_s, queries)
                for j, gate in enumerate(gates):
                    store(gates_s.at[j], gate)
                for j, scale in enumerate(vectors.scales(keys, queries)):
                    store(scales_s.at[j], scale)
                warpgroup_barrier(interpret)
                last = first + window >= end
                again = jnp.logical_not(one_window) & (jnp.logical_not(last) | (i + 1 < plan.run))

                @pl.when(again | next_row.busy)
                def _():
                    of_row = jnp.where(last, start, first + window)
                    fetch_keys(jnp.where(again, of_row, next_row.start), jnp.where(again, hk, next_hk))

            def tile_of(i, stage):
                # The tile that the worker computes after this one, if any: of the same run, or of the next one.
                in_run = i + 1 < plan.run
                more = in_run | next_row.busy
                tile_column = column + i * tile
                next_tile_column = jnp.where(in_run, tile_column + tile, next_column)
                next_slot = jnp.where(in_run, slot, next_row.slot)
                next_start = jnp.where(in_run, start, next_row.start)
                member, v0 = divided((part + i) * tile, value_dim)
                out_columns = pl.ds(tile_column, tile)

                def window_of(carry):
                    first, state, stage = carry
                    last = first + window >= end
                    gates_shift = first - jnp.minimum(first, num_tokens - window)

                    @pl.when(first > start)
                    def _():
                        plgpu.barrier_wait(values_arrived.at[warpgroup])
                        # All warps have done with the window before.
                        warpgroup_barrier(interpret)

                    @pl.when(more | jnp.logical_not(last))
                    def _():
                        fetch_values(
                            jnp.where(last, next_start, first + window),
                            jnp.where(last, next_tile_column, tile_column),
                            1 - stage,
                        )

                    @pl.when(jnp.logical_not(one_window) & ((i > 0) | (first > start)))
                    def _():
                        prepare(i, first, load_gates(first, n))

                    def token(p, state):
                        needed = None if ring is None else commits | (first + p + 1 < end)
                        state, out, factor = whole.step(
                            state,
                            whole.load_keys([keys_s.at[p, c] for c in chunks]),
                            whole.load_keys([queries_s.at[p, c] for c in chunks]),
                            load(values_s.at[stage, p], whole.value_layout),
                            [
                                *(gates_s[j, p + gates_shift, member] for j in range(2)),
                                *(scales_s[j, p] for j in range(3)),
                            ],
                            needed=needed,
                        )
                        store(out_g.at[first + p, out_columns], out)
                        if ring is not None:
                            store(factors_s.at[p], factor)
                        return state

                    count = jnp.minimum(end - first, window)
                    state = lax.fori_loop(0, count, token, state)
                    if ring is not None:

                        @pl.when(to >= 0)
                        def _():
                            records = ring_g.at[to, hk]

                            @pl.when(count == window)
                            def _():
                                # A warp copies the factors that it has stored itself.
                                warp_barrier(interpret)
                                whole_window = records.at[pl.ds(first - start, window)]
                                # All decays of the key head are here, whoever computes its other tiles.
                                write_record(whole_window, member, group, v0, keys_s, factors_s, value_dim)

                                @pl.when((member == 0) & (v0 == 0))
                                def _():
                                    decays = load(gates_s.at[0], token_rows_layout(group))
                                    store(whole_window.at[:, pl.ds(key_dim + group * value_dim, group)], decays)

                            @pl.when(count < window)
                            def _():
                                warpgroup_barrier(interpret)
                                # Or its addresses were computed ahead of every tile.
                                at = lax.optimization_barrier(first - start)

                                def write(p, _):
                                    record = records.at[at + p]
                                    decay = gates_s[0, p + gates_shift, member]
                                    write_record(
                                        record, member, group, v0, keys_s.at[p], factors_s.at[p], value_dim, decay
                                    )
                                    return 0

                                lax.fori_loop(0, count, write, 0)

                    return first + window, state, 1 - stage

                plgpu.barrier_wait(state_arrived.at[warpgroup])
                state = whole.load_shared([state_s.at[c] for c in chunks], has_state)
                plgpu.barrier_wait(values_arrived.at[warpgroup])
                # All warps have the state, and have done with the tile before.
                warpgroup_barrier(interpret)

                @pl.when(more)
                def _():
                    fetch_state(next_slot, next_tile_column)

                _, state, stage = lax.while_loop(lambda carry: carry[0] < end, window_of, (start, state, stage))

                @pl.when(commits)
                def _():
                    h = hk * group + member
                    whole.store([pool_g.at[slot, h, c, pl.ds(v0, tile)] for c in chunks], state)

                return stage

            def compute():
                # Before the state is waited for.
                prepare(0, start, first_gates)
                if staggered:
                    pl.when((n == 0) & (warpgroup > 0))(lambda: fetch_state(slot, column))
                return lax.fori_loop(0, plan.run, tile_of, stage)

            def skip():
                fetch_run(n + 1, next_row, stage)
                return stage

            stage = lax.cond(busy, compute, skip)

            # The compilers turn an index into a scalar at once, and so wait for memory wherever it is loaded. From the
            # begin of the run until here these only pass to shared memory; the barrier keeps warps within two runs.
            for j, index in enumerate(indices_after):
                rows_s[lax.rem(n, 2), j] = index
            warpgroup_barrier(interpret)
            after_next = row_of(n + 2, [rows_s[lax.rem(n, 2), j] for j in range(len(indices_after))])
            live = is_row_of(slot, max_slots)

            @pl.when((ends[0] > 0) | (ends[1] < num_tokens) | jnp.logical_not(live))
            def _():
                def zero(i, _):
                    out_columns = pl.ds(column + i * tile, tile)

                    @pl.when(jnp.logical_not(live))
                    def _():
                        zero_tokens(out_g, start, end, out_columns, whole.value_layout)

                    zero_uncovered(offset_g, ends, out_g, out_columns, whole.value_layout, b, batch)
                    return 0

                lax.fori_loop(0, plan.run, zero, 0)

            return next_row, after_next, next_gates, stage

        ends = offset_g[0], offset_g[batch]
        # Both rows' indices in one trip to memory.
        first_row, second_row = (row_of(n, indices) for n, indices in enumerate([row_indices(n) for n in range(2)]))
        # Before the bulk copies, or they would wait until those are through.
        gates = load_gates(first_row.start, 0)
        fetch_run(0, first_row, 0, with_state=warpgroup == 0 if staggered else True)
        count_runs = lax.div(num_runs - worker + (num_workers - 1), num_workers)
        carry = first_row, second_row, gates, jnp.int32(0)
        lax.fori_loop(0, count_runs, run_of, carry)

    def streamed(qkv_g, decay_g, beta_g, slot_g, offset_g, has_g, *refs):
        """Tiles one after the other; the next one's state and first tokens are on their way while one is computed.

        Windows are numbered through, tile by tile; window w is held in stage w % 2.
        """
        *refs, state_arrived, tokens_arrived = refs
        if ring is None:
            pool_g, out_g, *scratch = refs
        else:
            ring_slot_g, pool_g, ring_g, out_g, *scratch = refs
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("block") * plan.warpgroups + warpgroup
        scratch = [ref.at[warpgroup] for ref in scratch]
        state_s, keys_s, queries_s, gates_s, raw_keys, raw_queries, raw_values, *scratch = scratch
        if ring is not None:
            (factors,) = scratch
        vectors = KeyVectors(key_dim, window)
        gate_layout = vectors.layout.reduce(1)
        count_tiles = lax.div(num_programs - worker + (num_workers - 1), num_workers)

        def tile_index(n):
            """The worker's tile n; for one past its last, some tile that exists."""
            return jnp.minimum(worker + n * num_workers, num_programs - 1)

        def bounds(n):
            """Row of the worker's tile n: its slot, its tokens, and whether there is anything to compute."""
            b, _, _ = where(tile_index(n))
            start, end = row_bounds(offset_g, b, num_tokens)
            slot = slot_g[b]
            return slot, start, end, is_row_of(slot, max_slots) & (end > start) & (n < count_tiles)

        def fetch_tokens(n, first, w):
            _, h, v0 = where(tile_index(n))
            key_columns, query_columns, value_at = token_columns(h)
            stage = lax.rem(w, 2)
            for columns, raw in (
                (key_columns, raw_keys),
                (query_columns, raw_queries),
                (pl.ds(value_at + v0, tile), raw_values),
            ):
                plgpu.copy_gmem_to_smem(
                    qkv_g.at[pl.ds(first, window), columns],
                    raw.at[stage],
                    tokens_arrived.at[2 * warpgroup + stage],
                )

        def fetch_tile(n, row, w):
            """State and first window, numbered w, of tile n."""
            slot, start, _, busy = row

            @pl.when(busy)
            def _():
                _, h, v0 = where(tile_index(n))
                source = pool_g.at[slot, h, :, pl.ds(v0, tile)]
                plgpu.copy_gmem_to_smem(source, state_s, state_arrived.at[warpgroup])
                fetch_tokens(n, start, w)

        def gates_from(first):
            """First token whose gates are loaded: earlier than `first` where the array would end too soon."""
            return jnp.minimum(first, num_tokens - window)

        def load_gates(n, first):
            _, h, _ = where(tile_index(n))
            at = pl.ds(gates_from(first), window)
            return [load(g.at[at, h], gate_layout) for g in (decay_g, beta_g)]

        def prepare(stage, decay, beta):
            """Puts keys and queries of a window into shared memory in float32, and the gates of its tokens."""
            keys, queries = vectors.load(raw_keys.at[stage]), vectors.load(raw_queries.at[stage])
            vectors.store(keys_s, keys)
            vectors.store(queries_s, queries)
            for n, gate in enumerate((decay, beta, *vectors.scales(keys, queries))):
                store(gates_s.at[n], gate)
            plgpu.commit_smem()

        def tile_of(n, carry):
            row, next_row, decay, beta, w = carry
            slot, start, end, busy = row
            b, h, v0 = where(tile_index(n))
            after_next = bounds(n + 2)
            out_columns = pl.ds(h * value_dim + v0, tile)
            if ring is None:
                commits = True
            else:
                to = ring_row(ring_g, ring_slot_g[b], end - start)
                commits = end - start > ring_g.shape[2]

            def window_of(carry):
                first, state, decay, beta, w = carry
                stage = lax.rem(w, 2)
                count = jnp.minimum(end - first, window)
                last = first + window >= end
                gate_shift = first - gates_from(first)
                plgpu.commit_smem()

                @pl.when(last)
                def _():
                    fetch_tile(n + 1, next_row, w + 1)

                @pl.when(jnp.logical_not(last))
                def _():
                    fetch_tokens(n, first + window, w + 1)

                next_gates = load_gates(jnp.where(last, n + 1, n), jnp.where(last, next_row[1], first + window))
                plgpu.barrier_wait(tokens_arrived.at[2 * warpgroup + stage])
                prepare(stage, decay, beta)

                def operands(p):
                    return (
                        whole.load_keys([keys_s.at[p, c] for c in chunks]),
                        whole.load_keys([queries_s.at[p, c] for c in chunks]),
                        load(raw_values.at[stage, p], whole.value_layout),
                        [gates_s[n, p + gate_shift if n < 2 else p] for n in range(5)],
                    )

                def token(p, state):
                    needed = None if ring is None else commits | (first + p + 1 < end)
                    state, out, factor = whole.step(state, *operands(p), needed=needed)
                    store(out_g.at[first + p, out_columns], out)
                    if ring is not None:
                        store(factors.at[p], factor)
                    return state

                state = lax.fori_loop(0, count, token, state)
                if ring is not None:
                    plgpu.commit_smem()

                    @pl.when(to >= 0)
                    def _():
                        def write(p, _):
                            record = ring_g.at[to, lax.div(h, group), first - start + p]
                            member, decay = lax.rem(h, group), gates_s[0, p + gate_shift]
                            write_record(record, member, group, v0, keys_s.at[p], factors.at[p], value_dim, decay)
                            return 0

                        lax.fori_loop(0, count, write, 0)

                return first + window, state, *next_gates, w + 1

            def compute():
                plgpu.barrier_wait(state_arrived.at[warpgroup])
                state = whole.load_shared([state_s.at[c] for c in chunks], has_g[b])
                carry = (start, state, decay, beta, w)
                _, state, *rest = lax.while_loop(lambda c: c[0] < end, window_of, carry)

                @pl.when(commits)
                def _():
                    whole.store([pool_g.at[slot, h, c, pl.ds(v0, tile)] for c in chunks], state)

                return rest

            def skip():
                fetch_tile(n + 1, next_row, w)

                @pl.when(jnp.logical_not(is_row_of(slot, max_slots)))
                def _():
                    zero_tokens(out_g, start, end, out_columns, whole.value_layout)

                return [*load_gates(n + 1, next_row[1]), w]

            decay, beta, w = lax.cond(busy, compute, skip)
            ends = offset_g[0], offset_g[batch]
            zero_uncovered(offset_g, ends, out_g, out_columns, whole.value_layout, b, batch)
            return next_row, after_next, decay, beta, w

        first_row = bounds(0)
        fetch_tile(0, first_row, 0)
        carry = (first_row, bounds(1), *load_gates(0, first_row[1]), jnp.int32(0))
        lax.fori_loop(0, count_tiles, tile_of, carry)

    body = direct if not window else windowed if window == _SHORT_WINDOW else streamed
    f32 = jnp.float32
    threads = {}
    if window:
        # Values, and keys with queries, or all of them in two stages.
        arrivals = [(1, 1), (2, 1)] if body is windowed else [(3, 2)]
        scratch = [
            *(
                plgpu.SMEM((plan.warpgroups, *shape), dtype)
                for shape, dtype in window_buffers(plan, key_dim, group, dtypes, ring is not None)
            ),
            plgpu.Barrier(num_barriers=plan.warpgroups),
            *(plgpu.Barrier(num_arrivals=n, num_barriers=stages * plan.warpgroups) for n, stages in arrivals),
        ]
        threads = {"num_threads": plan.warpgroups, "thread_name": "warpgroup"}
    else:
        scratch = [plgpu.SMEM((3, max(key_dim, tile)), f32), plgpu.SMEM((2,), f32)]
        if ring is not None:
            scratch.append(plgpu.SMEM((tile,), f32))
        if plan.rows:
            scratch.append(plgpu.SMEM((2, KEY_ROWS, tile), f32))
            if pool.dtype != f32:
                scratch += [plgpu.SMEM((key_dim, tile), pool.dtype), plgpu.Barrier(num_barriers=num_pieces)]
    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=jax.ShapeDtypeStruct((num_tokens, num_value_heads * value_dim), qkv.dtype),
        grid=(num_blocks if window else num_programs,),
        grid_names=("block",),
        scratch_types=scratch,
        compiler_params=compiler_params(),
        interpret=interpret,
        **threads,
    )
    if ring is None:
        return kernel(*tokens, *rows, pool)
    return kernel(*tokens, *rows, ring_slot_idx, pool, ring)


def ring_row(ring, ring_slot, length):
    """The ring row that the records of a row of `length` tokens go to, or -1."""
    return jnp.where(is_row_of(ring_slot, ring.shape[0]) & (length <= ring.shape[2]), ring_slot, -1)


def write_record(record, member, group, v0, key, factor, value_dim, decay=None):
    """One program's part of a record, or of those of a window: its columns of the delta factor, and what only the first
    of its kind writes. The decay of a record is written if it is given.

    Key and factor come from shared memory, so that the accesses can be as narrow as the record's alignment asks.
    """
    key_dim = key.shape[-1]

    def copy(source, at, window_layout):
        size = source.shape[-1]
        layout = vector_layout(size) if len(source.shape) == 1 else window_layout(size)
        store(record.at[..., pl.ds(at, size)], load(source, layout))

    copy(factor, key_dim + member * value_dim + v0, token_columns_layout)

    @pl.when(v0 == 0)
    def _():
        if decay is not None:
            record[key_dim + group * value_dim + member] = decay.astype(record.dtype)

        @pl.when(member == 0)
        def _():
            copy(key, 0, token_rows_layout)
