"""Chunked recurrence on Hopper tensor cores (Pallas Mosaic GPU), ragged, on the slot pool in place.

Rows are cut into chunks of 64 tokens. With S the state before the chunk, gamma_i the product of the decays of the chunk
up to token i, q (scaled) and k the normalised rows, and the gate-free inverse

    X  = (I + strict_lower(beta_i k_i.k_j))^-1

the token-by-token rule is, over a whole chunk (the WY form; Yang et al., "Gated Delta Networks", 2024),

    D  = V - gamma K S                                                      what the state does not know yet
    O  = gamma Q S + W D      W_ij = gamma_i/gamma_j beta_j (lower(Q K^T) X)_ij
    S <- gamma_end S + R^T D  R_j  = gamma_end/gamma_j beta_j (X^T K)_j

W and R do not depend on the state. Row R_j is what token j adds to the state at the end of the chunk, after the later
tokens have corrected it, and W_ij how token i reads it: both are bounded by 1 for any keys and gates, and rounding them
costs one rounding. (Rounding T D, with T the gated X, costs more: on repeated keys its rows are differences of
neighbouring values, whose errors add up in the state.) Ratios of gamma are exponentials of differences of cumulative
log decays, all of them at most 1.

Two kernels. `_prepare` works on all chunks at once and writes W, R and three vectors a chunk and value head. `_pass`
walks each (row, value head, columns) serially: warpgroups with 64 value columns each carry S^T as float32 accumulators,
and one more streams the inputs. Where that leaves many multiprocessors idle, `_both` does the two side by side.
docs/kernels_chunked.md has the whole story.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm
from jaxlib.mlir.dialects import vector as vector_ops

from gdn_jax._mosaic import EPS, compiler_params, is_row_of, store
from gdn_jax._ragged import is_live, read_rows, row_bounds, token_rows

C = 64  # tokens of a chunk, and columns of a value tile: the M of a warpgroup product
LINE = 64  # 16-bit elements of a 128-byte swizzle line
SUB = 16  # columns of the compact block-diagonal form in `_prepare`
SMS = 132  # multiprocessors of an H100 or H200
LOG2_MIN = -150.0  # a decay of 0; 2**-150 rounds to 0 in float32
f32, f16, i32 = jnp.float32, jnp.float16, jnp.int32
WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COL = plgpu.Layout.WGMMA.reduce(0)
# The vectors `_prepare` hands to `_pass`, one of each per (chunk, value head), rk and rq the reciprocal norms:
# gamma rk | gamma rq / sqrt(key_dim) | log2 gamma
K_SCALE, Q_SCALE, LOG_GAMMA, NUM_VECTORS = range(4)


def _dims(qkv, recurrent_state):
    _, nv, key_dim, value_dim = recurrent_state.shape
    nk = (qkv.shape[1] - nv * value_dim) // (2 * key_dim)
    return nk, nv, key_dim, value_dim


def _is_short(total, batch, nv):
    """Whether rows of this average length are faster token by token: measured, from few rows and from many."""
    return total < batch * (20 if batch * nv > SMS else 64)


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
    _, nv, key_dim, value_dim = _dims(qkv, recurrent_state)
    if algorithm == "recurrent":
        return "the chunked Mosaic GPU kernel serves algorithm='chunked' and 'auto' only"
    if algorithm == "auto" and _is_short(qkv.shape[0], slot_idx.shape[0], nv):
        return "rows this short on average are faster token by token"
    if precision == "highest":
        return "the chunked Mosaic GPU kernel has 16-bit products; precision='highest' needs the recurrent algorithm"
    for name, dim in (("key_head_dim", key_dim), ("value_head_dim", value_dim)):
        if dim not in (64, 128, 256):
            return f"the chunked Mosaic GPU kernel serves {name} 64, 128 and 256, not {dim}"
    return None


class _Value:
    """An accumulator in interpret mode, which has no product with a register operand."""

    def __init__(self, value):
        self.value = value

    def mma(self, a, b):
        self.value = self.value + jnp.dot(a[...].astype(f32), b[...].astype(f32), preferred_element_type=f32)

    def set(self, value):
        self.value = value

    def read(self, pending=0):
        del pending
        return self.value


class _Registers:
    """A WGMMA accumulator; `read(pending)` waits until at most `pending` later products are in flight."""

    def __init__(self, ref):
        self.ref = ref

    def mma(self, a, b):
        plgpu.wgmma(self.ref, a, b)

    def set(self, value):
        self.ref[...] = value

    def read(self, pending=0):
        # Without the barrier a use of the value may be scheduled ahead of the wait.
        return lax.optimization_barrier(plgpu.wgmma_accumulator_load(self.ref, wait_n=pending))


def _accumulate(interpret, shapes, body):
    """`body(*accumulators)` with zeroed accumulators."""
    if interpret is not None:
        return body(*[_Value(jnp.zeros(s, f32)) for s in shapes])
    return pl.run_scoped(
        lambda *refs: body(*map(_Registers, refs)), *[plgpu.WGMMAAccumulatorRef(s, f32) for s in shapes]
    )


def _swizzle(row_bytes):
    # pyright takes this class, which jax instantiates everywhere, for an abstract one.
    return plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]


def _swizzled(shape, dtype):
    """Shared memory tiled and swizzled as an operand of a warpgroup product."""
    item = jnp.dtype(dtype).itemsize
    row_bytes = plgpu.find_swizzle(shape[-1] * item * 8)
    tiling = plgpu.TilingTransform((8, row_bytes // item))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, _swizzle(row_bytes)))


def _copy_target(interpret, shape, dtype, *more):
    """Shared memory for [.., C, LINE] tiles that bulk copies fill or drain at any token.

    A bulk copy into a tiled buffer has to start at a multiple of the tile's 8 rows. With rows of one swizzle line, the
    tiled and the untiled buffer hold the same bytes, so copies use an untiled alias of what the products read. In
    interpret mode members of a union do not share memory; there, one buffer is everything. `more`: further aliases.
    """
    if interpret is not None:
        return _swizzled(shape, dtype)
    rows = plgpu.SMEM(shape, dtype, transforms=(_swizzle(128),))
    return plgpu.RefUnion([rows], [_swizzled(shape, dtype)], *[[x] for x in more])


def _aliases(interpret, ref, count=2):
    """(what copies use, what products use, further aliases) of a `_copy_target`."""
    if interpret is not None:
        return (ref,) * count
    return tuple(alias for (alias,) in ref)


def _load_transposed(interpret, ref):
    """Global [m, n] as float32 [n, m] in registers; the lanes of a warp read whole sectors."""
    if interpret is not None:
        return ref[...].T.astype(f32)
    m, n = ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((n, m), jnp.dtype(f32), layout=WGMMA),
    )
    def transfer(_, source):
        single = ir.F32Type.get()

        def element(_, idx):
            x = memref.load(source, [idx[1], idx[0]])
            return x if x.type == single else arith.extf(single, x)

        zero = mgpu.FragmentedArray.splat(arith.constant(single, 0.0), (n, m), layout=WGMMA.to_mgpu())
        return zero.foreach(element, create_array=True)

    return transfer(ref)  # pyright: ignore[reportCallIssue]


def _store_transposed(interpret, ref, value):
    """The inverse of `_load_transposed`, rounding to the dtype of `ref`."""
    if interpret is not None:
        ref[...] = value.T.astype(ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def transfer(_, x, target):
        dtype = ir.MemRefType(target.type).element_type

        def element(v, idx):
            memref.store(v if v.type == dtype else arith.truncf(dtype, v), target, [idx[1], idx[0]])

        x.foreach(element)

    transfer(value, ref)  # pyright: ignore[reportCallIssue]


def _iota(shape, axis, layout: Any = WGMMA):
    return plgpu.broadcasted_iota(i32, shape, axis, layout=layout)


def _zeros(shape, dtype, layout: Any = WGMMA):
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


def _first_items(offsets, total, batch):
    """The item (place in the arrays between the kernels) of the first chunk of each row: int32 [B].

    Rows follow one another without gaps, wherever their tokens lie. Rows that do not overlap need no more than
    `total // C + B` items; what others would need beyond that, they share.
    """
    if batch == 1:
        return jnp.zeros((1,), i32)
    _, length = row_bounds(offsets, total)
    chunks = (length + (C - 1)) // C
    return jnp.minimum(jnp.cumsum(chunks) - chunks, total // C + batch - chunks).astype(i32)


def _find_row(first_items, item, batch):
    """The last row whose first item is at most `item`, by bisection; row 0 if there is none."""
    low, high = jnp.int32(0), jnp.int32(batch)
    for _ in range((batch - 1).bit_length()):
        middle = lax.shift_right_logical(low + high, i32(1))
        middle = jnp.minimum(middle, batch - 1)
        before = first_items[middle] <= item
        low, high = jnp.where(before, middle, low), jnp.where(before, high, middle)
    return low


def _block_products(interpret, *pairs) -> Any:
    """Sum of products of 16 x 16 blocks: block by block of [C, SUB], left @ right^T over the (left, right) in `pairs`.

    A block lies in one warp, so the products are the warp's own: nothing passes through shared memory.
    """
    if interpret is not None:
        # Side by side, the products of all pairs are one.
        left, right = [
            jnp.concatenate([x.astype(f32).reshape(-1, SUB, SUB) for x in side], axis=2)
            for side in zip(*pairs, strict=True)
        ]
        return jnp.einsum("bij,bkj->bik", left, right).reshape(C, SUB)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,) * (2 * len(pairs)),
        return_type=plgpu.ShapeDtypeStruct((C, SUB), jnp.dtype(f32), layout=WGMMA),
    )
    def multiply(_, *operands):
        single, word = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        packed = [[_bits(x, word) for x in array.registers.flat] for array in operands]
        columns = []
        for half in range(2):  # 8 columns of the sum, rows of `right`
            sums = [arith.constant(single, 0.0)] * 4
            for left, right in zip(packed[::2], packed[1::2], strict=True):
                out = llvm.inline_asm(
                    llvm.StructType.get_literal([single] * 4),
                    [*left, right[half], right[2 + half], *sums],
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                    "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                )
                sums = [llvm.extractvalue(single, out, [i]) for i in range(4)]
            columns += [vector_ops.from_elements(ir.VectorType.get((2,), single), sums[i : i + 2]) for i in (0, 2)]
        return _like(operands[0], columns)

    return multiply(*[x for pair in pairs for x in pair])  # pyright: ignore[reportCallIssue]


def _transpose_blocks(interpret, x) -> Any:
    """Every 16 x 16 block of the float16 [C, SUB] transposed."""
    if interpret is not None:
        return x.reshape(-1, SUB, SUB).swapaxes(1, 2).reshape(C, SUB)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((C, SUB), jnp.dtype(f16), layout=WGMMA))
    def transpose(_, x):
        word = ir.IntegerType.get_signless(32)
        registers = x.registers.flat
        turned = [
            llvm.inline_asm(word, [_bits(r, word)], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")
            for r in (registers[0], registers[2], registers[1], registers[3])
        ]
        return _like(x, [_bits(r, registers[0].type) for r in turned])

    return transpose(x)  # pyright: ignore[reportCallIssue]


def _bits(register, kind):
    return llvm.bitcast(kind, register)


def _like(array, registers):
    """An array in the layout of `array` made of these registers."""
    shaped = np.empty(array.registers.shape, dtype=object)
    shaped.flat[:] = registers
    return mgpu.FragmentedArray(_registers=shaped, _layout=array.layout, _is_signed=None)


def _warpgroup_barrier(interpret):
    """What any warp of the warpgroup has stored to shared memory, the others may load from here on."""
    if interpret is not None:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        mgpu.warpgroup_barrier()

    wait()  # pyright: ignore[reportCallIssue]


def _heads_at_once(group):
    """Value heads of a place in `_prepare`: all of a key head, or so many that their gates come in 8 columns.

    With 12 columns no second CTA fits on a multiprocessor.
    """
    return max(n for n in (1, 2, 3, 4, 5, 8) if group % n == 0)


def _gate_columns(heads):
    """Columns of decay and beta that are copied for `heads` heads: copies start and end at multiples of 16 bytes.

    The first head is a multiple of `heads`. Where that alone does not align it, up to three columns before it come too.
    """
    before = 0 if 4 % heads == 0 or heads % 4 == 0 else 3
    return pl.cdiv(heads + before, 4) * 4


def _pad_gates(x, nk):
    """Decay or beta [T, nv] with as many columns as `_gate_columns` asks for, in rows of a multiple of 16 bytes."""
    nv = x.shape[1]
    columns = max(pl.cdiv(nv, 4) * 4, _gate_columns(_heads_at_once(nv // nk)))
    return jnp.pad(x, ((0, 0), (0, columns - nv))) if columns > nv else x


def _preparation(qkv, decay, batch, *, nk, nv, key_dim, max_slots, normalise, units, interpret):
    """(what a warpgroup does for its places, buffers, barriers, buffers that overlap, types of results).

    A place is a chunk and a part of the value heads, `_heads_at_once` of one key head. `decay` and beta are those that
    `_pad_gates` returns.
    """
    total, columns = decay.shape
    items = total // C + batch
    group = nv // nk
    heads = _heads_at_once(group)
    width = _gate_columns(heads)
    halves = key_dim // LINE
    dtype = qkv.dtype
    tile = (C, SUB)
    scale = key_dim**-0.5

    def work(operands, buffers, unit, count, place_of, written=None):
        """The places `place_of(0)` to `place_of(count - 1)`, each as (item, part, row, its start and length, chunk).

        What one needs from memory arrives while the one before is computed: only the first has to be waited for.
        `written(item, part)` is called once others may read the results of a place, if it has any.
        """
        qkv_g, decay_g, beta_g, slot_g, w_g, r_g, vec_g = operands
        *refs, k_bar, q_bar, x_s, w_s, blocks_s = buffers
        rows_s, tiles_s, raw_s, key_s, vec_s, gate_s = [ref.at[unit] for ref in refs]
        x_s, w_s, blocks_s = [ref.at[unit] for ref in (x_s, w_s, blocks_s)]

        def look(n):
            """Item, part, first token, tokens, and whether there is anything to do."""
            item, part, b, start, length, chunk = place_of(n)
            first = chunk * C
            valid = jnp.minimum(length - first, C)
            active = (n < count) & (item < items) & (first >= 0) & (valid > 0) & is_row_of(slot_g[b], max_slots)
            return item, part, start + first, valid, active

        def bars(stage):
            return [bar.at[2 * unit + stage] for bar in (k_bar, q_bar)]

        def first_column(part):
            return jnp.minimum(lax.div(part * heads, i32(4)) * 4, columns - width)

        def bring(place, stage):
            _, part, t0, _, active = place
            key_head = lax.div(part * heads, i32(group))
            tokens = pl.ds(t0, C)

            @pl.when(active)
            def _():
                k_arrived, q_arrived = bars(stage)
                for kind, source in enumerate((decay_g, beta_g)):
                    source = source.at[tokens, pl.ds(first_column(part), width)]
                    plgpu.copy_gmem_to_smem(source, raw_s.at[stage, kind], k_arrived)
                for n, (head, bar) in enumerate(((nk + key_head, k_arrived), (key_head, q_arrived))):
                    for i in range(halves):
                        source = qkv_g.at[tokens, pl.ds(head * key_dim + i * LINE, LINE)]
                        plgpu.copy_gmem_to_smem(source, rows_s.at[stage, n, i], bar)

        def finish(place):
            """Waits until the results of a place have left their buffers, or are where others may read them."""
            item, part, *_, active = place
            plgpu.wait_smem_to_gmem(0, wait_read_only=written is None)
            if written is not None:
                pl.when(active)(partial(written, item, part))

        def step(n, carry):
            before, place = carry
            after = look(n + 1)

            def turn_over():
                finish(before)
                bring(after, (n + 1) & 1)

            active = place[-1]
            pl.when(active)(lambda: compute(place, n & 1, turn_over))
            pl.when(jnp.logical_not(active))(turn_over)
            return place, after

        def compute(place, stage, turn_over):
            item, part, _, valid, _ = place
            k_arrived, q_arrived = bars(stage)
            token = _iota((C,), 0, ROW)

            def normalised(tiles):
                """float16 rows of norm 1 and the reciprocal norms; zeros past the row's end, whatever lies there."""

                @pl.when(valid < C)
                def _():
                    inside = _iota((C, LINE), 0) < valid
                    for i in range(halves):
                        x = plgpu.load(tiles.at[i], layout=WGMMA)
                        tiles.at[i][...] = jnp.where(inside, x, jnp.zeros_like(x))
                    plgpu.commit_smem()

                raw = [plgpu.load(tiles.at[i], layout=WGMMA).astype(f32) for i in range(halves)]
                if not normalise:
                    return [x.astype(f16) for x in raw], _zeros((C,), f32, ROW) + 1.0
                r = lax.rsqrt(sum(_row_sum(x * x) for x in raw) + EPS)
                return [(x * _rows(r, LINE)).astype(f16) for x in raw], r

            plgpu.barrier_wait(k_arrived)
            key, rk = normalised(tiles_s.at[stage, 0])
            for i in range(halves):
                key_s.at[i][...] = key[i]
            plgpu.barrier_wait(q_arrived)
            query, rq = normalised(tiles_s.at[stage, 1])
            plgpu.commit_smem()

            def gram(kk_acc, qk_acc):
                for i in range(halves):
                    keys = key_s.at[i].transpose((1, 0))
                    kk_acc.mma(key_s.at[i], keys)
                    qk_acc.mma(query[i], keys)
                return kk_acc.read(), qk_acc.read()

            kk, qk = _accumulate(interpret, [(C, C), (C, C)], gram)
            turn_over()
            scores = jnp.where(_iota((C, C), 0) >= _iota((C, C), 1), qk, 0.0).astype(f16)

            # Compact forms, [C, SUB]: what each 16-row block needs of the columns of one 16-column block.
            r, c = _iota(tile, 0), _iota(tile, 1)
            block = lax.shift_right_logical(r, i32(4))
            k_tile = [kk[:, SUB * j : SUB * (j + 1)] for j in range(4)]
            k_diag = jnp.where(
                block == 0, k_tile[0],
                jnp.where(block == 1, k_tile[1], jnp.where(block == 2, k_tile[2], k_tile[3])),
            )  # fmt: skip
            k_diag = jnp.where((r & 15) > c, k_diag, 0.0)
            k_pair = jnp.where(block == 1, k_tile[0], jnp.where(block == 3, k_tile[2], 0.0))
            k_quad = [jnp.where(block >= 2, k_tile[j], 0.0) for j in range(2)]
            # Masks of blocks for 16-bit registers, which hold two elements: a product is one step, a select four.
            token_block = lax.shift_right_logical(token, i32(4))
            mask = [_rows(jnp.where(token_block == j, 1.0, 0.0), SUB).astype(f16) for j in range(4)]
            same_eighth = (lax.shift_right_logical(r, i32(3)) & 1) == lax.shift_right_logical(c, i32(3))
            near = jnp.where(same_eighth, -1.0, 0.0).astype(f16)
            far = jnp.where(same_eighth, 0.0, 1.0).astype(f16)
            identity = jnp.where((r & 15) == c, 1.0, 0.0).astype(f16)

            def multiply(*pairs):
                return _block_products(interpret, *pairs)

            def turn(x):
                return _transpose_blocks(interpret, x.astype(f16))

            def publish(blocks, slot, x):
                store(blocks.at[pl.ds(slot * C, C)], x)

            def fetch(blocks, slot, distance):
                """What the warp `distance` before this one has published in the slot.

                The first warps get something from the slot before, which is multiplied by zero.
                """
                return _vector(blocks.at[pl.ds(slot * C - distance * SUB, C)], WGMMA)

            def diagonal_inverse(beta):
                """Inverses of the 16 x 16 diagonal blocks."""
                # Rounded once, for all uses: on repeated keys the entries of the inverse are differences of
                # equal numbers, and an error that all of them share would add up in W and R.
                a = (k_diag * beta).astype(f16)
                # 8 x 8: (I + N)(I + N^2)(I + N^4), exact because N^8 = 0
                n1 = a * near
                n2 = multiply((n1, turn(n1))).astype(f16)
                n2_t = turn(n2)
                x16 = n1 + identity
                x = x16.astype(f32) + multiply((x16, n2_t))
                x = x + multiply((x.astype(f16), turn(multiply((n2, n2_t)))))
                # 8 -> 16: the block below the diagonal becomes -X22 L21 X11
                x16 = x.astype(f16)
                below = multiply((a * far, turn(x16)))
                return (x - multiply((x16, turn(below)))).astype(f16)

            def inverse(beta, blocks):
                """The inverse, as four [C, SUB]."""
                x = diagonal_inverse(beta)
                for slot in range(2):
                    publish(blocks, slot, turn(x))
                _warpgroup_barrier(interpret)
                # 16 -> 32
                by = [fetch(blocks, 1, distance) for distance in (1, 2, 3)]
                pair = multiply(((k_pair * beta).astype(f16), by[0]))
                pair = (multiply((x, turn(pair))) * -1.0).astype(f16)
                publish(blocks, 2, turn(pair))
                _warpgroup_barrier(interpret)
                # 32 -> 64
                x00 = by[1] * mask[2] + by[2] * mask[3]
                x10 = fetch(blocks, 2, 1) * mask[2] + fetch(blocks, 2, 2) * mask[3]
                x11 = by[0] * mask[2] + by[1] * mask[3]
                a = [(k * beta).astype(f16) for k in k_quad]
                quad = turn(multiply((a[0], x00), (a[1], x10))), turn(multiply((a[1], x11)))
                for n in range(2):
                    publish(blocks, 1 + 2 * n, quad[n])
                _warpgroup_barrier(interpret)
                z = [(multiply((x, quad[n]), (pair, fetch(blocks, 1 + 2 * n, 1))) * -1.0).astype(f16) for n in range(2)]
                return [
                    z[0] + pair * mask[1] + x * mask[0],
                    z[1] + x * mask[1],
                    pair * mask[3] + x * mask[2],
                    x * mask[3],
                ]

            def products(*sums, shape):
                """The sums of the products in each list of (left, right) operands."""

                def run(*accs):
                    for acc, (a, b) in zip(accs, sums, strict=True):
                        acc.mma(a, b)
                    return [acc.read() for acc in accs]

                return _accumulate(interpret, [shape] * len(sums), run)

            def one_head(n, _):
                head, turn_n = part * heads + n, n & 1
                gates, vectors = gate_s.at[turn_n], vec_s.at[turn_n]

                def vector(k):
                    return vectors.at[pl.ds(k * C, C)]

                column = head - first_column(part)
                decay, beta = [
                    jnp.where(token < valid, _vector(raw_s.at[stage, kind, :, column], ROW), 1.0 - kind)
                    for kind in range(2)
                ]
                store(gates.at[0], jnp.maximum(jnp.log2(decay), LOG2_MIN))
                store(gates.at[1], beta)
                plgpu.wait_smem_to_gmem(3, wait_read_only=True)  # the three copies of the head before the last one
                x = inverse(_rows(beta, SUB), blocks_s.at[turn_n])
                # cumulative log2 decay: a masked row sum stands in for a running sum
                gamma = None
                for j in range(4):
                    g = _cols(_vector(gates.at[0, pl.ds(SUB * j, SUB)], COL), C)
                    g = jnp.where(c + SUB * j <= r, g, 0.0)
                    gamma = g if gamma is None else gamma + g
                gamma = _row_sum(gamma)
                _warpgroup_barrier(interpret)  # all warps are through with the blocks, whose place X takes
                x_n = x_s.at[turn_n]
                x_n[...] = jnp.concatenate(x, axis=1)
                store(vector(LOG_GAMMA), gamma)
                store(vector(K_SCALE), rk * jnp.exp2(gamma))
                store(vector(Q_SCALE), rq * scale * jnp.exp2(gamma))
                plgpu.commit_smem()

                (w,) = products((scores, x_n), shape=(C, C))
                ratio = _rows(gamma, C) - _cols(_vector(vector(LOG_GAMMA), COL), C)
                # above the diagonal W is 0, and the ratio must not overflow there
                w = w * jnp.exp2(jnp.minimum(ratio, 0.0))
                w = (w * _cols(_vector(gates.at[1], COL) * scale, C)).astype(dtype)
                gamma_end = vectors[(LOG_GAMMA + 1) * C - 1]
                r_scale = _rows(beta * jnp.exp2(gamma_end - gamma), LINE)
                rows = products(*[(x_n.transpose((1, 0)), key_s.at[i]) for i in range(halves)], shape=(C, LINE))
                r_s = tiles_s.at[stage, turn_n]  # the raw rows are in registers
                for i in range(halves):
                    r_s.at[i][...] = (rows[i] * r_scale).astype(dtype)
                _warpgroup_barrier(interpret)  # all warps are through with X, whose place W takes
                w_s.at[turn_n][...] = w
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(w_s.at[turn_n], w_g.at[item, head])
                plgpu.copy_smem_to_gmem(r_s, r_g.at[item, head])
                plgpu.copy_smem_to_gmem(vectors, vec_g.at[item, head])

            lax.fori_loop(0, heads, one_head, None)

        place = look(0)
        bring(place, 0)
        nothing = *place[:-1], jnp.bool_(False)
        last, _ = lax.fori_loop(0, count, step, (nothing, place))
        finish(last)

    # The blocks that warps exchange, X and W take one another's place.
    overlay = [
        _swizzled((units, 2, C, C), f16),
        _swizzled((units, 2, C, C), dtype),
        plgpu.SMEM((units, 2, 4 * C, SUB), f16),
    ]
    buffers = [
        _copy_target(interpret, (units, 2, 2, halves, C, LINE), dtype),
        plgpu.SMEM((units, 2, 2, C, width), f32),
        _swizzled((units, halves, C, LINE), f16),
        plgpu.SMEM((units, 2, NUM_VECTORS * C), f32),
        plgpu.SMEM((units, 2, 2, C), f32),
    ]
    barriers = [plgpu.Barrier(num_arrivals=n, num_barriers=2 * units) for n in (halves + 2, halves)]
    results = [
        jax.ShapeDtypeStruct((items, nv, C, C), dtype),
        jax.ShapeDtypeStruct((items, nv, halves, C, LINE), dtype),
        jax.ShapeDtypeStruct((items, nv, NUM_VECTORS * C), f32),
    ]
    return work, buffers, barriers, overlay, results


