"""The speculative verify in Triton: the rows of the forward, records instead of states."""

import os

import jax

from gdn_jax._compat import triton_call
from gdn_jax._triton import (
    PARTS,
    float_parts,
    load_parts,
    load_token,
    row_launch,
    row_masks,
    row_of,
    store_parts,
    sums_of_state,
    tile_masks,
    tl,
    token_at,
    token_output,
    tokens_uncovered,
    triton,
    unsupported_head_dims,
    update_parts,
    zero_tokens,
    zero_parts,
    zero_uncovered,
)


_PROGRAMS = 1024


@triton.jit
def tokens_later(at, count, NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr):
    query, key, value, decay, beta = at
    step = count * (2 * NK * KD + NV * VD)
    return query + step, key + step, value + step, decay + count * NV, beta + count * NV


@triton.jit
def load_packed(at, key_index, is_key, column, is_value):
    """A token, with each element of the key and the one of the query beside it as the halves of a 64-bit number.

    That is how they go to the threads that have their rows: once a part, in a chain of waits, and not once for either.
    """
    key, query, value, decay, beta = load_token(at, key_index, is_key, column, is_value)
    both = ()
    for i in tl.static_range(PARTS):
        low = key[i].to(tl.uint32, bitcast=True).to(tl.uint64)
        both += (low | (query[i].to(tl.uint32, bitcast=True).to(tl.uint64) << 32),)
    return both, value, decay, beta


@triton.jit
def across(both, COLUMNS: tl.constexpr):
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (tl.broadcast_to(both[i][:, None], (both[i].shape[0], COLUMNS)),)
    return parts


@triton.jit
def unpacked(both):
    key = ()
    query = ()
    for i in tl.static_range(PARTS):
        key += (both[i].to(tl.uint32).to(tl.float32, bitcast=True),)
        query += ((both[i] >> 32).to(tl.uint32).to(tl.float32, bitcast=True),)
    return key, query


