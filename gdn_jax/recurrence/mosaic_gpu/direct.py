"""A tile of a state a program, which takes its row token by token: decode, and rows too few for windows."""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import (
    KEY_ROWS,
    along_keys,
    fetch_to_keep,
    is_row_of,
    load_chunks,
    load_whole,
    store_chunks,
    store_whole,
    vector_layout,
    when,
)
from gdn_jax.recurrence.mosaic_gpu.plan import Call
from gdn_jax.recurrence.mosaic_gpu.step import (
    KeyVectors,
    Rows,
    Tile,
    add_products,
    clear_chunks,
    ring_row,
    row_bounds,
    token_output,
    write_record,
    zero_tokens,
    zero_uncovered,
)

_PIECES = 4
"""Bulk copies that the tile of a program comes in, if its rows can be cut so. Several tiles in turn come whole."""


def _num_pieces(call: Call) -> int:
    return math.gcd(len(call.chunks), _PIECES) if call.plan.run == 1 else 1


def scratch_types(call: Call) -> list:
    f32, tile = jnp.float32, call.plan.tile
    types = [plgpu.SMEM((3, max(call.key_dim, tile)), f32), plgpu.SMEM((2 * call.plan.run,), f32)]
    if call.records:
        types.append(plgpu.SMEM((tile,), f32))
    if call.plan.rows:
        types.append(plgpu.SMEM((2, KEY_ROWS, tile), f32))
        if call.pool_dtype != f32:
            types += [plgpu.SMEM((call.key_dim, tile), call.pool_dtype), plgpu.Barrier(num_barriers=_num_pieces(call))]
    return types