def _prepare(qkv, decay, beta, slot_idx, offsets, first_items, *, nk, nv, key_dim, max_slots, normalise, interpret):
    """W [items, nv, C, C], R [items, nv, key_dim / LINE, C, LINE] and float32 vectors [items, nv, NUM_VECTORS * C].

    Two CTAs a multiprocessor, of one warpgroup each, take all places in turns. W and R have the dtype of the tokens.
    """
    total = decay.shape[0]
    batch = slot_idx.shape[0]
    work, buffers, barriers, overlay, results = _preparation(
        qkv, decay, batch,
        nk=nk, nv=nv, key_dim=key_dim, max_slots=max_slots, normalise=normalise, units=1, interpret=interpret,
    )  # fmt: skip
    parts = nv // _heads_at_once(nv // nk)
    places = (total // C + batch) * parts
    ctas = min(2 * SMS, places)

    def body(qkv_g, decay_g, beta_g, slot_g, off_g, item_g, w_g, r_g, vec_g, tokens_u, *scratch):
        *scratch, overlay = scratch if interpret is None else (*scratch[:-3], [[x] for x in scratch[-3:]])
        scratch = *_aliases(interpret, tokens_u), *scratch, *[ref for (ref,) in overlay]
        cta = lax.axis_index("cta")

        def place_of(n):
            # Rows of equal length leave items empty at regular distances: in another order every time, no CTA gets
            # more of these than others.
            place = n * ctas + lax.rem(cta + n * 101, i32(ctas))
            item, part = lax.div(place, i32(parts)), lax.rem(place, i32(parts))
            b = _find_row(item_g, item, batch)
            start, length = _row_of(off_g, b, total)
            return item, part, b, start, length, item - item_g[b]

        work((qkv_g, decay_g, beta_g, slot_g, w_g, r_g, vec_g), scratch, 0, pl.cdiv(places, ctas), place_of)

    kernel = plgpu.kernel(
        body,
        out_type=results,
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=[
            *buffers, *barriers, *([plgpu.RefUnion(*[[x] for x in overlay])] if interpret is None else overlay)
        ],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_prepare",
    )  # fmt: skip
    return kernel(qkv, decay, beta, slot_idx, offsets, first_items)


def _params():
    return dataclasses.replace(compiler_params(), approx_math=True)


def _passing(qkv, pool, batch, rows, *, nk, tiles, split, scaled_states, interpret):
    """(what a CTA does for one row, value head and columns, buffers, barriers)."""
    total = qkv.shape[0]
    max_slots, nv, key_dim, value_dim = pool.shape
    group = nv // nk
    halves = key_dim // LINE
    stages = 2 if key_dim == 256 else 3
    dtype = qkv.dtype
    width = tiles * C
    # Registers a thread, of 65536 a CTA: accumulators where the products are, few where only copies are issued.
    math_registers = 232 if tiles == 2 else 240

    def work(operands, buffers, wg, b, head, column, await_item=None):
        qkv_g, w_g, r_g, vec_g, slot_g, off_g, item_g, init_g, scale_g, table_g, initial_g, pool_g, o_g = operands
        (q_rows, q_tiles), (k_rows, k_tiles), (v_rows, v_tiles, v_plain), w_s, r_s, vec_s, *barriers = buffers
        in_bar, in_free, tail_ready, done = barriers
        first_column = column * width
        key_head = lax.div(head, i32(group))
        part_b = jnp.minimum(b, rows - 1)
        row_b = lax.div(part_b, i32(rows // batch))
        if not split:
            start, length = _row_of(off_g, row_b, total)
            item = item_g[row_b]
        else:
            start, length, item = [table_g[n, part_b] for n in (FIRST, LENGTH, ITEM)]
        slot = slot_g[row_b]
        live = (b < rows) & is_row_of(slot, max_slots)
        n_chunks = jnp.where(live, lax.div(length + (C - 1), i32(C)), 0)
        last = length - (n_chunks - 1) * C  # tokens of the last chunk

        def stage_of(n):
            return lax.rem(n, i32(stages))

        def tr(ref):
            return ref.transpose((1, 0))

        def drain(source, t0, count, channel):
            """Copies the first `count` <= C rows of `source` out: copies have static sizes, powers of two here."""
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
                """`t` moved past the rows that cover it, and the first start of a row after the given `t`."""

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
            plain = v_plain.at[0, m]  # free before the first and after the last chunk

            def part(i):
                return pool_g.at[slot, head, pl.ds(i * LINE, LINE), columns]

            def scaled(x, n):
                return x if not scaled_states else x * scale_g[n, row_b, head]

            @pl.when(n_chunks > 0)
            def _():
                if not split:
                    state = lax.cond(
                        init_g[row_b] != 0,
                        lambda: tuple(scaled(_load_transposed(interpret, part(i)), 0) for i in range(halves)),
                        lambda: tuple(_zeros((C, LINE), f32) for _ in range(halves)),
                    )
                else:
                    state = tuple(
                        _load_transposed(interpret, initial_g.at[part_b, head, pl.ds(i * LINE, LINE), columns])
                        for i in range(halves)
                    )

                def write_output(o, n, s):
                    """Through the buffer of values that chunk n + 1 has just read."""
                    plgpu.commit_smem()  # all four warps have read it
                    tr(v_tiles.at[s, m])[...] = o
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(v_rows.at[s, m], o_g.at[pl.ds(start + n * C, C), pl.ds(channel, C)])

                def step(n, carry):
                    state, low, before = carry
                    s = stage_of(n)
                    left = length - n * C
                    plgpu.barrier_wait(in_bar.at[s])

                    @pl.when(left < C)
                    def _():
                        plgpu.barrier_wait(tail_ready)

                    def chunk(u, q, o, *s_new):
                        for i in range(halves):
                            u.mma(low[i], tr(k_tiles.at[s, i]))
                        for i in range(halves):
                            q.mma(low[i], tr(q_tiles.at[s, i]))
                        v = plgpu.load(tr(v_tiles.at[s, m]), layout=WGMMA).astype(f32)

                        @pl.when(n > 0)
                        def _():
                            write_output(before, n - 1, s)

                        k_scale = _cols(_vector(vec_s.at[s, pl.ds(K_SCALE * C, C)], COL), C)
                        decay = jnp.exp2(vec_s[s, (LOG_GAMMA + 1) * C - 1])
                        d = (v - u.read(halves) * k_scale).astype(dtype)
                        for i in range(halves):
                            s_new[i].set(state[i] * decay)
                            s_new[i].mma(d, r_s.at[s, i])
                        q_scale = _cols(_vector(vec_s.at[s, pl.ds(Q_SCALE * C, C)], COL), C)
                        o.set(q.read(halves) * q_scale)
                        o.mma(d, tr(w_s.at[s]))
                        state_new = tuple(x.read(1) for x in s_new)
                        low_new = tuple(x.astype(dtype) for x in state_new)
                        return state_new, low_new, o.read().astype(dtype)

                    shapes = [(C, C)] * 3 + [(C, LINE)] * halves
                    carry = _accumulate(interpret, shapes, chunk)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if interpret is not None:
                        # Here products read like ordinary loads, and copies must not overtake those.
                        plgpu.commit_smem()
                    plgpu.barrier_arrive(in_free.at[s])
                    return carry

                low = tuple(x.astype(dtype) for x in state)
                carry = (state, low, _zeros((C, C), dtype))
                state, _, o = lax.fori_loop(0, n_chunks, step, carry)

                # Every chunk of inputs has been consumed, by this warpgroup's own columns: its buffers are free.
                plgpu.commit_smem()

                @pl.when(last == C)
                def _():
                    write_output(o, n_chunks - 1, 0)

                @pl.when(last < C)
                def _():
                    store(tr(plain), o)
                    plgpu.commit_smem()
                    drain(plain, start + (n_chunks - 1) * C, last, channel)

                @pl.when(True if not split else table_g[IS_LAST, part_b] != 0)
                def _():
                    for i in range(halves):
                        _store_transposed(interpret, part(i), scaled(state[i], 1))

                plgpu.wait_smem_to_gmem(0)

            @pl.when(jnp.logical_not(live))
            def _():
                store(plain, _zeros((C, C), dtype))
                plgpu.commit_smem()

                @pl.when(b < rows)
                def _():
                    zero_tokens(plain, start, start + length, channel)

                @pl.when(b == rows)
                def _():
                    zero_outside(plain, channel)

                plgpu.wait_smem_to_gmem(0)

        def stream():
            if interpret is None:
                plgpu.set_max_registers(40, action="decrease")

            def bring(n, _):
                s = stage_of(n)

                @pl.when(n >= stages)
                def _():
                    plgpu.barrier_wait(in_free.at[s])
                    plgpu.barrier_wait(in_bar.at[s])

                def copy(channel, target):
                    source = qkv_g.at[pl.ds(start + n * C, C), pl.ds(channel, LINE)]
                    plgpu.copy_gmem_to_smem(source, target, in_bar.at[s])

                for i in range(halves):
                    copy((nk + key_head) * key_dim + i * LINE, k_rows.at[s, i])
                for m in range(tiles):
                    copy(2 * nk * key_dim + head * value_dim + first_column + m * C, v_rows.at[s, m])
                for i in range(halves):
                    copy(key_head * key_dim + i * LINE, q_rows.at[s, i])
                if await_item is not None:
                    await_item(item + n)
                plgpu.copy_gmem_to_smem(vec_g.at[item + n, head], vec_s.at[s], in_bar.at[s])
                plgpu.copy_gmem_to_smem(r_g.at[item + n, head], r_s.at[s], in_bar.at[s])
                plgpu.copy_gmem_to_smem(w_g.at[item + n, head], w_s.at[s], in_bar.at[s])

            lax.fori_loop(0, n_chunks, bring, None)

            # A thread that waits on a barrier has to wait for every phase of it, in order.
            def last_stages(barrier):
                lax.fori_loop(
                    jnp.maximum(n_chunks - stages, 0), n_chunks,
                    lambda n, _: plgpu.barrier_wait(barrier.at[stage_of(n)]), None,
                )  # fmt: skip

            last_stages(in_bar)

            @pl.when((n_chunks > 0) & (last < C))
            def _():  # keys and values past the row's end may be NaN
                s = stage_of(n_chunks - 1)
                for ref in [k_tiles.at[s, i] for i in range(halves)] + [v_tiles.at[s, m] for m in range(tiles)]:
                    x = plgpu.load(ref, layout=WGMMA)
                    ref[...] = jnp.where(_iota((C, C), 0) < last, x, jnp.zeros_like(x))
                plgpu.commit_smem()
                plgpu.barrier_arrive(tail_ready)

            last_stages(in_free)

        for m in range(tiles):
            pl.when(wg == m)(partial(carry_state, m))
        pl.when(wg == tiles)(stream)
        # no warpgroup may leave while another still waits on a barrier in this CTA's shared memory
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    target = partial(_copy_target, interpret)
    bar = plgpu.Barrier
    buffers = [
        target((stages, halves, C, LINE), dtype),
        target((stages, halves, C, LINE), dtype),
        target((stages, tiles, C, C), dtype, plgpu.SMEM((stages, tiles, C, C), dtype)),
        _swizzled((stages, C, C), dtype),
        _swizzled((stages, halves, C, LINE), dtype),
        plgpu.SMEM((stages, NUM_VECTORS * C), f32),
    ]
    barriers = [
        bar(num_arrivals=2 * halves + tiles + 3, num_barriers=stages),
        bar(num_arrivals=tiles, num_barriers=stages),
        bar(),
        bar(num_arrivals=tiles + 1),
    ]
    return work, buffers, barriers


def _pass(
    qkv, w, r, vec, slot_idx, offsets, first_items, has_initial_state, scales, pool, *, nk, tiles, interpret, split=None
):  # fmt: skip
    """Outputs [T, nv * VD]; `pool` (a Ref) is updated. One CTA per (row, value head, `tiles` * 64 value columns).

    `scales` is None or [2, B, nv]: what states are multiplied with when read, and when written. `split` is None or
    (`_segments`, their initial states): each segment of a row then has its own CTAs, and the last writes the state.
    """
    table, initial = split or (None, None)
    total = qkv.shape[0]
    _, nv, _, value_dim = pool.shape
    batch = slot_idx.shape[0]
    rows = batch if table is None else table.shape[1]
    work, buffers, barriers = _passing(
        qkv, pool, batch, rows,
        nk=nk, tiles=tiles, split=split is not None, scaled_states=scales is not None, interpret=interpret,
    )  # fmt: skip

    def body(*refs):
        operands, (q_u, k_u, v_u, *buffers) = refs[:13], refs[13:]
        buffers = _aliases(interpret, q_u), _aliases(interpret, k_u), _aliases(interpret, v_u, 3), *buffers
        work(operands, buffers, *[lax.axis_index(name) for name in ("wg", "row", "head", "column")])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((total, nv * value_dim), qkv.dtype),
        grid=(value_dim // (tiles * C), nv, rows + 1),
        grid_names=("column", "head", "row"),
        num_threads=tiles + 1,
        thread_name="wg",
        scratch_types=[*buffers, *barriers],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_pass",
    )
    return kernel(qkv, w, r, vec, slot_idx, offsets, first_items, has_initial_state, scales, table, initial, pool)


def _both(
    qkv, decay, beta, slot_idx, offsets, first_items, has_initial_state, scales, pool, *, nk, workers, normalise
):  # fmt: skip
    """`_prepare` and `_pass` in one kernel, side by side: outputs [T, nv * VD]; `pool` (a Ref) is updated.

    `workers` CTAs prepare chunks, in the order in which they are needed; each of the others carries the state of one
    (row, value head, 64 columns) and waits for its next chunk where it has to. Preparing CTAs come first in the grid
    and wait for nothing, so that this ends however few CTAs run at a time. Every sum is taken as in the two kernels.
    """
    total = qkv.shape[0]
    max_slots, nv, key_dim, value_dim = pool.shape
    batch = slot_idx.shape[0]
    chunks, items = pl.cdiv(total, C), total // C + batch
    columns = value_dim // C
    heads = _heads_at_once(nv // nk)
    parts = nv // heads
    units = 2  # as many warpgroups as carrying a state takes
    prepare, buffers, barriers, overlay, results = _preparation(
        qkv, decay, batch,
        nk=nk, nv=nv, key_dim=key_dim, max_slots=max_slots, normalise=normalise, units=units, interpret=None,
    )  # fmt: skip
    carry, pass_buffers, pass_barriers = _passing(
        qkv, pool, batch, batch,
        nk=nk, tiles=1, split=False, scaled_states=scales is not None, interpret=None,
    )  # fmt: skip

    def body(
        qkv_g, decay_g, beta_g, slot_g, off_g, item_g, init_g, scale_g, pool_g,
        o_g, w_g, r_g, vec_g, memory, prepare_barriers, pass_barriers,
    ):  # fmt: skip
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        # How often the results for a (chunk, part) have been written: once they are there, 1.
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR((items * parts,)))
        first, second, third, *views = memory

        @pl.when(cta < workers)
        def _():
            operands = qkv_g, decay_g, beta_g, slot_g, w_g, r_g, vec_g
            (rows_s, *shared, x_s), (tiles_s, *_, w_s), (*_, blocks_s) = first, second, third
            refs = rows_s, tiles_s, *shared, *prepare_barriers, x_s, w_s, blocks_s

            def place_of(n):
                # All warpgroups of all CTAs take a chunk before any takes its second.
                place = (n * units + wg) * workers + cta
                place, part = lax.div(place, i32(parts)), lax.rem(place, i32(parts))
                chunk, b = lax.div(place, i32(batch)), lax.rem(place, i32(batch))
                start, length = _row_of(off_g, b, total)
                return item_g[b] + chunk, part, b, start, length, chunk

            def signal(item, part):
                plgpu.semaphore_signal(ready.at[item * parts + part], memory_scope="gpu")

            prepare(operands, refs, wg, pl.cdiv(chunks * batch * parts, units * workers), place_of, signal)

        @pl.when(cta >= workers)
        def _():
            operands = qkv_g, w_g, r_g, vec_g, slot_g, off_g, item_g, init_g, scale_g, None, None, pool_g, o_g
            (q_rows, k_rows, v_rows, *shared), (q_tiles, k_tiles, v_tiles, *_), (_, _, v_plain, *_) = views
            refs = (q_rows, q_tiles), (k_rows, k_tiles), (v_rows, v_tiles, v_plain), *shared, *pass_barriers
            place, column = lax.div(cta - workers, i32(columns)), lax.rem(cta - workers, i32(columns))
            b, head = lax.div(place, i32(nv)), lax.rem(place, i32(nv))

            def await_item(item):
                part = lax.div(head, i32(heads))
                plgpu.semaphore_wait(ready.at[item * parts + part], decrement=False, memory_scope="gpu")
                _order_copies()

            carry(operands, refs, wg, b, head, column, await_item)

    memory = [*_views([*buffers, plgpu.RefUnion(*[[x] for x in overlay])]), *_views(pass_buffers)]
    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((total, nv * value_dim), qkv.dtype), *results],
        grid=(workers + columns * nv * (batch + 1),),
        grid_names=("cta",),
        num_threads=units,
        thread_name="wg",
        scratch_types=[plgpu.RefUnion(*memory), barriers, pass_barriers],
        compiler_params=_params(),
        kernel_name="gated_delta_chunk",
    )
    return kernel(qkv, decay, beta, slot_idx, offsets, first_items, has_initial_state, scales, pool)[0]


def _views(buffers):
    """Three lists of refs that each lie in memory like `buffers`, with the first, second and third alias of unions."""

    def alias(ref, n):
        return ref.refs[min(n, len(ref.refs) - 1)][0] if isinstance(ref, plgpu.RefUnion) else ref

    return [[alias(ref, n) for ref in buffers] for n in range(3)]


def _order_copies():
    """Bulk copies that this warpgroup issues from here on read what other CTAs' had written before it was told."""

    @plgpu.inline_mgpu()
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_global)

    fence()  # pyright: ignore[reportCallIssue]


