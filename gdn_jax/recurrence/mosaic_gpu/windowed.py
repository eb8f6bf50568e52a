"""Windows of four tokens: short rows, and verifies. Tiles one after the other, those of a key head together."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import as_int, cond, is_row_of, load_whole, store_whole, vector_layout, warpgroup_barrier, when
from gdn_jax.recurrence.mosaic_gpu.plan import Call, window_scratch
from gdn_jax.recurrence.mosaic_gpu.step import (
    KeyVectors,
    ring_row,
    row_bounds,
    zero_tokens,
    zero_uncovered,
)
from gdn_jax.recurrence.mosaic_gpu.window_tile import WindowTile


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


def divided(x, n: int):
    """`x // n` and `x % n` of an int32 that is not negative, in fewer operations than a signed division takes."""
    parts = (op(jnp.asarray(x).astype(jnp.uint32), jnp.uint32(n)) for op in (lax.div, lax.rem))
    return tuple(part.astype(jnp.int32) for part in parts)


def rows_layout(size: int):
    """Layout of [window, size]: a token a warp, one element a lane."""
    lanes = math.gcd(size, 32)
    repeat = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    if lanes == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 1),)), (-2,), repeat, -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((4, lanes), (1,))), (-3,), (*repeat, -2), -1)


def scratch_types(call: Call) -> list:
    """Values arrive for themselves, keys with queries."""
    arrivals = (plgpu.Barrier(num_arrivals=n, num_barriers=call.plan.warpgroups) for n in (1, 2 * call.run_heads))
    return [*window_scratch(call), *arrivals]


def body(call: Call):
    load = functools.partial(load_whole, interpret=call.interpret)
    store = functools.partial(store_whole, interpret=call.interpret)
    tile, window = call.plan.tile, call.plan.window
    whole = WindowTile(tile, call.key_dim, call.pool_dtype.itemsize, call.swizzled, call.interpret)

    def windowed(qkv_g, decay_g, beta_g, slot_g, offset_g, has_g, *refs):
        """Tiles one after the other, each in registers; the next one's state and values are on their way meanwhile.

        The tiles of a run have one row and one key head, or are all those of several key heads: if the row is one
        window, its keys, queries, norms and gates are computed once for all of them. The values of one window are in
        one of two stages while those of the next arrive in the other. Keys and queries that are needed next arrive as
        soon as the last ones are in use, the gates of the next run are in registers a run ahead, and what its row is is
        known two runs ahead.
        """
        *refs, state_arrived, values_arrived, keys_arrived = refs
        if call.records:
            ring_slot_g, pool_g, ring_g, out_g, *scratch = refs
        else:
            pool_g, out_g, *scratch = refs
        warpgroup = lax.axis_index("warpgroup")
        # A block's workers are far apart, so that the last round of runs is spread over all multiprocessors.
        worker = warpgroup * call.num_blocks + lax.axis_index("block")
        scratch = [ref.at[warpgroup] for ref in scratch]
        state_s, words_s, scales_s, raw_s, values_s, factors_s, gates_s, rows_s, *scratch = scratch
        if call.records:
            (keys_s,) = scratch
        vectors = KeyVectors(call.key_dim, call.interpret, (1, window))
        scale_layout = vectors.layout.reduce(2)
        num_runs = call.num_programs // call.plan.run

        tiles_a_head = call.group * call.num_tiles
        runs_a_row = call.num_key_heads * tiles_a_head // call.plan.run
        run_group = call.run_heads * call.group
        # Where there are tiles enough to make up for it, the first program of a block has the memory for itself first.
        staggered = (
            call.pool_dtype.itemsize == 2 and call.plan.warpgroups > 1 and call.num_programs > 4 * call.num_workers
        )

        def place(n):
            """Row, first key head, first tile among those of that, and first value column of the worker's run n.

            For one past its last, those of some run that exists.
            """
            b, run = divided(jnp.minimum(worker + n * call.num_workers, num_runs - 1), runs_a_row)
            hk, part = divided(run * call.plan.run, tiles_a_head)
            return b, hk, part, run * (call.plan.run * tile)

        def row_indices(n):
            """What memory says about the row of the worker's run n, as int32."""
            b = place(n)[0]
            indices = [slot_g[b], offset_g[b], offset_g[b + 1], as_int(has_g[b])]
            return [*indices, ring_slot_g[b]] if call.records else indices

        def row_of(n, indices):
            """Row of the worker's run n."""
            slot, start, end, has_state, *ring_slot = indices
            start, end = row_bounds((start, end), 0, call.num_tokens)
            busy = is_row_of(slot, call.max_slots) & (end > start) & (worker + n * call.num_workers < num_runs)
            return RunRow(slot, start, end, busy, has_state != 0, ring_slot[0] if ring_slot else None)

        def fetch_state(slot, column):
            """The tile of a state that begins at a value column, counted through all heads."""
            h, v0 = divided(column, call.value_dim)
            plgpu.copy_gmem_to_smem(pool_g.at[slot, h, :, pl.ds(v0, tile)], state_s, state_arrived.at[warpgroup])

        def fetch_values(first, column, stage):
            """The values of a tile in the window that begins at token `first`."""
            columns = pl.ds(2 * call.num_key_heads * call.key_dim + column, tile)
            source = qkv_g.at[pl.ds(first, window), columns]
            plgpu.copy_gmem_to_smem(source, values_s.at[stage], values_arrived.at[warpgroup])

        def fetch_keys(first, hk):
            """Keys and queries of a run, whose first key head is `hk`, in the window that begins at token `first`."""

            def fetch(i, _):
                for which, head in enumerate((call.num_key_heads + hk, hk)):
                    source = qkv_g.at[pl.ds(first, window), pl.ds((head + i) * call.key_dim, call.key_dim)]
                    plgpu.copy_gmem_to_smem(source, raw_s.at[which, i], keys_arrived.at[warpgroup])
                return 0

            lax.fori_loop(0, call.run_heads, fetch, 0)

        def load_gates(first, n):
            """Decay and beta of all value heads of the key heads of the worker's run n, a window from `first` on."""
            # The array may end before the window does.
            rows = pl.ds(jnp.minimum(first, call.num_tokens - window), window)
            columns = pl.ds(place(n)[1] * call.group, run_group)
            return [load(g.at[rows, columns], rows_layout(run_group)) for g in (decay_g, beta_g)]

        def fetch_run(n, row, stage, with_state: bool | jax.Array = True):
            """What the worker's run n begins with."""

            @when(row.busy)
            def _():
                hk, column = place(n)[1::2]
                fetch_keys(row.start, hk)
                fetch_values(row.start, column, stage)
                when(with_state)(lambda: fetch_state(row.slot, column))

        def run_of(n, carry):
            row, next_row, first_gates, stage = carry
            b, hk, part, column = place(n)
            next_hk, next_column = place(n + 1)[1::2]
            slot, start, end, busy, has_state, ring_slot = row
            indices_after = row_indices(n + 2)
            next_gates = load_gates(next_row.start, n + 1)
            one_window = end - start <= window
            if call.records:
                to = ring_row(ring_g, ring_slot, end - start)
                commits = end - start > ring_g.shape[2]
            else:
                commits = True

            def prepare(i, heads, first, gates):
                """Keys, queries, scales and gates in the window that begins at token `first`, for the run's tile i.

                `heads` is the slice of those, counted from the run's first, whose keys and queries are needed.
                """
                plgpu.barrier_wait(keys_arrived.at[warpgroup])
                keys, queries = (vectors.load(raw_s.at[which, heads]) for which in range(2))
                whole.store_words(words_s.at[heads], keys, queries, vectors.layout)
                if call.records:
                    vectors.store(keys_s.at[heads], keys)
                for j, scale in enumerate(vectors.scales(keys, queries)):
                    store(scales_s.at[heads, j], scale, scale_layout)
                for j, gate in enumerate(gates):
                    store(gates_s.at[j], gate, rows_layout(run_group))
                warpgroup_barrier(call.interpret)
                last = first + window >= end
                again = jnp.logical_not(one_window) & (jnp.logical_not(last) | (i + 1 < call.plan.run))

                @when(again | next_row.busy)
                def _():
                    of_row = jnp.where(last, start, first + window)
                    fetch_keys(jnp.where(again, of_row, next_row.start), jnp.where(again, hk, next_hk))

            def record_keys(head, first):
                """Keys and decays of a key head in the window that begins at token `first`, where there are records."""
                count = jnp.minimum(end - first, window)
                shift = first - jnp.minimum(first, call.num_tokens - window)
                decays = pl.ds(head * call.group, call.group)
                decays_at = pl.ds(call.key_dim + call.group * call.value_dim, call.group)

                @when((to >= 0) & (count == window))
                def _():
                    records = ring_g.at[to, hk + head, pl.ds(first - start, window)]
                    for size, at, source in (
                        (call.key_dim, pl.ds(0, call.key_dim), keys_s.at[head]),
                        (call.group, decays_at, gates_s.at[0, :, decays]),
                    ):
                        store(records.at[:, at], load(source, rows_layout(size)), rows_layout(size))

                @when((to >= 0) & (count < window))
                def _():
                    def write(p, _):
                        record = ring_g.at[to, hk + head, first - start + p]
                        for size, at, source in (
                            (call.key_dim, pl.ds(0, call.key_dim), keys_s.at[head, p]),
                            (call.group, decays_at, gates_s.at[0, p + shift, decays]),
                        ):
                            store(record.at[at], load(source, vector_layout(size)), vector_layout(size))
                        return 0

                    lax.fori_loop(0, count, write, 0)

            def tile_of(i, stage):
                # The tile that the worker computes after this one, if any: of the same run, or of the next one.
                in_run = i + 1 < call.plan.run
                more = in_run | next_row.busy
                tile_column = column + i * tile
                next_tile_column = jnp.where(in_run, tile_column + tile, next_column)
                next_slot = jnp.where(in_run, slot, next_row.slot)
                next_start = jnp.where(in_run, start, next_row.start)
                in_run_member, v0 = divided((part + i) * tile, call.value_dim)
                head, member = divided(in_run_member, call.group) if call.run_heads > 1 else (0, in_run_member)
                out_columns = pl.ds(tile_column, tile)

                def window_of(carry):
                    first, state, stage = carry
                    last = first + window >= end
                    gates_shift = first - jnp.minimum(first, call.num_tokens - window)

                    @when(first > start)
                    def _():
                        plgpu.barrier_wait(values_arrived.at[warpgroup])
                        # All warps have done with the window before.
                        warpgroup_barrier(call.interpret)

                    @when(more | jnp.logical_not(last))
                    def _():
                        fetch_values(
                            jnp.where(last, next_start, first + window),
                            jnp.where(last, next_tile_column, tile_column),
                            1 - stage,
                        )

                    @when(jnp.logical_not(one_window) & ((i > 0) | (first > start)))
                    def _():
                        prepare(i, pl.ds(head, 1), first, load_gates(first, n))
                        if call.records:
                            when((member == 0) & (v0 == 0))(lambda: record_keys(head, first))

                    def token(p, state):
                        needed = commits | (first + p + 1 < end) if call.records else None
                        state, out, factor = whole.window_step(
                            state,
                            words_s.at[head, p],
                            load(values_s.at[stage, p], whole.spread_layout),
                            [
                                *(gates_s[j, p + gates_shift, in_run_member] for j in range(2)),
                                *(scales_s[head, j, p] for j in range(3)),
                            ],
                            factors_s.at[p],
                            needed,
                        )
                        store(out_g.at[first + p, out_columns], out, whole.spread_layout)
                        if call.records:
                            factors = pl.ds(call.key_dim + member * call.value_dim + v0, tile)
                            record = ring_g.at[to, hk + head, first - start + p, factors]
                            when(to >= 0)(lambda: store(record, factor, whole.spread_layout))
                        return state

                    count = jnp.minimum(end - first, window)
                    state = lax.fori_loop(0, count, token, state)
                    return first + window, state, 1 - stage

                plgpu.barrier_wait(state_arrived.at[warpgroup])
                state = whole.load_shared(state_s, has_state)
                plgpu.barrier_wait(values_arrived.at[warpgroup])
                # All warps have the state, and have done with the tile before.
                warpgroup_barrier(call.interpret)

                @when(more)
                def _():
                    fetch_state(next_slot, next_tile_column)

                _, state, stage = lax.while_loop(lambda carry: carry[0] < end, window_of, (start, state, stage))

                @when(commits)
                def _():
                    h = hk * call.group + in_run_member
                    whole.store(pool_g.at[slot, h, :, pl.ds(v0, tile)], state)

                return stage

            def compute():
                # Before the state is waited for.
                prepare(0, pl.ds(0, call.run_heads), start, first_gates)
                if staggered:
                    when((n == 0) & (warpgroup > 0))(lambda: fetch_state(slot, column))
                if call.records:
                    # Of several runs of a key head the first does it.
                    @when(part == 0)
                    def _():
                        def record(head, _):
                            record_keys(head, start)
                            return 0

                        lax.fori_loop(0, call.run_heads, record, 0)

                return lax.fori_loop(0, call.plan.run, tile_of, stage)

            def skip():
                fetch_run(n + 1, next_row, stage)
                return stage

            stage = cond(busy, compute, skip)

            # The compilers turn an index into a scalar at once, and so wait for memory wherever it is loaded. From the
            # begin of the run until here these only pass to shared memory; the barrier keeps warps within two runs.
            for j, index in enumerate(indices_after):
                rows_s[lax.rem(n, 2), j] = index
            warpgroup_barrier(call.interpret)
            after_next = row_of(n + 2, [rows_s[lax.rem(n, 2), j] for j in range(len(indices_after))])
            live = is_row_of(slot, call.max_slots)

            @when((ends[0] > 0) | (ends[1] < call.num_tokens) | jnp.logical_not(live))
            def _():
                def zero(i, _):
                    out_columns = pl.ds(column + i * tile, tile)

                    @when(jnp.logical_not(live))
                    def _():
                        zero_tokens(out_g, start, end, out_columns, whole.value_layout, call.interpret)

                    layout = whole.value_layout
                    zero_uncovered(offset_g, ends, out_g, out_columns, layout, b, call.batch, call.interpret)
                    return 0

                lax.fori_loop(0, call.plan.run, zero, 0)

            return next_row, after_next, next_gates, stage

        ends = offset_g[0], offset_g[call.batch]
        # Both rows' indices in one trip to memory.
        first_row, second_row = (row_of(n, indices) for n, indices in enumerate([row_indices(n) for n in range(2)]))
        # Before the bulk copies, or they would wait until those are through.
        gates = load_gates(first_row.start, 0)
        fetch_run(0, first_row, 0, with_state=warpgroup == 0 if staggered else True)
        count_runs = lax.div(num_runs - worker + (call.num_workers - 1), call.num_workers)
        carry = first_row, second_row, gates, jnp.int32(0)
        lax.fori_loop(0, count_runs, run_of, carry)

    return windowed
