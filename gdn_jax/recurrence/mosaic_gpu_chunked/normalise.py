"""float32 keys and queries from global memory, normalised for products of 16 bits."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from gdn_jax._mosaic import EPS
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import LINE, WGMMA, C, along_rows, f16, f32, iota
from gdn_jax.recurrence.mosaic_gpu_chunked.warp import Warp


def load_normalised(interpret, tokens, first, valid):
    """Tokens from the given one on, `valid` of them and then zeros: float16 [C, LINE] arrays side by side.

    `tokens`: one head of float32 tokens, [T, KD] in global memory with T >= C.
    """
    tiles = _load_rows(interpret, tokens, first)

    def masked():
        inside = iota((C, LINE), 0) < valid
        return [jnp.where(inside, x, 0.0) for x in tiles]

    tiles = lax.cond(valid < C, masked, lambda: tiles)
    norm = lax.rsqrt(sum(jnp.sum(x * x, axis=1) for x in tiles) + EPS)
    return [(x * along_rows(norm, LINE)).astype(f16) for x in tiles]


def _load_rows(interpret, tokens, first) -> Any:
    """float32 [C, LINE] arrays side by side; past the end of `tokens` the last token is repeated."""
    total, key_dim = tokens.shape
    halves = key_dim // LINE
    if interpret is not None:
        start = jnp.minimum(first, total - C)
        x = jnp.roll(tokens[pl.ds(start, C)], start - first, axis=0)
        return [x[:, i * LINE : (i + 1) * LINE] for i in range(halves)]

    tile = plgpu.ShapeDtypeStruct((C, LINE), jnp.dtype(f32), layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=[tile] * halves)
    def load(_, memory, first):
        warp = Warp()
        number = warp.number
        long, pair = ir.IntegerType.get_signless(64), ir.VectorType.get((2,), warp.single)
        pointer = ir.Type.parse("!llvm.ptr<1>")
        base, offset, _, _, stride, _ = memref.extract_strided_metadata(memory)
        base = arith.addi(
            memref.extract_aligned_pointer_as_index(base), arith.muli(offset, mgpu.c(4, ir.IndexType.get()))
        )
        row = arith.addi(first.registers.item(), arith.addi(arith.shli(warp.index, number(4)), warp.row))
        rows = []
        for lower in (0, 8):
            token = arith.minsi(arith.addi(row, number(lower)), number(total - 1))
            at = arith.muli(arith.extui(long, token), arith.index_cast(long, stride))
            at = arith.addi(at, arith.extui(long, warp.column))
            at = arith.addi(arith.index_cast(long, base), arith.shli(at, arith.constant(long, 2)))
            rows.append(llvm.inttoptr(pointer, at))
        arrays = []
        for i in range(halves):
            registers = np.empty(WGMMA.to_mgpu().registers_shape((C, LINE)), dtype=object)
            parts = []
            for n in range(LINE // 4):  # quarters of 8 x 8, as `Warp` has them in a block of 16 x 16
                column = i * LINE + n // 4 * 16 + n % 4 // 2 * 8
                place = llvm.getelementptr(pointer, rows[n % 2], [], [column], warp.single, llvm.GEPNoWrapFlags.none)
                parts.append(llvm.load(pair, place, alignment=8))
            registers.flat[:] = parts
            arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=WGMMA.to_mgpu(), _is_signed=None))
        return arrays

    return load(tokens, first)  # pyright: ignore[reportCallIssue]