# Rows of the table of segments: first token, tokens, first item, whether the row ends in this segment.
FIRST, LENGTH, ITEM, IS_LAST = range(4)


def _segments(offsets, first_items, total, count):
    """Every row in `count` segments of equally many chunks, the last ones shorter or empty: int32 [4, B * count]."""
    start, length = [x[:, None] for x in row_bounds(offsets, total)]
    chunks = (length + (C - 1)) // C
    each = (chunks + (count - 1)) // count
    first = jnp.minimum(jnp.arange(count, dtype=i32) * each, chunks)
    past = jnp.minimum(first + each, chunks)
    tokens = jnp.minimum(past * C, length) - jnp.minimum(first * C, length)
    item = first_items[:, None] + first
    table = [start + first * C, tokens, item, (past == chunks) & (first < past)]
    return jnp.stack([x.astype(i32).reshape(-1) for x in table])


def _segment_maps(qkv, r, vec, slot_idx, table, *, count, dims, max_slots, interpret):
    """What segments do to the state: float32 [B * count, nv, KD, VD + KD].

    The first VD columns are the state that a segment leaves behind when it starts from zeros, the others those of the
    unit vectors with values of zero: the map from the state before the segment to its share in the state after it. Only
    the segments that another one follows are filled in.
    """
    nk, nv, key_dim, value_dim = dims
    group = nv // nk
    halves = key_dim // LINE
    stages = 2 if key_dim == 256 else 3
    dtype = qkv.dtype
    segments = table.shape[1]
    value_tiles = value_dim // C

    def body(
        qkv_g, r_g, vec_g, slot_g, table_g, out_g, k_u, v_u, r_s, vec_s, in_bar, in_free, done
    ):  # fmt: skip
        k_rows, k_tiles = _aliases(interpret, k_u)
        v_rows, v_tiles = _aliases(interpret, v_u)
        segment, head, column = [lax.axis_index(name) for name in ("segment", "head", "column")]
        key_head = lax.div(head, i32(group))
        wg = lax.axis_index("wg")
        start, item = table_g[FIRST, segment], table_g[ITEM, segment]
        follows = lax.rem(segment, i32(count)) < count - 1
        follows = follows & (table_g[LENGTH, jnp.minimum(segment + 1, segments - 1)] > 0)
        live = follows & is_row_of(slot_g[lax.div(segment, i32(count))], max_slots)
        # A segment that another one follows is whole chunks.
        n_chunks = jnp.where(live, lax.div(table_g[LENGTH, segment], i32(C)), 0)
        is_map = column >= value_tiles

        def stage_of(n):
            return lax.rem(n, i32(stages))

        @pl.when((wg == 0) & (n_chunks > 0))
        def _():
            if interpret is None:
                plgpu.set_max_registers(240, action="increase")
            unit = _iota((C, LINE), 0) + (column - value_tiles) * C  # where a column of the identity has its 1

            def step(n, state):
                s = stage_of(n)
                plgpu.barrier_wait(in_bar.at[s])

                def chunk(u, *s_new):
                    for i in range(halves):
                        u.mma(state[i].astype(dtype), k_tiles.at[s, i].transpose((1, 0)))
                    v = plgpu.load(v_tiles.at[s].transpose((1, 0)), layout=WGMMA).astype(f32)
                    v = jnp.where(is_map, _zeros((C, C), f32), v)
                    k_scale = _cols(_vector(vec_s.at[s, pl.ds(K_SCALE * C, C)], COL), C)
                    decay = jnp.exp2(vec_s[s, (LOG_GAMMA + 1) * C - 1])
                    d = (v - u.read() * k_scale).astype(dtype)
                    for i in range(halves):
                        s_new[i].set(state[i] * decay)
                        s_new[i].mma(d, r_s.at[s, i])
                    return tuple(x.read() for x in s_new)

                state = _accumulate(interpret, [(C, C)] + [(C, LINE)] * halves, chunk)
                if interpret is not None:
                    plgpu.commit_smem()
                plgpu.barrier_arrive(in_free.at[s])
                return state

            state = tuple(jnp.where(_iota((C, LINE), 1) + i * LINE == unit, 1.0, 0.0) for i in range(halves))
            state = lax.fori_loop(0, n_chunks, step, state)
            for i in range(halves):
                target = out_g.at[segment, head, pl.ds(i * LINE, LINE), pl.ds(column * C, C)]
                _store_transposed(interpret, target, state[i])

        @pl.when(wg == 1)
        def _():
            if interpret is None:
                plgpu.set_max_registers(40, action="decrease")

            def bring(n, _):
                s = stage_of(n)

                @pl.when(n >= stages)
                def _():
                    plgpu.barrier_wait(in_free.at[s])

                def copy(channel, target):
                    source = qkv_g.at[pl.ds(start + n * C, C), pl.ds(channel, LINE)]
                    plgpu.copy_gmem_to_smem(source, target, in_bar.at[s])

                for i in range(halves):
                    copy((nk + key_head) * key_dim + i * LINE, k_rows.at[s, i])
                plgpu.copy_gmem_to_smem(vec_g.at[item + n, head], vec_s.at[s], in_bar.at[s])
                value_tile = jnp.minimum(column, value_tiles - 1)  # not used by a map
                copy(2 * nk * key_dim + head * value_dim + value_tile * C, v_rows.at[s])
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
        body,
        out_type=jax.ShapeDtypeStruct((segments, nv, key_dim, value_dim + key_dim), f32),
        grid=(value_tiles + key_dim // C, nv, segments),
        grid_names=("column", "head", "segment"),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            _copy_target(interpret, (stages, halves, C, LINE), dtype),
            _copy_target(interpret, (stages, C, C), dtype),
            _swizzled((stages, halves, C, LINE), dtype),
            plgpu.SMEM((stages, NUM_VECTORS * C), f32),
            bar(num_arrivals=halves + 3, num_barriers=stages),
            bar(num_barriers=stages),
            bar(num_arrivals=2),
        ],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_maps",
    )
    return kernel(qkv, r, vec, slot_idx, table)


