"""State fold in Pallas Mosaic GPU: all layers in one launch, the pool updated in place.

A state is a `[KD, VD]` matrix that lies contiguously in the pool, and folding a record touches each element once, so
the kernel is a stream over the pool. One program takes a block of whole rows of one state into registers while it
fetches the records of the request, folds them in float32, and writes the block back.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import (
    KEY_ROWS,
    after_previous,
    along_keys,
    along_values,
    compiler_params,
    is_row_of,
    load,
    load_chunks,
    row_layout,
    store,
    store_chunks,
    update,
    vector_layout,
    warpgroup_barrier,
    when,
    widen,
)

_BLOCK_BYTES = 16 * 1024
"""State of a program: 32 float32 elements a thread, or 64 of 16 bits."""
_RECORDS_IN_FLIGHT = 4
_MAX_RING_LEN = 64
_POOL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_RING_DTYPES = (jnp.float32, jnp.bfloat16)


def unsupported(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state):
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del row_ids, ring_row_ids, num_accepted, has_initial_state
    key_head_dim, value_head_dim = recurrent_state.shape[2:]
    for name, dim in (("key_head_dim", key_head_dim), ("value_head_dim", value_head_dim)):
        if dim % 16 or not 16 <= dim <= 256:
            return f"mosaic_gpu serves head dims that are multiples of 16 from 16 to 256; {name} is {dim}."
    if recurrent_state.dtype not in _POOL_DTYPES:
        return f"mosaic_gpu does not serve a recurrent_state of {recurrent_state.dtype}."
    if ring.dtype not in _RING_DTYPES:
        return f"mosaic_gpu does not serve a ring of {ring.dtype}."
    if ring.shape[2] > _MAX_RING_LEN:
        return f"mosaic_gpu serves a RING_LEN of at most {_MAX_RING_LEN}; it is {ring.shape[2]}."
    return None


def state_fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state, *, interpret=None):
    """See `gdn_jax.gated_delta_state_fold`."""
    max_slots, num_value_heads, key_dim, value_dim = recurrent_state.shape
    ring_rows, num_key_heads, ring_len, _ = ring.shape
    num_layers, batch = row_ids.shape
    group = num_value_heads // num_key_heads

    itemsize = recurrent_state.dtype.itemsize
    layout = row_layout(value_dim, itemsize)
    limit = _BLOCK_BYTES // (value_dim * itemsize)
    rows = max(n for n in range(KEY_ROWS, min(key_dim, limit) + 1, KEY_ROWS) if key_dim % n == 0)
    num_blocks = key_dim // rows
    chunks = [pl.ds(c, KEY_ROWS) for c in range(0, rows, KEY_ROWS)]
    key_layout, delta_layout = layout.reduce(1), layout.reduce(0)
    key_copy, delta_copy = vector_layout(rows), vector_layout(value_dim)
    in_flight = min(_RECORDS_IN_FLIGHT, ring_len)
    states_bytes = num_layers * batch * math.prod(recurrent_state.shape[1:]) * itemsize

    def body(
        ring_g,
        row_g,
        ring_row_g,
        count_g,
        has_g,
        pool_g,
        keys_s,
        deltas_s,
        decays_s,
    ):
        i = lax.axis_index("block")
        first = lax.rem(i, num_blocks) * rows
        head = lax.rem(lax.div(i, num_blocks), num_value_heads)
        layer_row = lax.div(i, num_blocks * num_value_heads)
        layer, b = lax.div(layer_row, batch), lax.rem(layer_row, batch)
        key_head, member = lax.div(head, group), lax.rem(head, group)
        slot, ring_row, count = row_g[layer, b], ring_row_g[layer, b], count_g[b]
        has_state = has_g[b]
        valid = is_row_of(slot, max_slots) & is_row_of(ring_row, ring_rows)

        @when(valid & (count > 0) & (count <= ring_len))
        def _():
            block = pool_g.at[slot, head, pl.ds(first, rows)]
            state = load_chunks(block, layout, has_state, interpret)

            def fetch(p):
                record = ring_g.at[ring_row, key_head, p]
                return (
                    load(record.at[pl.ds(first, rows)], key_copy),
                    load(record.at[pl.ds(key_dim + member * value_dim, value_dim)], delta_copy),
                    ring_g[ring_row, key_head, p, key_dim + group * value_dim + member],
                )

            def stage(j, _):
                # The last group repeats the last accepted record: what lies past it is never read.
                at = [jnp.minimum(j * in_flight + u, count - 1) for u in range(in_flight)]
                for p, (key, delta, decay) in zip(at, [fetch(p) for p in at], strict=True):
                    store(keys_s.at[p], key)
                    store(deltas_s.at[p], delta)
                    decays_s[p] = decay.astype(jnp.float32)
                return 0

            lax.fori_loop(0, lax.div(count + (in_flight - 1), in_flight), stage, 0)
            warpgroup_barrier(interpret)

            def fold(p, state):
                delta = along_keys(load(deltas_s.at[p], delta_layout), KEY_ROWS, layout)
                keys = [along_values(load(keys_s.at[p, c], key_layout), value_dim, layout) for c in chunks]
                return [update(s, key, delta, decays_s[p]) for s, key in zip(state, keys, strict=True)]

            state = [widen(s, layout, interpret) for s in state]
            store_chunks(block, layout, lax.fori_loop(0, count, fold, state), states_bytes, interpret)

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=(),
        grid=(num_layers * batch * num_value_heads * num_blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((ring_len, rows), jnp.float32),
            plgpu.SMEM((ring_len, value_dim), jnp.float32),
            plgpu.SMEM((ring_len,), jnp.float32),
        ],
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    pool = jax.new_ref(recurrent_state)
    kernel(ring, row_ids, ring_row_ids, num_accepted, has_initial_state, pool)
    return jax.freeze(pool)
