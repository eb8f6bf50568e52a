"""One token over a tile of a state as the kernel of short windows takes it: with as few instructions as there can be.

That kernel is bound by the instructions it issues and by the registers they read (docs/kernels_sequential.md). Hence

- a lane has one row of each chunk and so many columns that a key, once read, is multiplied by all of them;
- the keys of several chunks come to it in one access;
- lanes exchange only those sums that the other one goes on with, so each ends with those of one column, and
  computes its output and factor alone.
"""

import itertools
import math
import operator

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from gdn_jax._mosaic import (
    KEY_ROWS,
    along_values,
    cond,
    load,
    load_whole,
    store,
    store_whole,
    warp_barrier,
    widen,
)
from gdn_jax.recurrence.mosaic_gpu.step import Tile, add_products, output_of, token_factor

_COLUMN_LANES = 32 // KEY_ROWS
"""Lanes side by side along the columns of a warp."""


def _layout(tiles, warp_dims, lane_dims):
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims, lane_dims, -1)


def _array(registers, layout, shape):
    """An array from what a thread has of it, in the order of its layout."""
    tiled = layout.to_mgpu()
    places = np.empty(tiled.registers_shape(shape), dtype=object)
    for place, register in zip(np.ndindex(places.shape), registers, strict=True):
        places[place] = vector.from_elements(ir.VectorType.get((1,), register.type), [register])
    return mgpu.FragmentedArray(_registers=places, _layout=tiled, _is_signed=None)


