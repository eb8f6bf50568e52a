"""Both kernels in one, side by side, where few states leave half of the multiprocessors idle."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import after_previous, when
from gdn_jax.recurrence.mosaic_gpu_chunked.carry import passing, state_block
from gdn_jax.recurrence.mosaic_gpu_chunked.prepare import heads_at_once, preparation, units_of
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import C, buffer_views, first_item, i32, order_copies, params, row_of


def run_both(
    qkv, decay, beta, slot_idx, offsets, table, pool, *, nk, workers
):  # fmt: skip
    """`run_prepare` and `run_pass` in one kernel, side by side: outputs [T, nv * VD]; `pool` (a Ref) is updated.

    `workers` CTAs prepare chunks, in the order in which they are needed; each of the others carries the state of one
    (row, value head, 64 columns) and waits for its next chunk where it has to. Preparing CTAs come first in the grid
    and wait for nothing, so that this ends however few CTAs run at a time. Every sum is taken as in the two kernels.
    """
    total = qkv.shape[0]
    max_slots, nv, key_dim, value_dim = pool.shape
    batch = slot_idx.shape[0]
    chunks, items = pl.cdiv(total, C), total // C + batch
    columns = value_dim // C
    heads = heads_at_once(nv // nk)
    parts = nv // heads
    units = units_of(key_dim)  # as many warpgroups as carrying a state takes
    prepare, buffers, barriers, overlay, results = preparation(
        qkv, decay, batch,
        nk=nk, nv=nv, key_dim=key_dim, max_slots=max_slots, late_r=False, interpret=None,
    )  # fmt: skip
    carry, pass_buffers, pass_barriers = passing(
        qkv, pool, batch, batch,
        nk=nk, tiles=1, late_r=False, split=False, interpret=None,
    )  # fmt: skip

    def body(
        qkv_g, decay_g, beta_g, slot_g, off_g, table_g, pool_g,
        o_g, *refs,
    ):  # fmt: skip
        *results_g, memory, prepare_barriers, pass_barriers = refs
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        # How often the results for a (chunk, part) have been written: once they are there, 1.
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR((items * parts,)))
        first, second, third, *views = memory

        @when(cta < workers)
        def _():
            operands = qkv_g, decay_g, beta_g, slot_g, *results_g
            (rows_s, *shared, x_s), (tiles_s, *_, blocks_s), (keys_s, *_) = first, second, third
            refs = rows_s, tiles_s, keys_s, *shared, *prepare_barriers, x_s, blocks_s

            def place_of(n):
                # All warpgroups of all CTAs take a chunk before any takes its second.
                place = (n * units + wg) * workers + cta
                place, part = lax.div(place, i32(parts)), lax.rem(place, i32(parts))
                chunk, b = lax.div(place, i32(batch)), lax.rem(place, i32(batch))
                start, length = row_of(off_g, b, total)
                return first_item(table_g, b, length, items) + chunk, part, b, start, length, chunk

            def signal(item, part):
                plgpu.semaphore_signal(ready.at[item * parts + part], memory_scope="gpu")

            prepare(operands, refs, wg, pl.cdiv(chunks * batch * parts, units * workers), place_of, signal)

        @when(cta >= workers)
        def _():
            w_g, r_g, vec_g, *kq_g = results_g
            kq_g = kq_g[0] if kq_g else None
            operands = qkv_g, kq_g, w_g, r_g, vec_g, slot_g, off_g, table_g, None, None, pool_g, o_g
            rows, tiled, (_, _, v_plain, *_), states = views
            refs = *zip(rows[:2], tiled[:2], strict=True), (rows[2], tiled[2], v_plain), tiled[3]
            refs = *refs, state_block(*states[:4]), *rows[4:], *pass_barriers
            place, column = lax.div(cta - workers, i32(columns)), lax.rem(cta - workers, i32(columns))
            b, head = lax.div(place, i32(nv)), lax.rem(place, i32(nv))

            def await_item(head, item):
                part = lax.div(head, i32(heads))
                plgpu.semaphore_wait(ready.at[item * parts + part], decrement=False, memory_scope="gpu")
                order_copies()

            carry(operands, refs, wg, None, lambda _: (b, head, column), await_item)

    memory = [*buffer_views([*buffers, plgpu.RefUnion(*[[x] for x in overlay])], 3), *buffer_views(pass_buffers, 4)]
    kernel = plgpu.kernel(
        after_previous(body, None),
        out_type=[
            jax.ShapeDtypeStruct((total, nv * value_dim), qkv.dtype),
            *results,
        ],
        grid=(workers + columns * nv * (batch + 1),),
        grid_names=("cta",),
        num_threads=units,
        thread_name="wg",
        scratch_types=[plgpu.RefUnion(*memory), barriers, pass_barriers],
        compiler_params=params(),
        kernel_name="gated_delta_chunk",
    )
    return kernel(qkv, decay, beta, slot_idx, offsets, table, pool)[0]
