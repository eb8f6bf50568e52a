"""State fold in Pallas Mosaic GPU: all layers in one launch, the pool updated in place.

A state is a `[KD, VD]` matrix that lies contiguously in the pool, and folding a record touches each element once,
so the kernel is a stream over the pool: one program takes a block of whole state rows, every access to it is a run of
up to 16 bytes a lane and 512 bytes a warp. All loads of a block are in flight together with all records of the
request; the records go through shared memory, from where each thread reads the few values that its elements need.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import (
    along_keys,
    along_values,
    compiler_params,
    is_row_of,
    load,
    store,
    update,
)

_THREADS = 128
_BLOCK_BYTES = 32768
"""State bytes that one program holds: 64 four-byte registers a thread."""
_CHUNK_ELEMENTS = 16
"""State elements a thread widens to float32 at a time when the pool is narrower."""
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


def _state_layout(value_head_dim, itemsize):
    """Layout of a state block and the number of rows that the 4 warps cover in one access.

    A warp covers `32 / lanes` rows of `lanes * vec` columns: the widest vectors first, then as much of a row as fits.
    """
    vec = math.gcd(16 // itemsize, value_head_dim // 8)
    lanes = math.gcd(32, value_head_dim // vec)
    rows = 32 // lanes
    cols = lanes * vec
    if rows == 1:
        layout = plgpu.Layout.TILED(plgpu.Tiling(((4, cols), (vec,))), (-3,), (-2,), -1)
    else:
        tiling = plgpu.Tiling(((4 * rows, cols), (rows, cols), (vec,)))
        layout = plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)
    return layout, 4 * rows


def _vector_layout(size):
    """One element a thread; threads beyond `size` repeat."""
    unit = math.gcd(size, _THREADS)
    lanes = min(unit, 32)
    warps = unit // lanes
    repeat_lanes = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    repeat_warps = () if warps == 4 else (plgpu.Replicated(4 // warps),)
    if warps == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((unit,), (1,))), repeat_warps, (*repeat_lanes, -2), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((unit,), (lanes,), (1,))), (*repeat_warps, -3), (-2,), -1)


def _block_rows(key_head_dim, value_head_dim, itemsize, unit):
    """Rows of a state that one program takes: a divisor of KD, at most `_BLOCK_BYTES`, a multiple of `unit`."""
    best = unit
    for rows in range(unit, key_head_dim + 1, unit):
        if key_head_dim % rows == 0 and rows * value_head_dim * itemsize <= _BLOCK_BYTES:
            best = rows
    return best


def _chunk_rows(block_rows, value_head_dim, itemsize, unit):
    """Rows that are in float32 registers at a time: all of a float32 block, else a divisor of the block."""
    if itemsize == 4:
        return block_rows
    best = unit
    for rows in range(unit, block_rows + 1, unit):
        if block_rows % rows == 0 and rows * value_head_dim <= _CHUNK_ELEMENTS * _THREADS:
            best = rows
    return best


def state_fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state, *, interpret=None):
    """See `gdn_jax.gated_delta_state_fold`."""
    f32 = jnp.float32
    max_slots, num_value_heads, key_dim, value_dim = recurrent_state.shape
    ring_rows, num_key_heads, ring_len, _ = ring.shape
    num_layers, batch = row_ids.shape
    group = num_value_heads // num_key_heads
    itemsize = recurrent_state.dtype.itemsize

    layout, unit = _state_layout(value_dim, itemsize)
    rows = _block_rows(key_dim, value_dim, itemsize, unit)
    chunk = _chunk_rows(rows, value_dim, itemsize, unit)
    num_blocks = key_dim // rows
    num_chunks = rows // chunk
    key_layout, delta_layout = layout.reduce(1), layout.reduce(0)
    key_copy, delta_copy = _vector_layout(rows), _vector_layout(value_dim)
    shape = (chunk, value_dim)

    def body(ring_g, row_g, ring_row_g, count_g, has_g, pool_g, keys_s, deltas_s, decays_s):
        i = lax.axis_index("block")
        block = lax.rem(i, num_blocks)
        head = lax.rem(lax.div(i, num_blocks), num_value_heads)
        layer_row = lax.div(i, num_blocks * num_value_heads)
        layer, b = lax.div(layer_row, batch), lax.rem(layer_row, batch)
        key_head, member = lax.div(head, group), lax.rem(head, group)
        slot, ring_row, count = row_g[layer, b], ring_row_g[layer, b], count_g[b]
        fresh = jnp.logical_not(has_g[b])
        valid = is_row_of(slot, max_slots) & is_row_of(ring_row, ring_rows)

        @pl.when(valid & (count > 0) & (count <= ring_len))
        def _():
            first = block * rows
            chunks = [pl.ds(c * chunk, chunk) for c in range(num_chunks)]
            state = [pool_g.at[slot, head, pl.ds(first + c * chunk, chunk)] for c in range(num_chunks)]

            def zeros():
                return [plgpu.layout_cast(jnp.zeros(shape, recurrent_state.dtype), layout) for _ in chunks]

            def read():
                return [plgpu.load(r, layout=layout, optimized=False) for r in state]

            values = lax.cond(fresh, zeros, read)

            def fetch(p):
                record = ring_g.at[ring_row, key_head, p]
                delta_at = key_dim + member * value_dim
                return (
                    load(record.at[pl.ds(first, rows)], key_copy),
                    load(record.at[pl.ds(delta_at, value_dim)], delta_copy),
                    ring_g[ring_row, key_head, p, key_dim + group * value_dim + member].astype(f32),
                )

            def stage(j, _):
                # The last group repeats the last accepted record: what lies past it is never read.
                at = [jnp.minimum(j * in_flight + u, count - 1) for u in range(in_flight)]
                records = [fetch(p) for p in at]
                for p, (key, delta, decay) in zip(at, records):
                    store(keys_s.at[p], key)
                    store(deltas_s.at[p], delta)
                    decays_s[p] = decay
                return 0

            in_flight = min(_RECORDS_IN_FLIGHT, ring_len)
            lax.fori_loop(0, lax.div(count + (in_flight - 1), in_flight), stage, 0)
            plgpu.commit_smem()

            for c, ref, value in zip(chunks, state, values):

                def step(p, S, c=c):
                    key = along_values(load(keys_s.at[p, c], key_layout), value_dim, layout)
                    delta = along_keys(load(deltas_s.at[p], delta_layout), chunk, layout)
                    return update(S, key, delta, decays_s[p])

                S = lax.fori_loop(0, count, step, value.astype(f32))
                store(ref, S)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(num_layers * batch * num_value_heads * num_blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((ring_len, rows), f32),
            plgpu.SMEM((ring_len, value_dim), f32),
            plgpu.SMEM((ring_len,), f32),
        ],
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    pool = jax.new_ref(recurrent_state)
    kernel(ring, row_ids, ring_row_ids, num_accepted, has_initial_state, pool)
    return jax.freeze(pool)
