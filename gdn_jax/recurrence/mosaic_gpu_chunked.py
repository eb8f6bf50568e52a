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
and one more streams the inputs. Where that leaves many multiprocessors idle, `_both` does the two side by side, and
with few heads and long rows, rows are cut into segments first (`_segment_maps`, `_initial_states`).
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

from gdn_jax._mosaic import EPS, after_previous, compiler_params, is_row_of, store, warp_barrier, warpgroup_barrier
from gdn_jax._ragged import is_live, read_rows, row_bounds, token_rows

C = 64  # tokens of a chunk, and columns of a value tile: the M of a warpgroup product
LINE = 64  # 16-bit elements of a 128-byte swizzle line
ROWS = 32  # of a state that are copied at once: 8 KB of float32
HALF = C // 2  # columns of a tile of W, whose second has only rows from HALF on that are not zero
SUB = 16  # rows and columns of the blocks that warps invert in `_prepare`
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
    return total < batch * (16 if batch * nv > SMS else 64)


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


def _aliases(interpret, ref):
    """(what copies use, what products use, further aliases) of a `_copy_target`."""
    if interpret is not None:
        return ref, ref
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


def _vector(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _row_of(offsets, b, total):
    """First token and length of row b; offsets are clamped, and a row whose offsets decrease is empty."""
    start = jnp.clip(offsets[b], 0, total)
    return start, jnp.maximum(jnp.clip(offsets[b + 1], 0, total) - start, 0)


def _row_table(offsets, has_initial_state, total):
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


def _first_item(table, b, length, items):
    """The item (place in the arrays between the kernels, of which there are `items`) of the first chunk of row b.

    Rows follow one another without gaps, wherever their tokens lie. Rows that do not overlap need no more than
    `total // C + B` items; what others would need beyond that, they share.
    """
    first = lax.shift_right_logical(table[b], i32(1))
    return jnp.minimum(first, items - lax.div(length + (C - 1), i32(C)))


def _find_row(firsts, at, batch):
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


def _inline_asm(results, operands, text, constraints, *, effects=False):
    """The results of PTX, a list; `results` are their types."""
    if not results:
        kind = ir.Type.parse("!llvm.void")
    else:
        kind = results[0] if len(results) == 1 else llvm.StructType.get_literal(results)
    out = llvm.inline_asm(kind, operands, text, constraints, has_side_effects=effects)
    if len(results) < 2:
        return [out][: len(results)]
    return [llvm.extractvalue(x, out, [i]) for i, x in enumerate(results)]


def _bits(register, kind):
    return llvm.bitcast(kind, register)


def _like(array, registers):
    """An array in the layout of `array` made of these registers."""
    shaped = np.empty(array.registers.shape, dtype=object)
    shaped.flat[:] = registers
    return mgpu.FragmentedArray(_registers=shaped, _layout=array.layout, _is_signed=None)


def _row_vector(registers):
    """The float32 [C] in the layout ROW of which a lane has these two elements."""
    zero = arith.constant(ir.F32Type.get(), 0.0)
    vector, elements = mgpu.FragmentedArray.splat(zero, (C,), layout=ROW.to_mgpu()), iter(registers)
    return vector.foreach(lambda *_: next(elements), create_array=True)


def _shared_address(memory):
    """Where a reference to shared memory begins."""
    word = ir.IntegerType.get_signless(32)
    base, offset, *_ = memref.extract_strided_metadata(memory)
    itemsize = mgpu.bytewidth(ir.MemRefType(memory.type).element_type)
    offset = arith.muli(arith.index_cast(word, offset), arith.constant(word, itemsize))
    return arith.addi(arith.index_cast(word, memref.extract_aligned_pointer_as_index(base)), offset)


class _Warp:
    """Instructions of one warp that Pallas does not have.

    A block of 16 x 16 elements of 16 bits is four registers of two elements, its 8 x 8 quarters (upper left, lower
    left, upper right, lower right): the left operand of `mma.sync`, and what an array in the layout WGMMA has of a
    block. The right operand takes, for each half of its columns, the two transposed quarters above one another: what
    `transposed` returns in pairs.
    """

    def __init__(self):
        self.word, self.single = ir.IntegerType.get_signless(32), ir.F32Type.get()
        self.lane = _inline_asm([self.word], [], "mov.u32 $0, %laneid;", "=r")[0]
        self.index = arith.andi(mgpu.warp_idx(), self.number(3))
        # Of the two elements of a quarter that the lane has: their row, and the column of the first.
        self.row = arith.shrui(self.lane, self.number(2))
        self.column = arith.shli(arith.andi(self.lane, self.number(3)), self.number(1))
        # The lane's share of an access to a block in a tile of rows of 128 bytes: 16 bytes, swizzled.
        line = arith.andi(self.lane, self.number(15))
        piece = arith.xori(arith.shrui(self.lane, self.number(4)), arith.andi(self.lane, self.number(7)))
        self.share = arith.addi(arith.shli(line, self.number(7)), arith.shli(piece, self.number(4)))

    def number(self, n):
        return arith.constant(self.word, n)

    def real(self, x):
        return arith.constant(self.single, x)

    def compare(self, predicate, x, y):
        y = self.number(y) if isinstance(y, int) else y
        return arith.cmpi(getattr(arith.CmpIPredicate, predicate), x, y)

    def elements(self, predicate, value):
        """A quarter with `value` where its rows compare so with its columns, else zeros."""
        low, high = [
            arith.select(self.compare(predicate, self.row, column), self.number(bits), self.number(0))
            for column, bits in ((self.column, value), (arith.addi(self.column, self.number(1)), value << 16))
        ]
        return arith.ori(low, high)

    def address(self, base, row, column):
        """Where the lane accesses a block, by the numbers of its row and column of blocks, in the tile at `base`."""
        column = self.number(column) if isinstance(column, int) else column
        base = arith.addi(base, arith.xori(self.share, arith.shli(column, self.number(5))))
        return arith.addi(base, self.number(row * SUB * 2 * LINE))

    def load(self, address, kind=""):
        text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
        return _inline_asm([self.word] * 4, [address], text, "=r,=r,=r,=r,r,~{memory}", effects=True)

    def transposed(self, address):
        quarters = self.load(address, ".trans")
        return quarters[:2], quarters[2:]

    def store(self, address, block, where=None):
        """`where`: the same in all lanes."""
        instruction = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
        operands, constraints = [address, *block], "r,r,r,r,r,~{memory}"
        if where is not None:
            instruction = "{.reg .pred here; setp.ne.u32 here, $5, 0; @here " + instruction + "}"
            operands, constraints = [*operands, arith.extui(self.word, where)], "r," + constraints
        _inline_asm([], operands, instruction, constraints, effects=True)

    def load_float(self, base, index):
        address = arith.addi(base, arith.shli(index, self.number(2)))
        return _inline_asm([self.single], [address], "ld.shared.f32 $0, [$1];", "=f,r,~{memory}", effects=True)[0]

    def store_float(self, base, index, x):
        address = arith.addi(base, arith.shli(index, self.number(2)))
        _inline_asm([], [address, x], "st.shared.f32 [$0], $1;", "r,f,~{memory}", effects=True)

    def turn(self, quarter):
        return _inline_asm([self.word], [quarter], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")[0]

    def from_lane(self, x, lane):
        lane = self.number(lane) if isinstance(lane, int) else lane
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        return _inline_asm([self.single], [x, lane], text, "=f,f,r")[0]

    def running_sum(self, x):
        """Over the lanes, every lane included in its own."""
        for distance in (1, 2, 4, 8, 16):
            add_lower = (
                "{.reg .pred has; .reg .f32 lower;"
                f"shfl.sync.up.b32 lower|has, $1, {distance}, 0, 0xffffffff;"
                "mov.f32 $0, $1; @has add.f32 $0, $1, lower;}"
            )
            x = _inline_asm([self.single], [x], add_lower, "=&f,f")[0]
        return x

    def approximate(self, function, x):
        return _inline_asm([self.single], [x], f"{function}.approx.ftz.f32 $0, $1;", "=f,f")[0]

    def product(self, left, right, added=None, kind="f16"):
        """float32 [16, 8], four elements: left @ right + added. Of half the operands, [16, 8] @ [8, 8]."""
        operands = [*left, *right, *([self.real(0.0)] * 4 if added is None else added)]
        numbers = iter(range(4 + len(operands)))
        groups = ["{" + ",".join(f"${next(numbers)}" for _ in range(n)) + "}" for n in (4, len(left), len(right), 4)]
        text = f"mma.sync.aligned.m16n8k{4 * len(left)}.row.col.f32.{kind}.{kind}.f32 {', '.join(groups)};"
        constraints = ["=f"] * 4 + ["r"] * (len(left) + len(right)) + ["f"] * 4
        return _inline_asm([self.single] * 4, operands, text, ",".join(constraints))

    def rounded(self, x):
        """The two quarters of a `product`, in float16."""
        text = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return [_inline_asm([self.word], x[i : i + 2], text, "=r,f,f")[0] for i in (0, 2)]

    def times(self, *pairs):
        """The sum of products of blocks, a block; the right ones as `transposed` returns them."""
        quarters = []
        for half in range(2):
            x = None
            for left, right in pairs:
                x = self.product(left, right[half], x)
            quarters += self.rounded(x)
        return quarters


def _sum_of_squares(interpret, *tiles) -> Any:
    """Of the rows of 16-bit [C, LINE] arrays side by side: the diagonal of their product with their own transpose."""
    if interpret is not None:
        return sum(jnp.sum(jnp.square(x.astype(f32)), axis=1) for x in tiles)

    kind = "bf16" if tiles[0].dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,) * len(tiles), return_type=plgpu.ShapeDtypeStruct((C,), jnp.dtype(f32), layout=ROW)
    )
    def add_up(_, *tiles):
        warp = _Warp()
        registers = [_bits(r, warp.word) for tile in tiles for r in tile.registers.flat]
        odd = warp.compare("ne", arith.andi(warp.row, warp.number(1)), 0)
        owner = arith.addi(arith.shli(warp.row, warp.number(2)), arith.shrui(warp.row, warp.number(1)))
        sums = []
        for half in range(2):  # rows 0 to 7, then 8 to 15, of the warp's 16
            # The left operand is two neighbouring quarters of these rows, one above the other, the right one either:
            # half of the result is used. What lies above one another in the block would have to be moved to be one.
            rows = registers[half::2]
            upper = lower = [warp.real(0.0)] * 4
            for pair in zip(rows[::2], rows[1::2], strict=True):
                upper = warp.product(pair, pair[:1], upper, kind)
                lower = warp.product(pair, pair[1:], lower, kind)
            on_diagonal = arith.select(odd, arith.addf(upper[1], lower[3]), arith.addf(upper[0], lower[2]))
            sums.append(warp.from_lane(on_diagonal, owner))
        return _row_vector(sums)

    return add_up(*tiles)  # pyright: ignore[reportCallIssue]


