"""A tile of a state a program, which takes its row token by token: decode, and rows too few for windows."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import KEY_ROWS, along_keys, fetch_to_keep, is_row_of, load, load_chunks, store, store_chunks
from gdn_jax.recurrence.mosaic_gpu.plan import Call
from gdn_jax.recurrence.mosaic_gpu.step import (
    KeyVectors,
    Rows,
    Tile,
    add_products,
    ring_row,
    row_bounds,
    token_output,
    write_record,
    zero_tokens,
    zero_uncovered,
)

_UNROLL = 4
"""Chunks of a state in shared memory that are in registers together."""
_PIECES = 4
"""Bulk copies that a tile comes in, if its rows can be cut so."""


def _num_pieces(call: Call) -> int:
    return math.gcd(len(call.chunks), _PIECES)


def scratch_types(call: Call) -> list:
    f32, tile = jnp.float32, call.plan.tile
    types = [plgpu.SMEM((3, max(call.key_dim, tile)), f32), plgpu.SMEM((2,), f32)]
    if call.records:
        types.append(plgpu.SMEM((tile,), f32))
    if call.plan.rows:
        types.append(plgpu.SMEM((2, KEY_ROWS, tile), f32))
        if call.pool_dtype != f32:
            types += [plgpu.SMEM((call.key_dim, tile), call.pool_dtype), plgpu.Barrier(num_barriers=_num_pieces(call))]
    return types


def body(call: Call):
    tile, num_pieces = call.plan.tile, _num_pieces(call)
    one_key, whole = KeyVectors(call.key_dim), Tile(tile, call.interpret)

    def stage_token(qkv_g, decay_g, beta_g, t, h, keys_s, queries_s, gates_s):
        """Puts key and query into shared memory in float32 and returns the gates; ends at a barrier.

        The compilers move a load down to its use, which for the gates is behind the barrier. Their way through shared
        memory holds them back, so that all loads of a token are on their way together.
        """
        key_columns, query_columns, _ = call.token_columns(h)
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
        if call.records:
            ring_slot_g, pool_g, ring_g, out_g, token_s, gates_s, *scratch = refs
        else:
            pool_g, out_g, token_s, gates_s, *scratch = refs
        keys_s, queries_s = (token_s.at[i, pl.ds(0, call.key_dim)] for i in range(2))
        b, h, v0 = call.where(lax.axis_index("block"))
        # All indices at once: each is a trip to memory.
        slot, has_state = slot_g[b], has_g[b]
        start, end = row_bounds(offset_g, b, call.num_tokens)
        live = is_row_of(slot, call.max_slots)
        value_at = call.token_columns(h)[2]
        out_columns = pl.ds(h * call.value_dim + v0, tile)

        def by_token(part, state, at):
            """The row over a part of the tile in registers, `at` columns from its left."""

            def step(t, state):
                # By shared memory, for the same reason as the gates.
                value_s = token_s.at[2, pl.ds(0, part.width)]
                store(value_s, load(qkv_g.at[t, pl.ds(value_at + v0 + at, part.width)], part.value_layout))
                gates = stage_token(qkv_g, decay_g, beta_g, t, h, keys_s, queries_s, gates_s)
                value = load(value_s, part.value_layout)
                keys = part.load_keys([keys_s.at[c] for c in call.chunks])
                queries = part.load_keys([queries_s.at[c] for c in call.chunks])
                state, out, factor = part.step(state, keys, queries, value, gates)
                store(out_g.at[t, pl.ds(h * call.value_dim + v0 + at, part.width)], out)
                if call.records:
                    store(scratch[0], factor)
                plgpu.commit_smem()
                if call.records:
                    to = ring_row(ring_g, ring_slot_g[b], end - start)

                    @pl.when(to >= 0)
                    def _():
                        record = ring_g.at[to, lax.div(h, call.group), t - start]
                        write_record(
                            record, lax.rem(h, call.group), call.group, v0, keys_s, scratch[0], call.value_dim, gates[0]
                        )

                    plgpu.commit_smem()
                return state

            return lax.fori_loop(start, end, step, state)

        def plain():
            state_g = [pool_g.at[slot, h, c, pl.ds(v0, tile)] for c in call.chunks]
            state = by_token(whole, whole.load(state_g, has_state), 0)

            @pl.when(end - start > ring_g.shape[2] if call.records else True)
            def _():
                whole.store(state_g, state)

        def whole_rows():
            """One token: a float32 tile in registers, one of 16 bits, which has more elements, in shared memory."""
            part = Rows(tile, call.pool_dtype.itemsize, call.interpret)
            columns = pl.ds(v0, tile)
            block = pool_g.at[slot, h, :, columns]
            states_bytes = call.batch * call.num_value_heads * call.key_dim * call.value_dim * call.pool_dtype.itemsize
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
                state = load_chunks(block, part.layout, has_state, call.interpret)
                value, gates = begin()
                keys, queries = (part.load_keys([ref.at[c] for c in call.chunks]) for ref in (keys_s, queries_s))
                spread = finish(add_products((part.zeros(), part.zeros()), state, keys, queries), value, gates)
                keys = part.load_keys([keys_s.at[c] for c in call.chunks])
                state = part.update(state, keys, spread, gates[0])
                store_chunks(block, part.layout, state, states_bytes, call.interpret)

            def in_shared_memory():
                """Two passes over the tile, so that few registers hold many programs.

                It comes in pieces, the first of which are read before the last are there, and goes home from registers.
                """
                state_s, arrived = scratch_of_16_bit
                size = call.key_dim // num_pieces
                pieces = [pl.ds(i * size, size) for i in range(num_pieces)]
                unroll = math.gcd(size // KEY_ROWS, _UNROLL)
                rounds = size // KEY_ROWS // unroll
                fetch_to_keep(block, states_bytes, call.interpret)
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
                    store_chunks(home, part.layout, state, states_bytes, call.interpret)
                    return 0

                lax.fori_loop(0, num_pieces * rounds, write, 0)

            pl.when(end - start == 1)(in_registers if call.pool_dtype == jnp.float32 else in_shared_memory)

            @pl.when(end - start > 1)
            def _():
                narrow = Tile(16, call.interpret)

                def slab(j, _):
                    refs = [pool_g.at[slot, h, c, pl.ds(v0 + j * 16, 16)] for c in call.chunks]
                    narrow.store(refs, by_token(narrow, narrow.load(refs, has_state), j * 16))
                    return 0

                lax.fori_loop(0, tile // 16, slab, 0)

        # First: what it looks at is then one trip to memory with the other indices.
        zero_uncovered(
            offset_g, (offset_g[0], offset_g[call.batch]), out_g, out_columns, whole.value_layout, b, call.batch
        )
        pl.when(live & (end > start))(whole_rows if call.plan.rows else plain)

        @pl.when(jnp.logical_not(live))
        def _():
            zero_tokens(out_g, start, end, out_columns, whole.value_layout)

    return direct