def body(call: Call):
    tile, run = call.plan.tile, call.plan.run
    load = functools.partial(load_whole, interpret=call.interpret)
    store = functools.partial(store_whole, interpret=call.interpret)
    one_key, whole = KeyVectors(call.key_dim, call.interpret), Tile(tile, call.interpret)

    def stage_token(qkv_g, decay_g, beta_g, t, heads, keys_s, queries_s, gates_s):
        """Puts key and query into shared memory in float32 and returns the gates of each head; ends at a barrier.

        The compilers move a load down to its use, which for the gates is behind the barrier. Their way through shared
        memory holds them back, so that all loads of a token are on their way together.
        """
        key_columns, query_columns, _ = call.token_columns(heads[0])
        key = one_key.load(qkv_g.at[t, key_columns])
        query = one_key.load(qkv_g.at[t, query_columns])
        one_key.store(keys_s, key)
        one_key.store(queries_s, query)
        for i, h in enumerate(heads):
            gates_s[2 * i], gates_s[2 * i + 1] = decay_g[t, h], beta_g[t, h]
        scales = one_key.scales(key, query)
        plgpu.commit_smem()
        return [(gates_s[2 * i], gates_s[2 * i + 1], *scales) for i in range(len(heads))]

    def direct(qkv_g, decay_g, beta_g, slot_g, offset_g, has_g, *refs):
        """A tile a program, or several of a key head in turn, rows token by token."""
        if call.records:
            ring_slot_g, pool_g, ring_g, out_g, token_s, gates_s, *scratch = refs
        else:
            pool_g, out_g, token_s, gates_s, *scratch = refs
        keys_s, queries_s = (token_s.at[i, pl.ds(0, call.key_dim)] for i in range(2))
        first = lax.axis_index("block") * run
        b, h, v0 = call.where(first)
        # All indices at once: each is a trip to memory.
        slot, has_state = slot_g[b], has_g[b]
        start, end = row_bounds(offset_g, b, call.num_tokens)
        live = is_row_of(slot, call.max_slots)
        out_columns, out_layout = pl.ds(h * call.value_dim + v0, run * tile), vector_layout(run * tile)

        def by_token(part, state, h, v0):
            """The row over a part of a tile in registers, from column `v0` of head `h` on."""

            def step(t, state):
                # By shared memory, for the same reason as the gates.
                value_s = token_s.at[2, pl.ds(0, part.width)]
                values = qkv_g.at[t, pl.ds(call.token_columns(h)[2] + v0, part.width)]
                store(value_s, load(values, part.value_layout), part.value_layout)
                (gates,) = stage_token(qkv_g, decay_g, beta_g, t, [h], keys_s, queries_s, gates_s)
                value = load(value_s, part.value_layout)
                keys = part.load_keys(keys_s)
                queries = part.load_keys(queries_s)
                state, out, factor = part.step(state, keys, queries, value, gates)
                store(out_g.at[t, pl.ds(h * call.value_dim + v0, part.width)], out, part.value_layout)
                if call.records:
                    store(scratch[0], factor, part.value_layout)
                plgpu.commit_smem()
                if call.records:
                    to = ring_row(ring_g, ring_slot_g[b], end - start)

                    @when(to >= 0)
                    def _():
                        record = ring_g.at[to, lax.div(h, call.group), t - start]
                        member, vectors_s = lax.rem(h, call.group), (keys_s, scratch[0])
                        write_record(
                            record, member, call.group, v0, *vectors_s, call.value_dim, gates[0], call.interpret
                        )

                    plgpu.commit_smem()
                return state

            return lax.fori_loop(start, end, step, state)

        def plain():
            state_g = pool_g.at[slot, h, :, pl.ds(v0, tile)]
            state = by_token(whole, whole.load(state_g, has_state), h, v0)

            @when(end - start > ring_g.shape[2] if call.records else True)
            def _():
                whole.store(state_g, state)

        def whole_rows():
            """One token: a float32 tile in registers, one of 16 bits, which has more elements, in shared memory."""
            part = Rows(tile, call.pool_dtype.itemsize, call.interpret)
            tiles = [call.where(first + n)[1:] for n in range(run)]
            states_bytes = call.batch * call.num_value_heads * call.key_dim * call.value_dim * call.pool_dtype.itemsize
            partial_s, *tile_s = scratch

            def begin():
                values = [qkv_g.at[start, pl.ds(call.token_columns(h)[2] + v0, tile)] for h, v0 in tiles]
                values = [load(value, part.value_layout) for value in values]
                heads = [h for h, _ in tiles]
                return values, stage_token(qkv_g, decay_g, beta_g, start, heads, keys_s, queries_s, gates_s)

            def finish(sums, value, gates, h, v0):
                """Writes the output, and returns the delta factor repeated over the rows of a chunk."""
                out, factor = token_output(part.finish(sums, partial_s), value, gates)
                factor_s = token_s.at[2, pl.ds(0, tile)]
                store(factor_s, factor, part.value_layout)
                store(out_g.at[start, pl.ds(h * call.value_dim + v0, tile)], out, part.value_layout)
                plgpu.commit_smem()
                return along_keys(load(factor_s, part.factor_layout), KEY_ROWS, part.layout)

            def in_registers():
                """All loads of a tile are issued at once, with the policy that bulk copies cannot be given."""
                values, gates = [], []
                for n, (h, v0) in enumerate(tiles):
                    block = pool_g.at[slot, h, :, pl.ds(v0, tile)]
                    state = load_chunks(block, part.layout, has_state, call.interpret)
                    if n == 0:
                        values, gates = begin()
                    keys, queries = (part.load_keys(ref) for ref in (keys_s, queries_s))
                    sums = add_products((part.zeros(), part.zeros()), state, keys, queries)
                    spread = finish(sums, values[n], gates[n], h, v0)
                    keys = part.load_keys(keys_s)
                    state = part.update(state, keys, spread, gates[n][0])
                    store_chunks(block, part.layout, state, states_bytes, call.interpret)

            def in_shared_memory():
                """Two passes over a tile, so that few registers hold many programs.

                It comes in pieces, the first of which are read before the last are there, and goes home from registers.
                Of several tiles, which are in the cache, the next one is asked for when that has been read.
                """
                state_s, arrived = tile_s
                count = _num_pieces(call)
                size = call.key_dim // count

                def at_home(n, rows):
                    h, v0 = tiles[n]
                    return pool_g.at[slot, h, rows, pl.ds(v0, tile)]

                def fetch(n, i):
                    rows = pl.ds(i * size, size)
                    plgpu.copy_gmem_to_smem(at_home(n, rows), state_s.at[rows], arrived.at[i])

                fetch_to_keep(at_home(0, pl.ds(0, call.key_dim)), states_bytes, call.interpret)
                for i in range(count):
                    fetch(0, i)
                values, gates = begin()
                for n, (h, v0) in enumerate(tiles):

                    def add(i, sums):
                        rows = pl.ds(i * size, size)
                        plgpu.barrier_wait(arrived.at[i])

                        @when(jnp.logical_not(has_state))
                        def _():
                            clear_chunks(state_s.at[rows], part.zeros())

                        keys, queries = (part.load_keys(ref.at[rows]) for ref in (keys_s, queries_s))
                        return add_products(sums, part.load(state_s.at[rows]), keys, queries)

                    sums = lax.fori_loop(0, count, add, (part.zeros(), part.zeros()))
                    decay, spread = gates[n][0], finish(sums, values[n], gates[n], h, v0)

                    def send_home(i, _, n=n, decay=decay, spread=spread):
                        rows = pl.ds(i * size, size)
                        state = part.update(part.load(state_s.at[rows]), part.load_keys(keys_s.at[rows]), spread, decay)
                        store_chunks(at_home(n, rows), part.layout, state, states_bytes, call.interpret)
                        if n + 1 < run:
                            plgpu.commit_smem()
                            fetch(n + 1, i)
                        return 0

                    lax.fori_loop(0, count, send_home, 0)

            when(end - start == 1)(in_shared_memory if tile_s else in_registers)

            @when(end - start > 1)
            def _():
                narrow = Tile(16, call.interpret)

                def slab(j, _):
                    _, h, v0 = call.where(first + lax.div(j, tile // 16))
                    v0 += lax.rem(j, tile // 16) * 16
                    ref = pool_g.at[slot, h, :, pl.ds(v0, 16)]
                    narrow.store(ref, by_token(narrow, narrow.load(ref, has_state), h, v0))
                    return 0

                lax.fori_loop(0, run * tile // 16, slab, 0)

        # First: what it looks at is then one trip to memory with the other indices.
        ends = offset_g[0], offset_g[call.batch]
        zero_uncovered(offset_g, ends, out_g, out_columns, out_layout, b, call.batch, call.interpret)
        when(live & (end > start))(whole_rows if call.plan.rows else plain)

        @when(jnp.logical_not(live))
        def _():
            zero_tokens(out_g, start, end, out_columns, out_layout, call.interpret)

    return direct
