"""float32 tokens for products of 16 bits: normalised float16 queries and keys, and the largest values of all rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import EPS, after_previous, is_row_of, load, row_layout, store
from gdn_jax._ragged import row_bounds
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import C, f16, f32, find_row, first_item, i32, params, row_of

PIECE = 16  # tokens, or rows of a state, that a CTA loads at once


def run_tokens16(qkv, slot_idx, offsets, table, pool, *, nk, interpret):
    """(float16 [T, 2 nk KD], float32 [nv, items + B, PIECE]) of T >= C float32 tokens: one pass over all of them.

    The first are the normalised queries and keys. The second are, for a value head, the sizes of values of all items
    (chunks of rows, see `first_item`), then those of the initial states of all rows: the largest finite elements, by
    PIECE parts. Items that no row has are left as they are.
    """
    total = qkv.shape[0]
    max_slots, nv, key_dim, value_dim = pool.shape
    batch = slot_idx.shape[0]
    blocks, items = total // C, total // C + batch
    conversions, measures, states = blocks * 2 * nk, items * nv, batch * nv
    token_layout = row_layout(key_dim, qkv.dtype.itemsize)
    value_layout = row_layout(value_dim, qkv.dtype.itemsize)
    state_layout = row_layout(value_dim, pool.dtype.itemsize)

    def convert(place, qkv_g, heads_g):
        block, head = lax.div(place, i32(2 * nk)), lax.rem(place, i32(2 * nk))
        first, columns = block * C, pl.ds(head * key_dim, key_dim)
        # The last block takes what is left as well; where that is no whole piece, some tokens are converted twice.
        past = jnp.where(block == blocks - 1, total, first + C)

        def piece(n, _):
            tokens = pl.ds(jnp.minimum(first + n * PIECE, total - PIECE), PIECE)
            x = load(qkv_g.at[tokens, columns], token_layout)
            norm = lax.rsqrt(jnp.sum(x * x, axis=1) + EPS)
            norm = plgpu.layout_cast(lax.broadcast_in_dim(norm, x.shape, (0,)), token_layout)
            store(heads_g.at[tokens, columns], x * norm)

        lax.fori_loop(0, lax.div(past - first + (PIECE - 1), i32(PIECE)), piece, None)

    def largest(load_piece, layout, count, target):
        """Stores the largest of what `load_piece` returns, for pieces 0 to `count` - 1."""

        def piece(n, before):
            x, inside = load_piece(n)
            x = jnp.abs(x)
            return jnp.maximum(before, jnp.where(inside & (x < jnp.inf), x, 0.0))

        none = plgpu.layout_cast(jnp.zeros((PIECE, value_dim), f32), layout)
        store(target, jnp.max(lax.fori_loop(0, count, piece, none), axis=1))

    def measure(place, qkv_g, slot_g, off_g, table_g, sizes_g):
        item, head = lax.div(place, i32(nv)), lax.rem(place, i32(nv))
        b = find_row(table_g, 2 * item + 1, batch)
        start, length = row_of(off_g, b, total)
        first = (item - first_item(table_g, b, length, items)) * C
        columns = pl.ds(2 * nk * key_dim + head * value_dim, value_dim)
        token = plgpu.broadcasted_iota(i32, (PIECE, value_dim), 0, layout=value_layout)

        def load_piece(n):
            wanted = first + n * PIECE
            at = jnp.minimum(start + wanted, total - PIECE)
            inside = (token >= start + wanted - at) & (token < start + length - at)
            return load(qkv_g.at[pl.ds(at, PIECE), columns], value_layout), inside

        @pl.when((first >= 0) & (first < length) & is_row_of(slot_g[b], max_slots))
        def _():
            count = lax.div(jnp.minimum(length - first, C) + (PIECE - 1), i32(PIECE))
            largest(load_piece, value_layout, count, sizes_g.at[head, item])

    def measure_state(place, slot_g, table_g, pool_g, sizes_g):
        b, head = lax.div(place, i32(nv)), lax.rem(place, i32(nv))
        slot = slot_g[b]
        has_state = is_row_of(slot, max_slots) & ((table_g[b] & 1) != 0)

        def load_piece(n):
            return load(pool_g.at[slot, head, pl.ds(n * PIECE, PIECE)], state_layout), True

        count = jnp.where(has_state, key_dim // PIECE, 0)
        largest(load_piece, state_layout, count, sizes_g.at[head, items + b])

    def body(qkv_g, slot_g, off_g, table_g, pool_g, heads_g, sizes_g):
        place = lax.axis_index("cta")
        pl.when(place < conversions)(lambda: convert(place, qkv_g, heads_g))
        place = place - conversions
        pl.when((place >= 0) & (place < measures))(lambda: measure(place, qkv_g, slot_g, off_g, table_g, sizes_g))
        pl.when(place >= measures)(lambda: measure_state(place - measures, slot_g, table_g, pool_g, sizes_g))

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=[
            jax.ShapeDtypeStruct((total, 2 * nk * key_dim), f16),
            jax.ShapeDtypeStruct((nv, items + batch, PIECE), f32),
        ],
        grid=(conversions + measures + states,),
        grid_names=("cta",),
        compiler_params=params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_tokens",
    )
    return kernel(qkv, slot_idx, offsets, table, pool)


def value_scales(sizes, offsets, table, total):
    """What values and states are multiplied with before they become float16, and after: float32 [2, B, nv].

    The rule is linear in values and state together, so each (row, value head) is scaled, by a power of two, to a
    largest value or initial state in [1, 2): whatever their size, float16 keeps 11 bits of it.
    """
    batch = table.shape[0]
    _, length = row_bounds(offsets, total)
    chunks = (length + (C - 1)) // C
    first = jnp.minimum(table >> 1, total // C + batch - chunks)[:, None]
    place = jnp.arange(sizes.shape[1])
    own = (place >= first) & (place < first + chunks[:, None])
    own = own | (place == total // C + batch + jnp.arange(batch)[:, None])
    largest = jnp.max(jnp.where(own[:, None, :, None], sizes, 0.0), (2, 3))
    scale = jnp.exp2(-jnp.floor(jnp.log2(jnp.clip(largest, 2.0**-100, 2.0**100))))
    return jnp.stack([scale, 1.0 / scale])
