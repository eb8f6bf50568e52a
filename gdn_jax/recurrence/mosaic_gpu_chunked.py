"""Chunked recurrence on Hopper tensor cores (Pallas Mosaic GPU), ragged, on the slot pool in place.

Rows are cut into chunks of 64 tokens. With gamma_i the product of the decays of a chunk up to token i, k and q the
normalised rows, and S the state before the chunk,

    T  = (I + strict_lower(beta_i k_i.k_j))^-1,  gated: T_ij gamma_i/gamma_j beta_j
    V' = T (V - gamma K S)
    O  = gamma Q S + (lower(Q K^T) gamma_i/gamma_j) V'
    S <- gamma_end S + K^T (gamma_end/gamma V')

which is the WY form of the token-by-token rule (Yang et al., "Gated Delta Networks", 2024). Ratios of gamma are
exponentials of differences of cumulative log decays. The inverse is taken without the gates, which are a similarity
transform: its entries are then bounded by 1, so float16 holds them.

Two kernels. `_prepare` works on all chunks at once and writes T and three vectors a chunk and head. `_pass` walks each
(row, value head, columns) serially: warpgroups with 64 value columns each carry S^T as float32 accumulators, and one
more streams the inputs and computes the masked Q K^T one step ahead. docs/kernels_chunked.md has the whole story.
"""

import math
from functools import partial

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from gdn_jax._mosaic import EPS, compiler_params, is_row_of, store

C = 64  # tokens of a chunk, and columns of a value tile: the M of a warpgroup product
LINE = 64  # 16-bit elements of a 128-byte swizzle line
SUB = 16  # columns of the compact block-diagonal form in `_prepare`
LOG2_MIN = -150.0  # a decay of 0; 2**-150 rounds to 0 in float32
STAGES = 3
f32, f16, i32 = jnp.float32, jnp.float16, jnp.int32
WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COL = plgpu.Layout.WGMMA.reduce(0)
# The vectors `_prepare` hands to `_pass`, one of each per (chunk, value head); rk is the reciprocal key norm.
U_SCALE, S_SCALE, P_COL, LOG_GAMMA, NUM_VECTORS = range(5)  # gamma rk | rk gamma_end/gamma | log2 gamma/rk | log2 gamma


def _dims(qkv, recurrent_state):
    _, nv, key_dim, value_dim = recurrent_state.shape
    nk = (qkv.shape[1] - nv * value_dim) // (2 * key_dim)
    return nk, nv, key_dim, value_dim


def unsupported(
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
):
    """Why this backend cannot serve the call, in one sentence; None when it can."""
    _, _, key_dim, value_dim = _dims(qkv, recurrent_state)
    if algorithm != "chunked":
        return "the chunked Mosaic GPU kernel serves algorithm='chunked' only"
    if precision == "highest":
        return "the chunked Mosaic GPU kernel works in 16-bit products; precision='highest' needs the recurrent algorithm"
    if qkv.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the chunked Mosaic GPU kernel does not serve {qkv.dtype} tokens"
    for name, dim in (("key_head_dim", key_dim), ("value_head_dim", value_dim)):
        if dim not in (64, 128, 256):
            return f"the chunked Mosaic GPU kernel serves {name} 64, 128 and 256, not {dim}"
    return None


class _Value:
    """An accumulator in interpret mode, which has no product with a register operand."""

    def __init__(self, value):
        self.value = value

    def mma(self, a, b):
        self.value = self.value + jnp.dot(
            a[...].astype(f32), b[...].astype(f32), preferred_element_type=f32
        )

    def read(self, pending=0):
        return self.value


class _Registers:
    """A WGMMA accumulator; `read(pending)` waits until at most `pending` later products are in flight."""

    def __init__(self, ref):
        self.ref = ref

    def mma(self, a, b):
        plgpu.wgmma(self.ref, a, b)

    def read(self, pending=0):
        # Without the barrier a use of the value may be scheduled ahead of the wait.
        return lax.optimization_barrier(
            plgpu.wgmma_accumulator_load(self.ref, wait_n=pending)
        )


def _accumulate(interpret, shapes, body):
    """`body(*accumulators)` with zeroed accumulators."""
    if interpret is not None:
        return body(*[_Value(jnp.zeros(s, f32)) for s in shapes])
    return pl.run_scoped(
        lambda *refs: body(*map(_Registers, refs)), *[plgpu.ACC(s, f32) for s in shapes]
    )


