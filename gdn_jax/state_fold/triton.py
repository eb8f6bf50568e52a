"""The state fold in Triton: all layers in one launch, the pool updated in place.

A program takes a block of whole rows of one state through the accepted records, in float32 registers.
"""

# What Triton compiles is not typed as Python is.
# pyright: reportGeneralTypeIssues=false

from gdn_jax._compat import triton_call
from gdn_jax._triton import load_float, tl, triton, unsupported_head_dims, update

_BLOCK_ELEMENTS = 1024
_NUM_WARPS = 1
TOGETHER = tl.constexpr(4)
"""Records that are on their way at once."""


@triton.jit
def load_records(
    ring, first, count, member, key_index, value_index,
    GROUP: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Raw keys (a block of each), delta factors and decays of one value head, in float32; none past the accepted."""
    records = ()
    for i in tl.static_range(TOGETHER):
        record = ring + (first + i) * STRIDE
        accepted = first + i < count
        key = load_float(record + key_index, (key_index < KD) & accepted)
        factor = load_float(record + KD + member * VD + value_index, (value_index < VD) & accepted)
        decay = load_float(record + KD + GROUP * VD + member, accepted)
        records += ((key, factor, decay),)
    return records


@triton.jit
def apply_records(state, records, first, count):
    for i in tl.static_range(TOGETHER):
        if first + i < count:
            key, factor, decay = records[i]
            state = update(state, key[:, None], factor, decay)
    return state


@triton.jit
def fold_kernel(
    ring, row_ids, ring_row_ids, num_accepted, has_initial_state, B, MAX_SLOTS, RING_ROWS, pool,
    pool_again: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr,
    VD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RING_LEN: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (KD + ROWS - 1) // ROWS
    GROUP: tl.constexpr = NV // NK
    program = tl.program_id(0)
    key_index = program % BLOCKS * ROWS + tl.arange(0, ROWS)
    value_index = tl.arange(0, COLUMNS)
    h = program // BLOCKS % NV
    entry = program // (BLOCKS * NV)
    b = entry % B
    slot, ring_row, count = tl.load(row_ids + entry), tl.load(ring_row_ids + entry), tl.load(num_accepted + b)
    has_state = tl.load(has_initial_state + b) != 0
    live = (slot >= 0) & (slot < MAX_SLOTS) & (ring_row >= 0) & (ring_row < RING_ROWS)
    if live & (count > 0) & (count <= RING_LEN):
        ring += (tl.cast(ring_row, tl.int64) * NK + h // GROUP) * (RING_LEN * STRIDE)
        # Before the state, whose arrival is waited for.
        records = load_records(ring, 0, count, h % GROUP, key_index, value_index, GROUP, KD, VD, STRIDE)
        state_at = pool + (tl.cast(slot, tl.int64) * NV + h) * (KD * VD)
        state_at += key_index[:, None] * VD + value_index[None, :]
        inside = (key_index < KD)[:, None] & (value_index < VD)[None, :]
        state = load_float(state_at, inside & has_state)
        state = apply_records(state, records, 0, count)
        if RING_LEN > TOGETHER:
            for first in range(TOGETHER, count, TOGETHER):
                more = load_records(ring, first, count, h % GROUP, key_index, value_index, GROUP, KD, VD, STRIDE)
                state = apply_records(state, more, first, count)
        tl.store(state_at, state.to(pool.dtype.element_ty), inside)


def unsupported(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del ring, row_ids, ring_row_ids, num_accepted, has_initial_state
    return unsupported_head_dims(*recurrent_state.shape[2:])


def state_fold(recurrent_state, ring, row_ids, ring_row_ids, num_accepted, has_initial_state):
    """See `gdn_jax.gated_delta_state_fold`."""
    max_slots, nv, kd, vd = recurrent_state.shape
    ring_rows, nk, ring_len, stride = ring.shape
    layers, batch = row_ids.shape
    columns = triton.next_power_of_2(vd)
    rows = min(triton.next_power_of_2(kd), max(_BLOCK_ELEMENTS // columns, 1))
    _, (pool,) = triton_call(
        fold_kernel,
        [ring, row_ids, ring_row_ids, num_accepted, has_initial_state, batch, max_slots, ring_rows],
        [recurrent_state],
        [],
        grid=(layers * batch * nv * triton.cdiv(kd, rows),),
        num_warps=_NUM_WARPS,
        num_stages=1,
        NK=nk,
        NV=nv,
        KD=kd,
        VD=vd,
        ROWS=rows,
        COLUMNS=columns,
        RING_LEN=ring_len,
        STRIDE=stride,
    )
    return pool
