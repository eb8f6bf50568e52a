"""Tiles of values, and of outputs, in shared memory: 16-bit or float32.

A tile is [C, C], tokens by channels. It lies in parts of columns, [parts, C, C / parts], whose rows are one 128-byte
swizzle line each, so that bulk copies fill and drain them at any token (`copy_target`). Where states are carried, the
tile is needed transposed, in the layout WGMMA. For 16 bits there are instructions that transpose; with float32 a lane
accesses pairs of channels: 8 pairs of 4 tokens a warp, which the swizzle spreads over all banks.
"""

import math
from functools import reduce
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from gdn_jax._mosaic import cond, store
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import (
    ROW,
    WGMMA,
    C,
    along_rows,
    copy_target,
    f32,
    i32,
    load_transposed,
    store_tile,
    store_transposed,
)
from gdn_jax.recurrence.mosaic_gpu_chunked.warp import Warp, row_vector, shared_address


def value_parts(dtype):
    """Into how many parts of 128 bytes a row of a tile is cut."""
    return C * jnp.dtype(dtype).itemsize // 128


def value_buffer(interpret, tiles, dtype):
    """Shared memory for tiles, `tiles` being their numbers: three aliases, of which `load_values` says what for."""
    parts = value_parts(dtype)
    shape = (*tiles, parts, C, C // parts)
    plain = plgpu.SMEM(shape, dtype)
    if dtype != f32:
        return copy_target(interpret, shape, dtype, plain)
    if interpret is not None:
        return plain
    transforms = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]
    return plgpu.RefUnion([plgpu.SMEM(shape, dtype, transforms=transforms)], [plain], [plain])


def bring_values(tokens, first, channel, tile, barrier):
    """Starts the copies of a tile, `value_parts` of them, from global memory; `tile`: the first alias."""
    parts, count, width = tile.shape
    for i in range(parts):
        source = tokens.at[pl.ds(first, count), pl.ds(channel + i * width, width)]
        plgpu.copy_gmem_to_smem(source, tile.at[i], barrier)


def load_values(interpret, tile) -> Any:
    """A tile, transposed, in float32. `tile`: the second alias; the first is for copies, the third is not swizzled."""
    if tile.dtype != f32:
        return plgpu.load(tile.at[0].transpose((1, 0)), layout=WGMMA).astype(f32)
    if interpret is not None:
        return jnp.concatenate([tile[0], tile[1]], 1).T

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((C, C), jnp.dtype(f32), layout=WGMMA)
    )
    def load(_, memory):
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        return _from_pairs([llvm.load(pair, x, alignment=8) for x in _places(memory, swizzled=True)], (C, C))

    return load(tile)  # pyright: ignore[reportCallIssue]


