"""State fold in Pallas Mosaic GPU: all layers in one launch, the pool updated in place.

A state is a `[KD, VD]` matrix that lies contiguously in the pool, and folding a record touches each element once, so
the kernel is a stream over the pool. One program takes a block of whole rows of one state. Bulk copies bring it to
shared memory in pieces while the records of the request are fetched; each piece is folded in float32 registers, a few
rows at a time, as soon as it is there, and a bulk copy takes it home while the next one is folded.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import (
    along_keys,
    along_values,
    compiler_params,
    fetch_to_keep,
    is_row_of,
    load,
    row_layout,
    store,
    update,
    vector_layout,
    zeros,
)

_BLOCK_ELEMENTS = 16384
_PROGRAM_BYTES = 75776
"""Shared memory of one program that leaves room for three on a multiprocessor."""
_PIECE_ELEMENTS = {4: 2048, 2: 8192}
_CHUNK_ELEMENTS = {4: 2048, 2: 4096}
"""State elements in registers at a time, by the size of a pool element."""
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


def _rows_within(rows, unit, limit):
    """The largest multiple of `unit` that divides `rows` and is at most `limit`, or `unit`."""
    fitting = [n for n in range(unit, min(rows, limit) + 1, unit) if rows % n == 0]
    return fitting[-1] if fitting else unit


def _geometry(key_dim, value_dim, ring_len, itemsize, unit):
    """State rows of a program, of a bulk copy, and of a step in registers; from shapes alone."""
    per_row = value_dim * itemsize + ring_len * 4
    limit = min(_BLOCK_ELEMENTS // value_dim, (_PROGRAM_BYTES - ring_len * (value_dim + 1) * 4) // per_row)
    rows = _rows_within(key_dim, unit, limit)
    piece = _rows_within(rows, unit, _PIECE_ELEMENTS[itemsize] // value_dim)
    chunk = _rows_within(piece, unit, _CHUNK_ELEMENTS[itemsize] // value_dim)
    return rows, piece, chunk


def state_fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state, *, interpret=None):
    """See `gdn_jax.gated_delta_state_fold`."""
    max_slots, num_value_heads, key_dim, value_dim = recurrent_state.shape
    ring_rows, num_key_heads, ring_len, _ = ring.shape
    num_layers, batch = row_ids.shape
    group = num_value_heads // num_key_heads
    itemsize = recurrent_state.dtype.itemsize

    layout, unit = row_layout(value_dim, itemsize)
    rows, piece, chunk = _geometry(key_dim, value_dim, ring_len, itemsize, unit)
    num_blocks, num_pieces = key_dim // rows, rows // piece
    key_layout, delta_layout = layout.reduce(1), layout.reduce(0)
    key_copy, delta_copy = vector_layout(rows), vector_layout(value_dim)
    in_flight = min(_RECORDS_IN_FLIGHT, ring_len)

    def body(
        ring_g,
        row_g,
        ring_row_g,
        count_g,
        has_g,
        pool_g,
        tile_s,
        keys_s,
        deltas_s,
        decays_s,
        arrived,
    ):
        i = lax.axis_index("block")
        first = lax.rem(i, num_blocks) * rows
        head = lax.rem(lax.div(i, num_blocks), num_value_heads)
        layer_row = lax.div(i, num_blocks * num_value_heads)
        layer, b = lax.div(layer_row, batch), lax.rem(layer_row, batch)
        key_head, member = lax.div(head, group), lax.rem(head, group)
        slot, ring_row, count = row_g[layer, b], ring_row_g[layer, b], count_g[b]
        fresh = jnp.logical_not(has_g[b])
        valid = is_row_of(slot, max_slots) & is_row_of(ring_row, ring_rows)

        @pl.when(valid & (count > 0) & (count <= ring_len))
        def _():
            pieces = [
                (
                    tile_s.at[pl.ds(j * piece, piece)],
                    pool_g.at[slot, head, pl.ds(first + j * piece, piece)],
                )
                for j in range(num_pieces)
            ]

            @pl.when(jnp.logical_not(fresh))
            def _():
                states_bytes = num_layers * batch * num_value_heads * key_dim * value_dim * itemsize
                fetch_to_keep(pool_g.at[slot, head, pl.ds(first, rows)], states_bytes, interpret)
                for j, (tile, home) in enumerate(pieces):
                    plgpu.copy_gmem_to_smem(home, tile, arrived.at[j])

            @pl.when(fresh)
            def _():
                for j in range(rows // chunk):
                    store(tile_s.at[pl.ds(j * chunk, chunk)], zeros((chunk, value_dim), layout))

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
            plgpu.commit_smem()

            def fold(at):
                def step(p, state):
                    key = along_values(load(keys_s.at[p, pl.ds(at, chunk)], key_layout), value_dim, layout)
                    delta = along_keys(load(deltas_s.at[p], delta_layout), chunk, layout)
                    return update(state, key, delta, decays_s[p])

                part = tile_s.at[pl.ds(at, chunk)]
                store(part, lax.fori_loop(0, count, step, load(part, layout)))

            for j, (tile, home) in enumerate(pieces):

                @pl.when(jnp.logical_not(fresh))
                def _(j=j):
                    plgpu.barrier_wait(arrived.at[j])

                for at in range(j * piece, (j + 1) * piece, chunk):
                    fold(at)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile, home)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(num_layers * batch * num_value_heads * num_blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((rows, value_dim), recurrent_state.dtype),
            plgpu.SMEM((ring_len, rows), jnp.float32),
            plgpu.SMEM((ring_len, value_dim), jnp.float32),
            plgpu.SMEM((ring_len,), jnp.float32),
            plgpu.Barrier(num_barriers=num_pieces),
        ],
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    pool = jax.new_ref(recurrent_state)
    kernel(ring, row_ids, ring_row_ids, num_accepted, has_initial_state, pool)
    return jax.freeze(pool)
