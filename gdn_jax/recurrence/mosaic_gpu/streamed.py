"""Windows of sixteen tokens: long rows. Tiles one after the other, the next one's first tokens on their way."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import KEY_ROWS, along_values, cond, is_row_of, load, load_whole, store, store_whole, when, widen
from gdn_jax.recurrence.mosaic_gpu.plan import Call, window_scratch
from gdn_jax.recurrence.mosaic_gpu.step import (
    KeyVectors,
    Tile,
    ring_row,
    row_bounds,
    write_record,
    zero_tokens,
    zero_uncovered,
)


class TileByChunks(Tile):
    """A tile each of whose chunks has an address of its own, as loads and stores of Pallas compute it.

    The tokens of a long row are a chain. With one address for all chunks there is less to compile, but the compilers
    give the loop over tokens another order, and one row of 8192 takes 4 percent longer.
    """

    def chunks(self, ref):
        return [ref.at[pl.ds(i, KEY_ROWS)] for i in range(0, ref.shape[0], KEY_ROWS)]

    def shared_chunks(self, ref):
        chunks = [plgpu.load(chunk, layout=self.layout, optimized=False) for chunk in self.chunks(ref)]
        return [widen(chunk, self.layout, self.interpret) for chunk in chunks]

    def store(self, ref, state):
        for chunk, value in zip(self.chunks(ref), state, strict=True):
            store(chunk, value)

    def load_keys(self, ref):
        return [along_values(load(chunk, self.key_layout), self.width, self.layout) for chunk in self.chunks(ref)]


def scratch_types(call: Call) -> list:
    """Keys, queries and values arrive together, in two stages."""
    return [*window_scratch(call), plgpu.Barrier(num_arrivals=3, num_barriers=2 * call.plan.warpgroups)]


def body(call: Call):
    get = functools.partial(load_whole, interpret=call.interpret)
    put = functools.partial(store_whole, interpret=call.interpret)
    tile, window, whole = call.plan.tile, call.plan.window, TileByChunks(call.plan.tile, call.interpret)

    def streamed(qkv_g, decay_g, beta_g, slot_g, offset_g, has_g, *refs):
        """Tiles one after the other; the next one's state and first tokens are on their way while one is computed.

        Windows are numbered through, tile by tile; window w is held in stage w % 2.
        """
        *refs, state_arrived, tokens_arrived = refs
        if call.records:
            ring_slot_g, pool_g, ring_g, out_g, *scratch = refs
        else:
            pool_g, out_g, *scratch = refs
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("block") * call.plan.warpgroups + warpgroup
        scratch = [ref.at[warpgroup] for ref in scratch]
        state_s, keys_s, queries_s, gates_s, raw_keys, raw_queries, raw_values, *scratch = scratch
        if call.records:
            (factors,) = scratch
        vectors = KeyVectors(call.key_dim, call.interpret, (4,))
        gate_layout = vectors.layout.reduce(1)
        count_tiles = lax.div(call.num_programs - worker + (call.num_workers - 1), call.num_workers)

        def tile_index(n):
            """The worker's tile n; for one past its last, some tile that exists."""
            return jnp.minimum(worker + n * call.num_workers, call.num_programs - 1)

        def bounds(n):
            """Row of the worker's tile n: its slot, its tokens, and whether there is anything to compute."""
            b, _, _ = call.where(tile_index(n))
            start, end = row_bounds(offset_g, b, call.num_tokens)
            slot = slot_g[b]
            return slot, start, end, is_row_of(slot, call.max_slots) & (end > start) & (n < count_tiles)

        def fetch_tokens(n, first, w):
            _, h, v0 = call.where(tile_index(n))
            key_columns, query_columns, value_at = call.token_columns(h)
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

            @when(busy)
            def _():
                _, h, v0 = call.where(tile_index(n))
                source = pool_g.at[slot, h, :, pl.ds(v0, tile)]
                plgpu.copy_gmem_to_smem(source, state_s, state_arrived.at[warpgroup])
                fetch_tokens(n, start, w)

        def gates_from(first):
            """First token whose gates are loaded: earlier than `first` where the array would end too soon."""
            return jnp.minimum(first, call.num_tokens - window)

        def load_gates(n, first):
            _, h, _ = call.where(tile_index(n))
            at = pl.ds(gates_from(first), window)
            return [get(g.at[at, h], gate_layout) for g in (decay_g, beta_g)]

        def prepare(stage, decay, beta):
            """Puts keys and queries of a window into shared memory in float32, and the gates of its tokens."""
            keys, queries = vectors.load(raw_keys.at[stage]), vectors.load(raw_queries.at[stage])
            vectors.store(keys_s, keys)
            vectors.store(queries_s, queries)
            for n, gate in enumerate((decay, beta, *vectors.scales(keys, queries))):
                put(gates_s.at[n], gate, gate_layout)
            plgpu.commit_smem()

        def tile_of(n, carry):
            row, next_row, decay, beta, w = carry
            slot, start, end, busy = row
            b, h, v0 = call.where(tile_index(n))
            after_next = bounds(n + 2)
            out_columns = pl.ds(h * call.value_dim + v0, tile)
            if call.records:
                to = ring_row(ring_g, ring_slot_g[b], end - start)
                commits = end - start > ring_g.shape[2]
            else:
                commits = True

            def window_of(carry):
                first, state, decay, beta, w = carry
                stage = lax.rem(w, 2)
                count = jnp.minimum(end - first, window)
                last = first + window >= end
                gate_shift = first - gates_from(first)
                plgpu.commit_smem()

                @when(last)
                def _():
                    fetch_tile(n + 1, next_row, w + 1)

                @when(jnp.logical_not(last))
                def _():
                    fetch_tokens(n, first + window, w + 1)

                next_gates = load_gates(jnp.where(last, n + 1, n), jnp.where(last, next_row[1], first + window))
                plgpu.barrier_wait(tokens_arrived.at[2 * warpgroup + stage])
                prepare(stage, decay, beta)

                def operands(p):
                    return (
                        whole.load_keys(keys_s.at[p]),
                        whole.load_keys(queries_s.at[p]),
                        load(raw_values.at[stage, p], whole.value_layout),
                        [gates_s[n, p + gate_shift if n < 2 else p] for n in range(5)],
                    )

                def token(p, state):
                    needed = commits | (first + p + 1 < end) if call.records else None
                    state, out, factor = whole.step(state, *operands(p), needed=needed)
                    put(out_g.at[first + p, out_columns], out, whole.value_layout)
                    if call.records:
                        put(factors.at[p], factor, whole.value_layout)
                    return state

                state = lax.fori_loop(0, count, token, state)
                if call.records:
                    plgpu.commit_smem()

                    @when(to >= 0)
                    def _():
                        def write(p, _):
                            record = ring_g.at[to, lax.div(h, call.group), first - start + p]
                            member, decay = lax.rem(h, call.group), gates_s[0, p + gate_shift]
                            vectors_s = keys_s.at[p], factors.at[p]
                            write_record(
                                record, member, call.group, v0, *vectors_s, call.value_dim, decay, call.interpret
                            )
                            return 0

                        lax.fori_loop(0, count, write, 0)

                return first + window, state, *next_gates, w + 1

            def compute():
                plgpu.barrier_wait(state_arrived.at[warpgroup])
                state = whole.load_shared(state_s, has_g[b])
                carry = (start, state, decay, beta, w)
                _, state, *rest = lax.while_loop(lambda c: c[0] < end, window_of, carry)

                @when(commits)
                def _():
                    whole.store(pool_g.at[slot, h, :, pl.ds(v0, tile)], state)

                return rest

            def skip():
                fetch_tile(n + 1, next_row, w)

                @when(jnp.logical_not(is_row_of(slot, call.max_slots)))
                def _():
                    zero_tokens(out_g, start, end, out_columns, whole.value_layout, call.interpret)

                return [*load_gates(n + 1, next_row[1]), w]

            decay, beta, w = cond(busy, compute, skip)
            ends = offset_g[0], offset_g[call.batch]
            zero_uncovered(offset_g, ends, out_g, out_columns, whole.value_layout, b, call.batch, call.interpret)
            return next_row, after_next, decay, beta, w

        first_row = bounds(0)
        fetch_tile(0, first_row, 0)
        carry = (first_row, bounds(1), *load_gates(0, first_row[1]), jnp.int32(0))
        lax.fori_loop(0, count_tiles, tile_of, carry)

    return streamed