def _accumulate_into(interpret, values, body):
    """The values of accumulators that start from `values` after `body(*accumulators)`."""
    if interpret is not None:
        accs = [_Value(v) for v in values]
        body(*accs)
        return [a.value for a in accs]

    def run(refs):
        body(*map(_Registers, refs))

    out = pl.run_state(run)([plgpu.ACC.init(v) for v in values])
    return lax.optimization_barrier(list(out))


def _swizzled(shape, dtype):
    """Shared memory tiled and swizzled as an operand of a warpgroup product."""
    item = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * item * 8)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            plgpu.TilingTransform((8, swizzle // item)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )


def _copy_target(interpret, shape, dtype):
    """Shared memory for [.., C, LINE] tiles that bulk copies fill or drain at any token.

    A bulk copy into a tiled buffer has to start at a multiple of the tile's 8 rows. With rows of one swizzle line, the
    tiled and the untiled buffer hold the same bytes, so copies use an untiled alias of what the products read. In
    interpret mode members of a union do not share memory, and there is nothing to alias.
    """
    if interpret is not None:
        return _swizzled(shape, dtype)
    rows = plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(128),))
    return plgpu.RefUnion([rows], [_swizzled(shape, dtype)])


def _aliases(interpret, ref):
    """(what copies use, what products use) of a `_copy_target`."""
    if interpret is not None:
        return ref, ref
    (rows,), (tiles,) = ref
    return rows, tiles


def _load_transposed(interpret, ref):
    """Global [m, n] as float32 [n, m] in registers; the lanes of a warp read whole sectors."""
    if interpret is not None:
        return ref[...].T.astype(f32)
    m, n = ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((n, m), f32, layout=WGMMA),
    )
    def transfer(_, source):
        single = ir.F32Type.get()

        def element(_, idx):
            x = memref.load(source, [idx[1], idx[0]])
            return x if x.type == single else arith.extf(single, x)

        zero = mgpu.FragmentedArray.splat(
            arith.constant(single, 0.0), (n, m), layout=WGMMA.to_mgpu()
        )
        return zero.foreach(element, create_array=True)

    return transfer(ref)


def _store_transposed(interpret, ref, value):
    """The inverse of `_load_transposed`, rounding to the dtype of `ref`."""
    if interpret is not None:
        ref[...] = value.T.astype(ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def transfer(_, x, target):
        dtype = ir.MemRefType(target.type).element_type

        def element(v, idx):
            memref.store(
                v if v.type == dtype else arith.truncf(dtype, v), target, [idx[1], idx[0]]
            )

        x.foreach(element)

    transfer(value, ref)


def _iota(shape, axis, layout=WGMMA):
    return plgpu.broadcasted_iota(i32, shape, axis, layout=layout)


def _zeros(shape, dtype, layout=WGMMA):
    return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)


def _rows(x, n):
    """A vector [m] over the columns of [m, n]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], n), (0,)), WGMMA)


def _cols(x, m):
    """A vector [n] over the rows of [m, n]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (m, x.shape[0]), (1,)), WGMMA)


def _row_sum(x):
    return plgpu.layout_cast(jnp.sum(x, axis=1), ROW)


