"""Tiles of values, and of outputs, in shared memory: 16-bit or float32.

A tile is [C, C], tokens by channels. It lies in parts of columns, [parts, C, C / parts], whose rows are one 128-byte
swizzle line each, so that bulk copies fill and drain them at any token (`copy_target`). Where states are carried, the
tile is needed transposed, in the layout WGMMA. For 16 bits there are instructions that transpose; with float32 a lane
accesses single words: 8 channels of 4 tokens a warp, which the swizzle spreads over all banks.
"""

from functools import reduce
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from gdn_jax._mosaic import store
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import ROW, WGMMA, C, along_rows, copy_target, f32, i32
from gdn_jax.recurrence.mosaic_gpu_chunked.warp import Warp, shared_address


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
        single, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
        registers = np.empty(WGMMA.to_mgpu().registers_shape((C, C)), dtype=object)
        registers.flat[:] = [
            vector.from_elements(pair, [llvm.load(single, place) for place in places])
            for places in _places(memory, swizzled=True)
        ]
        return mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None)

    return load(tile)  # pyright: ignore[reportCallIssue]


def store_values(interpret, tile, value, *, swizzled=True) -> None:
    """The inverse of `load_values`, rounding to the dtype of the tile; into the third alias if not `swizzled`."""
    if tile.dtype != f32:
        target = tile.at[0].transpose((1, 0))
        if swizzled:
            target[...] = value.astype(tile.dtype)
        else:
            store(target, value)
        return
    if interpret is not None:
        for i in range(2):
            tile.at[i][...] = value.T[:, i * (C // 2) : (i + 1) * (C // 2)]
        return

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def put(_, value, memory):
        for register, places in zip(value.registers.flat, _places(memory, swizzled), strict=True):
            for i, place in enumerate(places):
                llvm.store(vector.extract(register, [], [i]), place)

    put(value, tile)  # pyright: ignore[reportCallIssue]


def _places(memory, swizzled):
    """Pointers to what a lane has of a transposed float32 tile in the layout WGMMA, by its registers of two."""
    warp = Warp()
    number, single = warp.number, ir.F32Type.get()
    pointer = ir.Type.parse("!llvm.ptr<3>")
    # A register's channel is 16 warp + 8 lower + row, its tokens 8 n + column and the next one. A part has 32 channels,
    # of which four are 16 bytes; the swizzle flips the number of those by the token.
    row, column, odd_warp = warp.row, warp.column, arith.andi(warp.index, number(1))
    base = arith.addi(shared_address(memory), arith.muli(arith.shrui(warp.index, number(1)), number(C * 128)))
    base = arith.addi(
        base, arith.addi(arith.shli(column, number(7)), arith.shli(arith.andi(row, number(3)), number(2)))
    )
    piece = arith.addi(arith.shli(odd_warp, number(2)), arith.shrui(row, number(2)))
    if swizzled:
        piece = arith.xori(piece, column)

    def start(lower, token):
        flipped = arith.xori(piece, number(2 * lower + (token if swizzled else 0)))
        address = arith.addi(base, arith.addi(arith.shli(flipped, number(4)), number(128 * token)))
        return llvm.inttoptr(pointer, address)

    starts = [[start(lower, token) for token in range(2)] for lower in range(2)]
    places = []
    for n in range(0, C // 8, 2):  # blocks of 16 x 16, their quarters as `Warp` says
        for quarter in range(4):
            distance = (n + quarter // 2) * 8 * 128 // 4
            places.append(
                [
                    llvm.getelementptr(pointer, x, [], [distance], single, llvm.GEPNoWrapFlags.none)
                    for x in starts[quarter % 2]
                ]
            )
    return places


def in_units(v, unit):
    """(v, unit, change): float32 values counted in units of their rows, which are now at least those of the values.

    `change` is what to multiply with what counts in the units before. Units never shrink: what is much less than the
    largest that a row has had in a column is rounded to what float16 can tell from zero beside that.
    """
    new = jnp.maximum(unit, unit_of(v))
    return v * along_rows(inverse(new), C), new, unit * inverse(new)


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

    return lax.cond(any_change(change) != 0, multiply, lambda: tuple(tiles))  # pyright: ignore[reportCallIssue]


def in_full(x, unit):
    """What `x` counts in units, in float32; `x` where there are none."""
    return x if unit is None else x.astype(f32) * along_rows(unit, x.shape[1])


def unit_of(*tiles):
    """The largest power of two in each row of these tiles, float32 [C]: one that has an inverse in float32."""
    largest = reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1) for x in tiles])
    return lax.bitcast_convert_type(jnp.clip(_exponent_bits(largest), 1 << 23, 253 << 23), f32)


def _exponent_bits(x):
    return lax.bitcast_convert_type(x, i32) & 0x7F800000


def inverse(unit):
    """Of powers of two."""
    return lax.bitcast_convert_type((254 << 23) - _exponent_bits(unit), f32)
