"""Matrices of single warps by `mma.sync`: norms, masks and the inverse, of which Pallas has nothing."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import LINE, ROW, WGMMA, C, f16, f32, i32

SUB = 16  # rows and columns of the blocks that warps invert in `run_prepare`


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


def row_vector(registers):
    """The float32 [C] in the layout ROW of which a lane has these two elements."""
    zero = arith.constant(ir.F32Type.get(), 0.0)
    vector, elements = mgpu.FragmentedArray.splat(zero, (C,), layout=ROW.to_mgpu()), iter(registers)
    return vector.foreach(lambda *_: next(elements), create_array=True)


def shared_address(memory):
    """Where a reference to shared memory begins."""
    word = ir.IntegerType.get_signless(32)
    base, offset, *_ = memref.extract_strided_metadata(memory)
    itemsize = mgpu.bytewidth(ir.MemRefType(memory.type).element_type)
    offset = arith.muli(arith.index_cast(word, offset), arith.constant(word, itemsize))
    return arith.addi(arith.index_cast(word, memref.extract_aligned_pointer_as_index(base)), offset)


class Warp:
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


def sum_of_squares(interpret, *tiles) -> Any:
    """Of the rows of 16-bit [C, LINE] arrays side by side: the diagonal of their product with their own transpose."""
    if interpret is not None:
        return sum(jnp.sum(jnp.square(x.astype(f32)), axis=1) for x in tiles)

    kind = "bf16" if tiles[0].dtype == jnp.bfloat16 else "f16"

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,) * len(tiles), return_type=plgpu.ShapeDtypeStruct((C,), jnp.dtype(f32), layout=ROW)
    )
    def add_up(_, *tiles):
        warp = Warp()
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
        return row_vector(sums)

    return add_up(*tiles)  # pyright: ignore[reportCallIssue]


def any_zero(interpret, ref) -> Any:
    """Whether any of 128 float32 in shared memory is 0; a warp finds out by itself."""
    if interpret is not None:
        return jnp.min(jnp.abs(ref[...])) == 0.0

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(i32), layout=splat)
    )
    def vote(_, memory):
        warp = Warp()
        address = arith.addi(shared_address(memory), arith.shli(warp.lane, warp.number(4)))
        text = """{ .reg .f32 a, b, c, d; .reg .pred p, q, r, s;
            ld.shared.v4.f32 {a, b, c, d}, [$1];
            setp.eq.f32 p, a, 0f00000000; setp.eq.f32 q, b, 0f00000000;
            setp.eq.or.f32 r, c, 0f00000000, p; setp.eq.or.f32 s, d, 0f00000000, q;
            or.pred p, r, s; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"""
        (found,) = _inline_asm([warp.word], [address], text, "=r,r,~{memory}", effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(ref) != 0  # pyright: ignore[reportCallIssue]


def lower_part(interpret, x) -> Any:
    """The 16-bit [C, C] with zeros above the diagonal, whatever was there."""
    if interpret is not None:
        return jnp.tril(x)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((C, C), x.dtype, layout=WGMMA))
    def select(_, x):
        """By bits: a register holds two elements, which a select would take apart."""
        warp = Warp()
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


def put_lower(interpret, ref, alias, value):
    """Stores the 16 x 16 blocks on and below the diagonal of float16 [C, C]. `alias`: `ref` without its tiling."""
    if interpret is not None:
        r, c = [lax.broadcasted_iota(i32, (C, C), axis) for axis in range(2)]
        ref[...] = jnp.where(r // SUB >= c // SUB, value, 0.0).astype(f16)
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def put(_, x, memory):
        warp = Warp()
        base = arith.addi(shared_address(memory), arith.muli(warp.index, warp.number(SUB * 2 * LINE)))
        registers = [_bits(r, warp.word) for r in x.registers.flat]
        for j in range(C // SUB):
            lower = warp.compare("uge", warp.index, j)
            warp.store(warp.address(base, 0, j), registers[4 * j : 4 * j + 4], where=lower)

    put(value, alias)  # pyright: ignore[reportCallIssue]


def invert_lower(interpret, ref, alias):
    """(I - N)^-1 of two matrices N of which `put_lower` has stored the blocks, in place: [2, C, C].

    N is what lies strictly below the diagonal. Above it there are zeros before and after. Two warps share a matrix:
    each inverts the half of it that lies on the diagonal, and the second then makes the block below.
    """
    if interpret is not None:
        for n in range(2):
            ref[n] = _inverse(ref[n])
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def invert(_, memory):
        warp = Warp()
        number, rounded, turn, zero = warp.number, warp.rounded, warp.turn, warp.number(0)
        head, second = arith.shrui(warp.index, number(1)), arith.andi(warp.index, number(1))
        base = arith.addi(shared_address(memory), arith.muli(head, number(2 * C * C)))
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
    """What `invert_lower` does to one matrix, with the same roundings."""

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