class WindowTile(Tile):
    """A tile whose lanes hold one row of each chunk and `width / 16` columns, neighbours as many as come in one access.

    Attributes:
        spread_layout: of a value vector, a column a lane; where a lane has fewer than eight columns, several lanes have
            the same one.
    """

    def __init__(self, width, key_dim, itemsize, swizzled, interpret):
        self.width = width
        self.key_dim = key_dim
        self.swizzled = swizzled
        self.interpret = interpret
        self.columns = columns = width // 4 // _COLUMN_LANES
        # Of more columns than come in one access a lane has two groups, so that lanes side by side share a sector.
        access = min(columns, 16 // itemsize)
        groups = columns // access
        parts = ((_COLUMN_LANES * access,), (access,)) if groups > 1 else ((columns,),)
        more = groups - 1
        if swizzled:
            # Rows four apart side by side: of these no two lanes of an access meet a bank.
            tiles = (KEY_ROWS, width), (4, width // 4), (2, width // 4), *parts
            self.layout = _layout(tiles, (-6 - more,), (-5 - more, -3 - more, -7 - more, -2))
        else:
            self.layout = _layout(((KEY_ROWS, width), (width // 4,), *parts), (-3 - more,), (-4 - more, -2))
        # How far away the lane with the other row of two, of the other two of four, and of the other four is.
        self.distances = tuple(_COLUMN_LANES * i for i in ((2, 4, 1) if swizzled else (1, 2, 4)))
        self.key_layout, self.value_layout = self.layout.reduce(1), self.layout.reduce(0)
        # A warp's columns are halved until one is left, and once cut among the lanes side by side.
        cuts = [2] * more + [_COLUMN_LANES] + [2] * (access.bit_length() - 1)
        sizes = itertools.accumulate(cuts, operator.floordiv, initial=width // 4)
        dims = list(range(-1 - len(cuts), -1))
        lanes = dims.pop(more)
        # Of the bits of a lane's row the first picks a half of its columns, the next a half of that.
        halves = (dims[1], dims[0], dims[2]) if swizzled else dims[::-1]
        repeat = () if columns == KEY_ROWS else (plgpu.Replicated(KEY_ROWS // columns),)
        self.spread_layout = _layout(((width,), *((n,) for n in sizes)), (-2 - len(cuts),), (*repeat, *halves, lanes))
        # Chunks whose keys a lane loads together.
        self.together = math.gcd(key_dim // KEY_ROWS, 4)
        rows = (KEY_ROWS, 4, 2, 1) if swizzled else (KEY_ROWS, 1)
        self.words_layout = _layout(
            tuple((n * self.together,) for n in rows),
            (plgpu.Replicated(4),),
            (*((-3, -2, -4) if swizzled else (-2,)), plgpu.Replicated(_COLUMN_LANES)),
        )

    def shared_chunks(self, ref):
        if not self.swizzled:
            return super().shared_chunks(ref)

        count = self.key_dim // KEY_ROWS
        array = plgpu.ShapeDtypeStruct((KEY_ROWS, self.width), ref.dtype, self.layout)

        @plgpu.inline_mgpu(arg_types=(self.layout,), return_type=[array] * count)
        def chunks(_, state):
            parts = np.split(state.registers, count)
            return [mgpu.FragmentedArray(_registers=x, _layout=state.layout, _is_signed=None) for x in parts]

        state = plgpu.load(ref, layout=self.layout, optimized=False)
        return [widen(chunk, self.layout, None) for chunk in chunks(state)]  # pyright: ignore[reportCallIssue]

    def store_words(self, ref, keys, queries, layout):
        """Keys and then queries of heads, pieces [heads, window, piece] as of `KeyVectors`, as `load_words` loads them.

        The key of row `r` of chunk `c` goes to `[c // together, r, c % together]`.
        """
        if self.interpret is not None:
            for first, pieces in ((0, keys), (self.key_dim, queries)):
                for piece in pieces:
                    store(ref.at[:, :, first : first + piece.shape[-1]], piece)
                    first += piece.shape[-1]
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), [[layout] * len(keys)] * 2))
        def stores(_, ref, vectors):
            i32 = ir.IntegerType.get_signless(32)
            tiled = layout.to_mgpu()
            element = ir.MemRefType(ref.type).element_type

            def split(x, n):
                return arith.divui(x, mgpu.c(n, i32)), arith.remui(x, mgpu.c(n, i32))

            warp, lane = split(arith.remui(mgpu.thread_idx(), mgpu.c(128, i32)), 32)
            lane = split(lane, math.gcd(self.key_dim, 32))[1]
            # The neighbours of a lane are rows of one chunk, and a piece is whole groups of chunks.
            chunk, row = split(arith.muli(lane, mgpu.c(tiled.vector_length, i32)), KEY_ROWS)
            group, member = split(chunk, self.together)
            at = arith.addi(arith.muli(group, mgpu.c(KEY_ROWS, i32)), row)
            at = arith.addi(arith.muli(at, mgpu.c(self.together, i32)), member)
            at = arith.addi(at, arith.muli(warp, mgpu.c(2 * self.key_dim, i32)))
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [at], element)
            for which, pieces in enumerate(vectors):
                for i, piece in enumerate(pieces):
                    first = which * self.key_dim + i * piece.shape[-1]
                    for head, register in enumerate(piece.registers.flat):
                        for j in range(tiled.vector_length):
                            distance = first + 4 * head * 2 * self.key_dim + j * self.together
                            to = mgpu.utils.getelementptr(pointer, [distance], element)
                            llvm.store(vector.extract(register, [], [j]), to)

        stores(ref, [keys, queries])  # pyright: ignore[reportCallIssue]

    def load_words(self, words):
        """Chunks of the keys of a token, then of its queries, or of the keys alone, from what `store_words` wrote."""
        if self.interpret is not None:
            return [load(words.at[pl.ds(i, KEY_ROWS)], self.key_layout) for i in range(0, words.shape[0], KEY_ROWS)]

        count = words.shape[0] // KEY_ROWS
        array = plgpu.ShapeDtypeStruct((KEY_ROWS,), jnp.dtype(jnp.float32), self.key_layout)

        @plgpu.inline_mgpu(arg_types=(self.words_layout,), return_type=[array] * count)
        def chunks(_, words):
            words = [vector.extract(x, [], [i]) for x in words.registers.flat for i in range(self.together)]
            return [_array([word], self.key_layout, (KEY_ROWS,)) for word in words]

        return chunks(plgpu.load(words, layout=self.words_layout, optimized=False))  # pyright: ignore[reportCallIssue]

    def finish(self, total):
        """The sum over the rows of a chunk, in `spread_layout`.

        A lane gives away the sums that the other one goes on with, and so ends with one column's.
        """
        if self.interpret is not None:
            return plgpu.layout_cast(jnp.sum(total, axis=0), self.spread_layout)

        @plgpu.inline_mgpu(
            arg_types=(self.layout,),
            return_type=plgpu.ShapeDtypeStruct((self.width,), jnp.dtype(jnp.float32), self.spread_layout),
        )
        def finished(_, total):
            i32 = ir.IntegerType.get_signless(32)
            sums = [vector.extract(x, [], [i]) for x in total.registers.flat for i in range(x.type.shape[0])]
            for distance in self.distances:
                kept = given = sums
                if len(sums) > 1:
                    bit = arith.andi(mgpu.thread_idx(), mgpu.c(distance, i32))
                    upper = arith.cmpi(arith.CmpIPredicate.ne, bit, mgpu.c(0, i32))
                    halves = list(zip(sums[: len(sums) // 2], sums[len(sums) // 2 :], strict=True))
                    kept = [arith.select(upper, b, a) for a, b in halves]
                    given = [arith.select(upper, a, b) for a, b in halves]
                sums = [arith.addf(a, mgpu.utils.shfl_bfly(b, distance)) for a, b in zip(kept, given, strict=True)]
            return _array(sums, self.spread_layout, (self.width,))

        return finished(total)  # pyright: ignore[reportCallIssue]

    def window_step(self, state, words_s, value, gates, factor_s, needed=None):
        """New state (the old one where `needed` is false), output and delta factor, both in `spread_layout`."""
        words = self.load_words(words_s)
        words = [along_values(word, self.width, self.layout) for word in words]
        totals = add_products(self.zeros(2), state, words[: len(state)], words[len(state) :])
        factor = token_factor(self.finish(totals[0]), value, gates)
        store_whole(factor_s, factor, self.spread_layout, self.interpret)

        def output():
            return output_of(self.finish(totals[1]), factor, gates)

        def updated():
            # A lane needs the factors of the lanes beside it.
            warp_barrier(self.interpret)
            # Keys again, from behind the barrier: a few loads, but no registers that they would hold until here.
            keys = self.load_words(words_s.at[pl.ds(0, self.key_dim)])
            keys = [along_values(key, self.width, self.layout) for key in keys]
            # Both in one piece of code, so that the update hides the exchange.
            return self.update(state, keys, load_whole(factor_s, self.value_layout, self.interpret), gates[0]), output()

        state, out = updated() if needed is None else cond(needed, updated, lambda: (state, output()))
        return state, out, factor