def _initial_states(maps, states, count):
    """The states before all segments, float32 [B * count, nv, KD, VD], from `_segment_maps` and the rows' own."""
    batch, nv, key_dim, value_dim = states.shape
    maps = maps.reshape(batch, count, nv, key_dim, value_dim + key_dim)
    before = [states]
    for n in range(count - 1):
        local, step = maps[:, n, ..., :value_dim], maps[:, n, ..., value_dim:]
        before.append(jnp.matmul(step, before[-1], precision=lax.Precision.HIGHEST) + local)
    return jnp.stack(before, 1).reshape(batch * count, nv, key_dim, value_dim)


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
    dtype = qkv.dtype
    scales = token_scale = None
    if dtype == f32:
        qkv, scales, token_scale = _to_float16(qkv, recurrent_state, slot_idx, input_row_offsets, has_initial_state)
    short = max(C - total, 0)
    # Copies and loads take whole chunks of the token arrays, so there must be one. Clamping offsets to the
    # true T first keeps the tokens added here out of every row.
    offsets = jnp.minimum(input_row_offsets, total) if short else input_row_offsets
    qkv, decay, beta = [jnp.pad(x, ((0, short), (0, 0))) if short else x for x in (qkv, decay, beta)]
    decay, beta = _pad_gates(decay, nk), _pad_gates(beta, nk)
    first_items = _first_items(offsets, total + short, slot_idx.shape[0])
    count = _num_segments(total, slot_idx.shape[0], nv, key_dim, value_dim)
    workers = _num_workers(total, slot_idx.shape[0], nv, key_dim, value_dim) if count == 1 and interpret is None else 0
    if workers:
        pool = jax.new_ref(recurrent_state)
        out = _both(
            qkv, decay, beta, slot_idx, offsets, first_items, has_initial_state.astype(i32), scales, pool,
            nk=nk, workers=workers, normalise=dtype != f32,
        )[:total]  # fmt: skip
    else:
        w, r, vec = _prepare(
            qkv, decay, beta, slot_idx, offsets, first_items,
            nk=nk, nv=nv, key_dim=key_dim, max_slots=recurrent_state.shape[0], normalise=dtype != f32,
            interpret=interpret,
        )  # fmt: skip
        split = None
        if count > 1:
            table = _segments(offsets, first_items, total, count)
            maps = _segment_maps(
                qkv, r, vec, slot_idx, table,
                count=count, dims=(nk, nv, key_dim, value_dim), max_slots=recurrent_state.shape[0], interpret=interpret,
            )  # fmt: skip
            live = is_live(slot_idx, recurrent_state.shape[0])
            states = read_rows(recurrent_state, slot_idx, live & has_initial_state)
            if scales is not None:
                states = states * scales[0, :, :, None, None]
            split = table, _initial_states(maps, states, count)
        pool = jax.new_ref(recurrent_state)
        out = _pass(
            qkv, w, r, vec, slot_idx, offsets, first_items, has_initial_state.astype(i32), scales, pool,
            nk=nk, tiles=_tiles(slot_idx.shape[0], nv, key_dim, value_dim), interpret=interpret, split=split,
        )[:total]  # fmt: skip
    if token_scale is not None:
        out = out.reshape(total, nv, value_dim).astype(f32) * (1.0 / token_scale)[..., None]
        out = out.reshape(total, nv * value_dim)
    return out, jax.freeze(pool)