def _vector(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _row_of(offsets, b, total):
    """First token and length of row b; offsets are clamped, and a row whose offsets decrease is empty."""
    start = jnp.clip(offsets[b], 0, total)
    return start, jnp.maximum(jnp.clip(offsets[b + 1], 0, total) - start, 0)


def _item_of(start, b):
    """The item (place in the arrays between the kernels) of the first chunk of row b.

    Row b owns the items from `start // C + b` on: rows that do not overlap never share one, and no more than
    `total // C + B` are needed, so that no running sum over the rows has to be taken.
    """
    return lax.shift_right_logical(start, i32(C.bit_length() - 1)) + b


def _find_row(offsets, item, batch, total):
    """The last row whose first item is at most `item`, by bisection; row 0 if there is none."""
    low, high = jnp.int32(0), jnp.int32(batch)
    for _ in range((batch - 1).bit_length()):
        middle = lax.shift_right_logical(low + high, i32(1))
        middle = jnp.minimum(middle, batch - 1)
        before = _item_of(jnp.clip(offsets[middle], 0, total), middle) <= item
        low, high = jnp.where(before, middle, low), jnp.where(before, high, middle)
    return low


def _prepare(qkv, decay, beta, slot_idx, offsets, *, nk, key_dim, max_slots, interpret):
    """T [items, nv, C, C] float16 and vectors [items, nv, NUM_VECTORS, C] float32, one CTA per (chunk, key head)."""
    total, nv = decay.shape
    batch = slot_idx.shape[0]
    items = total // C + batch
    group = nv // nk
    halves = key_dim // LINE
    tile = (C, SUB)

    def body(
        qkv_g, decay_g, beta_g, slot_g, off_g, t_g, vec_g,
        k_u, pair_s, quad_s, t_s, vec_s, norm_s, gate_s, late_s, bar,
    ):  # fmt: skip
        k_rows, k_tiles = _aliases(interpret, k_u)
        item, key_head = lax.axis_index("item"), lax.axis_index("head")
        b = _find_row(off_g, item, batch, total)
        start, length = _row_of(off_g, b, total)
        first = (item - _item_of(start, b)) * C
        t0 = start + first
        valid = jnp.minimum(length - first, C)

        @pl.when((first >= 0) & (valid > 0) & is_row_of(slot_g[b], max_slots))
        def _():
            for i in range(halves):
                channel = (nk + key_head) * key_dim + i * LINE
                plgpu.copy_gmem_to_smem(
                    qkv_g.at[pl.ds(t0, C), pl.ds(channel, LINE)], k_rows.at[i], bar
                )
            token = _iota((C,), 0, ROW)

            def read_gates(j, _):
                head = key_head * group + j

                def gates(begin):
                    g = _vector(decay_g.at[pl.ds(begin, C), head], ROW)
                    return jnp.maximum(jnp.log2(g), LOG2_MIN), _vector(
                        beta_g.at[pl.ds(begin, C), head], ROW
                    )

                def put(values):
                    for n, x in enumerate(values):
                        store(gate_s.at[j, n], jnp.where(token < valid, x, 0.0))

                @pl.when(t0 + C <= total)
                def _():
                    put(gates(t0))

                @pl.when(t0 + C > total)
                def _():  # the arrays end inside this chunk: read their last C tokens, shift in shared memory
                    for n, x in enumerate(gates(total - C)):
                        store(late_s.at[n, pl.ds(0, C)], x)
                        store(late_s.at[n, pl.ds(C, C)], _zeros((C,), f32, ROW))
                    plgpu.commit_smem()
                    put([_vector(late_s.at[n, pl.ds(t0 + C - total, C)], ROW) for n in range(2)])
                    plgpu.commit_smem()

            lax.fori_loop(0, group, read_gates, None)

            row, col = _iota((C, C), 0), _iota((C, C), 1)
            plgpu.barrier_wait(bar)

            def gram(acc):
                for i in range(halves):
                    acc.mma(k_tiles.at[i], k_tiles.at[i].transpose((1, 0)))
                return acc.read()

            kk = _accumulate(interpret, [(C, C)], gram)
            k2 = _row_sum(jnp.where(row == col, kk, 0.0)) + EPS
            rk = jnp.where(token < valid, lax.rsqrt(k2), 0.0)
            log_rk = jnp.where(token < valid, jnp.log2(k2) * -0.5, 0.0)
            store(norm_s, rk)
            plgpu.commit_smem()
            rk_col = _vector(norm_s, COL)
            kk = jnp.where((row > col) & (row < valid), kk * _rows(rk, C) * _cols(rk_col, C), 0.0)

            # Compact forms, [C, SUB]: what each 16-row block needs of the columns of one 16-column block.
            r, c = _iota(tile, 0), _iota(tile, 1)
            block = lax.shift_right_logical(r, i32(4))
            eighth = lax.shift_right_logical(r, i32(3)) & 1
            same_eighth = eighth == lax.shift_right_logical(c, i32(3))
            identity = jnp.where((r & 15) == c, 1.0, 0.0)
            odd, lower = (block & 1) == 1, block >= 2
            k_tile = [kk[:, SUB * j : SUB * (j + 1)] for j in range(4)]
            k_diag = jnp.where(
                block == 0, k_tile[0],
                jnp.where(block == 1, k_tile[1], jnp.where(block == 2, k_tile[2], k_tile[3])),
            )  # fmt: skip
            k_pair = jnp.where(block == 1, k_tile[0], jnp.where(block == 3, k_tile[2], 0.0))
            k_quad = [jnp.where(lower, k_tile[j], 0.0) for j in range(2)]

            def only(x, mask):
                return jnp.where(mask, x, jnp.zeros_like(x))

            def diagonal(x):
                """Compact [C, SUB] as the block-diagonal left operand [C, C]."""
                x = x.astype(f16)
                return jnp.concatenate([only(x, block == j) for j in range(4)], axis=1)

            def publish(ref, x):
                ref[...] = x.astype(f16)

            def product(*pairs):
                def run(acc):
                    for a, b in pairs:
                        acc.mma(a, b)
                    return acc.read()

                return _accumulate(interpret, [tile], run)

            def per_head(j, _):
                head = key_head * group + j
                beta_row = _vector(gate_s.at[j, 1], ROW)
                beta_tile = _rows(beta_row, SUB)
                # cumulative log2 decay: a masked row sum stands in for a running sum
                total_g = None
                for n in range(4):
                    g = _cols(_vector(gate_s.at[j, 0, pl.ds(SUB * n, SUB)], COL), C)
                    g = jnp.where(c + SUB * n <= r, g, 0.0)
                    total_g = g if total_g is None else total_g + g
                gamma = _row_sum(total_g)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous head's copies
                store(vec_s.at[LOG_GAMMA], gamma)

                # 8 x 8 diagonal blocks: (I + N)(I + N^2)(I + N^4), exact because N^8 = 0
                a = k_diag * beta_tile
                n1 = jnp.where(same_eighth, a * -1.0, 0.0)
                publish(pair_s.at[0], n1)
                plgpu.commit_smem()
                n2 = product((diagonal(n1), pair_s.at[0]))
                publish(pair_s.at[1], n2)
                plgpu.commit_smem()
                x = n1 + identity

                def both(acc1, acc2):
                    acc1.mma(diagonal(x), pair_s.at[1])
                    acc2.mma(diagonal(n2), pair_s.at[1])
                    return acc1.read(), acc2.read()

                x_n2, n4 = _accumulate(interpret, [tile, tile], both)
                x = x + x_n2
                publish(pair_s.at[0], n4)
                plgpu.commit_smem()
                x = x + product((diagonal(x), pair_s.at[0]))
                # 8 -> 16, 16 -> 32, 32 -> 64: the block below the diagonal becomes -X22 L21 X11
                publish(pair_s.at[1], x)
                plgpu.commit_smem()
                y = product((diagonal(jnp.where(same_eighth, 0.0, a)), pair_s.at[1]))
                publish(pair_s.at[0], y)
                plgpu.commit_smem()
                x = x - product((diagonal(x), pair_s.at[0]))

                x16 = x.astype(f16)
                pair_s.at[1][...] = x16
                plgpu.commit_smem()
                a = (k_pair * beta_tile).astype(f16)
                y = product(
                    (only(a, block == 1), pair_s.at[1, pl.ds(0, SUB)]),
                    (only(a, block == 3), pair_s.at[1, pl.ds(2 * SUB, SUB)]),
                )
                publish(pair_s.at[0], y)
                plgpu.commit_smem()
                z = product(
                    (only(x16, block == 1), pair_s.at[0, pl.ds(SUB, SUB)]),
                    (only(x16, block == 3), pair_s.at[0, pl.ds(3 * SUB, SUB)]),
                )
                left, right = jnp.where(odd, z * -1.0, x), only(x, odd)

                left16, right16 = left.astype(f16), right.astype(f16)
                quad_s.at[0][...] = left16
                quad_s.at[1][...] = right16
                plgpu.commit_smem()
                a0, a1 = [(k_quad[n] * beta_tile).astype(f16) for n in range(2)]

                def below(acc_l, acc_r):
                    acc_l.mma(a0, quad_s.at[0, pl.ds(0, SUB)])
                    acc_l.mma(a1, quad_s.at[0, pl.ds(SUB, SUB)])
                    acc_r.mma(a1, quad_s.at[1, pl.ds(SUB, SUB)])
                    return acc_l.read(), acc_r.read()

                y_l, y_r = _accumulate(interpret, [tile, tile], below)
                publish(pair_s.at[0], y_l)
                publish(pair_s.at[1], y_r)
                # this barrier also makes gamma visible, which is read as columns from here on
                plgpu.commit_smem()
                a0, a1 = only(left16, lower), only(right16, lower)

                def corner(acc_l, acc_r):
                    for acc, ref in ((acc_l, pair_s.at[0]), (acc_r, pair_s.at[1])):
                        acc.mma(a0, ref.at[pl.ds(2 * SUB, SUB)])
                        acc.mma(a1, ref.at[pl.ds(3 * SUB, SUB)])
                    return acc_l.read(), acc_r.read()

                z_l, z_r = _accumulate(interpret, [tile, tile], corner)
                inverse = [
                    jnp.where(lower, z_l * -1.0, left), jnp.where(lower, z_r * -1.0, right),
                    only(left, lower), only(right, lower),
                ]  # fmt: skip
                gated = []
                for n, x in enumerate(inverse):
                    at = pl.ds(SUB * n, SUB)
                    ratio = _rows(gamma, SUB) - _cols(_vector(vec_s.at[LOG_GAMMA, at], COL), C)
                    # above the diagonal the inverse is 0, and the ratio must not overflow there
                    x = x * jnp.exp2(jnp.minimum(ratio, 0.0))
                    gated.append((x * _cols(_vector(gate_s.at[j, 1, at], COL), C)).astype(f16))
                t_s[...] = jnp.concatenate(gated, axis=1)
                gamma_end = vec_s[LOG_GAMMA, C - 1]
                store(vec_s.at[U_SCALE], rk * jnp.exp2(gamma))
                store(vec_s.at[S_SCALE], rk * jnp.exp2(gamma_end - gamma))
                store(vec_s.at[P_COL], gamma - log_rk)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(t_s, t_g.at[item, head])
                plgpu.copy_smem_to_gmem(vec_s, vec_g.at[item, head])

            plgpu.commit_smem()
            lax.fori_loop(0, group, per_head, None)
            plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((items, nv, C, C), f16),
            jax.ShapeDtypeStruct((items, nv, NUM_VECTORS, C), f32),
        ],
        grid=(nk, items),
        grid_names=("head", "item"),
        scratch_types=[
            _copy_target(interpret, (halves, C, LINE), qkv.dtype),
            _swizzled((2, C, SUB), f16),
            _swizzled((2, C, SUB), f16),
            _swizzled((C, C), f16),
            plgpu.SMEM((NUM_VECTORS, C), f32),
            plgpu.SMEM((C,), f32),
            plgpu.SMEM((group, 2, C), f32),
            plgpu.SMEM((2, 2 * C), f32),
            plgpu.Barrier(num_arrivals=halves),
        ],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_prepare",
    )
    return kernel(qkv, decay, beta, slot_idx, offsets)