@triton.jit
def store_token(
    out, o, record, key, factor, decay, member, column, is_value, key_index, is_key, wanted, recorded, of_tile,
    v0, GROUP: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """One token's output, if `wanted`, and its record, if `recorded`; what does not depend on the tile if `of_tile`."""
    tl.store(out + column, o.to(out.dtype.element_ty), is_value & wanted)
    factor_at = record + (KD + member * VD + v0) + column
    tl.store(factor_at, factor.to(record.dtype.element_ty), is_value & recorded)
    tl.store(record + KD + GROUP * VD + member, decay.to(record.dtype.element_ty), recorded & of_tile)
    if recorded & of_tile & (member == 0):
        store_parts(record + key_index, key_index.shape[0], key, is_key, "")


@triton.jit
def verify_kernel(
    qkv, decay, beta, slot_idx, ring_slot_idx, offsets, has_initial_state, T, B, MAX_SLOTS, RING_ROWS, pool, ring, out,
    pool_again: tl.constexpr, ring_again: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    KD: tl.constexpr, VD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPREAD: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, RING_LEN: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Takes the same tile of the states of HEADS heads, one after another, through the tokens of their row.

    The last token asks for no new state, so the next head's is on its way as soon as the sums over the old one are
    taken: in the same registers.
    """
    TILES: tl.constexpr = (VD + COLUMNS - 1) // COLUMNS
    GROUP: tl.constexpr = NV // NK
    PART: tl.constexpr = ROWS // PARTS
    program = tl.program_id(0)
    v0 = program % TILES * COLUMNS
    h0 = program // TILES % (NV // HEADS) * HEADS
    b = program // (TILES * (NV // HEADS))
    slot, start, end, live = row_of(slot_idx, offsets, b, T, MAX_SLOTS)
    has_state = tl.load(has_initial_state + b) != 0
    key_index = tl.arange(0, PART)
    is_key = row_masks(key_index, KD)
    column = tl.arange(0, COLUMNS)
    is_value = v0 + column < VD
    if live & (end > start):
        # Before the state, whose arrival is waited for.
        at = token_at(qkv, decay, beta, start, h0, v0, NK, NV, KD, VD)
        token = load_packed(at, key_index, is_key, column, is_value)
        state_at = pool + (slot * NV + h0) * (KD * VD) + v0 + key_index[:, None] * VD + column[None, :]
        inside = tile_masks(is_key, is_value)
        if has_state:
            loaded = load_parts(state_at, PART * VD, inside, "evict_first")
        else:
            loaded = zero_parts(state_at)
        # A row that the ring has no room for writes its state.
        committed = end - start > RING_LEN
        ring_slot = tl.load(ring_slot_idx + b)
        recorded = (ring_slot >= 0) & (ring_slot < RING_ROWS) & (committed == 0)
        row_at = ring + tl.cast(ring_slot, tl.int64) * (NK * RING_LEN * STRIDE)
        updates = tl.where(committed, end, end - 1)
        for h in range(h0, h0 + HEADS):
            state = float_parts(loaded)
            record = row_at + h // GROUP * (RING_LEN * STRIDE)
            out_at = out + tl.cast(start, tl.int64) * (NV * VD) + h * VD + v0
            for t in range(start, updates):
                both, value, d, bt = token
                at = tokens_later(at, tl.where(t + 1 < end, 1, 0), NK, NV, KD, VD)
                token = load_packed(at, key_index, is_key, column, is_value)
                key, query = unpacked(both)
                key_rows, query_rows = unpacked(across(both, COLUMNS))
                sums = sums_of_state(state, key_rows, query_rows, SPREAD)
                o, factor = token_output(sums, key, query, value, d, bt, SCALE)
                state = update_parts(state, key_rows, factor, d)
                store_token(
                    out_at, o, record, key, factor, d, h % GROUP, column, is_value, key_index, is_key, True, recorded,
                    v0 == 0, v0, GROUP, KD, VD,
                )  # fmt: skip
                record += STRIDE
                out_at += NV * VD
            if committed:
                store_parts(state_at, PART * VD, state, inside, "evict_first")
            # The last token; of a row that is committed once more, for nothing.
            both, value, d, bt = token
            after = tl.minimum(h + 1, h0 + HEADS - 1)
            at = token_at(qkv, decay, beta, start, after, v0, NK, NV, KD, VD)
            token = load_packed(at, key_index, is_key, column, is_value)
            key, query = unpacked(both)
            key_rows, query_rows = unpacked(across(both, COLUMNS))
            sums = sums_of_state(state, key_rows, query_rows, SPREAD)
            state_at += (after - h) * (KD * VD)
            if has_state:
                loaded = load_parts(state_at, PART * VD, inside, "evict_first")
            else:
                loaded = zero_parts(state_at)
            o, factor = token_output(sums, key, query, value, d, bt, SCALE)
            store_token(
                out_at, o, record, key, factor, d, h % GROUP, column, is_value, key_index, is_key, committed == 0,
                recorded, v0 == 0, v0, GROUP, KD, VD,
            )  # fmt: skip
    if (live == 0) | tokens_uncovered(offsets, B, T):
        for h in range(h0, h0 + HEADS):
            out_columns = h * VD + v0 + column
            if not live:
                zero_tokens(out, start, end, out_columns, is_value, NV * VD)
            zero_uncovered(offsets, out, out_columns, is_value, b, B, T, NV * VD)


def unsupported(
    qkv, decay, beta, recurrent_state, ring, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del qkv, decay, beta, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state
    if 0 in ring.shape:
        return f"triton does not serve an empty ring; its shape is {ring.shape}"
    return unsupported_head_dims(*recurrent_state.shape[2:])


def verify_ring(
    qkv,
    decay,
    beta,
    recurrent_state,
    ring,
    slot_idx,
    ring_slot_idx,
    input_row_offsets,
    has_initial_state,
):
    """See `gdn_jax.gated_delta_recurrence_verify_ring`."""
    max_slots, nv, _, vd = recurrent_state.shape
    batch = slot_idx.shape[0]
    operands = (qkv, decay, beta, slot_idx, ring_slot_idx, input_row_offsets, has_initial_state)
    launch = row_launch(qkv, recurrent_state, batch)
    launch.pop("AHEAD")
    heads = 1
    while nv % (2 * heads) == 0 and launch["grid"][0] >= 2 * heads * _PROGRAMS:
        heads *= 2
    heads = int(os.environ.get("HEADS", str(heads)))
    launch["grid"] = (launch["grid"][0] // heads,)
    launch["HEADS"] = heads
    (out,), (pool, ring) = triton_call(
        verify_kernel,
        [*operands, qkv.shape[0], batch, max_slots, ring.shape[0]],
        [recurrent_state, ring],
        [jax.ShapeDtypeStruct((qkv.shape[0], nv * vd), qkv.dtype)],
        RING_LEN=ring.shape[2],
        STRIDE=ring.shape[3],
        **launch,
    )
    return out, ring, pool
