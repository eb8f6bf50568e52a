"""What the chunked kernels share: accumulators, buffers that products read, and how rows own places."""

import dataclasses
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm

from gdn_jax._mosaic import compiler_params
from gdn_jax._ragged import row_bounds

C = 64  # tokens of a chunk, and columns of a value tile: the M of a warpgroup product
LINE = 64  # 16-bit elements of a 128-byte swizzle line
ROWS = 32  # of a state that are copied at once: 8 KB of float32
HALF = C // 2  # columns of a tile of W, whose second has only rows from HALF on that are not zero
SMS = 132  # multiprocessors of an H100 or H200
f32, f16, i32 = jnp.float32, jnp.float16, jnp.int32
WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COL = plgpu.Layout.WGMMA.reduce(0)
# The vectors `run_prepare` hands to `run_pass`, one of each per (chunk, value head), rk and rq the reciprocal norms:
# log2 gamma | gamma rk | gamma rq / sqrt(key_dim), and where that makes R from X, rk | beta gamma_end / gamma
LOG_GAMMA, K_SCALE, Q_SCALE, NUM_VECTORS = range(4)
K_NORM, R_SCALE, ALL_VECTORS = range(3, 6)


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


def accumulate(interpret, shapes, body):
    """`body(*accumulators)` with zeroed accumulators."""
    if interpret is not None:
        return body(*[_Value(jnp.zeros(s, f32)) for s in shapes])
    return pl.run_scoped(
        lambda *refs: body(*map(_Registers, refs)), *[plgpu.WGMMAAccumulatorRef(s, f32) for s in shapes]
    )


def await_products(interpret):
    """Waits for all products, so that no register operand is in use any more."""
    if interpret is None:
        plgpu.wgmma_wait(0)


def _swizzle(row_bytes):
    # pyright takes this class, which jax instantiates everywhere, for an abstract one.
    return plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]


def swizzled_buffer(shape, dtype):
    """Shared memory tiled and swizzled as an operand of a warpgroup product."""
    item = jnp.dtype(dtype).itemsize
    row_bytes = plgpu.find_swizzle(shape[-1] * item * 8)
    tiling = plgpu.TilingTransform((8, row_bytes // item))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, _swizzle(row_bytes)))


def store_tile(interpret, ref, value, *, transposed=False) -> None:
    """Stores a tile in the layout WGMMA to a `swizzled_buffer`; `transposed`, its transpose.

    Plain assignment first loads what it replaces, which compilers take long to find out.
    """
    value = value.astype(ref.dtype)
    if interpret is not None:
        ref[...] = value.T if transposed else value
        return
    row_bytes = ref.shape[-1] * jnp.dtype(ref.dtype).itemsize
    tiling = plgpu.TilingTransform((8, ref.shape[-1]))  # pyright: ignore[reportAbstractUsage]

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType((tiling, _swizzle(row_bytes)))))
    def transfer(_, x, target):
        if transposed:
            target = mgpu.memref_transpose(target, (1, 0, 3, 2))
        x.store_tiled(target, swizzle=row_bytes, tiling_rank=2)

    transfer(value, ref)  # pyright: ignore[reportCallIssue]


def copy_target(interpret, shape, dtype, *more):
    """Shared memory for [.., C, LINE] tiles that bulk copies fill or drain at any token.

    A bulk copy into a tiled buffer has to start at a multiple of the tile's 8 rows. With rows of one swizzle line, the
    tiled and the untiled buffer hold the same bytes, so copies use an untiled alias of what the products read. In
    interpret mode members of a union do not share memory; there, one buffer is everything. `more`: further aliases.
    """
    if interpret is not None:
        return swizzled_buffer(shape, dtype)
    rows = plgpu.SMEM(shape, dtype, transforms=(_swizzle(128),))
    return plgpu.RefUnion([rows], [swizzled_buffer(shape, dtype)], *[[x] for x in more])


def aliases_of(interpret, ref):
    """(what copies use, what products use, further aliases) of a `copy_target`."""
    if interpret is not None:
        return ref, ref
    return tuple(alias for (alias,) in ref)


def load_transposed(interpret, ref):
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


def store_transposed(interpret, ref, value):
    """The inverse of `load_transposed`, rounding to the dtype of `ref`."""
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


def iota(shape, axis, layout: Any = WGMMA):
    return plgpu.broadcasted_iota(i32, shape, axis, layout=layout)


def zero_tile(shape, dtype, layout: Any = WGMMA):
    return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)


def along_rows(x, n):
    """A vector [m] over the columns of [m, n]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], n), (0,)), WGMMA)


def along_cols(x, m):
    """A vector [n] over the rows of [m, n]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (m, x.shape[0]), (1,)), WGMMA)


def load_vector(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def row_of(offsets, b, total):
    """First token and length of row b; offsets are clamped, and a row whose offsets decrease is empty."""
    start = jnp.clip(offsets[b], 0, total)
    return start, jnp.maximum(jnp.clip(offsets[b + 1], 0, total) - start, 0)


def row_table(offsets, has_initial_state, total):
    """What the kernels look up about a row: int32 [B], twice the chunks of the rows before, plus 1 if it has a state.

    One sum over [B, B], so that XLA makes one small kernel of it.
    """
    batch = has_initial_state.shape[0]
    flags = has_initial_state.astype(i32)
    if batch == 1:
        return flags
    _, length = row_bounds(offsets, total)
    chunks = (length + (C - 1)) // C
    row = jnp.arange(batch)[:, None]
    other = jnp.arange(batch)
    return jnp.sum(jnp.where(other < row, 2 * chunks, jnp.where(other == row, flags, 0)), 1, dtype=i32)


def first_item(table, b, length, items):
    """The item (place in the arrays between the kernels, of which there are `items`) of the first chunk of row b.

    Rows follow one another without gaps, wherever their tokens lie. Rows that do not overlap need no more than
    `total // C + B` items; what others would need beyond that, they share.
    """
    first = lax.shift_right_logical(table[b], i32(1))
    return jnp.minimum(first, items - lax.div(length + (C - 1), i32(C)))


def find_row(firsts, at, batch):
    """The last row of which `firsts` has at most `at`; row 0 if there is none.

    Eight parts at a time: the loads of a step wait for memory once.
    """
    low, size = jnp.int32(0), batch
    while size > 1:
        step = pl.cdiv(size, 8)
        probes = [low + n * step for n in range(1, pl.cdiv(size, step))]
        before = [(p < batch) & (firsts[jnp.minimum(p, batch - 1)] <= at) for p in probes]
        low, size = low + step * sum(x.astype(i32) for x in before), step
    return low


def params():
    return dataclasses.replace(compiler_params(), approx_math=True)


def buffer_views(buffers, count):
    """Lists of refs that each lie in memory like `buffers`, with the first, second, ... alias of unions."""

    def alias(ref, n):
        return ref.refs[min(n, len(ref.refs) - 1)][0] if isinstance(ref, plgpu.RefUnion) else ref

    return [[alias(ref, n) for ref in buffers] for n in range(count)]


def order_copies():
    """Bulk copies that this warpgroup issues from here on read what other CTAs' had written before it was told."""

    @plgpu.inline_mgpu()
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_global)

    fence()  # pyright: ignore[reportCallIssue]


# Rows of the table of segments: first token, tokens, first item, whether the row ends in this segment.
FIRST, LENGTH, ITEM, IS_LAST = range(4)