def _any_zero(interpret, ref) -> Any:
    """Whether any of 128 float32 in shared memory is 0; a warp finds out by itself."""
    if interpret is not None:
        return jnp.min(jnp.abs(ref[...])) == 0.0

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(i32), layout=splat)
    )
    def vote(_, memory):
        warp = _Warp()
        address = arith.addi(_shared_address(memory), arith.shli(warp.lane, warp.number(4)))
        text = """{ .reg .f32 a, b, c, d; .reg .pred p, q, r, s;
            ld.shared.v4.f32 {a, b, c, d}, [$1];
            setp.eq.f32 p, a, 0f00000000; setp.eq.f32 q, b, 0f00000000;
            setp.eq.or.f32 r, c, 0f00000000, p; setp.eq.or.f32 s, d, 0f00000000, q;
            or.pred p, r, s; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"""
        (found,) = _inline_asm([warp.word], [address], text, "=r,r,~{memory}", effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(ref) != 0  # pyright: ignore[reportCallIssue]


def _lower(interpret, x) -> Any:
    """The 16-bit [C, C] with zeros above the diagonal, whatever was there."""
    if interpret is not None:
        return jnp.tril(x)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((C, C), x.dtype, layout=WGMMA))
    def select(_, x):
        """By bits: a register holds two elements, which a select would take apart."""
        warp = _Warp()
        on_and_below = warp.elements("uge", 0xFFFF)

        def all_if(predicate, block):
            return arith.select(warp.compare(predicate, warp.index, block), warp.number(-1), warp.number(0))

        registers = []
        for n, register in enumerate(x.registers.flat):
            block, quarter = n // 4, n % 4
            keep = all_if("ugt", block)
            if quarter == 1:
                keep = all_if("uge", block)
            elif quarter != 2:
                keep = arith.ori(keep, arith.andi(all_if("eq", block), on_and_below))
            registers.append(_bits(arith.andi(_bits(register, warp.word), keep), register.type))
        return _like(x, registers)

    return select(x)  # pyright: ignore[reportCallIssue]


