"""Rows cut into segments, where few heads leave most multiprocessors idle: an affine map each, and states between."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import after_previous, is_row_of, store, when
from gdn_jax._ragged import row_bounds
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import (
    COL,
    FIRST,
    ITEM,
    K_SCALE,
    LENGTH,
    LINE,
    LOG_GAMMA,
    NUM_VECTORS,
    WGMMA,
    C,
    accumulate,
    aliases_of,
    along_cols,
    along_rows,
    copy_target,
    f16,
    f32,
    i32,
    iota,
    load_transposed,
    load_vector,
    params,
    store_tile,
    store_transposed,
    swizzled_buffer,
    zero_tile,
)
from gdn_jax.recurrence.mosaic_gpu_chunked.values import (
    bring_values,
    in_full,
    in_units,
    inverse,
    load_paired,
    load_values,
    store_paired,
    unit_of,
    value_buffer,
    value_parts,
)


def cut_rows(offsets, table, total, count):
    """Every row in `count` segments of equally many chunks, the last ones shorter or empty: int32 [4, B * count]."""
    start, length = [x[:, None] for x in row_bounds(offsets, total)]
    chunks = (length + (C - 1)) // C
    each = (chunks + (count - 1)) // count
    first = jnp.minimum(jnp.arange(count, dtype=i32) * each, chunks)
    past = jnp.minimum(first + each, chunks)
    tokens = jnp.minimum(past * C, length) - jnp.minimum(first * C, length)
    item = jnp.minimum(table[:, None] >> 1, total // C + table.shape[0] - chunks) + first
    segments = [start + first * C, tokens, item, (past == chunks) & (first < past)]
    return jnp.stack([x.astype(i32).reshape(-1) for x in segments])


def segment_maps(qkv, kq, r, vec, slot_idx, table, *, count, dims, max_slots, interpret):
    """What segments do to the state, as (local, steps): only of the segments that another one follows.

    `local`, float32 [B * count, nv, VD, KD], is the transposed state that a segment leaves behind when it starts from
    zeros, with rows as `load_values` has them. `steps` are the states that the unit vectors become with values of zero,
    transposed: the map from the state before the segment to its share in the state after it. They are sums of two
    arrays of 16 bits, in tiles: [B * count, nv, (KD / LINE) * 2 * (KD / LINE), LINE, LINE], by rows of tiles, the
    array, and columns.
    """
    nk, nv, key_dim, value_dim = dims
    group = nv // nk
    halves = key_dim // LINE
    stages = 3
    wide = qkv.dtype == f32
    dtype = f16 if wide else qkv.dtype
    # With float32 tokens, states may be of any size, and two of these are exact enough.
    step_dtype = jnp.bfloat16 if wide else dtype
    segments = table.shape[1]
    value_tiles = value_dim // C
    tiles = map_tiles(key_dim, value_dim)

    def body(
        qkv_g, kq_g, r_g, vec_g, slot_g, table_g, local_g, steps_g,
        k_u, v_u, r_s, vec_s, in_bar, in_free, done,
    ):  # fmt: skip
        k_rows, k_tiles = aliases_of(interpret, k_u)
        v_rows, v_tiles = (v_u, v_u) if interpret is not None else [alias for (alias,) in v_u[:2]]
        segment, head, column = [lax.axis_index(name) for name in ("segment", "head", "column")]
        key_head = lax.div(head, i32(group))
        wg = lax.axis_index("wg")
        start, item = table_g[FIRST, segment], table_g[ITEM, segment]
        follows = lax.rem(segment, i32(count)) < count - 1
        follows = follows & (table_g[LENGTH, jnp.minimum(segment + 1, segments - 1)] > 0)
        live = follows & is_row_of(slot_g[lax.div(segment, i32(count))], max_slots)
        # A segment that another one follows is whole chunks.
        n_chunks = jnp.where(live, lax.div(table_g[LENGTH, segment], i32(C)), 0)

        def stage_of(n):
            return lax.rem(n, i32(stages))

        def carry(m):
            if interpret is None:
                plgpu.set_max_registers(232 if tiles == 2 else 240, action="increase")
            tile = column * tiles + m
            is_map = tile >= value_tiles
            one = iota((C, LINE), 0) + (tile - value_tiles) * C  # where a column of the identity has its 1

            def step(n, carry):
                state, unit, bound = carry
                s = stage_of(n)
                plgpu.barrier_wait(in_bar.at[s])

                def chunk(u, *s_new, unit=unit, bound=bound):
                    for i in range(halves):
                        u.mma(state[i].astype(dtype), k_tiles.at[s, i].transpose((1, 0)))
                    v = load_values(interpret, v_tiles.at[s, m])
                    v = jnp.where(is_map, zero_tile((C, C), f32), v)
                    decay = jnp.exp2(vec_s[s, (LOG_GAMMA + 1) * C - 1])
                    change = None
                    if wide:
                        v, unit, bound, change = in_units(interpret, v, unit, bound, decay)

                    def changed(x):
                        return x * along_rows(change, x.shape[1]) if wide else x

                    k_scale = along_cols(load_vector(vec_s.at[s, pl.ds(K_SCALE * C, C)], COL), C)
                    d = (v - changed(u.read()) * k_scale).astype(dtype)
                    for i in range(halves):
                        s_new[i].set(changed(state[i]) * decay)
                        s_new[i].mma(d, r_s.at[s, i])
                    return tuple(x.read() for x in s_new), unit, bound

                carry = accumulate(interpret, [(C, C)] + [(C, LINE)] * halves, chunk)
                if interpret is not None:
                    plgpu.commit_smem()
                plgpu.barrier_arrive(in_free.at[s])
                return carry

            @when(n_chunks > 0)
            def _():
                state = tuple(jnp.where(iota((C, LINE), 1) + i * LINE == one, 1.0, 0.0) for i in range(halves))
                unit = bound = None
                if wide:
                    unit, bound = unit_of(interpret, *state)
                    state = tuple(x * along_rows(inverse(unit), LINE) for x in state)
                state, unit, _ = lax.fori_loop(0, n_chunks, step, (state, unit, bound))
                state = tuple(in_full(x, unit) for x in state)

                @when(is_map)
                def _():
                    for i in range(halves):
                        high = state[i].astype(step_dtype)
                        for n, x in enumerate((high, state[i] - high.astype(f32))):
                            store(steps_g.at[segment, head, ((tile - value_tiles) * 2 + n) * halves + i], x)

                @when(jnp.logical_not(is_map))
                def _():
                    for i in range(halves):
                        store(local_g.at[segment, head, pl.ds(tile * C, C), pl.ds(i * LINE, LINE)], state[i])

        for m in range(tiles):
            when(wg == m)(partial(carry, m))

        @when(wg == tiles)
        def _():
            if interpret is None:
                plgpu.set_max_registers(40, action="decrease")

            def bring(n, _):
                s = stage_of(n)

                @when(n >= stages)
                def _():
                    plgpu.barrier_wait(in_free.at[s])

                for i in range(halves):
                    source = qkv_g.at[pl.ds(start + n * C, C), pl.ds((nk + key_head) * key_dim + i * LINE, LINE)]
                    if wide:
                        source = kq_g.at[item + n, lax.div(head, i32(nv // kq_g.shape[1])), 0, i]
                    plgpu.copy_gmem_to_smem(source, k_rows.at[s, i], in_bar.at[s])
                plgpu.copy_gmem_to_smem(vec_g.at[item + n, head], vec_s.at[s], in_bar.at[s])
                for m in range(tiles):
                    tile = jnp.minimum(column * tiles + m, value_tiles - 1)  # not used by a map
                    channel = 2 * nk * key_dim + head * value_dim + tile * C
                    bring_values(qkv_g, start + n * C, channel, v_rows.at[s, m], in_bar.at[s])
                plgpu.copy_gmem_to_smem(r_g.at[item + n, head], r_s.at[s], in_bar.at[s])

            lax.fori_loop(0, n_chunks, bring, None)
            lax.fori_loop(
                jnp.maximum(n_chunks - stages, 0), n_chunks,
                lambda n, _: plgpu.barrier_wait(in_free.at[stage_of(n)]), None,
            )  # fmt: skip

        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    bar = plgpu.Barrier
    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=[
            jax.ShapeDtypeStruct((segments, nv, value_dim, key_dim), f32),
            jax.ShapeDtypeStruct((segments, nv, halves * 2 * halves, LINE, LINE), step_dtype),
        ],
        grid=((value_tiles + halves) // tiles, nv, segments),
        grid_names=("column", "head", "segment"),
        num_threads=tiles + 1,
        thread_name="wg",
        scratch_types=[
            copy_target(interpret, (stages, halves, C, LINE), dtype),
            value_buffer(interpret, (stages, tiles), qkv.dtype),
            swizzled_buffer((stages, halves, C, LINE), dtype),
            plgpu.SMEM((stages, NUM_VECTORS * C), f32),
            bar(num_arrivals=halves + tiles * value_parts(qkv.dtype) + 2, num_barriers=stages),
            bar(num_arrivals=tiles, num_barriers=stages),
            bar(num_arrivals=tiles + 1),
        ],
        compiler_params=params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_maps",
    )
    return kernel(qkv, kq, r, vec, slot_idx, table)


def initial_states(local, steps, states, count, wide, interpret):
    """The states before all segments, float32 [B * count, nv, KD, VD], from `segment_maps` and the rows' own.

    With `wide` (float32) tokens, `load_values` has left the rows of `local` in an order of its own. One CTA per (row,
    value head, 64 value columns) takes one step after the other, a warpgroup per 64 keys. States and maps are sums of
    two 16-bit arrays, of whose products only that of the two small ones is left out.
    """
    batch, nv, key_dim, value_dim = states.shape
    halves = key_dim // LINE
    dtype = steps.dtype
    load_state, store_state = (load_paired, store_paired) if wide else (load_transposed, store_transposed)

    def body(local_g, steps_g, states_g, out_g, steps_s, parts_s, arrived, shared):
        b, head, column, wg = [lax.axis_index(name) for name in ("row", "head", "column", "wg")]
        columns, keys = pl.ds(column * C, C), pl.ds(wg * LINE, LINE)

        def bring(n):
            plgpu.copy_gmem_to_smem(steps_g.at[b * count + n, head], steps_s.at[n & 1], arrived.at[n & 1])

        def load_local(n):
            return load_vector(local_g.at[b * count + n, head, columns, keys], WGMMA)

        def put(n, state):
            store_state(interpret, out_g.at[b * count + n, head, keys, columns], state)

        def step(n, carry):
            state, added = carry
            buffer = n & 1
            high = state.astype(dtype)
            store_tile(interpret, parts_s.at[buffer, wg, 0], high)
            store_tile(interpret, parts_s.at[buffer, wg, 1], state - high.astype(f32))
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.at[buffer])
            plgpu.barrier_wait(shared.at[buffer])
            # All warpgroups are through with the step before this one.
            when((wg == 0) & (n > 0) & (n < count - 2))(lambda: bring(n + 1))
            put(n, state)
            ahead = load_local(jnp.minimum(n + 1, count - 2))
            plgpu.barrier_wait(arrived.at[buffer])

            def products(after):
                after.set(added)
                for j in range(halves):
                    for of_state, of_step in ((1, 0), (0, 1), (0, 0)):
                        tile = steps_s.at[buffer, (2 * j + of_step) * halves + wg]
                        after.mma(parts_s.at[buffer, j, of_state], tile)
                return after.read()

            return accumulate(interpret, [(C, LINE)], products), ahead

        @when(wg == 0)
        def _():
            for n in range(min(2, count - 1)):
                bring(jnp.int32(n))

        state = load_state(interpret, states_g.at[b, head, keys, columns])
        state, _ = lax.fori_loop(0, count - 1, step, (state, load_local(0)))
        put(count - 1, state)

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=jax.ShapeDtypeStruct((batch * count, nv, key_dim, value_dim), f32),
        grid=(value_dim // C, nv, batch),
        grid_names=("column", "head", "row"),
        num_threads=halves,
        thread_name="wg",
        scratch_types=[
            swizzled_buffer((2, halves * 2 * halves, LINE, LINE), dtype),
            swizzled_buffer((2, halves, 2, C, LINE), dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=halves, num_barriers=2),
        ],
        compiler_params=params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_states",
    )
    return kernel(local, steps, states)


def map_tiles(key_dim, value_dim):
    """Tiles of C columns, of states or maps, of a CTA of `segment_maps`."""
    return 2 if (value_dim + key_dim) % (2 * C) == 0 else 1
