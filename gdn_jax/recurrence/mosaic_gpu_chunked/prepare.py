"""The first kernel: W, R (or X) and the vectors of all chunks at once."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from gdn_jax._mosaic import EPS, after_previous, cond, is_row_of, store, warp_barrier, warpgroup_barrier, when
from gdn_jax.recurrence.mosaic_gpu_chunked.normalise import put_normalised
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import (
    ALL_VECTORS,
    COL,
    HALF,
    K_NORM,
    K_SCALE,
    LINE,
    LOG_GAMMA,
    NUM_VECTORS,
    Q_SCALE,
    R_SCALE,
    ROW,
    SMS,
    WGMMA,
    C,
    accumulate,
    aliases_of,
    along_cols,
    along_rows,
    copy_target,
    f16,
    f32,
    find_row,
    first_item,
    i32,
    iota,
    load_vector,
    params,
    row_of,
    store_tile,
    swizzled_buffer,
    zero_tile,
)
from gdn_jax.recurrence.mosaic_gpu_chunked.values import output_unit
from gdn_jax.recurrence.mosaic_gpu_chunked.warp import (
    Warp,
    any_zero,
    invert_lower,
    lower_part,
    put_lower,
    shared_address,
    sum_of_squares,
)

LOG2_MIN = -150.0  # a decay of 0; 2**-150 rounds to 0 in float32


def _gate_vectors(interpret, decays, betas, norms, vectors, factors, scale):
    """What the gates of two heads make of a chunk: the vectors for `run_pass`, and what scales columns of W, rows of R.

    Args:
        decays, betas: of either head, [C] in shared memory.
        norms: reciprocal norms of keys and queries, [2, C].
        vectors: to be filled for either head, [2, NUM_VECTORS * C] or [2, ALL_VECTORS * C].
        factors: likewise, [2, 2, C]: beta times `scale`, and, unless it is one of the vectors, beta times the decay
            from a token to the chunk's end.
        scale: of the outputs.
    """
    if interpret is not None:
        for n in range(2):
            gamma = jnp.cumsum(jnp.maximum(jnp.log2(decays[n][...]), LOG2_MIN))
            beta = betas[n][...]
            r_scale = beta * jnp.exp2(gamma[-1] - gamma)
            parts = [gamma, norms[0] * jnp.exp2(gamma), norms[1] * (scale * jnp.exp2(gamma)), norms[0], r_scale]
            vectors[n] = jnp.concatenate(parts[: vectors.shape[1] // C])
            factors[n] = jnp.stack([beta * scale, r_scale])
        return

    num_vectors = vectors.shape[1] // C

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 7)
    def fill(_, *memory):
        """A warp has one half of the tokens of one head, a lane one of them."""
        warp = Warp()
        number = warp.number
        head, half = arith.shrui(warp.index, number(1)), arith.andi(warp.index, number(1))
        token = arith.addi(warp.lane, arith.shli(half, number(5)))
        (stride,), _ = ir.MemRefType(memory[0].type).get_strides_and_offset()
        *gates, norms, vectors, factors = map(shared_address, memory)
        decays, betas = [arith.select(warp.compare("ne", head, 0), gates[i + 1], gates[i]) for i in (0, 2)]
        vectors = arith.addi(vectors, arith.muli(head, number(4 * num_vectors * C)))
        factors = arith.addi(factors, arith.muli(head, number(4 * 2 * C)))

        def gate(base, token):
            return warp.load_float(base, arith.muli(token, number(stride)))

        def put(base, n, x):
            warp.store_float(base, arith.addi(token, number(n * C)), x)

        sums = []
        for first in (0, 32):
            logs = warp.approximate("lg2", gate(decays, arith.addi(warp.lane, number(first))))
            sums.append(warp.running_sum(arith.maximumf(logs, warp.real(LOG2_MIN))))
        sums[1] = arith.addf(sums[1], warp.from_lane(sums[0], 31))
        gamma = arith.select(warp.compare("ne", half, 0), sums[1], sums[0])
        decay = warp.approximate("ex2", gamma)
        rk, rq = [warp.load_float(norms, arith.addi(token, number(n * C))) for n in range(2)]
        put(vectors, K_SCALE, arith.mulf(rk, decay))
        put(vectors, Q_SCALE, arith.mulf(rq, arith.mulf(warp.real(scale), decay)))
        put(vectors, LOG_GAMMA, gamma)
        beta = gate(betas, token)
        put(factors, 0, arith.mulf(beta, warp.real(scale)))
        to_end = warp.approximate("ex2", arith.subf(warp.from_lane(sums[1], 31), gamma))
        r_scale = arith.mulf(beta, to_end)
        if num_vectors == NUM_VECTORS:
            put(factors, 1, r_scale)
        else:
            put(vectors, K_NORM, rk)
            put(vectors, R_SCALE, r_scale)

    fill(*decays, *betas, norms, vectors, factors)  # pyright: ignore[reportCallIssue]


def heads_at_once(group):
    """Value heads of a place in `run_prepare`: all of a key head, or so many that their gates come in 8 columns."""
    return max(n for n in (1, 2, 3, 4, 5, 8) if group % n == 0)


def units_of(key_dim):
    """Warpgroups of a CTA that prepare chunks, each its own: as many as its memory has room for."""
    return 1 if key_dim == 256 else 2


def _gate_columns(heads):
    """Columns of decay and beta that are copied for `heads` heads: copies start and end at multiples of 16 bytes.

    The first head is a multiple of `heads`. Where that alone does not align it, up to three columns before it come too.
    """
    before = 0 if 4 % heads == 0 or heads % 4 == 0 else 3
    return pl.cdiv(heads + before, 4) * 4


def pad_gates(x, nk):
    """Decay or beta [T, nv] with as many columns as `_gate_columns` asks for, in rows of a multiple of 16 bytes."""
    nv = x.shape[1]
    columns = max(pl.cdiv(nv, 4) * 4, _gate_columns(heads_at_once(nv // nk)))
    return jnp.pad(x, ((0, 0), (0, columns - nv))) if columns > nv else x


def preparation(qkv, decay, batch, *, nk, nv, key_dim, max_slots, late_r, interpret):
    """(what a warpgroup does for its places, buffers, barriers, buffers that overlap, types of results).

    A place is a chunk and a part of the value heads, `heads_at_once` of one key head. `decay` and beta are those that
    `pad_gates` returns. With `late_r` the second kernel makes R, from X and two vectors more.
    """
    total, columns = decay.shape
    items = total // C + batch
    group = nv // nk
    heads = heads_at_once(group)
    units = units_of(key_dim)
    width = _gate_columns(heads)
    halves = key_dim // LINE
    wide = qkv.dtype == f32
    dtype = f16 if wide else qkv.dtype
    scale = key_dim**-0.5 / (output_unit(key_dim) if wide else 1.0)
    num_vectors = ALL_VECTORS if late_r else NUM_VECTORS

    def work(operands, buffers, unit, count, place_of, written=None):
        """The places `place_of(0)` to `place_of(count - 1)`, each as (item, part, row, its start and length, chunk).

        What one needs from memory arrives while the one before is computed: only the first has to be waited for.
        `written(item, part)` is called once others may read the results of a place, if it has any.
        """
        qkv_g, decay_g, beta_g, slot_g, w_g, r_g, vec_g, *kq_g = operands
        *refs, arrived, x_s, blocks_s = buffers
        refs = [ref.at[unit] for ref in (*refs, x_s, blocks_s)]
        rows_s, tiles_s, keys_s, raw_s, w_s, vectors, factors, norms, x_s, blocks_s = refs

        def look(n):
            """Item, part, first token, and tokens: at most 0 if there is nothing to do."""
            item, part, b, start, length, chunk = place_of(n)
            first = chunk * C
            active = (n < count) & (item < items) & (first >= 0) & is_row_of(slot_g[b], max_slots)
            return item, part, start + first, jnp.where(active, jnp.minimum(length - first, C), 0)

        def first_column(part):
            return jnp.minimum(lax.div(part * heads, i32(4)) * 4, columns - width)

        def bring(place, stage):
            _, part, t0, valid = place
            key_head = lax.div(part * heads, i32(group))
            tokens = pl.ds(t0, C)

            @when(valid > 0)
            def _():
                bar = arrived.at[2 * unit + stage]
                for n, head in enumerate((nk + key_head, key_head)):
                    for i in range(halves):
                        source = qkv_g.at[tokens, pl.ds(head * key_dim + i * LINE, LINE)]
                        if not wide:
                            plgpu.copy_gmem_to_smem(source, rows_s.at[stage, n, i], bar)
                        elif interpret is None:
                            plgpu.async_prefetch(source)
                for kind, source in enumerate((decay_g, beta_g)):
                    source = source.at[tokens, pl.ds(first_column(part), width)]
                    plgpu.copy_gmem_to_smem(source, raw_s.at[stage, kind], bar)

        def finish(place):
            """Waits until the results of a place have left their buffers, or are where others may read them."""
            item, part, _, valid = place
            plgpu.wait_smem_to_gmem(0, wait_read_only=written is None)
            if written is not None:
                when(valid > 0)(partial(written, item, part))

        def step(n, carry):
            before, place = carry
            after = look(n + 1)

            def turn_over():
                finish(before)
                bring(after, (n + 1) & 1)

            active = place[-1] > 0
            when(active)(lambda: compute(place, n & 1, turn_over))
            when(jnp.logical_not(active))(turn_over)
            return place, after

        def compute(place, stage, turn_over):
            item, part, t0, valid = place
            raw_tiles = tiles_s.at[stage]
            if wide:
                key_head = lax.div(part * heads, i32(group))
                sources = [qkv_g.at[:, pl.ds(head * key_dim, key_dim)] for head in (nk + key_head, key_head)]
                targets = (tiles_s if interpret is not None else keys_s).at[stage]
                put_normalised(interpret, sources, t0, valid, [targets.at[n] for n in range(2)])
                plgpu.commit_smem()
                for n in range(2):
                    plgpu.copy_smem_to_gmem(raw_tiles.at[n], kq_g[0].at[item, part, n])
            plgpu.barrier_wait(arrived.at[2 * unit + stage])

            @when(valid < C)
            def _():
                """Past the row's end zeros and decays of 1, whatever lies there."""
                token, inside = iota((C,), 0, ROW), iota((C, LINE), 0) < valid
                for n in range(0 if wide else 2):
                    for i in range(halves):
                        x = plgpu.load(raw_tiles.at[n, i], layout=WGMMA)
                        store_tile(interpret, raw_tiles.at[n, i], jnp.where(inside, x, jnp.zeros_like(x)))
                gates = [(raw_s.at[stage, kind, :, i], 1.0 - kind) for kind in range(2) for i in range(width)]
                held = [jnp.where(token < valid, load_vector(ref, ROW), outside) for ref, outside in gates]
                warp_barrier(interpret)  # four lanes have each gate
                for (ref, _), gate in zip(gates, held, strict=True):
                    store(ref, gate)
                plgpu.commit_smem()

            def products(kk_acc, qk_acc):
                raw_keys, raw_queries = raw_tiles.at[0], raw_tiles.at[1]
                for i in range(halves):
                    keys = raw_keys.at[i].transpose((1, 0))
                    kk_acc.mma(raw_keys.at[i], keys)
                    qk_acc.mma(raw_queries.at[i], keys)
                if wide:
                    return kk_acc.read(), qk_acc.read()
                key, query = [[plgpu.load(raw_tiles.at[n, i], layout=WGMMA) for i in range(halves)] for n in range(2)]
                rk, rq = [lax.rsqrt(sum_of_squares(interpret, *x) + EPS) for x in (key, query)]
                store(norms.at[0], rk)
                store(norms.at[1], rq)
                key = [(x.astype(f32) * along_rows(rk, LINE)).astype(f16) for x in key if not late_r]
                return kk_acc.read(), qk_acc.read(), rk, rq, *key

            kk, qk, *normalised = accumulate(interpret, [(C, C), (C, C)], products)
            rk = rq = zero_tile((C,), f32, ROW) + 1.0
            if wide:
                for n in range(2):
                    store(norms.at[n], rk)
            turn_over()  # and all warps are through with the products
            key_s = (tiles_s if wide else keys_s).at[stage, 0]
            if not wide:
                rk, rq, *key = normalised
                # A square that overflows has the reciprocal norm 0, and then products may be infinite, or NaN: nothing
                # is left of them. Where both squares are finite, so is the product.
                kk, qk = cond(
                    any_zero(interpret, norms),
                    lambda: [jnp.where(jnp.abs(x) < jnp.inf, x, 0.0) for x in (kk, qk)],
                    lambda: [kk, qk],
                )
                columns_rk = along_cols(load_vector(norms.at[0], COL), C)
                kk, qk = kk * columns_rk, qk * columns_rk * along_rows(rq, C)
                for i, x in enumerate(key):
                    store_tile(interpret, key_s.at[i], x)
            scores = lower_part(interpret, qk.astype(f16))

            def two_heads(pair, _):
                at = [part * heads + jnp.minimum(2 * pair + n, heads - 1) - first_column(part) for n in range(2)]
                decays, betas = [[raw_s.at[stage, kind, :, n] for n in at] for kind in range(2)]
                when(pair > 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
                for n in range(min(2, heads)):
                    # Rounded once, for all uses: on repeated keys the entries of the inverse are differences of
                    # equal numbers, and an error that all of them share would add up in W and R.
                    beta = load_vector(betas[n], ROW) * rk
                    put_lower(interpret, x_s.at[n], blocks_s.at[n], (kk * along_rows(-beta, C)).astype(f16))
                warpgroup_barrier(interpret)
                _gate_vectors(interpret, decays, betas, norms, vectors, factors, scale)
                invert_lower(interpret, x_s, blocks_s)
                plgpu.commit_smem()
                lax.fori_loop(2 * pair, jnp.minimum(2 * pair + 2, heads), one_head, None)

            def one_head(n, _):
                head, slot = part * heads + n, n & 1
                x, log_gamma = x_s.at[slot], vectors.at[slot, pl.ds(LOG_GAMMA * C, C)]
                r_s = tiles_s.at[stage, 1]  # the raw queries are not needed any more
                w_to = w_s.at[slot if late_r else 0]
                if late_r:
                    plgpu.copy_smem_to_gmem(x, r_g.at[item, head])  # until both heads are done, X stays where it is

                def results(w_acc, *r_acc):
                    w_acc.mma(scores, x)
                    for i, acc in enumerate(r_acc):
                        acc.mma(x.transpose((1, 0)), key_s.at[i])
                    ratio = along_rows(load_vector(log_gamma, ROW), C) - along_cols(load_vector(log_gamma, COL), C)
                    ratio = jnp.exp2(ratio) * along_cols(load_vector(factors.at[slot, 0], COL), C)
                    if not late_r:
                        r_scale = along_rows(load_vector(factors.at[slot, 1], ROW), LINE)
                        # The results of the head before, or the queries, have left their buffers.
                        when((n > 0) | wide)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
                    # Above the diagonal the ratio may overflow.
                    w = lower_part(interpret, (w_acc.read(len(r_acc)) * ratio).astype(dtype))
                    for i in range(2):
                        store_tile(interpret, w_to.at[i], w[:, i * HALF : (i + 1) * HALF])
                    for i, acc in enumerate(r_acc):
                        store_tile(interpret, r_s.at[i], acc.read(halves - 1 - i) * r_scale)

                accumulate(interpret, [(C, C)] + [(C, LINE)] * (0 if late_r else halves), results)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(w_to.at[0], w_g.at[item, head, pl.ds(0, C)])
                plgpu.copy_smem_to_gmem(w_to.at[1, pl.ds(HALF, HALF)], w_g.at[item, head, pl.ds(C, HALF)])
                if not late_r:
                    plgpu.copy_smem_to_gmem(r_s, r_g.at[item, head])
                plgpu.copy_smem_to_gmem(vectors.at[slot], vec_g.at[item, head])

            lax.fori_loop(0, pl.cdiv(heads, 2), two_heads, None)

        for n in range(2):
            x_s.at[n][...] = zero_tile((C, C), f16)  # what lies above the diagonal blocks stays
        place = look(0)
        bring(place, 0)
        nothing = *place[:-1], jnp.int32(0)
        last, _ = lax.fori_loop(0, count, step, (nothing, place))
        finish(last)

    # X of two heads, for the products and for single warps.
    overlay = [swizzled_buffer((units, 2, C, C), f16), plgpu.SMEM((units, 2, C, C), f16)]
    tokens = (units, 2, 2, halves, C, LINE)
    # Keys are normalised in place; float32 tokens come from registers, not by copies.
    alias = plgpu.SMEM(tokens, f16) if wide else swizzled_buffer(tokens, f16)
    buffers = [
        copy_target(interpret, tokens, dtype, alias),
        plgpu.SMEM((units, 2, 2, C, width), f32),
        swizzled_buffer((units, 2 if late_r else 1, 2, C, HALF), dtype),
        plgpu.SMEM((units, 2, num_vectors * C), f32),
        plgpu.SMEM((units, 2, 2, C), f32),
        plgpu.SMEM((units, 2, C), f32),
    ]
    if interpret is not None:  # where aliases are buffers of their own
        buffers.insert(1, swizzled_buffer(tokens, f16))
    barriers = [plgpu.Barrier(num_arrivals=2 if wide else 2 * halves + 2, num_barriers=2 * units)]
    r_type = jax.ShapeDtypeStruct((items, nv, halves, C, LINE), dtype)
    results = [
        jax.ShapeDtypeStruct((items, nv, C + HALF, HALF), dtype),
        jax.ShapeDtypeStruct((items, nv, C, C), f16) if late_r else r_type,
        jax.ShapeDtypeStruct((items, nv, num_vectors * C), f32),
    ]
    if wide:
        results.append(jax.ShapeDtypeStruct((items, nv // heads, 2, halves, C, LINE), dtype))
    return work, buffers, barriers, overlay, results


def run_prepare(qkv, decay, beta, slot_idx, offsets, table, *, nk, nv, key_dim, max_slots, late_r, interpret):
    """W [items, nv, C + HALF, HALF], R [items, nv, key_dim / LINE, C, LINE] and vectors [items, nv, NUM_VECTORS * C].

    With `late_r`, X, float16 [items, nv, C, C], takes the place of R, and there are ALL_VECTORS vectors. W comes as its
    two tiles of HALF columns, of which the second begins at row HALF: it is zero above. W and R have the dtype of the
    tokens, float16 if that is float32, the vectors are float32. Of float32 tokens there are normalised keys and
    queries, too, [items, parts of the value heads, 2, key_dim / LINE, C, LINE]. The warpgroups of a CTA on every
    multiprocessor take places in turns.
    """
    total = decay.shape[0]
    batch = slot_idx.shape[0]
    work, buffers, barriers, overlay, results = preparation(
        qkv, decay, batch,
        nk=nk, nv=nv, key_dim=key_dim, max_slots=max_slots, late_r=late_r, interpret=interpret,
    )  # fmt: skip
    parts = nv // heads_at_once(nv // nk)
    items = total // C + batch
    places = items * parts
    ctas = min(SMS, places)
    units = units_of(key_dim)
    takers = ctas * units

    def body(qkv_g, decay_g, beta_g, slot_g, off_g, table_g, *refs):
        results_g, (tokens_u, *scratch) = refs[: len(results)], refs[len(results) :]
        *scratch, overlay = scratch if interpret is None else (*scratch[:-2], [[x] for x in scratch[-2:]])
        scratch = *aliases_of(interpret, tokens_u), *scratch, *[ref for (ref,) in overlay]
        wg = lax.axis_index("wg")
        taker = wg * ctas + lax.axis_index("cta")
        _, length = row_of(off_g, batch - 1, total)
        used = parts * (first_item(table_g, batch - 1, length, items) + lax.div(length + (C - 1), i32(C)))

        def place_of(n):
            # From the last to the first: what is made last is still in the L2 cache when the second kernel, which
            # begins with the first rows, reads it.
            place = used - 1 - (n * takers + taker)
            place = jnp.where(place < 0, places, place)
            item, part = lax.div(place, i32(parts)), lax.rem(place, i32(parts))
            b = find_row(table_g, 2 * item + 1, batch)
            start, length = row_of(off_g, b, total)
            return item, part, b, start, length, item - first_item(table_g, b, length, items)

        count = lax.div(used + (takers - 1), i32(takers))
        work((qkv_g, decay_g, beta_g, slot_g, *results_g), scratch, wg, count, place_of)

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=results,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=units,
        thread_name="wg",
        scratch_types=[
            *buffers, *barriers, *([plgpu.RefUnion(*[[x] for x in overlay])] if interpret is None else overlay)
        ],
        compiler_params=params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_prepare",
    )  # fmt: skip
    return kernel(qkv, decay, beta, slot_idx, offsets, table)