def _put_lower(interpret, ref, alias, value):
    """Stores the 16 x 16 blocks on and below the diagonal of float16 [C, C]. `alias`: `ref` without its tiling."""
    if interpret is not None:
        r, c = [lax.broadcasted_iota(i32, (C, C), axis) for axis in range(2)]
        ref[...] = jnp.where(r // SUB >= c // SUB, value, 0.0).astype(f16)
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def put(_, x, memory):
        warp = _Warp()
        base = arith.addi(_shared_address(memory), arith.muli(warp.index, warp.number(SUB * 2 * LINE)))
        registers = [_bits(r, warp.word) for r in x.registers.flat]
        for j in range(C // SUB):
            lower = warp.compare("uge", warp.index, j)
            warp.store(warp.address(base, 0, j), registers[4 * j : 4 * j + 4], where=lower)

    put(value, alias)  # pyright: ignore[reportCallIssue]


def _invert(interpret, ref, alias):
    """(I - N)^-1 of two matrices N of which `_put_lower` has stored the blocks, in place: [2, C, C].

    N is what lies strictly below the diagonal. Above it there are zeros before and after. Two warps share a matrix:
    each inverts the half of it that lies on the diagonal, and the second then makes the block below.
    """
    if interpret is not None:
        for n in range(2):
            ref[n] = _inverse(ref[n])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def invert(_, memory):
        warp = _Warp()
        number, rounded, turn, zero = warp.number, warp.rounded, warp.turn, warp.number(0)
        head, second = arith.shrui(warp.index, number(1)), arith.andi(warp.index, number(1))
        base = arith.addi(_shared_address(memory), arith.muli(head, number(2 * C * C)))
        own = arith.addi(base, arith.muli(second, number(2 * SUB * 2 * LINE)))
        is_second = warp.compare("ne", second, 0)
        strictly_below, strictly_above = warp.elements("ugt", 0xFFFF), warp.elements("ult", 0xFFFF)
        identity = warp.elements("eq", 0x3C00)

        def address(row, column):
            """Of a block in the warp's own half."""
            return warp.address(own, row, arith.addi(arith.shli(second, number(1)), number(column)))

        def diagonal(address):
            """The inverse of a block on the diagonal, as left and as right operand."""

            def twice(left, right, added=None):
                """Products of two pairs of quarters: the left ones above one another are one operand."""
                upper, lower = [warp.product(left, [x], added) for x in right]
                return upper[:2] + lower[2:]

            def plus_identity(x):
                return [arith.ori(q, identity) for q in x]  # there are only zeros on the diagonal

            n, n_t = warp.load(address), warp.load(address, ".trans")
            n1 = [arith.andi(n[i], strictly_below) for i in (0, 3)]
            n1_t = [arith.andi(n_t[i], strictly_above) for i in (0, 3)]
            # 8 x 8: (I + N)(I + N^2)(I + N^4), exact because N^8 = 0
            n2, n2_t = rounded(twice(n1, n1_t)), rounded(twice(n1_t, n1))
            n4_t = rounded(twice(n2_t, n2))
            x = twice(plus_identity(n1), plus_identity(n2_t))
            upper, lower = rounded(twice(rounded(x), n4_t, x))
            # 8 -> 16: the quarter below the diagonal becomes X22 N21 X11
            upper_t = turn(upper)
            below = rounded(warp.product([lower, lower], n_t[1:2]))[1]
            below = rounded(warp.product([below, below], [upper_t]))[1]
            return [upper, below, zero, lower], ((upper_t, turn(below)), (zero, turn(lower)))

        (x0, x0_t), (x1, _) = diagonal(address(0, 0)), diagonal(address(1, 1))
        warp.store(address(0, 0), x0)
        warp.store(address(1, 1), x1)
        # 16 -> 32
        x10 = warp.times((warp.times((x1, warp.transposed(address(1, 0)))), x0_t))
        warp.store(address(1, 0), x10)
        # 32 -> 64
        barrier = arith.addi(number(8), arith.shrui(mgpu.warp_idx(), number(1)))  # the lower numbers are taken

        def meet(kind):
            _inline_asm([], [barrier], f"bar.{kind} $0, 64;", "r,~{memory}", effects=True)

        with mgpu.when(warp.compare("eq", second, 0)):
            meet("arrive")
        with mgpu.when(is_second):
            n = [[warp.transposed(warp.address(base, i, j)) for j in range(2)] for i in (2, 3)]
            left = (
                [warp.times((x0, n[0][j])) for j in range(2)],
                [warp.times((x10, n[0][j]), (x1, n[1][j])) for j in range(2)],
            )
            meet("sync")
            y0, y10, y1 = [warp.transposed(warp.address(base, i, j)) for i, j in ((0, 0), (1, 0), (1, 1))]
            for i in range(2):
                warp.store(warp.address(base, 2 + i, 0), warp.times((left[i][0], y0), (left[i][1], y10)))
                warp.store(warp.address(base, 2 + i, 1), warp.times((left[i][1], y1)))

    invert(alias)  # pyright: ignore[reportCallIssue]


def _inverse(n):
    """What `_invert` does to one matrix, with the same roundings."""

    def dot(*pairs) -> Any:
        return sum(x.astype(f32) @ y.astype(f32) for x, y in pairs)

    def rounded(*pairs):
        return dot(*pairs).astype(f16)

    def diagonal(n):
        n1 = jnp.tril(n, -1)
        eye = jnp.eye(8, dtype=f16)
        quarters = []
        for i in range(2):
            q = n1[8 * i : 8 * i + 8, 8 * i : 8 * i + 8]
            n2 = rounded((q, q))
            x = dot((q + eye, n2 + eye))
            quarters.append((x + dot((x.astype(f16), rounded((n2, n2))))).astype(f16))
        upper, lower = quarters
        below = rounded((rounded((lower, n1[8:, :8])), upper))
        return jnp.block([[upper, jnp.zeros_like(upper)], [below, lower]])

    def block(i, j):
        return n[SUB * i : SUB * (i + 1), SUB * j : SUB * (j + 1)]

    x = [diagonal(block(i, i)) for i in range(4)]
    pairs = [rounded((rounded((x[i + 1], block(i + 1, i))), x[i])) for i in (0, 2)]
    first = [rounded((x[2], block(2, j))) for j in range(2)]
    last = [rounded((pairs[1], block(2, j)), (x[3], block(3, j))) for j in range(2)]
    zero = jnp.zeros_like(x[0])
    rows = [[x[0], zero, zero, zero], [pairs[0], x[1], zero, zero]]
    for u, right in ((first, [x[2], zero]), (last, [pairs[1], x[3]])):
        rows.append([rounded((u[0], x[0]), (u[1], pairs[0])), rounded((u[1], x[1])), *right])
    return jnp.block(rows)


def _gate_vectors(interpret, decays, betas, norms, vectors, factors, scale):
    """What the gates of two heads make of a chunk: the vectors for `_pass`, and what scales columns of W and rows of R.

    Args:
        decays, betas: of either head, [C] in shared memory.
        norms: reciprocal norms of keys and queries, [2, C].
        vectors: to be filled for either head, [2, NUM_VECTORS * C].
        factors: likewise, [2, 2, C]: beta times `scale`, and beta times the decay from a token to the chunk's end.
        scale: of the queries.
    """
    if interpret is not None:
        for n in range(2):
            gamma = jnp.cumsum(jnp.maximum(jnp.log2(decays[n][...]), LOG2_MIN))
            beta = betas[n][...]
            vectors[n] = jnp.concatenate([norms[0] * jnp.exp2(gamma), norms[1] * (scale * jnp.exp2(gamma)), gamma])
            factors[n] = jnp.stack([beta * scale, beta * jnp.exp2(gamma[-1] - gamma)])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 7)
    def fill(_, *memory):
        """A warp has one half of the tokens of one head, a lane one of them."""
        warp = _Warp()
        number = warp.number
        head, half = arith.shrui(warp.index, number(1)), arith.andi(warp.index, number(1))
        token = arith.addi(warp.lane, arith.shli(half, number(5)))
        (stride,), _ = ir.MemRefType(memory[0].type).get_strides_and_offset()
        *gates, norms, vectors, factors = map(_shared_address, memory)
        decays, betas = [arith.select(warp.compare("ne", head, 0), gates[i + 1], gates[i]) for i in (0, 2)]
        vectors = arith.addi(vectors, arith.muli(head, number(4 * NUM_VECTORS * C)))
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
        put(factors, 1, arith.mulf(beta, to_end))

    fill(*decays, *betas, norms, vectors, factors)  # pyright: ignore[reportCallIssue]


def _heads_at_once(group):
    """Value heads of a place in `_prepare`: all of a key head, or so many that their gates come in 8 columns."""
    return max(n for n in (1, 2, 3, 4, 5, 8) if group % n == 0)


def _units(key_dim):
    """Warpgroups of a CTA that prepare chunks, each its own: as many as its memory has room for."""
    return 1 if key_dim == 256 else 2


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


def _preparation(qkv, decay, batch, *, nk, nv, key_dim, max_slots, normalise, interpret):
    """(what a warpgroup does for its places, buffers, barriers, buffers that overlap, types of results).

    A place is a chunk and a part of the value heads, `_heads_at_once` of one key head. `decay` and beta are those that
    `_pad_gates` returns.
    """
    total, columns = decay.shape
    items = total // C + batch
    group = nv // nk
    heads = _heads_at_once(group)
    units = _units(key_dim)
    width = _gate_columns(heads)
    halves = key_dim // LINE
    dtype = qkv.dtype
    scale = key_dim**-0.5

    def work(operands, buffers, unit, count, place_of, written=None):
        """The places `place_of(0)` to `place_of(count - 1)`, each as (item, part, row, its start and length, chunk).

        What one needs from memory arrives while the one before is computed: only the first has to be waited for.
        `written(item, part)` is called once others may read the results of a place, if it has any.
        """
        qkv_g, decay_g, beta_g, slot_g, w_g, r_g, vec_g = operands
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

            @pl.when(valid > 0)
            def _():
                bar = arrived.at[2 * unit + stage]
                for n, head in enumerate((nk + key_head, key_head)):
                    for i in range(halves):
                        source = qkv_g.at[tokens, pl.ds(head * key_dim + i * LINE, LINE)]
                        plgpu.copy_gmem_to_smem(source, rows_s.at[stage, n, i], bar)
                for kind, source in enumerate((decay_g, beta_g)):
                    source = source.at[tokens, pl.ds(first_column(part), width)]
                    plgpu.copy_gmem_to_smem(source, raw_s.at[stage, kind], bar)

        def finish(place):
            """Waits until the results of a place have left their buffers, or are where others may read them."""
            item, part, _, valid = place
            plgpu.wait_smem_to_gmem(0, wait_read_only=written is None)
            if written is not None:
                pl.when(valid > 0)(partial(written, item, part))

        def step(n, carry):
            before, place = carry
            after = look(n + 1)

            def turn_over():
                finish(before)
                bring(after, (n + 1) & 1)

            active = place[-1] > 0
            pl.when(active)(lambda: compute(place, n & 1, turn_over))
            pl.when(jnp.logical_not(active))(turn_over)
            return place, after

        def compute(place, stage, turn_over):
            item, part, _, valid = place
            raw_tiles = tiles_s.at[stage]
            plgpu.barrier_wait(arrived.at[2 * unit + stage])

            @pl.when(valid < C)
            def _():
                """Past the row's end zeros and decays of 1, whatever lies there."""
                token, inside = _iota((C,), 0, ROW), _iota((C, LINE), 0) < valid
                for n in range(2):
                    for i in range(halves):
                        x = plgpu.load(raw_tiles.at[n, i], layout=WGMMA)
                        raw_tiles.at[n, i][...] = jnp.where(inside, x, jnp.zeros_like(x))
                gates = [(raw_s.at[stage, kind, :, i], 1.0 - kind) for kind in range(2) for i in range(width)]
                held = [jnp.where(token < valid, _vector(ref, ROW), outside) for ref, outside in gates]
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
                if not normalise:
                    return kk_acc.read(), qk_acc.read()
                key, query = [[plgpu.load(raw_tiles.at[n, i], layout=WGMMA) for i in range(halves)] for n in range(2)]
                rk, rq = [lax.rsqrt(_sum_of_squares(interpret, *x) + EPS) for x in (key, query)]
                store(norms.at[0], rk)
                store(norms.at[1], rq)
                key = [(x.astype(f32) * _rows(rk, LINE)).astype(f16) for x in key]
                return kk_acc.read(), qk_acc.read(), rk, rq, *key

            kk, qk, *normalised = _accumulate(interpret, [(C, C), (C, C)], products)
            rk = rq = _zeros((C,), f32, ROW) + 1.0
            if not normalise:
                for n in range(2):
                    store(norms.at[n], rk)
            turn_over()  # and all warps are through with the products
            key_s = (keys_s if normalise else tiles_s).at[stage, 0]
            if normalise:
                rk, rq, *key = normalised
                # A square that overflows has the reciprocal norm 0, and then products may be infinite, or NaN: nothing
                # is left of them. Where both squares are finite, so is the product.
                kk, qk = lax.cond(
                    _any_zero(interpret, norms),
                    lambda: [jnp.where(jnp.abs(x) < jnp.inf, x, 0.0) for x in (kk, qk)],
                    lambda: [kk, qk],
                )
                columns_rk = _cols(_vector(norms.at[0], COL), C)
                kk, qk = kk * columns_rk, qk * columns_rk * _rows(rq, C)
                for i in range(halves):
                    key_s.at[i][...] = key[i]
            scores = _lower(interpret, qk.astype(f16))

            def two_heads(pair, _):
                at = [part * heads + jnp.minimum(2 * pair + n, heads - 1) - first_column(part) for n in range(2)]
                decays, betas = [[raw_s.at[stage, kind, :, n] for n in at] for kind in range(2)]
                pl.when(pair > 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
                for n in range(min(2, heads)):
                    # Rounded once, for all uses: on repeated keys the entries of the inverse are differences of
                    # equal numbers, and an error that all of them share would add up in W and R.
                    beta = _vector(betas[n], ROW) * rk
                    _put_lower(interpret, x_s.at[n], blocks_s.at[n], (kk * _rows(-beta, C)).astype(f16))
                warpgroup_barrier(interpret)
                _gate_vectors(interpret, decays, betas, norms, vectors, factors, scale)
                _invert(interpret, x_s, blocks_s)
                plgpu.commit_smem()
                lax.fori_loop(2 * pair, jnp.minimum(2 * pair + 2, heads), one_head, None)

            def one_head(n, _):
                head, slot = part * heads + n, n & 1
                x, log_gamma = x_s.at[slot], vectors.at[slot, pl.ds(LOG_GAMMA * C, C)]
                r_s = tiles_s.at[stage, 1]  # the raw queries are not needed any more

                def results(w_acc, *r_acc):
                    w_acc.mma(scores, x)
                    for i in range(halves):
                        r_acc[i].mma(x.transpose((1, 0)), key_s.at[i])
                    ratio = _rows(_vector(log_gamma, ROW), C) - _cols(_vector(log_gamma, COL), C)
                    ratio = jnp.exp2(ratio) * _cols(_vector(factors.at[slot, 0], COL), C)
                    r_scale = _rows(_vector(factors.at[slot, 1], ROW), LINE)
                    # The results of the head before have left their buffers.
                    pl.when(n > 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
                    # Above the diagonal the ratio may overflow.
                    w = _lower(interpret, (w_acc.read(halves) * ratio).astype(dtype))
                    for i in range(2):
                        w_s.at[i][...] = w[:, i * HALF : (i + 1) * HALF]
                    for i in range(halves):
                        r_s.at[i][...] = (r_acc[i].read(halves - 1 - i) * r_scale).astype(dtype)

                _accumulate(interpret, [(C, C)] + [(C, LINE)] * halves, results)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(w_s.at[0], w_g.at[item, head, pl.ds(0, C)])
                plgpu.copy_smem_to_gmem(w_s.at[1, pl.ds(HALF, HALF)], w_g.at[item, head, pl.ds(C, HALF)])
                plgpu.copy_smem_to_gmem(r_s, r_g.at[item, head])
                plgpu.copy_smem_to_gmem(vectors.at[slot], vec_g.at[item, head])

            lax.fori_loop(0, pl.cdiv(heads, 2), two_heads, None)

        for n in range(2):
            x_s.at[n][...] = _zeros((C, C), f16)  # what lies above the diagonal blocks stays
        place = look(0)
        bring(place, 0)
        nothing = *place[:-1], jnp.int32(0)
        last, _ = lax.fori_loop(0, count, step, (nothing, place))
        finish(last)

    # X of two heads, for the products and for single warps.
    overlay = [_swizzled((units, 2, C, C), f16), plgpu.SMEM((units, 2, C, C), f16)]
    tokens = (units, 2, 2, halves, C, LINE)
    buffers = [
        _copy_target(interpret, tokens, dtype, _swizzled(tokens, f16)),  # keys are normalised in place
        plgpu.SMEM((units, 2, 2, C, width), f32),
        _swizzled((units, 2, C, HALF), dtype),
        plgpu.SMEM((units, 2, NUM_VECTORS * C), f32),
        plgpu.SMEM((units, 2, 2, C), f32),
        plgpu.SMEM((units, 2, C), f32),
    ]
    if interpret is not None:  # where aliases are buffers of their own
        buffers.insert(1, _swizzled(tokens, f16))
    barriers = [plgpu.Barrier(num_arrivals=2 * halves + 2, num_barriers=2 * units)]
    results = [
        jax.ShapeDtypeStruct((items, nv, C + HALF, HALF), dtype),
        jax.ShapeDtypeStruct((items, nv, halves, C, LINE), dtype),
        jax.ShapeDtypeStruct((items, nv, NUM_VECTORS * C), f32),
    ]
    return work, buffers, barriers, overlay, results


def _prepare(qkv, decay, beta, slot_idx, offsets, table, *, nk, nv, key_dim, max_slots, normalise, interpret):
    """W [items, nv, C + HALF, HALF], R [items, nv, key_dim / LINE, C, LINE] and vectors [items, nv, NUM_VECTORS * C].

    W comes as its two tiles of HALF columns, of which the second begins at row HALF: it is zero above. W and R have the
    dtype of the tokens, the vectors are float32. The warpgroups of a CTA on every multiprocessor take places in turns.
    """
    total = decay.shape[0]
    batch = slot_idx.shape[0]
    work, buffers, barriers, overlay, results = _preparation(
        qkv, decay, batch,
        nk=nk, nv=nv, key_dim=key_dim, max_slots=max_slots, normalise=normalise, interpret=interpret,
    )  # fmt: skip
    parts = nv // _heads_at_once(nv // nk)
    items = total // C + batch
    places = items * parts
    ctas = min(SMS, places)
    units = _units(key_dim)
    takers = ctas * units

    def body(qkv_g, decay_g, beta_g, slot_g, off_g, table_g, w_g, r_g, vec_g, tokens_u, *scratch):
        *scratch, overlay = scratch if interpret is None else (*scratch[:-2], [[x] for x in scratch[-2:]])
        scratch = *_aliases(interpret, tokens_u), *scratch, *[ref for (ref,) in overlay]
        wg = lax.axis_index("wg")
        taker = wg * ctas + lax.axis_index("cta")
        _, length = _row_of(off_g, batch - 1, total)
        used = parts * (_first_item(table_g, batch - 1, length, items) + lax.div(length + (C - 1), i32(C)))

        def place_of(n):
            # From the last to the first: what is made last is still in the L2 cache when the second kernel, which
            # begins with the first rows, reads it.
            place = used - 1 - (n * takers + taker)
            place = jnp.where(place < 0, places, place)
            item, part = lax.div(place, i32(parts)), lax.rem(place, i32(parts))
            b = _find_row(table_g, 2 * item + 1, batch)
            start, length = _row_of(off_g, b, total)
            return item, part, b, start, length, item - _first_item(table_g, b, length, items)

        count = lax.div(used + (takers - 1), i32(takers))
        work((qkv_g, decay_g, beta_g, slot_g, w_g, r_g, vec_g), scratch, wg, count, place_of)

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
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_prepare",
    )  # fmt: skip
    return kernel(qkv, decay, beta, slot_idx, offsets, table)


def _params():
    return dataclasses.replace(compiler_params(), approx_math=True)


def _passing(qkv, pool, batch, rows, *, nk, tiles, split, scaled_states, interpret):
    """(what a CTA does, buffers, barriers): one (row, value head, columns), or several one after the other."""
    total = qkv.shape[0]
    max_slots, nv, key_dim, value_dim = pool.shape
    group = nv // nk
    halves = key_dim // LINE
    stages = 2 if key_dim == 256 else 3
    dtype = qkv.dtype
    width = tiles * C
    # Registers a thread, of 65536 a CTA: accumulators where the products are, few where only copies are issued.
    math_registers = 232 if tiles == 2 else 240
    blocks = tiles * key_dim // ROWS  # of [ROWS, C], that a state is copied in

    def work(operands, buffers, wg, count, pair_of, await_item=None):
        """The states `pair_of(0)` to `pair_of(count - 1)`, each as (row, value head, columns), one after the other."""
        qkv_g, w_g, r_g, vec_g, slot_g, off_g, table_g, scale_g, segments_g, initial_g, pool_g, o_g = operands
        (q_rows, q_tiles), (k_rows, k_tiles), (v_rows, v_tiles, v_plain), r_s, state_s, w_s, vec_s, *barriers = buffers
        in_bar, state_in, in_free, done = barriers

        def look(n):
            """What has to be read about place n: first token, tokens, first item, slot, whether the row has a state."""
            part_b, row_b = parts_of(pair_of(n)[0])
            if split:
                start, length, item = [segments_g[k, part_b] for k in (FIRST, LENGTH, ITEM)]
            else:
                start, length = _row_of(off_g, row_b, total)
                item = _first_item(table_g, row_b, length, total // C + batch)
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

        def state_blocks(s, m, i):
            return [state_s(s, (m * halves + i) * (LINE // ROWS) + j) for j in range(LINE // ROWS)]

        def carry_states(m):
            if interpret is None:
                plgpu.set_max_registers(math_registers, action="increase")
            one_by_one(partial(carry_state, m))
            plgpu.wait_smem_to_gmem(0)

        def carry_state(m, n, looked, t):
            b, head, column = pair_of(n)
            part_b, row_b = parts_of(b)
            start, length, _, slot, has_state = looked
            live, n_chunks = chunks_of(n, looked)
            last = length - (n_chunks - 1) * C  # tokens of the last chunk
            first_column = column * width
            columns = pl.ds(first_column + m * C, C)
            channel = head * value_dim + first_column + m * C
            s0 = stage_of(t)
            plgpu.barrier_wait(state_in.at[s0])

            def part(i):
                return pool_g.at[slot, head, pl.ds(i * LINE, LINE), columns]

            def scaled(x, n):
                return x if not scaled_states else x * scale_g[n, row_b, head]

            def loaded(i):
                x = [_load_transposed(interpret, ref) for ref in state_blocks(s0, m, i)]
                x = jnp.concatenate(x, axis=1)
                return x if split else scaled(x, 0)

            def release(s):
                plgpu.commit_smem()  # all four warps have read it
                plgpu.barrier_arrive(in_free.at[s])

            @pl.when(n_chunks > 0)
            def _():
                state = lax.cond(
                    has_state != 0,
                    lambda: tuple(loaded(i) for i in range(halves)),
                    lambda: tuple(_zeros((C, LINE), f32) for _ in range(halves)),
                )
                release(s0)

                def write_output(o, n, s):
                    """Through the buffer of values of chunk n + 1: a warp has read just what it overwrites."""
                    tr(v_tiles.at[s, m])[...] = o
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(v_rows.at[s, m], o_g.at[pl.ds(start + n * C, C), pl.ds(channel, C)])

                def step(n, carry):
                    state, low, before = carry
                    s = stage_of(t + 1 + n)
                    left = length - n * C
                    plgpu.barrier_wait(in_bar.at[s])

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
                        d = v - u.read(halves) * k_scale
                        # Keys and values past the row's end may be NaN.
                        masked = partial(jnp.where, _iota((C, C), 1) < left, d, 0.0)
                        d = lax.cond(left < C, masked, lambda d=d: d).astype(dtype)
                        for i in range(halves):
                            s_new[i].set(state[i] * decay)
                            s_new[i].mma(d, r_s.at[s, i])
                        q_scale = _cols(_vector(vec_s.at[s, pl.ds(Q_SCALE * C, C)], COL), C)
                        o.set(q.read(halves) * q_scale)
                        for i in range(2):
                            o.mma(d[:, i * HALF : (i + 1) * HALF], tr(w_s.at[s, i]))
                        state_new = tuple(x.read(1) for x in s_new)
                        low_new = tuple(x.astype(dtype) for x in state_new)
                        return state_new, low_new, o.read().astype(dtype)

                    shapes = [(C, C)] * 3 + [(C, LINE)] * halves
                    carry = _accumulate(interpret, shapes, chunk)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if interpret is not None:
                        # Here products read like ordinary loads, and copies must not overtake those.
                        plgpu.commit_smem()
                    pl.when(n < n_chunks - 1)(lambda: plgpu.barrier_arrive(in_free.at[s]))
                    return carry

                low = tuple(x.astype(dtype) for x in state)
                carry = (state, low, _zeros((C, C), dtype))
                state, _, o = lax.fori_loop(0, n_chunks, step, carry)

                # The last output, too, leaves through the values of its chunk.
                s = stage_of(t + n_chunks)

                @pl.when(last == C)
                def _():
                    write_output(o, n_chunks - 1, s)

                @pl.when(last < C)
                def _():
                    plgpu.commit_smem()
                    store(tr(v_plain.at[s, m]), o)
                    plgpu.commit_smem()
                    drain(v_plain.at[s, m], start + (n_chunks - 1) * C, last, channel)

                @pl.when(True if not split else segments_g[IS_LAST, part_b] != 0)
                def _():
                    for i in range(halves):
                        _store_transposed(interpret, part(i), scaled(state[i], 1))

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(in_free.at[s])

            @pl.when(n_chunks == 0)
            def _():
                @pl.when(jnp.logical_not(live))
                def _():
                    plain = v_plain.at[s0, m]
                    store(plain, _zeros((C, C), dtype))
                    plgpu.commit_smem()

                    @pl.when(b < rows)
                    def _():
                        zero_tokens(plain, start, start + length, channel)

                    @pl.when(b == rows)
                    def _():
                        zero_outside(plain, channel)

                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                release(s0)

            return t + 1 + n_chunks

        def stream():
            if interpret is None:
                plgpu.set_max_registers(40, action="decrease")
            for s in range(stages):  # the part that is never copied
                w_s.at[s, 1][...] = _zeros((C, HALF), dtype)
            plgpu.commit_smem()
            end = one_by_one(bring_all)
            lax.fori_loop(
                jnp.maximum(end - stages, 0), end, lambda t, _: plgpu.barrier_wait(in_free.at[stage_of(t)]), None
            )

        def claim(t):
            s = stage_of(t)

            @pl.when(t >= stages)
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
            reads = (n_chunks > 0) & (has_state != 0)

            @pl.when(reads)
            def _():
                for m in range(tiles):
                    for i in range(halves):
                        for j, ref in enumerate(state_blocks(s0, m, i)):
                            at = pl.ds(i * LINE + j * ROWS, ROWS), pl.ds(first_column + m * C, C)
                            source = pool_g.at[slot, head, *at] if not split else initial_g.at[part_b, head, *at]
                            plgpu.copy_gmem_to_smem(source, ref, state_in.at[s0])

            @pl.when(jnp.logical_not(reads))
            def _():
                for _ in range(blocks):
                    plgpu.barrier_arrive(state_in.at[s0])

            def bring(n, _):
                if await_item is not None:  # while there is no room yet
                    await_item(head, item + n)
                s = claim(t + 1 + n)

                def copy(channel, target):
                    source = qkv_g.at[pl.ds(start + n * C, C), pl.ds(channel, LINE)]
                    plgpu.copy_gmem_to_smem(source, target, in_bar.at[s])

                for i in range(halves):
                    copy((nk + key_head) * key_dim + i * LINE, k_rows.at[s, i])
                for m in range(tiles):
                    copy(2 * nk * key_dim + head * value_dim + first_column + m * C, v_rows.at[s, m])
                for i in range(halves):
                    copy(key_head * key_dim + i * LINE, q_rows.at[s, i])
                plgpu.copy_gmem_to_smem(vec_g.at[item + n, head], vec_s.at[s], in_bar.at[s])
                plgpu.copy_gmem_to_smem(r_g.at[item + n, head], r_s.at[s], in_bar.at[s])
                w = w_g.at[item + n, head]
                plgpu.copy_gmem_to_smem(w.at[pl.ds(0, C)], w_s.at[s, 0], in_bar.at[s])
                plgpu.copy_gmem_to_smem(w.at[pl.ds(C, HALF)], w_s.at[s, 1, pl.ds(HALF, HALF)], in_bar.at[s])

            lax.fori_loop(0, n_chunks, bring, None)
            return t + 1 + n_chunks

        for m in range(tiles):
            pl.when(wg == m)(partial(carry_states, m))
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
        target((stages, halves, C, LINE), dtype),
        _swizzled((stages, 2, C, HALF), dtype),
        plgpu.SMEM((stages, NUM_VECTORS * C), f32),
    ]
    state_dtype = f32 if split else pool.dtype
    # A stage of an alias is as long as a stage of tokens: [ROWS, C] of float32 take what [C, LINE] of the tokens do.
    fit = 4 // jnp.dtype(state_dtype).itemsize
    aliases = [plgpu.SMEM((stages, n * fit, ROWS, C), state_dtype) for n in (halves, halves, tiles, halves)]
    if interpret is None:
        buffers[:4] = [plgpu.RefUnion(*union.refs, [x]) for union, x in zip(buffers[:4], aliases, strict=True)]
    else:
        buffers.insert(4, plgpu.SMEM((stages, blocks, ROWS, C), state_dtype))
    barriers = [
        bar(num_arrivals=2 * halves + tiles + 4, num_barriers=stages),
        bar(num_arrivals=blocks, num_barriers=stages),
        bar(num_arrivals=tiles, num_barriers=stages),
        bar(num_arrivals=tiles + 1),
    ]
    return work, buffers, barriers


def _stay(total, batch):
    """Whether CTAs of `_pass` carry one state after the other and fetch the next meanwhile: worth it for short rows.

    Where rows are long, each is a CTA of its own, so that the chip is busy until the end whatever their lengths.
    """
    return total <= 512 * batch


def _pass_refs(interpret, scratch):
    """The buffers of `_passing`, as its CTAs use them."""
    if interpret is not None:
        q, k, v, r, state, *others = scratch
        return (q, q), (k, k), (v, v, v), r, lambda s, n: state.at[s, n], *others
    unions, others = scratch[:4], scratch[4:]
    q, k, v, r = [_aliases(interpret, u) for u in unions]
    return q[:2], k[:2], v[:3], r[1], _state_block(q[-1], k[-1], v[-1], r[-1]), *others


def _state_block(*refs):
    """Where block n of a state lies: `f(stage, n)`, in one of the refs, which are filled one after the other."""
    places = [(ref, n) for ref in refs for n in range(ref.shape[1])]

    def block(stage, n):
        ref, at = places[n]
        return ref.at[stage, at]

    return block


def _pass(
    qkv, w, r, vec, slot_idx, offsets, table, scales, pool, *, nk, tiles, interpret, split=None
):  # fmt: skip
    """Outputs [T, nv * VD]; `pool` (a Ref) is updated. A CTA for each (row, value head, `tiles` * 64 value columns).

    Where rows are short, there are no more CTAs than multiprocessors, and each takes one of these after the other.

    `scales` is None or [2, B, nv]: what states are multiplied with when read, and when written. `split` is None or
    (`_segments`, their initial states): each segment of a row then has its own CTAs, and the last writes the state.
    """
    segments, initial = split or (None, None)
    total = qkv.shape[0]
    _, nv, _, value_dim = pool.shape
    batch = slot_idx.shape[0]
    rows = batch if segments is None else segments.shape[1]
    work, buffers, barriers = _passing(
        qkv, pool, batch, rows,
        nk=nk, tiles=tiles, split=split is not None, scaled_states=scales is not None, interpret=interpret,
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
        work(operands, _pass_refs(interpret, scratch), wg, count, pair_of)

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=jax.ShapeDtypeStruct((total, nv * value_dim), qkv.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=tiles + 1,
        thread_name="wg",
        scratch_types=[*buffers, *barriers],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_pass",
    )
    return kernel(qkv, w, r, vec, slot_idx, offsets, table, scales, segments, initial, pool)


def _both(
    qkv, decay, beta, slot_idx, offsets, table, scales, pool, *, nk, workers, normalise
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
    units = _units(key_dim)  # as many warpgroups as carrying a state takes
    prepare, buffers, barriers, overlay, results = _preparation(
        qkv, decay, batch,
        nk=nk, nv=nv, key_dim=key_dim, max_slots=max_slots, normalise=normalise, interpret=None,
    )  # fmt: skip
    carry, pass_buffers, pass_barriers = _passing(
        qkv, pool, batch, batch,
        nk=nk, tiles=1, split=False, scaled_states=scales is not None, interpret=None,
    )  # fmt: skip

    def body(
        qkv_g, decay_g, beta_g, slot_g, off_g, table_g, scale_g, pool_g,
        o_g, w_g, r_g, vec_g, memory, prepare_barriers, pass_barriers,
    ):  # fmt: skip
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        # How often the results for a (chunk, part) have been written: once they are there, 1.
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR((items * parts,)))
        first, second, third, *views = memory

        @pl.when(cta < workers)
        def _():
            operands = qkv_g, decay_g, beta_g, slot_g, w_g, r_g, vec_g
            (rows_s, *shared, x_s), (tiles_s, *_, blocks_s), (keys_s, *_) = first, second, third
            refs = rows_s, tiles_s, keys_s, *shared, *prepare_barriers, x_s, blocks_s

            def place_of(n):
                # All warpgroups of all CTAs take a chunk before any takes its second.
                place = (n * units + wg) * workers + cta
                place, part = lax.div(place, i32(parts)), lax.rem(place, i32(parts))
                chunk, b = lax.div(place, i32(batch)), lax.rem(place, i32(batch))
                start, length = _row_of(off_g, b, total)
                return _first_item(table_g, b, length, items) + chunk, part, b, start, length, chunk

            def signal(item, part):
                plgpu.semaphore_signal(ready.at[item * parts + part], memory_scope="gpu")

            prepare(operands, refs, wg, pl.cdiv(chunks * batch * parts, units * workers), place_of, signal)

        @pl.when(cta >= workers)
        def _():
            operands = qkv_g, w_g, r_g, vec_g, slot_g, off_g, table_g, scale_g, None, None, pool_g, o_g
            rows, tiled, (_, _, v_plain, *_), states = views
            refs = *zip(rows[:2], tiled[:2], strict=True), (rows[2], tiled[2], v_plain), tiled[3]
            refs = *refs, _state_block(*states[:4]), *rows[4:], *pass_barriers
            place, column = lax.div(cta - workers, i32(columns)), lax.rem(cta - workers, i32(columns))
            b, head = lax.div(place, i32(nv)), lax.rem(place, i32(nv))

            def await_item(head, item):
                part = lax.div(head, i32(heads))
                plgpu.semaphore_wait(ready.at[item * parts + part], decrement=False, memory_scope="gpu")
                _order_copies()

            carry(operands, refs, wg, None, lambda _: (b, head, column), await_item)

    memory = [*_views([*buffers, plgpu.RefUnion(*[[x] for x in overlay])], 3), *_views(pass_buffers, 4)]
    kernel = plgpu.kernel(
        after_previous(body, None),
        out_type=[jax.ShapeDtypeStruct((total, nv * value_dim), qkv.dtype), *results],
        grid=(workers + columns * nv * (batch + 1),),
        grid_names=("cta",),
        num_threads=units,
        thread_name="wg",
        scratch_types=[plgpu.RefUnion(*memory), barriers, pass_barriers],
        compiler_params=_params(),
        kernel_name="gated_delta_chunk",
    )
    return kernel(qkv, decay, beta, slot_idx, offsets, table, scales, pool)[0]


def _views(buffers, count):
    """Lists of refs that each lie in memory like `buffers`, with the first, second, ... alias of unions."""

    def alias(ref, n):
        return ref.refs[min(n, len(ref.refs) - 1)][0] if isinstance(ref, plgpu.RefUnion) else ref

    return [[alias(ref, n) for ref in buffers] for n in range(count)]


def _order_copies():
    """Bulk copies that this warpgroup issues from here on read what other CTAs' had written before it was told."""

    @plgpu.inline_mgpu()
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_global)

    fence()  # pyright: ignore[reportCallIssue]


# Rows of the table of segments: first token, tokens, first item, whether the row ends in this segment.
FIRST, LENGTH, ITEM, IS_LAST = range(4)


def _segments(offsets, table, total, count):
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


def _segment_maps(qkv, r, vec, slot_idx, table, *, count, dims, max_slots, interpret):
    """What segments do to the state, as (local, steps): only of the segments that another one follows.

    `local`, float32 [B * count, nv, VD, KD], is the transposed state that a segment leaves behind when it starts from
    zeros. `steps` are the states that the unit vectors become with values of zero, transposed: the map from the state
    before the segment to its share in the state after it. They are sums of two arrays of the tokens' dtype, in tiles:
    [B * count, nv, (KD / LINE) * 2 * (KD / LINE), LINE, LINE], by rows of tiles, the array, and columns.
    """
    nk, nv, key_dim, value_dim = dims
    group = nv // nk
    halves = key_dim // LINE
    stages = 3
    dtype = qkv.dtype
    segments = table.shape[1]
    value_tiles = value_dim // C
    tiles = _map_tiles(key_dim, value_dim)

    def body(
        qkv_g, r_g, vec_g, slot_g, table_g, local_g, steps_g, k_u, v_u, r_s, vec_s, in_bar, in_free, done
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

        def stage_of(n):
            return lax.rem(n, i32(stages))

        def carry(m):
            if interpret is None:
                plgpu.set_max_registers(232 if tiles == 2 else 240, action="increase")
            tile = column * tiles + m
            is_map = tile >= value_tiles
            unit = _iota((C, LINE), 0) + (tile - value_tiles) * C  # where a column of the identity has its 1

            def step(n, state):
                s = stage_of(n)
                plgpu.barrier_wait(in_bar.at[s])

                def chunk(u, *s_new):
                    for i in range(halves):
                        u.mma(state[i].astype(dtype), k_tiles.at[s, i].transpose((1, 0)))
                    v = plgpu.load(v_tiles.at[s, m].transpose((1, 0)), layout=WGMMA).astype(f32)
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

            @pl.when(n_chunks > 0)
            def _():
                state = tuple(jnp.where(_iota((C, LINE), 1) + i * LINE == unit, 1.0, 0.0) for i in range(halves))
                state = lax.fori_loop(0, n_chunks, step, state)

                @pl.when(is_map)
                def _():
                    for i in range(halves):
                        high = state[i].astype(dtype)
                        for n, x in enumerate((high, state[i] - high.astype(f32))):
                            store(steps_g.at[segment, head, ((tile - value_tiles) * 2 + n) * halves + i], x)

                @pl.when(jnp.logical_not(is_map))
                def _():
                    for i in range(halves):
                        store(local_g.at[segment, head, pl.ds(tile * C, C), pl.ds(i * LINE, LINE)], state[i])

        for m in range(tiles):
            pl.when(wg == m)(partial(carry, m))

        @pl.when(wg == tiles)
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
                for m in range(tiles):
                    tile = jnp.minimum(column * tiles + m, value_tiles - 1)  # not used by a map
                    copy(2 * nk * key_dim + head * value_dim + tile * C, v_rows.at[s, m])
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
            jax.ShapeDtypeStruct((segments, nv, halves * 2 * halves, LINE, LINE), dtype),
        ],
        grid=((value_tiles + halves) // tiles, nv, segments),
        grid_names=("column", "head", "segment"),
        num_threads=tiles + 1,
        thread_name="wg",
        scratch_types=[
            _copy_target(interpret, (stages, halves, C, LINE), dtype),
            _copy_target(interpret, (stages, tiles, C, C), dtype),
            _swizzled((stages, halves, C, LINE), dtype),
            plgpu.SMEM((stages, NUM_VECTORS * C), f32),
            bar(num_arrivals=halves + tiles + 2, num_barriers=stages),
            bar(num_arrivals=tiles, num_barriers=stages),
            bar(num_arrivals=tiles + 1),
        ],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_maps",
    )
    return kernel(qkv, r, vec, slot_idx, table)


def _initial_states(local, steps, states, count, interpret):
    """The states before all segments, float32 [B * count, nv, KD, VD], from `_segment_maps` and the rows' own.

    One CTA per (row, value head, 64 value columns) takes one step after the other, a warpgroup per 64 keys. States and
    maps are sums of two 16-bit arrays, of whose products only that of the two small ones is left out.
    """
    batch, nv, key_dim, value_dim = states.shape
    halves = key_dim // LINE
    dtype = steps.dtype

    def body(local_g, steps_g, states_g, out_g, steps_s, parts_s, arrived, shared):
        b, head, column, wg = [lax.axis_index(name) for name in ("row", "head", "column", "wg")]
        columns, keys = pl.ds(column * C, C), pl.ds(wg * LINE, LINE)

        def bring(n):
            plgpu.copy_gmem_to_smem(steps_g.at[b * count + n, head], steps_s.at[n & 1], arrived.at[n & 1])

        def load_local(n):
            return _vector(local_g.at[b * count + n, head, columns, keys], WGMMA)

        def put(n, state):
            _store_transposed(interpret, out_g.at[b * count + n, head, keys, columns], state)

        def step(n, carry):
            state, added = carry
            buffer = n & 1
            high = state.astype(dtype)
            parts_s.at[buffer, wg, 0][...] = high
            parts_s.at[buffer, wg, 1][...] = (state - high.astype(f32)).astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.at[buffer])
            plgpu.barrier_wait(shared.at[buffer])
            # All warpgroups are through with the step before this one.
            pl.when((wg == 0) & (n > 0) & (n < count - 2))(lambda: bring(n + 1))
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

            return _accumulate(interpret, [(C, LINE)], products), ahead

        @pl.when(wg == 0)
        def _():
            for n in range(min(2, count - 1)):
                bring(jnp.int32(n))

        state = _load_transposed(interpret, states_g.at[b, head, keys, columns])
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
            _swizzled((2, halves * 2 * halves, LINE, LINE), dtype),
            _swizzled((2, halves, 2, C, LINE), dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=halves, num_barriers=2),
        ],
        compiler_params=_params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_states",
    )
    return kernel(local, steps, states)


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
    table = _row_table(offsets, has_initial_state, total + short)
    count = _num_segments(total, slot_idx.shape[0], nv, key_dim, value_dim)
    workers = (
        _num_workers(total, slot_idx.shape[0], nk, nv, key_dim, value_dim) if count == 1 and interpret is None else 0
    )
    if workers:
        pool = jax.new_ref(recurrent_state)
        out = _both(
            qkv, decay, beta, slot_idx, offsets, table, scales, pool,
            nk=nk, workers=workers, normalise=dtype != f32,
        )[:total]  # fmt: skip
    else:
        w, r, vec = _prepare(
            qkv, decay, beta, slot_idx, offsets, table,
            nk=nk, nv=nv, key_dim=key_dim, max_slots=recurrent_state.shape[0], normalise=dtype != f32,
            interpret=interpret,
        )  # fmt: skip
        split = None
        if count > 1:
            segments = _segments(offsets, table, total, count)
            local, steps = _segment_maps(
                qkv, r, vec, slot_idx, segments,
                count=count, dims=(nk, nv, key_dim, value_dim), max_slots=recurrent_state.shape[0], interpret=interpret,
            )  # fmt: skip
            live = is_live(slot_idx, recurrent_state.shape[0])
            states = read_rows(recurrent_state, slot_idx, live & has_initial_state)
            if scales is not None:
                states = states * scales[0, :, :, None, None]
            split = segments, _initial_states(local, steps, states, count, interpret)
        pool = jax.new_ref(recurrent_state)
        out = _pass(
            qkv, w, r, vec, slot_idx, offsets, table, scales, pool,
            nk=nk, tiles=_tiles(slot_idx.shape[0] * count, nv, key_dim, value_dim), interpret=interpret, split=split,
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

    The maps cost as many columns again as the states, so two segments would gain nothing. Under 32 chunks of the batch
    for each, the steps between the kernels cost more than is saved. Where fewer than five fit, `_both` has taken over.
    With 256 keys the maps of a step are too large for `_initial_states`.
    """
    ctas = batch * nv * (value_dim + key_dim) // (C * _map_tiles(key_dim, value_dim))
    count = min(SMS // ctas + 1, total // (32 * C))
    return count if count >= 3 and SMS // ctas >= 4 and key_dim <= 128 else 1


def _map_tiles(key_dim, value_dim):
    """Tiles of C columns, of states or maps, of a CTA of `_segment_maps`."""
    return 2 if (value_dim + key_dim) % (2 * C) == 0 else 1


def _num_workers(total, batch, nk, nv, key_dim, value_dim):
    """CTAs that prepare chunks beside those that carry states, in one kernel; 0 for one kernel after the other.

    Measured: worth it from 32 chunks a row on, where the states leave half of the multiprocessors idle. With 1.5 CTAs a
    value head chunks are prepared as fast as they are needed; with more, W and R wait in memory until they have left
    the L2 cache. A head that shares no place with another takes longer.
    """
    carrying = batch * nv * value_dim // C
    if carrying > SMS // 2 or total < 32 * C * batch or key_dim > 128:
        return 0
    idle = SMS - carrying
    return idle if _heads_at_once(nv // nk) == 1 else min(idle, 3 * batch * nv // 2)