def _to_float16(qkv, recurrent_state, slot_idx, offsets, has_initial_state):
    """float32 tokens for the 16-bit kernels: (float16 rows, scales for `_pass`, value scales [T, nv]).

    Queries and keys come out normalised. The rule is linear in values and state together, so each (row, value head) is
    scaled, by a power of two, to a largest value or initial state in [1, 2): whatever their size, float16 keeps 11 bits
    of it. The scale of a row depends on that row alone, as long as no token belongs to two.
    """
    nk, nv, key_dim, value_dim = _dims(qkv, recurrent_state)
    total, batch = qkv.shape[0], slot_idx.shape[0]
    start, length = row_bounds(offsets, total)
    live = is_live(slot_idx, recurrent_state.shape[0])
    row = token_rows(start, jnp.where(live, length, 0), total)
    inside = row >= 0

    heads = qkv[:, : 2 * nk * key_dim].reshape(total, 2 * nk, key_dim)
    heads = heads * lax.rsqrt(jnp.sum(heads * heads, -1, keepdims=True) + EPS)
    values = qkv[:, 2 * nk * key_dim :].reshape(total, nv, value_dim)
    largest = jnp.where(inside[:, None], jnp.max(jnp.abs(values), -1), 0.0)
    largest = jax.ops.segment_max(largest, jnp.maximum(row, 0), batch)
    states = read_rows(recurrent_state, slot_idx, live & has_initial_state)
    largest = jnp.maximum(jnp.maximum(largest, jnp.max(jnp.abs(states), (2, 3))), 2.0**-100)
    # Rows that overlap, as decreasing offsets may make them, share tokens and so must share a scale.
    overlapping = jnp.any(start[1:] < start[:-1])
    largest = jnp.where(overlapping, jnp.max(largest, 0, keepdims=True), largest)
    scale = jnp.exp2(-jnp.floor(jnp.log2(jnp.minimum(largest, 2.0**100))))
    token_scale = jnp.where(inside[:, None], scale[row], 1.0)
    rows = [heads.reshape(total, -1), (values * token_scale[..., None]).reshape(total, -1)]
    return jnp.concatenate(rows, 1).astype(f16), jnp.stack([scale, 1.0 / scale]), token_scale


def _tiles(batch, nv, key_dim, value_dim):
    """Value tiles of a CTA: two share keys, queries, W and R, one leaves more CTAs for an idle chip."""
    return 2 if value_dim % (2 * C) == 0 and key_dim <= 128 and batch * nv > SMS // 2 else 1


def _num_segments(total, batch, nv, key_dim, value_dim):
    """In how many segments to cut every row: 1, or as many as leave no multiprocessor idle while their maps are made.

    The maps cost as many columns again as the states, so two segments would gain nothing. Under 32 chunks a segment,
    the steps between the kernels cost more than is saved.
    """
    columns = batch * nv * (value_dim + key_dim) // C
    count = min(SMS // columns + 1, total // (32 * C))
    return count if count >= 3 else 1


def _num_workers(total, batch, nv, key_dim, value_dim):
    """CTAs that prepare chunks beside those that carry states, in one kernel; 0 for one kernel after the other.

    Measured: worth it from 32 chunks a row on, where the states leave half of the multiprocessors idle.
    """
    carrying = batch * nv * value_dim // C
    return SMS - carrying if carrying <= SMS // 2 and total >= 32 * C * batch and key_dim <= 128 else 0
