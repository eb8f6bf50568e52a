"""The second kernel: states are carried through the chunks of their rows."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import after_previous, cond, is_row_of, warpgroup_barrier, when
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import (
    COL,
    FIRST,
    HALF,
    IS_LAST,
    ITEM,
    K_NORM,
    K_SCALE,
    LENGTH,
    LINE,
    LOG_GAMMA,
    NUM_VECTORS,
    Q_SCALE,
    R_SCALE,
    ROW,
    ROWS,
    SMS,
    WGMMA,
    C,
    accumulate,
    aliases_of,
    along_cols,
    along_rows,
    await_products,
    copy_target,
    f16,
    f32,
    first_item,
    i32,
    iota,
    load_transposed,
    load_vector,
    params,
    row_of,
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
    output_unit,
    rescaled,
    store_paired,
    store_values,
    unit_of,
    value_buffer,
    value_parts,
)


def passing(qkv, pool, batch, rows, *, nk, tiles, late_r, split, interpret):
    """(what a CTA does, buffers, barriers): one (row, value head, columns), or several one after the other.

    With `late_r` the first kernel has handed over X in place of R, and a warpgroup of its own makes R.
    """
    total = qkv.shape[0]
    max_slots, nv, key_dim, value_dim = pool.shape
    group = nv // nk
    halves = key_dim // LINE
    wide = qkv.dtype == f32
    stages = num_stages(key_dim, tiles, wide)
    # With float32 values and 256 keys registers are short, and there is room for one stage of values only.
    tight = wide and key_dim == 256
    ahead = wide and not tight  # values are taken a chunk ahead
    dtype = f16 if wide else qkv.dtype
    parts = value_parts(qkv.dtype)
    width = tiles * C
    # Registers a thread, of 65536 a CTA: accumulators where the products are, few where only copies are issued.
    math_registers = 208 if late_r else 232 if tiles == 2 else 248 if tight else 240
    making_registers, copying_registers = (72, 24) if late_r else (0, 40)
    load_state, store_state = (load_paired, store_paired) if wide else (load_transposed, store_transposed)
    blocks = tiles * key_dim // ROWS  # of [ROWS, C], that a state is copied in

    def work(operands, buffers, wg, count, pair_of, await_item=None):
        """The states `pair_of(0)` to `pair_of(count - 1)`, each as (row, value head, columns), one after the other."""
        qkv_g, kq_g, w_g, r_g, vec_g, slot_g, off_g, table_g, segments_g, initial_g, pool_g, o_g = operands
        (q_rows, q_tiles), (k_rows, k_tiles), (v_rows, v_tiles, v_plain), r_s, state_s, w_s, vec_s, *others = buffers
        if late_r:
            x_s, keys_s, in_bar, state_in, in_free, r_made, r_free, done = others
        elif tight:
            in_bar, state_in, in_free, values_in, values_free, done = others
        else:
            in_bar, state_in, in_free, done = others

        def look(n):
            """What has to be read about place n: first token, tokens, first item, slot, whether the row has a state."""
            part_b, row_b = parts_of(pair_of(n)[0])
            if split:
                start, length, item = [segments_g[k, part_b] for k in (FIRST, LENGTH, ITEM)]
            else:
                start, length = row_of(off_g, row_b, total)
                item = first_item(table_g, row_b, length, total // C + batch)
            return start, length, item, slot_g[row_b], jnp.int32(1) if split else table_g[row_b] & 1

        def parts_of(b):
            """A place in `rows` for row b, and one in the batch: the last for what is past it."""
            part_b = jnp.minimum(b, rows - 1)
            return part_b, lax.div(part_b, i32(rows // batch))

        def chunks_of(n, looked):
            _, length, _, slot, _ = looked
            live = (pair_of(n)[0] < rows) & is_row_of(slot, max_slots)
            return live, jnp.where(live, lax.div(length + (C - 1), i32(C)), 0)

        def one_by_one(process):
            """`process(n, what look says, t)`: what is brought lies in the ring from t on; returns t for the next."""
            if count is None:
                return process(0, look(0), 0)

            def step(n, carry):
                t, looked = carry
                after = look(n + 1)
                return process(n, looked, t), after

            return lax.fori_loop(0, count, step, (jnp.int32(0), look(0)))[0]

        def stage_of(n):
            return lax.rem(n, i32(stages))

        def of_values(ref, s, m):
            return ref.at[0 if tight else s, m]

        def free_values():
            if tight:
                plgpu.barrier_arrive(values_free)

        def tr(ref):
            return ref.transpose((1, 0))

        def send(source, first, count, t0, channel):
            """Copies rows of a tile out."""
            part = C // parts
            for i in range(parts):
                target = o_g.at[pl.ds(t0, count), pl.ds(channel + i * part, part)]
                plgpu.copy_smem_to_gmem(source.at[i, pl.ds(first, count)], target)

        def drain(source, t0, count, channel):
            """Copies the first `count` <= C rows of `source` out: copies have static sizes, powers of two here."""
            done_rows = 0
            for bit in range(C.bit_length() - 1, -1, -1):
                m = 1 << bit

                @when((count & m) != 0)
                def _(done_rows=done_rows, m=m):
                    send(source, done_rows, m, t0 + done_rows, channel)

                done_rows = done_rows + (count & m)

        def zero_tokens(zeros, begin, end, channel):
            def one(n, _):
                t0 = begin + n * C
                drain(zeros, t0, jnp.minimum(end - t0, C), channel)

            lax.fori_loop(0, lax.div(end - begin + (C - 1), i32(C)), one, None)

        def zero_outside(zeros, channel):
            """Zeros for the tokens of no row, wherever the offsets leave them."""

            def look(t):
                """`t` moved past the rows that cover it, and the first start of a row after the given `t`."""

                def one(n, carry):
                    reached, ahead = carry
                    first, count = row_of(off_g, n, total)
                    covers = (first <= reached) & (reached < first + count)
                    ahead = jnp.where((first > t) & (count > 0), jnp.minimum(ahead, first), ahead)
                    return jnp.where(covers, first + count, reached), ahead

                return lax.fori_loop(0, batch, one, (t, jnp.int32(total)))

            def step(t):
                reached, ahead = look(t)
                free = reached == t
                zero_tokens(zeros, t, jnp.where(free, ahead, t), channel)
                return jnp.where(free, ahead, reached)

            @when((off_g[0] > 0) | (off_g[batch] < total))
            def _():
                lax.while_loop(lambda t: t < total, step, jnp.int32(0))

        def state_blocks(s, m, i):
            return [state_s(s, (m * halves + i) * (LINE // ROWS) + j) for j in range(LINE // ROWS)]

        def carry_states(m):
            if interpret is None:
                plgpu.set_max_registers(math_registers, action="increase")
            one_by_one(partial(carry_state, m))
            plgpu.wait_smem_to_gmem(0)

        def carry_state(m, place, looked, t):
            b, head, column = pair_of(place)
            part_b = parts_of(b)[0]
            start, length, _, slot, has_state = looked
            live, n_chunks = chunks_of(place, looked)
            last = length - (n_chunks - 1) * C  # tokens of the last chunk
            first_column = column * width
            columns = pl.ds(first_column + m * C, C)
            channel = head * value_dim + first_column + m * C
            s0 = stage_of(t)
            plgpu.barrier_wait(state_in.at[s0])

            def part(i):
                return pool_g.at[slot, head, pl.ds(i * LINE, LINE), columns]

            def loaded(i):
                return jnp.concatenate([load_state(interpret, ref) for ref in state_blocks(s0, m, i)], axis=1)

            def release(s):
                plgpu.commit_smem()  # all four warps have read it
                if blocks_in_w and m == tiles - 1:  # its own blocks lie last: there have to be zeros again
                    store_tile(interpret, w_s.at[s, 1], zero_tile((C, HALF), dtype))
                    plgpu.commit_smem()
                plgpu.barrier_arrive(in_free.at[s])
                free_values()

            @when(n_chunks > 0)
            def _():
                state = cond(
                    has_state != 0,
                    lambda: tuple(loaded(i) for i in range(halves)),
                    lambda: tuple(zero_tile((C, LINE), f32) for _ in range(halves)),
                )
                release(s0)

                def write_output(output, n, s):
                    """Through the buffer of values of chunk n + 1: a warp has read just what it overwrites."""
                    store_values(interpret, of_values(v_tiles, s, m), in_full(*output))
                    plgpu.commit_smem()
                    send(of_values(v_rows, s, m), 0, C, start + n * C, channel)

                def in_row(x, n):
                    """Without what is past the row's end, which may be NaN."""
                    left = length - n * C
                    masked = partial(jnp.where, iota((C, C), 1) < left, x, jnp.zeros_like(x))
                    return cond(left < C, masked, lambda: x)

                def wait_for(n):
                    plgpu.barrier_wait(in_bar.at[stage_of(t + 1 + n)])

                def decay_of(s):
                    return jnp.exp2(vec_s[s, (LOG_GAMMA + 1) * C - 1 - HALF])

                def take_values(n, unit, bound):
                    """With float32 tokens, states and values are counted in units, so that they fit into float16."""
                    s = stage_of(t + 1 + n)
                    if tight:
                        plgpu.barrier_wait(values_in)
                    v = in_row(load_values(interpret, of_values(v_tiles, s, m)), n)
                    return in_units(interpret, v, unit, bound, decay_of(s))

                def take_ahead(n, unit, bound):
                    wait_for(n)
                    return take_values(n, unit, bound)

                unit = bound = v = None
                if wide:
                    unit, bound = unit_of(interpret, *state)
                    state = tuple(x * along_rows(inverse(unit), LINE) for x in state)
                    if ahead:
                        v, unit, bound, change = take_ahead(0, unit, bound)
                        state = rescaled(interpret, state, change)

                def step(n, carry):
                    state, low, before, unit, bound, v = carry
                    s = stage_of(t + 1 + n)
                    at = (t - place + n) & 1 if late_r else s  # chunks take turns in what R is made in
                    if not ahead:
                        wait_for(n)
                        if wide:
                            v, unit, bound, change = take_values(n, unit, bound)
                            state = rescaled(interpret, state, change)

                    def chunk(u, q, o, *s_new):
                        k_scale = partial(load_vector, vec_s.at[s, pl.ds(K_SCALE * C - HALF, C)], COL)

                        def write_before():
                            when(n > 0)(lambda: write_output(before, n - 1, s))

                        if tight:
                            for i in range(halves):
                                part = state[i].astype(dtype)
                                u.mma(part, tr(k_tiles.at[s, i]))
                                q.mma(part, tr(q_tiles.at[s, i]))
                                await_products(interpret)
                            v_now = load_values(interpret, of_values(v_tiles, s, m)) * along_rows(inverse(unit), C)
                            d = in_row((v_now - u.read() * along_cols(k_scale(), C)).astype(dtype), n)
                            write_before()
                        else:
                            for i in range(halves):
                                u.mma(low[i], tr(k_tiles.at[s, i]))
                            for i in range(halves):
                                q.mma(low[i], tr(q_tiles.at[s, i]))
                            v_now = v if wide else load_values(interpret, of_values(v_tiles, s, m))
                            write_before()
                            d = in_row(v_now - u.read(halves) * along_cols(k_scale(), C), n).astype(dtype)
                        decay = decay_of(s)
                        if late_r:
                            plgpu.barrier_wait(r_made.at[at])
                        for i in range(halves):
                            s_new[i].set(state[i] * decay)
                            s_new[i].mma(d, r_s.at[at, i])
                        q_scale = along_cols(load_vector(vec_s.at[s, pl.ds(Q_SCALE * C - HALF, C)], COL), C)
                        o.set(q.read(halves) * q_scale)
                        for i in range(2):
                            o.mma(d[:, i * HALF : (i + 1) * HALF], tr(w_s.at[s, i]))
                        if tight:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all four warps have read the values
                            if interpret is not None:
                                plgpu.commit_smem()  # there it is no barrier
                            when(n < n_chunks - 1)(free_values)
                        after = None, unit, bound, None
                        if ahead:
                            none = v, unit, bound, zero_tile((C,), f32, ROW) + 1.0
                            after = cond(n < n_chunks - 1, partial(take_ahead, n + 1, unit, bound), lambda: none)
                        v_new, unit_new, bound_new, change = after
                        state_new = tuple(x.read(1) for x in s_new)
                        if ahead:
                            state_new = rescaled(interpret, state_new, change)
                        low_new = () if tight else tuple(x.astype(dtype) for x in state_new)
                        output = o.read().astype(dtype), unit * output_unit(key_dim) if wide else None
                        return state_new, low_new, output, unit_new, bound_new, v_new

                    shapes = [(C, C)] * 3 + [(C, LINE)] * halves
                    carry = accumulate(interpret, shapes, chunk)
                    if late_r:
                        plgpu.barrier_arrive(r_free.at[at])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if interpret is not None:
                        # Here products read like ordinary loads, and copies must not overtake those.
                        plgpu.commit_smem()
                    when(n < n_chunks - 1)(lambda: plgpu.barrier_arrive(in_free.at[s]))
                    return carry

                low = () if tight else tuple(x.astype(dtype) for x in state)
                carry = (state, low, (zero_tile((C, C), dtype), unit), unit, bound, v)
                state, _, last_output, unit, _, _ = lax.fori_loop(0, n_chunks, step, carry)

                # The last output, too, leaves through the values of its chunk.
                s = stage_of(t + n_chunks)

                @when(last == C)
                def _():
                    write_output(last_output, n_chunks - 1, s)

                @when(last < C)
                def _():
                    plgpu.commit_smem()
                    store_values(interpret, of_values(v_plain, s, m), in_full(*last_output), swizzled=False)
                    plgpu.commit_smem()
                    drain(of_values(v_plain, s, m), start + (n_chunks - 1) * C, last, channel)

                @when(True if not split else segments_g[IS_LAST, part_b] != 0)
                def _():
                    for i in range(halves):
                        store_state(interpret, part(i), in_full(state[i], unit))

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(in_free.at[s])
                free_values()

            @when(n_chunks == 0)
            def _():
                @when(jnp.logical_not(live))
                def _():
                    plain = of_values(v_plain, s0, m)
                    store_values(interpret, plain, zero_tile((C, C), qkv.dtype), swizzled=False)
                    plgpu.commit_smem()

                    @when(b < rows)
                    def _():
                        zero_tokens(plain, start, start + length, channel)

                    @when(b == rows)
                    def _():
                        zero_outside(plain, channel)

                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                release(s0)

            return t + 1 + n_chunks

        def stream():
            if interpret is None:
                plgpu.set_max_registers(copying_registers, action="decrease")
            for s in range(stages):  # the part that is never copied
                store_tile(interpret, w_s.at[s, 1], zero_tile((C, HALF), dtype))
            plgpu.commit_smem()
            end = one_by_one(bring_all)
            lax.fori_loop(
                jnp.maximum(end - stages, 0), end, lambda t, _: plgpu.barrier_wait(in_free.at[stage_of(t)]), None
            )
            if tight:
                plgpu.barrier_wait(values_free)

        def claim(t):
            s = stage_of(t)

            @when(t >= stages)
            def _():
                plgpu.barrier_wait(in_free.at[s])

            return s

        def bring_all(n, looked, t):
            b, head, column = pair_of(n)
            part_b = parts_of(b)[0]
            start, _length, item, slot, has_state = looked
            n_chunks = chunks_of(n, looked)[1]
            key_head = lax.div(head, i32(group))
            first_column = column * width
            s0 = claim(t)
            if tight:  # states take a turn of the buffer of values, too: tokens of padding are zeroed through it
                when(t > 0)(lambda: plgpu.barrier_wait(values_free))
            reads = (n_chunks > 0) & (has_state != 0)

            @when(reads)
            def _():
                for m in range(tiles):
                    for i in range(halves):
                        for j, ref in enumerate(state_blocks(s0, m, i)):
                            at = pl.ds(i * LINE + j * ROWS, ROWS), pl.ds(first_column + m * C, C)
                            source = pool_g.at[slot, head, *at] if not split else initial_g.at[part_b, head, *at]
                            plgpu.copy_gmem_to_smem(source, ref, state_in.at[s0])

            @when(jnp.logical_not(reads))
            def _():
                for _ in range(blocks):
                    plgpu.barrier_arrive(state_in.at[s0])

            def bring(n, _):
                if await_item is not None:  # while there is no room yet
                    await_item(head, item + n)
                s = claim(t + 1 + n)

                def copy(kind, i, target):
                    """Half i of the keys (0) or queries (1)."""
                    channel = (kind * key_dim * -nk) + (nk + key_head) * key_dim + i * LINE
                    source = qkv_g.at[pl.ds(start + n * C, C), pl.ds(channel, LINE)]
                    if wide:
                        part = lax.div(head, i32(nv // kq_g.shape[1]))
                        source = kq_g.at[item + n, part, kind, i]
                    plgpu.copy_gmem_to_smem(source, target, in_bar.at[s])

                for i in range(halves):
                    copy(0, i, k_rows.at[s, i])
                channel = 2 * nk * key_dim + head * value_dim + first_column
                for m in range(0 if tight else tiles):
                    bring_values(qkv_g, start + n * C, channel + m * C, v_rows.at[s, m], in_bar.at[s])
                for i in range(halves):
                    copy(1, i, q_rows.at[s, i])
                vectors = vec_g.at[item + n, head, pl.ds(HALF, NUM_VECTORS * C - HALF)]
                plgpu.copy_gmem_to_smem(vectors, vec_s.at[s], in_bar.at[s])
                plgpu.copy_gmem_to_smem(r_g.at[item + n, head], (x_s if late_r else r_s).at[s], in_bar.at[s])
                w = w_g.at[item + n, head]
                plgpu.copy_gmem_to_smem(w.at[pl.ds(0, C)], w_s.at[s, 0], in_bar.at[s])
                plgpu.copy_gmem_to_smem(w.at[pl.ds(C, HALF)], w_s.at[s, 1, pl.ds(HALF, HALF)], in_bar.at[s])
                if tight:
                    plgpu.barrier_wait(values_free)
                    bring_values(qkv_g, start + n * C, channel, v_rows.at[0, 0], values_in)

            lax.fori_loop(0, n_chunks, bring, None)
            return t + 1 + n_chunks

        def make_all():
            if interpret is None:
                plgpu.set_max_registers(making_registers, action="decrease")
            turns = one_by_one(make) - (1 if count is None else count)
            lax.fori_loop(jnp.maximum(turns - 2, 0), turns, lambda n, _: plgpu.barrier_wait(r_free.at[n & 1]), None)

        def make(place, looked, t):
            """R of the chunks of a row, as the first kernel would have made it, one or two chunks ahead."""
            _, head, _ = pair_of(place)
            _, length, item, _, _ = looked
            n_chunks = chunks_of(place, looked)[1]

            def vectors(n):
                """Loaded a chunk ahead: nothing else would hide that they come from memory."""
                at = jnp.minimum(item + n, vec_g.shape[0] - 1), head
                return [load_vector(vec_g.at[*at, pl.ds(i * C, C)], ROW) for i in (K_NORM, R_SCALE)]

            def one(n, ahead):
                s, turn = stage_of(t + 1 + n), t - place + n
                at = turn & 1
                left = length - n * C
                rk, scale = ahead
                ahead = vectors(n + 1)
                plgpu.barrier_wait(in_bar.at[s])
                when(turn >= 2)(lambda: plgpu.barrier_wait(r_free.at[at]))
                for i in range(halves):
                    key = plgpu.load(k_tiles.at[s, i], layout=WGMMA)
                    # What lies past the row's end is no part of it, and may be NaN.
                    masked = partial(jnp.where, iota((C, LINE), 0) < left, key, jnp.zeros_like(key))
                    key = cond(left < C, masked, lambda key=key: key)
                    store_tile(interpret, keys_s.at[at, i], key.astype(f32) * along_rows(rk, LINE))
                plgpu.commit_smem()
                for i in range(halves):

                    def product(acc, i=i):
                        acc.mma(x_s.at[s].transpose((1, 0)), keys_s.at[at, i])
                        return (acc.read() * along_rows(scale, LINE)).astype(dtype)

                    r = accumulate(interpret, [(C, LINE)], product)
                    warpgroup_barrier(interpret)  # all warps are through with the keys, which lie where R goes
                    store_tile(interpret, r_s.at[at, i], r)
                plgpu.commit_smem()
                plgpu.barrier_arrive(r_made.at[at])
                return ahead

            lax.fori_loop(0, n_chunks, one, vectors(0))
            return t + 1 + n_chunks

        for m in range(tiles):
            when(wg == m)(partial(carry_states, m))
        when(wg == tiles)(stream)
        if late_r:
            when(wg == tiles + 1)(make_all)
        # no warpgroup may leave while another still waits on a barrier in this CTA's shared memory
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    target = partial(copy_target, interpret)
    bar = plgpu.Barrier
    value_stages = 1 if tight else stages
    buffers = [
        target((stages, halves, C, LINE), dtype),
        target((stages, halves, C, LINE), dtype),
        value_buffer(interpret, (value_stages, tiles), qkv.dtype),
        swizzled_buffer((stages, C, C), f16) if late_r else target((stages, halves, C, LINE), dtype),
        swizzled_buffer((stages, 2, C, HALF), dtype),
        plgpu.SMEM((stages, NUM_VECTORS * C - HALF), f32),
    ]
    state_dtype = f32 if split else pool.dtype
    # A stage of an alias is as long as a stage of tokens: [ROWS, C] of float32 take what [C, LINE] of the tokens do.
    fit = 4 // jnp.dtype(state_dtype).itemsize
    sizes = (halves, halves, tiles * parts, 1, 1) if late_r else (halves, halves, tiles * parts, halves)
    blocks_in_w = late_r and blocks > sum(sizes[:4]) * fit
    # Where there are fewer stages of values, states do not reach as far as those.
    counts = [value_stages if i == 2 else stages for i in range(len(sizes))]
    aliases = [plgpu.SMEM((k, n * fit, ROWS, C), state_dtype) for k, n in zip(counts, sizes, strict=True)]
    if interpret is None:
        for i, x in enumerate(aliases):
            union = buffers[i]
            buffers[i] = plgpu.RefUnion(*(union.refs if isinstance(union, plgpu.RefUnion) else [[union]]), [x])
    else:
        buffers.insert(4, plgpu.SMEM((stages, blocks, ROWS, C), state_dtype))
    barriers = [
        bar(num_arrivals=2 * halves + (0 if tight else tiles * parts) + 4, num_barriers=stages),
        bar(num_arrivals=blocks, num_barriers=stages),
        bar(num_arrivals=tiles, num_barriers=stages),
    ]
    if tight:
        barriers += [bar(num_arrivals=parts), bar()]
    if late_r:
        made = [swizzled_buffer((2, halves, C, LINE), x) for x in (f16, dtype)]
        buffers[-1:-1] = made if interpret is not None else [plgpu.RefUnion(*[[x] for x in made])]
        barriers += [bar(num_barriers=2), bar(num_arrivals=tiles, num_barriers=2)]
    return work, buffers, [*barriers, bar(num_arrivals=tiles + 1 + late_r)]


def num_stages(key_dim, tiles, float32):
    """As many as memory has room for, but for float32 values of 256 keys."""
    if key_dim == 256:
        return 2
    return 2 if float32 and tiles == 2 and key_dim == 128 else 3


def _stay(total, batch):
    """Whether CTAs of `run_pass` carry one state after the other and fetch the next meanwhile: worth it for short rows.

    Where rows are long, each is a CTA of its own, so that the chip is busy until the end whatever their lengths.
    """
    return total <= 512 * batch


def _pass_refs(interpret, late_r, scratch):
    """The buffers of `passing`, as its CTAs use them."""
    if interpret is not None:
        if late_r:
            q, k, v, x, state, w, keys, r, vec, *barriers = scratch
            return (q, q), (k, k), (v, v, v), r, lambda s, n: state.at[s, n], w, vec, x, keys, *barriers
        q, k, v, r, state, *others = scratch
        return (q, q), (k, k), (v, v, v), r, lambda s, n: state.at[s, n], *others
    if late_r:
        q, k, v, x, w = [aliases_of(interpret, u) for u in scratch[:5]]
        made, vec, *barriers = scratch[5:]
        keys, r = aliases_of(interpret, made)
        state = state_block(q[-1], k[-1], v[-1], x[-1], w[-1])
        return q[:2], k[:2], v[:3], r, state, w[0], vec, x[0], keys, *barriers
    unions, others = scratch[:4], scratch[4:]
    q, k, v, r = [aliases_of(interpret, u) for u in unions]
    return q[:2], k[:2], v[:3], r[1], state_block(q[-1], k[-1], v[-1], r[-1]), *others


def state_block(*refs):
    """Where block n of a state lies: `f(stage, n)`, in one of the refs, which are filled one after the other."""
    places = [(ref, n) for ref in refs for n in range(ref.shape[1])]

    def block(stage, n):
        ref, at = places[n]
        return ref.at[stage, at]

    return block


def run_pass(
    qkv, kq, w, r, vec, slot_idx, offsets, table, pool, *, nk, tiles, late_r, interpret, split=None
):  # fmt: skip
    """Outputs [T, nv * VD]; `pool` (a Ref) is updated. A CTA for each (row, value head, `tiles` * 64 value columns).

    Where rows are short, there are no more CTAs than multiprocessors, and each takes one of these after the other.

    `kq` are the keys and queries that `run_prepare` has made of float32 tokens, or None. `split` is None or
    (`cut_rows`, their initial states): each segment of a row then has its own CTAs, and the last writes the state.
    """
    segments, initial = split or (None, None)
    total = qkv.shape[0]
    _, nv, _, value_dim = pool.shape
    batch = slot_idx.shape[0]
    rows = batch if segments is None else segments.shape[1]
    work, buffers, barriers = passing(
        qkv, pool, batch, rows,
        nk=nk, tiles=tiles, late_r=late_r, split=split is not None, interpret=interpret,
    )  # fmt: skip
    columns = value_dim // (tiles * C)
    pairs = columns * nv * (rows + 1)
    ctas = min(pairs, SMS) if _stay(total, batch) else pairs

    def body(*refs):
        operands, scratch = refs[:12], refs[12:]
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")

        def pair_of(n):
            pair = cta + n * ctas
            row, column = lax.div(pair, i32(columns)), lax.rem(pair, i32(columns))
            return lax.div(row, i32(nv)), lax.rem(row, i32(nv)), column

        count = None if ctas == pairs else lax.div(pairs - cta + (ctas - 1), i32(ctas))
        work(operands, _pass_refs(interpret, late_r, scratch), wg, count, pair_of)

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=jax.ShapeDtypeStruct((total, nv * value_dim), qkv.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=tiles + 1 + late_r,
        thread_name="wg",
        scratch_types=[*buffers, *barriers],
        compiler_params=params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_pass",
    )
    return kernel(qkv, kq, w, r, vec, slot_idx, offsets, table, segments, initial, pool)
