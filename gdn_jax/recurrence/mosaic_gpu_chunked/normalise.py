"""What comes first with float32 tokens: normalised queries and keys for products of 16 bits."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import EPS, after_previous, load, row_layout, store
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import C, f16, i32, params

PIECE = 16  # tokens that a CTA loads at once


def run_normalise(qkv, *, nk, key_dim, interpret):
    """Queries and keys of T >= C float32 tokens: float16 [T, 2 nk KD]. A CTA for each (C tokens, head).

    What tokens of no row hold, and be it NaN, stays in its own place.
    """
    total = qkv.shape[0]
    blocks = total // C
    layout = row_layout(key_dim, qkv.dtype.itemsize)

    def body(qkv_g, heads_g):
        place = lax.axis_index("cta")
        block, head = lax.div(place, i32(2 * nk)), lax.rem(place, i32(2 * nk))
        first, columns = block * C, pl.ds(head * key_dim, key_dim)
        # The last block takes what is left as well; where that is no whole piece, some tokens are taken twice.
        past = jnp.where(block == blocks - 1, total, first + C)

        def piece(n, _):
            tokens = pl.ds(jnp.minimum(first + n * PIECE, total - PIECE), PIECE)
            x = load(qkv_g.at[tokens, columns], layout)
            norm = lax.rsqrt(jnp.sum(x * x, axis=1) + EPS)
            store(heads_g.at[tokens, columns], x * plgpu.layout_cast(lax.broadcast_in_dim(norm, x.shape, (0,)), layout))

        lax.fori_loop(0, lax.div(past - first + (PIECE - 1), i32(PIECE)), piece, None)

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=jax.ShapeDtypeStruct((total, 2 * nk * key_dim), f16),
        grid=(blocks * 2 * nk,),
        grid_names=("cta",),
        compiler_params=params(),
        interpret=interpret,
        kernel_name="gated_delta_chunk_normalise",
    )
    return kernel(qkv)
