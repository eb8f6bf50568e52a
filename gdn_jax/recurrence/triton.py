"""The recurrence in Triton, called through jax-triton: for GPUs that the Mosaic GPU kernels do not serve.

Token by token, each program takes one tile of a state through its row; in chunks, see `triton_chunked.py`.
"""

# What Triton compiles is not typed as Python is.
# pyright: reportArgumentType=false, reportAssignmentType=false

import jax

from gdn_jax._compat import triton_call
from gdn_jax._triton import (
    PARTS,
    across,
    each_and,
    float_parts,
    float_token,
    load_parts,
    load_token,
    product_with_state,
    row_launch,
    row_masks,
    row_of,
    store_parts,
    tile_masks,
    tl,
    token_at,
    token_output,
    triton,
    unsupported_head_dims,
    update_parts,
    zero_tokens,
    zero_uncovered,
)
from gdn_jax.recurrence import triton_chunked


@triton.jit
def forward_kernel(
    qkv, decay, beta, slot_idx, offsets, has_initial_state, T, B, MAX_SLOTS, pool, out,
    pool_again: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr,
    VD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLAB: tl.constexpr,
    SPREAD: tl.constexpr, SCALE: tl.constexpr, CACHED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Takes one tile of one state through the tokens of its row.

    With AHEAD, a token is loaded while the one before it is computed: which costs registers, and so programs in flight,
    that rows of one token have a better use for.
    """
    TILES: tl.constexpr = (VD + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    v0 = program % TILES * COLUMNS
    h = program // TILES % NV
    b = program // (TILES * NV)
    slot, start, end, live = row_of(slot_idx, offsets, b, T, MAX_SLOTS)
    has_state = tl.load(has_initial_state + b) != 0
    key_index = tl.arange(0, ROWS // PARTS)
    is_key = row_masks(key_index, PARTS, KD)
    row = tl.arange(0, SLAB)
    is_row = row_masks(row, ROWS // SLAB, KD)
    column = tl.arange(0, COLUMNS)
    is_value = v0 + column < VD
    out_columns = h * VD + v0 + column
    if live & (end > start):
        # Before the state, whose arrival is waited for.
        at = token_at(qkv, decay, beta, start, h, v0, NK, NV, KD, VD)
        token = load_token(at, key_index, is_key, column, is_value)
        state_at = pool + (slot * NV + h) * (KD * VD) + v0 + row[:, None] * VD + column[None, :]
        inside = tile_masks(is_row, is_value)
        # It is written where it was read: until then the cache is to keep it. Stores that ask for their lines to go
        # first take longer than those that ask for nothing.
        keep: tl.constexpr = "" if CACHED else "evict_last"
        state = float_parts(load_parts(state_at, SLAB * VD, each_and(inside, has_state), keep))
        for t in range(start, end):
            key, query, value, d, bt = float_token(token)
            if AHEAD:
                at = token_at(qkv, decay, beta, tl.minimum(t + 1, end - 1), h, v0, NK, NV, KD, VD)
                token = load_token(at, key_index, is_key, column, is_value)
            key_slabs = across(key, SLAB, COLUMNS)
            against_key = product_with_state(state, key_slabs)
            against_query = product_with_state(state, across(query, SLAB, COLUMNS))
            o, factor = token_output(against_key, against_query, key, query, value, d, bt, SPREAD, SCALE)
            state = update_parts(state, key_slabs, factor, d)
            out_at = out + tl.cast(t, tl.int64) * (NV * VD) + out_columns
            tl.store(out_at, o.to(out.dtype.element_ty), mask=is_value)
            if (AHEAD == 0) & (t + 1 < end):
                at = token_at(qkv, decay, beta, t + 1, h, v0, NK, NV, KD, VD)
                token = load_token(at, key_index, is_key, column, is_value)
        store_parts(state_at, SLAB * VD, state, inside, "")
    if not live:
        zero_tokens(out, start, end, out_columns, is_value, NV * VD)
    zero_uncovered(offsets, out, out_columns, is_value, b, B, T, NV * VD)


def unsupported(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, *, algorithm, precision
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del decay, beta, slot_idx, input_row_offsets, has_initial_state, precision
    reason = unsupported_head_dims(*recurrent_state.shape[2:])
    if reason is None and algorithm == "chunked":
        return triton_chunked.unsupported(qkv, recurrent_state)
    return reason


def recurrence(
    qkv,
    decay,
    beta,
    recurrent_state,
    slot_idx,
    input_row_offsets,
    has_initial_state,
    *,
    algorithm,
    precision,
):
    """See `gdn_jax.gated_delta_recurrence_fwd`."""
    del precision  # float32 tokens keep to the budget of "highest" in either form
    operands = (qkv, decay, beta, slot_idx, input_row_offsets, has_initial_state)
    long_rows = qkv.shape[0] >= triton_chunked.CHUNKED_FROM * slot_idx.shape[0]
    in_chunks = algorithm == "auto" and long_rows and triton_chunked.unsupported(qkv, recurrent_state) is None
    if algorithm == "chunked" or in_chunks:
        return triton_chunked.recurrence(operands, recurrent_state)
    _, nv, _, vd = recurrent_state.shape
    tiles, longer, constants = row_launch(qkv, recurrent_state, slot_idx.shape[0])
    (out,), (pool,) = triton_call(
        forward_kernel,
        [*operands, qkv.shape[0], slot_idx.shape[0], recurrent_state.shape[0]],
        [recurrent_state],
        [jax.ShapeDtypeStruct((qkv.shape[0], nv * vd), qkv.dtype)],
        grid=(tiles,),
        AHEAD=longer,
        **constants,
    )
    return out, pool
