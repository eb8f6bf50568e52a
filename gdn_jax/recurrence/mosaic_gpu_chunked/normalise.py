"""float32 keys and queries from global memory, normalised for products of 16 bits."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from gdn_jax._mosaic import EPS
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import LINE, C, f16
from gdn_jax.recurrence.mosaic_gpu_chunked.warp import Warp, shared_address


def put_normalised(interpret, heads, first, valid, tiles) -> None:
    """Stores the normalised tokens of heads, `valid` of them from the first one on and then zeros, as operands.

    Args:
        heads: float32 tokens, [T, KD] in global memory with T >= C.
        tiles: for each head float16 [KD / LINE, C, LINE] in shared memory; what lies there is tiled and swizzled, but
            these references are not.
    """
    for_both = list(zip(heads, tiles, strict=True))
    if interpret is not None:
        for head, tile in for_both:
            start = jnp.minimum(first, head.shape[0] - C)
            x = jnp.roll(head[pl.ds(start, C)], start - first, axis=0)
            x = jnp.where(jnp.arange(C)[:, None] < valid, x, 0.0)
            x = (x * lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + EPS)).astype(f16)
            for i in range(tile.shape[0]):
                tile.at[i][...] = x[:, i * LINE : (i + 1) * LINE]
        return

    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(splat, splat, *[plgpu.RefType()] * (2 * len(for_both))))
    def put(_, first, valid, *memory):
        """A warp has 16 tokens, four lanes have each of the first and each of the last eight."""
        warp = Warp()
        first, valid = first.registers.item(), valid.registers.item()
        row = arith.addi(arith.shli(warp.index, warp.number(4)), warp.row)
        rows = [row, arith.addi(row, warp.number(8))]
        pairs = list(zip(memory[::2], memory[1::2], strict=True))
        loaded = [[_load(warp, head, arith.addi(first, row)) for row in rows] for head, _ in pairs]
        for (_, tile), both in zip(pairs, loaded, strict=True):
            for row, pieces in zip(rows, both, strict=True):
                _store(warp, tile, row, arith.cmpi(arith.CmpIPredicate.slt, row, valid), pieces)

    put(first, valid, *[ref for pair in for_both for ref in pair])  # pyright: ignore[reportCallIssue]


def _load(warp, head, token):
    """What the lane has of a token: every fourth four elements. Past the end it is the last token."""
    long, four = ir.IntegerType.get_signless(64), ir.VectorType.get((4,), warp.single)
    total, key_dim = ir.MemRefType(head.type).shape
    base, offset, _, _, stride, _ = memref.extract_strided_metadata(head)
    token = arith.minsi(token, warp.number(total - 1))
    at = arith.addi(
        arith.muli(arith.extui(long, token), arith.index_cast(long, stride)), arith.index_cast(long, offset)
    )
    at = arith.addi(at, arith.extui(long, arith.shli(warp.column, warp.number(1))))
    base = arith.index_cast(long, memref.extract_aligned_pointer_as_index(base))
    pointer = ir.Type.parse("!llvm.ptr<1>")
    place = llvm.inttoptr(pointer, arith.addi(base, arith.shli(at, arith.constant(long, 2))))
    places = [
        llvm.getelementptr(pointer, place, [], [n], warp.single, llvm.GEPNoWrapFlags.none)
        for n in range(0, key_dim, 16)
    ]
    loaded = [llvm.load(four, x, alignment=16) for x in places]
    return [[vector.extract(x, [], [i]) for i in range(4)] for x in loaded]


def _store(warp, tile, row, inside, pieces):
    """Stores what `_load` returned, normalised, or zeros."""
    total = warp.real(0.0)
    for piece in pieces:
        for x in piece:
            total = arith.addf(total, arith.mulf(x, x))
    for distance in (1, 2):
        text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        total = arith.addf(total, llvm.inline_asm(warp.single, [total], text, "=f,f", has_side_effects=True))
    norm = warp.approximate("rsqrt", arith.addf(total, warp.real(EPS)))
    number, pointer = warp.number, ir.Type.parse("!llvm.ptr<3>")
    two = ir.VectorType.get((2,), warp.word)
    # The lane's 8 bytes of every 32 of a row: half of one of its pieces of 16 bytes, of which a row of the tile has
    # eight, swizzled by the number of the row.
    lane = arith.shrui(warp.column, number(1))
    line = arith.addi(shared_address(tile), arith.shli(row, number(7)))
    line = arith.addi(line, arith.shli(arith.andi(lane, number(1)), number(3)))
    for n, piece in enumerate(pieces):
        scaled = [arith.mulf(x, norm) for x in piece]
        bits = []
        for i in (0, 2):
            packed = llvm.inline_asm(
                warp.word, [scaled[i], scaled[i + 1]], "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", has_side_effects=False
            )
            bits.append(arith.select(inside, packed, number(0)))
        i, block = divmod(n, LINE // 16)
        at = arith.xori(arith.addi(number(2 * block), arith.shrui(lane, number(1))), arith.andi(row, number(7)))
        address = arith.addi(line, arith.addi(arith.shli(at, number(4)), number(i * C * 128)))
        llvm.store(vector.from_elements(two, bits), llvm.inttoptr(pointer, address), alignment=8)