def _params():
    import dataclasses

    return dataclasses.replace(compiler_params(), approx_math=True)


def _pass(
    qkv, t, vec, slot_idx, offsets, has_initial_state, pool, *, nk, tiles, interpret
):
    """Outputs [T, nv * VD]; `pool` (a Ref) is updated. One CTA per (row, value head, `tiles` * 64 value columns)."""
    total = qkv.shape[0]
    max_slots, nv, key_dim, value_dim = pool.shape
    batch = slot_idx.shape[0]
    group = nv // nk
    halves = key_dim // LINE
    dtype = qkv.dtype
    width = tiles * C
    math_registers, side_registers = ((208, 88) if tiles == 2 else (240, 240))
    # How much of Q S is put before T X in the queue of products, to run while X is computed. With two value tiles the
    # other one's products fill that gap, and there are no registers for one more accumulator.
    early = halves // 2 if tiles == 1 else 0
    stages = 2 if key_dim == 256 else STAGES

    def body(
        qkv_g, t_g, vec_g, slot_g, off_g, init_g, pool_g, o_g,
        q_u, k_u, v_u, t_s, vec_s, p_s, p_row_s, o_u, o_plain, in_bar, in_free, p_ready, p_free, done,
    ):  # fmt: skip
        q_rows, q_tiles = _aliases(interpret, q_u)
        k_rows, k_tiles = _aliases(interpret, k_u)
        v_rows, v_tiles = _aliases(interpret, v_u)
        o_rows, o_tiles = _aliases(interpret, o_u)
        b = lax.axis_index("row")
        head = lax.axis_index("head")
        first_column = lax.axis_index("column") * width
        key_head = lax.div(head, i32(group))
        wg = lax.axis_index("wg")
        row_b = jnp.minimum(b, batch - 1)
        start, length = _row_of(off_g, row_b, total)
        slot = slot_g[row_b]
        live = (b < batch) & is_row_of(slot, max_slots)
        n_chunks = jnp.where(live, lax.div(length + (C - 1), i32(C)), 0)
        item = _item_of(start, row_b)
        stage_of = lambda n: lax.rem(n, i32(stages))
        tr = lambda ref: ref.transpose((1, 0))

        def drain(source, t0, count, channel):
            """Copies the first `count` < 2 C rows of `source` out: copies have static sizes, powers of two here."""
            done_rows = 0
            for bit in range(C.bit_length() - 1, -1, -1):
                m = 1 << bit

                @pl.when((count & m) != 0)
                def _(done_rows=done_rows, m=m):
                    plgpu.copy_smem_to_gmem(
                        source.at[pl.ds(done_rows, m)],
                        o_g.at[pl.ds(t0 + done_rows, m), pl.ds(channel, C)],
                    )

                done_rows = done_rows + (count & m)

        def zero_tokens(zeros, begin, end, channel):
            def one(n, _):
                t0 = begin + n * C
                drain(zeros, t0, jnp.minimum(end - t0, C), channel)

            lax.fori_loop(0, lax.div(end - begin + (C - 1), i32(C)), one, None)

        def zero_outside(zeros, channel):
            """Zeros for the tokens of no row, wherever the offsets leave them."""

            def look(t):
                """`t` moved past the rows that cover it, and the next row's start after the given `t`."""

                def one(n, carry):
                    reached, ahead = carry
                    first, count = _row_of(off_g, n, total)
                    covers = (first <= reached) & (reached < first + count)
                    ahead = jnp.where((first > t) & (count > 0), jnp.minimum(ahead, first), ahead)
                    return jnp.where(covers, first + count, reached), ahead

                return lax.fori_loop(0, batch, one, (t, jnp.int32(total)))

            def step(t):
                reached, ahead = look(t)
                free = reached == t
                zero_tokens(zeros, t, jnp.where(free, ahead, t), channel)
                return jnp.where(free, ahead, reached)

            @pl.when((off_g[0] > 0) | (off_g[batch] < total))
            def _():
                lax.while_loop(lambda t: t < total, step, jnp.int32(0))

        def carry_state(m):
            if interpret is None:
                plgpu.set_max_registers(math_registers, action="increase")
            columns = pl.ds(first_column + m * C, C)
            channel = head * value_dim + first_column + m * C
            part = lambda i: pool_g.at[slot, head, pl.ds(i * LINE, LINE), columns]
            o_row, o_tile, plain = o_rows.at[m], o_tiles.at[m], o_plain.at[m]

            @pl.when(n_chunks > 0)
            def _():
                state = lax.cond(
                    init_g[row_b] != 0,
                    lambda: tuple(_load_transposed(interpret, part(i)) for i in range(halves)),
                    lambda: tuple(
                        _zeros((C, LINE), f32) for _ in range(halves)
                    ),
                )

                def write_output(o, n):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    tr(o_tile)[...] = o
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        o_row, o_g.at[pl.ds(start + n * C, C), pl.ds(channel, C)]
                    )

                def step(n, carry):
                    state, o = carry
                    s, half = stage_of(n), lax.rem(n, i32(2))
                    left = length - n * C
                    plgpu.barrier_wait(in_bar.at[s])

                    @pl.when(left < C)
                    def _():  # what lies past the row's end may be NaN; keys are cleared before `p_ready`
                        plgpu.barrier_wait(p_ready.at[half])
                        v = plgpu.load(v_tiles.at[s, m], layout=WGMMA)
                        v = jnp.where(_iota((C, C), 0) < left, v.astype(f32), 0.0)
                        v_tiles.at[s, m][...] = v.astype(dtype)
                        plgpu.commit_smem()

                    low = [x.astype(dtype) for x in state]

                    def products(u_acc, q_acc, v_acc):
                        for i in range(halves):
                            u_acc.mma(low[i], tr(k_tiles.at[s, i]))
                        for i in range(early):
                            q_acc.mma(low[i], tr(q_tiles.at[s, i]))

                        @pl.when(n > 0)
                        def _():
                            write_output(o, n - 1)

                        v = plgpu.load(tr(v_tiles.at[s, m]), layout=WGMMA).astype(f32)
                        scale = _cols(_vector(vec_s.at[s, U_SCALE], COL), C)
                        x = (v - u_acc.read(early) * scale).astype(f16)
                        v_acc.mma(x, tr(t_s.at[s]))
                        for i in range(early, halves):
                            q_acc.mma(low[i], tr(q_tiles.at[s, i]))
                        s_scale = _cols(_vector(vec_s.at[s, S_SCALE], COL), C)
                        decay = jnp.exp2(vec_s[s, LOG_GAMMA, C - 1])

                        @pl.when(left >= C)
                        def _():
                            plgpu.barrier_wait(p_ready.at[half])

                        q_scale = _cols(_vector(p_row_s.at[half], COL), C)
                        new_v = v_acc.read(halves - early)
                        for_state, for_output = (new_v * s_scale).astype(dtype), new_v.astype(f16)
                        return for_state, for_output, q_acc.read() * q_scale, decay

                    for_state, for_output, o, decay = _accumulate(interpret, [(C, C)] * 3, products)

                    def update(*accs):
                        for i in range(halves):
                            accs[i].mma(for_state, k_tiles.at[s, i])
                        accs[-1].mma(for_output, tr(p_s.at[half]))

                    *state, o = _accumulate_into(
                        interpret, [x * decay for x in state] + [o], update
                    )
                    plgpu.barrier_arrive(p_free.at[half])
                    plgpu.barrier_arrive(in_free.at[s])
                    return tuple(state), o.astype(dtype)

                o = _zeros((C, C), dtype)
                state, o = lax.fori_loop(0, n_chunks, step, (state, o))
                last = length - (n_chunks - 1) * C

                @pl.when(last == C)
                def _():
                    write_output(o, n_chunks - 1)

                @pl.when(last < C)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    store(tr(plain), o)
                    plgpu.commit_smem()
                    drain(plain, start + (n_chunks - 1) * C, last, channel)

                for i in range(halves):
                    _store_transposed(interpret, part(i), state[i])
                plgpu.wait_smem_to_gmem(0)

            @pl.when(jnp.logical_not(live))
            def _():
                store(plain, _zeros((C, C), dtype))
                plgpu.commit_smem()

                @pl.when(b < batch)
                def _():
                    zero_tokens(plain, start, start + length, channel)

                @pl.when(b == batch)
                def _():
                    zero_outside(plain, channel)

                plgpu.wait_smem_to_gmem(0)

        def stream():
            """Brings the inputs in, and computes the masked, scaled Q K^T of each chunk."""
            if interpret is None and tiles == 2:
                plgpu.set_max_registers(side_registers, action="decrease")
            log_scale = -0.5 * math.log2(key_dim)

            def bring(n):
                s = stage_of(n)
                tokens = pl.ds(start + n * C, C)

                def copy(channel, target):
                    plgpu.copy_gmem_to_smem(
                        qkv_g.at[tokens, pl.ds(channel, LINE)], target, in_bar.at[s]
                    )

                for i in range(halves):
                    copy((nk + key_head) * key_dim + i * LINE, k_rows.at[s, i])
                for i in range(halves):
                    copy(key_head * key_dim + i * LINE, q_rows.at[s, i])
                plgpu.copy_gmem_to_smem(vec_g.at[item + n, head], vec_s.at[s], in_bar.at[s])
                for m in range(tiles):
                    copy(2 * nk * key_dim + head * value_dim + first_column + m * C, v_rows.at[s, m])
                plgpu.copy_gmem_to_smem(t_g.at[item + n, head], t_s.at[s], in_bar.at[s])

            lax.fori_loop(0, jnp.minimum(n_chunks, stages), lambda n, _: bring(n), None)

            def step(n, _):
                s, half = stage_of(n), lax.rem(n, i32(2))
                left = length - n * C
                plgpu.barrier_wait(in_bar.at[s])

                @pl.when(left < C)
                def _():
                    for i in range(halves):
                        k = plgpu.load(k_tiles.at[s, i], layout=WGMMA).astype(f32)
                        k = jnp.where(_iota((C, LINE), 0) < left, k, 0.0)
                        k_tiles.at[s, i][...] = k.astype(dtype)
                    plgpu.commit_smem()

                def scores(acc):
                    for i in range(halves):
                        acc.mma(q_tiles.at[s, i], tr(k_tiles.at[s, i]))
                    q2 = None
                    for i in range(halves):
                        q = plgpu.load(q_tiles.at[s, i], layout=WGMMA).astype(f32)
                        q2 = _row_sum(q * q) if q2 is None else q2 + _row_sum(q * q)
                    p_row = jnp.log2(q2 + EPS) * -0.5 + _vector(vec_s.at[s, LOG_GAMMA], ROW)
                    p_row = p_row + log_scale
                    ratio = _rows(p_row, C) - _cols(_vector(vec_s.at[s, P_COL], COL), C)
                    return jnp.exp2(p_row), jnp.exp2(ratio), acc.read()

                q_scale, ratio, qk = _accumulate(interpret, [(C, C)], scores)
                p = jnp.where(_iota((C, C), 0) >= _iota((C, C), 1), qk * ratio, 0.0).astype(f16)

                @pl.when(n >= 2)
                def _():
                    plgpu.barrier_wait(p_free.at[half])

                p_s.at[half][...] = p
                store(p_row_s.at[half], q_scale)
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[half])
                plgpu.barrier_arrive(in_free.at[s])

                @pl.when((n >= 1) & (n - 1 + stages < n_chunks))
                def _():
                    plgpu.barrier_wait(in_free.at[stage_of(n - 1)])
                    bring(n - 1 + stages)

            lax.fori_loop(0, n_chunks, step, None)
            # every barrier is left with all its phases waited for
            lax.fori_loop(
                jnp.maximum(n_chunks - stages, 0), n_chunks,
                lambda n, _: plgpu.barrier_wait(in_free.at[stage_of(n)]), None,
            )  # fmt: skip
            lax.fori_loop(
                jnp.maximum(n_chunks - 2, 0), n_chunks,
                lambda n, _: plgpu.barrier_wait(p_free.at[lax.rem(n, i32(2))]), None,
            )  # fmt: skip

        for m in range(tiles):
            pl.when(wg == m)(partial(carry_state, m))
        pl.when(wg == tiles)(stream)
        # no warpgroup may leave while another still waits on a barrier in this CTA's shared memory
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    target = partial(_copy_target, interpret)
    bar = plgpu.Barrier
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((total, nv * value_dim), dtype),
        grid=(value_dim // width, nv, batch + 1),
        grid_names=("column", "head", "row"),
        num_threads=tiles + 1,
        thread_name="wg",
        scratch_types=[
            target((stages, halves, C, LINE), dtype),
            target((stages, halves, C, LINE), dtype),
            target((stages, tiles, C, C), dtype),
            _swizzled((stages, C, C), f16),
            plgpu.SMEM((stages, NUM_VECTORS, C), f32),
            _swizzled((2, C, C), f16),
            plgpu.SMEM((2, C), f32),
            target((tiles, C, C), dtype),
            plgpu.SMEM((tiles, C, C), dtype),
            bar(num_arrivals=2 * halves + tiles + 2, num_barriers=stages),
            bar(num_arrivals=tiles + 1, num_barriers=stages),
            bar(num_barriers=2),
            bar(num_arrivals=tiles, num_barriers=2),
            bar(num_arrivals=tiles + 1),
        ],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_pass",
    )
    return kernel(qkv, t, vec, slot_idx, offsets, has_initial_state, pool)


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
    """`gated_delta_recurrence_fwd` for algorithm "chunked": (out [T, nv*VD], recurrent_state)."""
    del algorithm, precision
    nk, nv, key_dim, value_dim = _dims(qkv, recurrent_state)
    total = qkv.shape[0]
    short = max(C - total, 0)
    # Copies and loads take whole chunks of the token arrays, so there must be one. Clamping offsets to the
    # true T first keeps the tokens added here out of every row.
    offsets = jnp.minimum(input_row_offsets, total) if short else input_row_offsets
    qkv, decay, beta = [jnp.pad(x, ((0, short), (0, 0))) if short else x for x in (qkv, decay, beta)]
    tiles = 2 if value_dim % (2 * C) == 0 and key_dim <= 128 and slot_idx.shape[0] * nv > 66 else 1
    t, vec = _prepare(
        qkv, decay, beta, slot_idx, offsets,
        nk=nk, key_dim=key_dim, max_slots=recurrent_state.shape[0], interpret=interpret,
    )  # fmt: skip
    pool = jax.new_ref(recurrent_state)
    out = _pass(
        qkv, t, vec, slot_idx, offsets, has_initial_state.astype(i32), pool,
        nk=nk, tiles=tiles, interpret=interpret,
    )  # fmt: skip
    return out[:total], jax.freeze(pool)