def store_values(interpret, tile, value, *, swizzled=True) -> None:
    """The inverse of `load_values`, rounding to the dtype of the tile; into the third alias if not `swizzled`."""
    if tile.dtype != f32:
        if swizzled:
            store_tile(interpret, tile.at[0], value, transposed=True)
        else:
            store(tile.at[0].transpose((1, 0)), value)
        return
    if interpret is not None:
        for i in range(2):
            tile.at[i][...] = value.T[:, i * (C // 2) : (i + 1) * (C // 2)]
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def put(_, value, memory):
        for x, place in zip(_to_pairs(value), _places(memory, swizzled), strict=True):
            llvm.store(x, place, alignment=8)

    put(value, tile)  # pyright: ignore[reportCallIssue]


def _places(memory, swizzled):
    """Pointers to the pairs of channels that a lane has of a float32 tile: of its two tokens of all blocks of eight."""
    warp = Warp()
    number, single = warp.number, ir.F32Type.get()
    pointer = ir.Type.parse("!llvm.ptr<3>")
    # The pair begins at channel 16 warp + 2 row. A part has 32 channels, of which four are 16 bytes; the swizzle flips
    # the number of those by the token.
    row, column, odd_warp = warp.row, warp.column, arith.andi(warp.index, number(1))
    base = arith.addi(shared_address(memory), arith.muli(arith.shrui(warp.index, number(1)), number(C * 128)))
    base = arith.addi(
        base, arith.addi(arith.shli(column, number(7)), arith.shli(arith.andi(row, number(1)), number(3)))
    )
    piece = arith.addi(arith.shli(odd_warp, number(2)), arith.shrui(row, number(1)))
    if swizzled:
        piece = arith.xori(piece, column)
    starts = []
    for token in range(2):
        flipped = arith.xori(piece, number(token if swizzled else 0))
        address = arith.addi(base, arith.addi(arith.shli(flipped, number(4)), number(128 * token)))
        starts.append(llvm.inttoptr(pointer, address))
    return [
        llvm.getelementptr(pointer, x, [], [n * 8 * 128 // 4], single, llvm.GEPNoWrapFlags.none)
        for n in range(C // 8)
        for x in starts
    ]


def _from_pairs(pairs, shape):
    """An array in the layout WGMMA from what a lane has of neighbouring rows, by its columns in ascending order.

    Of 16 rows a lane has two in that layout, eight apart. Here these are channels 2 n and 2 n + 1, so that one access
    brings both: a state's rows are not in the order of the channels, which matters to no product.
    """
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    registers = np.empty(WGMMA.to_mgpu().registers_shape(shape), dtype=object)
    registers.flat[:] = [
        vector.from_elements(kind, [vector.extract(x, [], [row]) for x in columns])
        for columns in zip(pairs[::2], pairs[1::2], strict=True)
        for row in range(2)
    ]
    return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)


def _to_pairs(array):
    """The inverse of `_from_pairs`."""
    kind, registers = ir.VectorType.get((2,), ir.F32Type.get()), list(array.registers.flat)
    return [
        vector.from_elements(kind, [vector.extract(x, [], [column]) for x in rows])
        for rows in zip(registers[::2], registers[1::2], strict=True)
        for column in range(2)
    ]


def load_paired(interpret, ref) -> Any:
    """`load_transposed` with the rows as `load_values` has them with float32 tokens."""
    if interpret is not None:
        return load_transposed(interpret, ref)
    m, n = ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((n, m), jnp.dtype(f32), layout=WGMMA)
    )
    def load(_, source):
        dtype = ir.MemRefType(source.type).element_type
        stored, wide = [ir.VectorType.get((2,), x) for x in (dtype, ir.F32Type.get())]
        loaded = [llvm.load(stored, x, alignment=2 * mgpu.bytewidth(dtype)) for x in _state_places(source)]
        return _from_pairs([x if stored == wide else arith.extf(wide, x) for x in loaded], (n, m))

    return load(ref)  # pyright: ignore[reportCallIssue]


def store_paired(interpret, ref, value) -> None:
    """The inverse of `load_paired`, rounding to the dtype of `ref`."""
    if interpret is not None:
        store_transposed(interpret, ref, value)
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def put(_, value, target):
        dtype = ir.MemRefType(target.type).element_type
        stored = ir.VectorType.get((2,), dtype)
        for x, place in zip(_to_pairs(value), _state_places(target), strict=True):
            x = x if x.type == stored else arith.truncf(stored, x)
            llvm.store(x, place, alignment=2 * mgpu.bytewidth(dtype))

    put(value, ref)  # pyright: ignore[reportCallIssue]


def _state_places(memory):
    """Pointers to the pairs of channels that a lane has of [m, C] in global or shared memory, by its m / 4 rows."""
    warp, kind = Warp(), ir.MemRefType(memory.type)
    (stride, _), _ = kind.get_strides_and_offset()
    base, offset, *_ = memref.extract_strided_metadata(memory)
    word = ir.IntegerType.get_signless(64)
    first = arith.addi(arith.shli(warp.index, warp.number(4)), arith.shli(warp.row, warp.number(1)))
    first = arith.addi(arith.muli(warp.column, warp.number(stride)), first)
    first = arith.addi(arith.index_cast(word, offset), arith.extui(word, first))
    size = arith.constant(word, mgpu.bytewidth(kind.element_type))
    address = arith.index_cast(word, memref.extract_aligned_pointer_as_index(base))
    pointer = ir.Type.parse("!llvm.ptr<1>" if kind.memory_space is None else "!llvm.ptr<3>")
    start = llvm.inttoptr(pointer, arith.addi(address, arith.muli(first, size)))
    return [
        llvm.getelementptr(pointer, start, [], [(8 * n + i) * stride], kind.element_type, llvm.GEPNoWrapFlags.none)
        for n in range(kind.shape[0] // 8)
        for i in range(2)
    ]


# A unit is this power of two below the largest value: so much more room for what is small beside it. Up to the largest
# number of float16 there are 2**11 left, the root of four million tokens.
BELOW = 4


def in_units(interpret, v, unit, bound, decay):
    """float32 values of a chunk counted in units of their rows, powers of two that follow states and values.

    A unit grows with the largest value, and falls where that and the state are less than a sixteenth of what it was
    made for. How large the state is at most follows from what it began with, its values and its decays; it can be
    larger only by the root of the number of its tokens, for which float16 has room. As values may come after the decays
    of their chunk, these count for what was there before the chunk.

    Args:
        v: the values.
        unit: of the chunk before.
        bound: on the state before this chunk.
        decay: of this chunk, a scalar.

    Returns:
        (v, unit, bound, change): in the units returned, with the bound on the state after the chunk. `change` is what
        to multiply with what counts in the units before.
    """
    largest = _largest(interpret, v)
    needed, now = _unit_bits(jnp.maximum(largest, bound)), _exponent_bits(unit)
    fallen = jnp.maximum(needed, now - (126 << 23))  # so that `change` is finite
    new = jnp.where(now - (4 << 23) > needed, fallen, jnp.maximum(needed, now))
    new = lax.bitcast_convert_type(new, f32)
    return v * along_rows(inverse(new), C), new, jnp.maximum(bound * decay, largest), unit * inverse(new)


def rescaled(interpret, tiles, change):
    """Tiles with their rows multiplied by powers of two; a warp in which all are 1 has nothing to do."""

    def multiply():
        return tuple(x * along_rows(change, x.shape[1]) for x in tiles)

    if interpret is not None:
        return multiply()

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(i32), layout=splat))
    def any_change(_, change):
        warp = Warp()
        bits = [llvm.bitcast(warp.word, vector.extract(x, [], [0])) for x in change.registers.flat]
        differ = reduce(arith.ori, [arith.xori(x, warp.number(0x3F800000)) for x in bits])
        text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        found = llvm.inline_asm(warp.word, [differ], text, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return cond(any_change(change) != 0, multiply, lambda: tuple(tiles))  # pyright: ignore[reportCallIssue]


def in_full(x, unit):
    """What `x` counts in units, in float32; `x` where there are none."""
    return x if unit is None else x.astype(f32) * along_rows(unit, x.shape[1])


def output_unit(key_dim):
    """The unit of outputs in that of states: a power of two near `key_dim**-0.5`, so that both are as large."""
    return 2.0 ** -round(math.log2(key_dim**0.5))


def unit_of(interpret, *tiles):
    """(unit, what it is for: the largest size) of each row of these tiles, float32 [C]."""
    largest = _largest(interpret, *tiles)
    return lax.bitcast_convert_type(_unit_bits(largest), f32), largest


def _largest(interpret, *tiles) -> Any:
    """The largest size in each row of float32 tiles, NaN aside: four lanes have a row."""
    if interpret is not None:
        return reduce(jnp.fmax, [jnp.max(jnp.where(x != x, 0.0, jnp.abs(x)), axis=1) for x in tiles])

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,) * len(tiles), return_type=plgpu.ShapeDtypeStruct((C,), jnp.dtype(f32), layout=ROW)
    )
    def find(_, *tiles):
        single, found = ir.F32Type.get(), []
        for lower in range(2):
            largest = arith.constant(single, 0.0)
            for register in [r for tile in tiles for r in tile.registers.flat[lower::2]]:
                for i in range(2):
                    text, x = "{ .reg .f32 x; abs.f32 x, $2; max.f32 $0, $1, x; }", vector.extract(register, [], [i])
                    largest = llvm.inline_asm(single, [largest, x], text, "=f,f,f", has_side_effects=False)
            for distance in (1, 2):
                text = f"{{ .reg .f32 x; shfl.sync.bfly.b32 x, $1, {distance}, 31, 0xffffffff; max.f32 $0, $1, x; }}"
                largest = llvm.inline_asm(single, [largest], text, "=f,f", has_side_effects=True)
            found.append(largest)
        return row_vector(found)

    return find(*tiles)  # pyright: ignore[reportCallIssue]


def _unit_bits(largest):
    """The exponent of a unit: one of which the inverse, and the unit of outputs, are float32 numbers."""
    return jnp.maximum(_exponent_bits(largest) - (BELOW << 23), 5 << 23)


def _exponent_bits(x):
    return lax.bitcast_convert_type(x, i32) & 0x7F800000


def inverse(unit):
    """Of powers of two."""
    return lax.bitcast_convert_type((254 << 23) - _exponent_bits(unit), f32)
