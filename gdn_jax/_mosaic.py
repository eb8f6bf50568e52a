"""What the Mosaic GPU kernels of this package share.

One kernel thread is a warpgroup of 128 lanes. A tile of a state is handled as a list of chunks of
`KEY_ROWS` key rows by `value_tile` value columns; the eight rows of a chunk sit in one warp, one or two of
them in a lane, so a sum over the key dimension is a sum over chunks inside a lane followed by a few shuffles,
and no value crosses warps (in `Rows` of recurrence/mosaic_gpu/step.py it does, through shared memory). The order of
every such sum depends on the key dimension alone, never on the width of the tile or on the path that computed
it: that is what makes all paths agree bit for bit.
"""

import functools
import math

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

KEY_ROWS = 8
EPS = 1e-6
L2_BYTES = 50 * 1024 * 1024
"""Second-level cache of a Hopper GPU. Up to that many bytes of states may still be there from the call before."""
_STAYING_BYTES = 32 * 1024 * 1024
"""Of states that are up to half as much again: what is left there for the next call."""


def compiler_params():
    """Lane semantics: the layout solver of the other mode needs many seconds for lists of small chunks."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def after_previous(body, interpret):
    """`body` of a kernel, held until the kernels before it have ended and what they wrote can be seen.

    A kernel that waits for this itself is launched while the one before it still ends, unless XLA has put it into a
    CUDA graph. Every thread waits, and before it does so none may touch global memory: anything there may still be in
    use. No kernel lets the next one begin earlier than that: some calls gain by it, others lose as much
    (docs/kernels_sequential.md).
    """
    if interpret is not None:
        return body

    @functools.wraps(body)
    def waiting(*refs):
        plgpu.griddepcontrol_wait()
        body(*refs)

    return waiting


def value_tile(value_head_dim: int, limit: int) -> int:
    """The widest tile of 16, 32, 64 or 128 value columns that divides the head, if it can at most `limit`."""
    tile = math.gcd(value_head_dim, 128)
    while tile > max(limit, 16):
        tile //= 2
    return tile


def state_layout(tile: int):
    """Layout of [8 n, tile]: warps along the values, lanes along values and keys.

    Of the eight rows of a chunk a lane holds one for tiles of 16 columns, otherwise two neighbours (their keys come
    from shared memory in one access). A sum over the rows adds neighbours first in either case, in a lane or between
    lanes. `.reduce(1)` is the layout of a key vector [8 n], `.reduce(0)` that of a value vector [tile].
    """
    columns = tile // 4
    if columns == 4:
        return plgpu.Layout.TILED(plgpu.Tiling(((KEY_ROWS, tile), (KEY_ROWS, 4), (1,))), (-4,), (-3, -2), -1)
    tiling = plgpu.Tiling(((KEY_ROWS, tile), (KEY_ROWS, columns), (2, columns // 8)))
    return plgpu.Layout.TILED(tiling, (-5,), (-4, -3), -1)


def row_layout(width: int, itemsize: int):
    """Layout of a chunk [KEY_ROWS, width] of whole rows as they lie in memory.

    A warp covers `32 / lanes` rows of `lanes * vec` columns in one access: the widest vectors first, then as much of a
    row as fits.
    """
    vec = math.gcd(16 // itemsize, width * KEY_ROWS // 128)
    lanes = math.gcd(32, width // vec)
    rows = 32 // lanes
    cols = lanes * vec
    if rows == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, cols), (vec,))), (-3,), (-2,), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((4 * rows, cols), (rows, cols), (vec,))), (-5,), (-3, -2), -1)


def vector_layout(size: int):
    """One element a thread; threads beyond `size` repeat."""
    unit = math.gcd(size, 128)
    lanes = min(unit, 32)
    warps = unit // lanes
    repeat_lanes = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    repeat_warps = () if warps == 4 else (plgpu.Replicated(4 // warps),)
    if unit == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((1,),)), repeat_warps, repeat_lanes, -1)
    if warps == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((unit,), (1,))), repeat_warps, (*repeat_lanes, -2), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((unit,), (lanes,), (1,))), (*repeat_warps, -3), (-2,), -1)


def cond(condition, function, otherwise):
    """`lax.cond`, or the branch itself if the condition is known.

    For each conversion of a boolean to another type Mosaic runs ptxas, to ask for its version: 6 to 14 ms of a first
    call for every branch. A selection takes none.
    """
    if isinstance(condition, bool):
        return function() if condition else otherwise()
    return lax.switch(as_int(condition), (otherwise, function))


def when(condition):
    """`pl.when`, by way of `cond`."""
    return lambda function: cond(condition, function, lambda: None)


def as_int(condition) -> jax.Array:
    return lax.select(condition, jnp.int32(1), jnp.int32(0))


def load(ref, layout) -> jax.Array:
    """The contents of `ref` (shared or global memory) in float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def widen(x, layout, interpret) -> jax.Array:
    """`x` in float32, with one instruction for each bfloat16: compilers take two for the upper one of a pair."""
    if interpret is not None or x.dtype != jnp.bfloat16 or layout.to_mgpu().vector_length % 2:
        return x.astype(jnp.float32)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float32), layout))
    def widened(_, x):
        registers = np.empty_like(x.registers)
        for i, register in np.ndenumerate(x.registers):
            registers[i] = _widened(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return widened(x)  # pyright: ignore[reportCallIssue]


def _widened(register):
    """A vector in float32, of those in bfloat16 one of an even length."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    (n,) = register.type.shape
    if register.type.element_type == f32:
        return register
    wide = ir.VectorType.get((n,), f32)
    if n % 2 or register.type.element_type != ir.BF16Type.get():
        return arith.extf(wide, register)
    pairs_of_bits = ir.VectorType.get((n // 2,), i32)
    pairs = vector.bitcast(pairs_of_bits, register)
    lower, upper = (
        op(pairs, vector.broadcast(pairs_of_bits, mgpu.c(x, i32)))
        for op, x in ((arith.shli, 16), (arith.andi, -(1 << 16)))
    )
    order = [j // 2 + n // 2 * (j % 2) for j in range(n)]
    return vector.bitcast(wide, vector.shuffle(lower, upper, order))


def _places(ref, layout, shape):
    """Where a thread has what is its own of arrays of `shape` that lie one after the other along the rows of `ref`.

    For each array a list of places in its registers and pointers to their vectors: one address, and distances from it.
    Loads and stores of Pallas compute each from the number of the thread, which the compilers take long to see through.
    """
    i32 = ir.IntegerType.get_signless(32)
    kind = ir.MemRefType(ref.type)
    n = layout.vector_length
    vectors = ir.VectorType.get((n,), kind.element_type)
    strides_of_ref, _ = kind.get_strides_and_offset()
    strides = layout.tiling.tile_strides(tuple(strides_of_ref))
    thread, before, at = mgpu.thread_idx(), 1, mgpu.c(0, i32)
    for dim in (*layout.lane_dims[::-1], *layout.warp_dims[::-1]):
        if isinstance(dim, int):
            size = layout.tiled_tiling_shape[dim]
            assert size == 1 or strides[dim] % n == 0
            index = arith.remui(arith.divui(thread, mgpu.c(before, i32)), mgpu.c(size, i32))
            # One sum: a pointer that is moved once for the lane and once for the warp takes more registers.
            at = arith.addi(at, arith.muli(index, mgpu.c(strides[dim] // n, i32)))
            before *= size
        else:
            before *= dim.times
    # All in units of vectors, which tells the compilers how the addresses are aligned.
    pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [at], vectors)

    def moved(distance):
        assert distance % n == 0
        return mgpu.utils.getelementptr(pointer, [distance // n], vectors)

    places = [
        (i, sum(a * b for a, b in zip(i, strides, strict=True))) for i in np.ndindex(layout.registers_shape(shape))
    ]
    firsts = [row * strides_of_ref[0] for row in range(0, kind.shape[0], shape[0])]
    return [[(i, moved(first + distance)) for i, distance in places] for first in firsts]


def load_rows(ref, rows: int, layout, interpret) -> list[jax.Array]:
    """`ref`, in shared or global memory, in float32 and cut along its first axis into arrays of `rows`.

    With `rows` 0 into arrays without that axis.
    """
    step = max(rows, 1)
    count, shape = ref.shape[0] // step, (rows,) * (rows > 0) + ref.shape[1:]
    if interpret is not None:
        return [load(ref.at[pl.ds(i * rows, rows) if rows else i], layout) for i in range(count)]

    array = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[array] * count)
    def loads(_, ref):
        tiled = layout.to_mgpu()
        kind = ir.VectorType.get((tiled.vector_length,), ir.MemRefType(ref.type).element_type)
        loaded = []
        for places in _places(ref, tiled, (step, *ref.type.shape[1:])):
            registers = np.empty(len(places), dtype=object)
            for i, (_, pointer) in enumerate(places):
                registers[i] = _widened(llvm.load(kind, pointer))
            registers = registers.reshape(tiled.registers_shape(shape))
            loaded.append(mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None))
        return loaded

    return loads(ref)  # pyright: ignore[reportCallIssue]


def load_whole(ref, layout, interpret) -> jax.Array:
    """The contents of `ref`, as `load_rows` loads them."""
    return load_rows(ref, ref.shape[0], layout, interpret)[0]


def store_rows(ref, arrays, layout, interpret) -> None:
    """Writes float32 arrays, rounded to the dtype of `ref` and one after the other along its first axis."""
    if interpret is not None:
        rows = arrays[0].shape[0]
        for i, array in enumerate(arrays):
            store(ref.at[pl.ds(i * rows, rows)], array)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [layout] * len(arrays)))
    def stores(_, ref, arrays):
        tiled = layout.to_mgpu()
        for array, places in zip(arrays, _places(ref, tiled, arrays[0].shape), strict=True):
            rounded = array.astype(ir.MemRefType(ref.type).element_type)
            for i, pointer in places:
                llvm.store(rounded.registers[i], pointer)

    stores(ref, list(arrays))  # pyright: ignore[reportCallIssue]


def store(ref, value) -> None:
    """Writes `value`, rounded to the dtype of `ref`, to shared or global memory at any alignment."""
    value = value.astype(ref.dtype)
    if hasattr(plgpu, "store"):
        # From jax 0.12 on, plain assignment insists on whole sectors and conflict-free banks.
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def fetch_to_keep(ref, states_bytes, interpret) -> None:
    """Prefetches a block of rows of global memory into the L2 cache with priority `evict_last`.

    For states that are read at once and written soon after, by many programs: the reads that follow find the lines, and
    memory serves reads and writes faster (docs/kernels_conv_fold.md). Nothing but time depends on it.
    Left out where all states of the call, `states_bytes`, fit into that cache: there it costs time.
    """
    if interpret is not None or states_bytes <= L2_BYTES:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def fetch(_, block):
        i32, i64, index = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.IndexType.get()
        kind = ir.MemRefType(block.type)
        itemsize = mgpu.bytewidth(kind.element_type)
        line_elements = 128 // itemsize
        rows, columns = kind.shape
        lines_a_row = -(-columns // line_elements)
        base, offset, _, _, row_stride, _ = memref.extract_strided_metadata(block)
        base = memref.extract_aligned_pointer_as_index(base)
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(128, i32))
        for first in range(0, rows * lines_a_row, 128):
            # Threads beyond the last line repeat others.
            line = arith.remui(arith.addi(thread, mgpu.c(first, i32)), mgpu.c(rows * lines_a_row, i32))
            line = arith.index_cast(index, line)
            row, line = (op(line, mgpu.c(lines_a_row, index)) for op in (arith.divui, arith.remui))
            at = arith.addi(arith.muli(row, row_stride), arith.muli(line, mgpu.c(line_elements, index)))
            address = arith.addi(base, arith.muli(arith.addi(offset, at), mgpu.c(itemsize, index)))
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [arith.index_cast(i64, address)],
                "prefetch.global.L2::evict_last [$0];",
                "l",
                has_side_effects=True,
            )

    fetch(ref)  # pyright: ignore[reportCallIssue]


def warpgroup_barrier(interpret) -> None:
    """What any warp of the warpgroup has stored to shared memory, the others may load from here on.

    Bulk copies are not told: what they read must be committed (`commit_smem`). They may overwrite what has been loaded.
    """
    if interpret is not None:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        mgpu.warpgroup_barrier()

    wait()  # pyright: ignore[reportCallIssue]


def warp_barrier(interpret) -> None:
    """What any lane of a warp has stored to shared memory, the others of that warp may load from here on."""
    if interpret is not None:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), [], "bar.warp.sync 0xffffffff;", "~{memory}", has_side_effects=True
        )

    wait()  # pyright: ignore[reportCallIssue]


def _chunk_accesses(block, layout):
    """Address of what a thread has of a block of whole rows, and for each of its chunks where the vectors lie.

    That is a list of places in the registers of the chunk and distances from the address in bytes.
    """
    index = ir.IndexType.get()
    kind = ir.MemRefType(block.type)
    itemsize = mgpu.bytewidth(kind.element_type)
    (row_stride, _), _ = kind.get_strides_and_offset()
    strides = layout.tiling.tile_strides((row_stride, 1))
    base, at, *_ = memref.extract_strided_metadata(block)
    base = memref.extract_aligned_pointer_as_index(base)
    for indices in (layout.warp_indices(), layout.lane_indices()):
        for i, stride in zip(indices, strides[-layout.tiled_tiling_rank :], strict=True):
            at = arith.addi(at, arith.muli(arith.index_cast(index, i), mgpu.c(stride, index)))
    address = arith.addi(base, arith.muli(at, mgpu.c(itemsize, index)))
    rows, columns = kind.shape
    places = list(np.ndindex(layout.registers_shape((KEY_ROWS, columns))))
    chunks = [
        [(i, itemsize * (chunk * row_stride + sum(a * b for a, b in zip(i, strides, strict=True)))) for i in places]
        for chunk in range(0, rows, KEY_ROWS)
    ]
    return arith.index_cast(ir.IntegerType.get_signless(64), address), chunks


_VECTOR = {1: "", 2: ".v2", 4: ".v4"}


def _words(block, layout):
    """Type of the words that a thread accesses at once, how many there are, and the letter of assembly for one."""
    bits = 8 * layout.vector_length * mgpu.bytewidth(ir.MemRefType(block.type).element_type)
    width, letter = (16, "h") if bits == 16 else (32, "r")
    return ir.IntegerType.get_signless(width), bits // width, letter


def _operands(count: int, first: int) -> str:
    names = ", ".join(f"${first + i}" for i in range(count))
    return f"{{{names}}}" if count > 1 else names


def _cache_policy(priorities: str, share: float = 1.0):
    """The policy of an access by which a share of the lines, picked by address, gets the first of the priorities."""
    i64 = ir.IntegerType.get_signless(64)
    return llvm.inline_asm(i64, [], f"createpolicy.fractional.{priorities}.b64 $0, {share:.4f};", "=l")


def load_chunks(block, layout, exists, interpret) -> list[jax.Array]:
    """The chunks of a block of states in global memory, in its dtype, and zeros if they do not exist yet.

    All loads are on their way at once, and ask the L2 cache to keep their lines until `store_chunks` has overwritten
    them: memory then serves reads and writes faster (docs/kernels_sequential.md). Nothing but time depends on it.
    """
    count, columns = block.shape[0] // KEY_ROWS, block.shape[1]
    if interpret is not None:
        parts = [block.at[pl.ds(i * KEY_ROWS, KEY_ROWS)] for i in range(count)]
        parts = [plgpu.load(part, layout=layout, optimized=False) for part in parts]
        return [jnp.where(exists, part, jnp.zeros_like(part)) for part in parts]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=[plgpu.ShapeDtypeStruct((KEY_ROWS, columns), block.dtype, layout)] * count,
    )
    def loads(_, block, exists):
        tiled = layout.to_mgpu()
        address, chunks = _chunk_accesses(block, tiled)
        word, n, letter = _words(block, tiled)
        operands = [exists.registers.item(), address, _cache_policy("L2::evict_last")]
        # By a predicate, not by a branch: the loads are then issued in a row.
        clear = " ".join(f"mov.b{word.width} ${i}, 0;" for i in range(n))
        load = f"@p ld.global.L2::cache_hint{_VECTOR[n]}.b{word.width} {_operands(n, 0)}"
        result = word if n == 1 else llvm.StructType.get_literal([word] * n)
        constraints = ",".join([f"=&{letter}"] * n + ["r", "l", "l"])
        element = ir.MemRefType(block.type).element_type
        arrays = []
        for chunk in chunks:
            registers = np.empty(tiled.registers_shape((KEY_ROWS, columns)), dtype=object)
            for i, distance in chunk:
                text = f"{{ .reg .pred p; setp.ne.b32 p, ${n}, 0; {clear} {load}, [${n + 1}+{distance}], ${n + 2}; }}"
                loaded = llvm.inline_asm(result, operands, text, constraints, has_side_effects=True)
                parts = [loaded] if n == 1 else [llvm.extractvalue(word, loaded, [j]) for j in range(n)]
                words = vector.from_elements(ir.VectorType.get((n,), word), parts)
                registers[i] = vector.bitcast(ir.VectorType.get((tiled.vector_length,), element), words)
            arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=tiled, _is_signed=None))
        return arrays

    return loads(block, as_int(exists))  # pyright: ignore[reportCallIssue]


def store_chunks(block, layout, chunks, states_bytes, interpret) -> None:
    """Writes chunks of float32, rounded to the dtype of the block in global memory.

    The compiler takes a reference to global memory for one to any memory, and so loads nothing from shared memory
    between two ordinary stores; these are to global memory by name.

    They end what `load_chunks` asked of the L2 cache. Where all states of the call, `states_bytes`, are somewhat more
    than it holds, a call on them would find nothing of the one before, because each line is pushed out just before it
    is needed: lines that go at once make room there for others, which stay.
    """
    if interpret is not None:
        for i, chunk in enumerate(chunks):
            store(block.at[pl.ds(i * KEY_ROWS, KEY_ROWS)], chunk)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [layout] * len(chunks)))
    def stores(_, block, arrays):
        tiled = layout.to_mgpu()
        address, places = _chunk_accesses(block, tiled)
        word, n, letter = _words(block, tiled)
        if L2_BYTES < states_bytes <= 1.5 * L2_BYTES:
            policy = _cache_policy("L2::evict_normal.L2::evict_first", _STAYING_BYTES / states_bytes)
        else:
            policy = _cache_policy("L2::evict_normal")
        for array, chunk in zip(arrays, places, strict=True):
            for i, distance in chunk:
                words = vector.bitcast(ir.VectorType.get((n,), word), array.registers[i])
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [address, *(vector.extract(words, [], [j]) for j in range(n)), policy],
                    f"st.global.L2::cache_hint{_VECTOR[n]}.b{word.width} [$0+{distance}], {_operands(n, 1)}, ${n + 1};",
                    ",".join(["l"] + [letter] * n + ["l"]),
                    has_side_effects=True,
                )

    stores(block, [chunk.astype(block.dtype) for chunk in chunks])  # pyright: ignore[reportCallIssue]


def store_whole(ref, value, layout, interpret) -> None:
    """Writes `value` as `store_rows` does."""
    store_rows(ref, [value], layout, interpret)


def along_values(x, tile: int, layout) -> jax.Array:
    """A key vector [n] repeated over the columns of [n, tile]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], tile), (0,)), layout)


def along_keys(x, rows: int, layout) -> jax.Array:
    """A value vector [tile] repeated over the rows of [rows, tile]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,)), layout)


def zeros(shape, layout) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def rounded_product(x, y) -> jax.Array:
    """`x * y`, rounded before it enters any sum.

    A compiler may fuse a product into the sum it enters, even where the product is needed as it is too: the lanes
    that exchange products would then each add the other's rounded product to their own exact one, and end with
    different sums. A sum with a zero that it cannot see through gives the rounded product, fused or not.
    """
    return x * y + lax.optimization_barrier(jnp.zeros_like(x))


def update(state, key, factor, decay) -> jax.Array:
    """`fma(key, factor, state * decay)`, elementwise, with exactly these two roundings.

    Of the two products in `state * decay + key * factor` the compiler may fuse either one into the
    addition. The barrier leaves it only the second, so the forward and the fold round alike.
    `key` and `factor` have the shape of `state` (see `along_values` and `along_keys`).
    """
    return lax.optimization_barrier(state * decay) + key * factor


def is_row_of(slot, rows: int):
    """Whether `slot` names one of `rows` pool rows; every other value is a padding slot."""
    return (slot >= 0) & (slot < rows)
