"""The speculative verify in Triton: the token step of the forward, records instead of states.

A program takes the same tile of several heads' states, one after another, through the tokens of their row. The last
token of a row asks for no new state: as soon as the sums over the old one are taken, the next head's is on its way,
into the same registers.
"""

# What Triton compiles is not typed as Python is.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp

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
    tokens_uncovered,
    triton,
    unsupported_head_dims,
    update_parts,
    zero_tokens,
    zero_uncovered,
)

_PROGRAMS = 8 * 132
"""What an H200 has room for at once."""


def heads_in_turn(tiles: int, num_heads: int) -> int:
    """How many heads a program takes.

    The time is that of the rounds of as many programs as there is room for, each as long as its heads and the wait for
    the first of them, about another one.
    """
    counts = (heads for heads in range(1, num_heads + 1) if num_heads % heads == 0)
    return min(counts, key=lambda heads: triton.cdiv(tiles, heads * _PROGRAMS) * (heads + 1))


@triton.jit
def token_after(at, count, NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr):
    """`token_at`, `count` tokens later."""
    query, key, value, decay, beta = at
    step = count * (2 * NK * KD + NV * VD)
    return query + step, key + step, value + step, decay + count * NV, beta + count * NV


@triton.jit
def packed(key, query):
    """Each element of a key with the one of the query as the halves of a 64-bit number.

    As one they go to the threads that have their rows, which is a chain of waits, one for each part of what goes.
    """
    both = ()
    for i in tl.static_range(PARTS):
        low = key[i].to(tl.uint32, bitcast=True).to(tl.uint64)
        both += (low | (query[i].to(tl.uint32, bitcast=True).to(tl.uint64) << 32),)
    return both


@triton.jit
def unpacked(both):
    key = ()
    query = ()
    for i in tl.static_range(len(both)):
        key += (both[i].to(tl.uint32).to(tl.float32, bitcast=True),)
        query += ((both[i] >> 32).to(tl.uint32).to(tl.float32, bitcast=True),)
    return key, query


@triton.jit
def float_state(parts, WIDE: tl.constexpr):
    if WIDE == 1:
        return float_parts(parts)
    else:
        floats = ()
        for i in tl.static_range(len(parts)):
            low = (parts[i] << 16).to(tl.float32, bitcast=True)
            high = (parts[i] & 0xFFFF0000).to(tl.float32, bitcast=True)
            floats += (tl.reshape(tl.join(low, high), (low.shape[0], 2 * low.shape[1])),)
        return floats


@triton.jit
def load_state(at, step, masks, wanted, EVICTION: tl.constexpr):
    """A branch: zeros cost nothing where they are not wanted."""
    if wanted:  # noqa: SIM108
        parts = load_parts(at, step, masks, EVICTION)
    else:
        parts = zero_parts(at, masks)
    return parts


@triton.jit
def zero_parts(at, masks):
    parts = ()
    for _ in tl.static_range(len(masks)):
        parts += (tl.zeros(at.shape, at.dtype.element_ty),)
    return parts


@triton.jit
def sums_with_state(state, key, query, SLAB: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows whose sums are those of the state with the key and with the query, and the key in slabs."""
    key, query = unpacked(across(packed(key, query), SLAB, COLUMNS))
    return product_with_state(state, key), product_with_state(state, query), key


@triton.jit
def store_token(
    out, record, o, key, factor, decay, column, is_value, key_index, is_key, v0, member, wanted, recorded,
    GROUP: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """One token's output if it is wanted, and its record if it is recorded: the key and the decay by one tile only."""
    tl.store(out + column, o.to(out.dtype.element_ty), is_value & wanted)
    factor_at = record + (KD + member * VD + v0) + column
    tl.store(factor_at, factor.to(record.dtype.element_ty), is_value & recorded)
    first = recorded & (v0 == 0)
    tl.store(record + KD + GROUP * VD + member, decay.to(record.dtype.element_ty), first)
    if first & (member == 0):
        store_parts(record + key_index, key_index.shape[0], key, is_key, "")


@triton.jit
def verify_kernel(
    qkv, decay, beta, slot_idx, ring_slot_idx, offsets, has_initial_state, T, B, MAX_SLOTS, RING_ROWS, pool, ring, out,
    pool_again: tl.constexpr, ring_again: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    KD: tl.constexpr, VD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLAB: tl.constexpr,
    SPREAD: tl.constexpr, SCALE: tl.constexpr, CACHED: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
    RING_LEN: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """HEADS heads a program. With WIDE 2 the pool is bfloat16 and read as 32-bit numbers, two columns each."""
    TILES: tl.constexpr = (VD + COLUMNS - 1) // COLUMNS
    GROUP: tl.constexpr = NV // NK
    DROP: tl.constexpr = "" if CACHED else "evict_first"
    # Of a 16-bit pool there is room for a next state beside the old one.
    NARROW: tl.constexpr = pool.dtype.element_ty.primitive_bitwidth == 16
    program = tl.program_id(0)
    tile = program % TILES
    h0 = program // TILES % (NV // HEADS) * HEADS
    b = program // (TILES * (NV // HEADS))
    slot, start, end, live = row_of(slot_idx, offsets, b, T, MAX_SLOTS)
    has_state = tl.load(has_initial_state + b) != 0
    key_index = tl.arange(0, ROWS // PARTS)
    is_key = row_masks(key_index, PARTS, KD)
    row = tl.arange(0, SLAB)
    is_row = row_masks(row, ROWS // SLAB, KD)
    v0 = tile * COLUMNS
    column = tl.arange(0, COLUMNS)
    is_value = v0 + column < VD
    if live & (end > start):
        # Before the state, whose arrival is waited for.
        at = token_at(qkv, decay, beta, start, h0, v0, NK, NV, KD, VD)
        token = load_token(at, key_index, is_key, column, is_value)
        words = pool if WIDE == 1 else pool.to(tl.pointer_type(tl.uint32), bitcast=True)
        word = tile * (COLUMNS // WIDE) + tl.arange(0, COLUMNS // WIDE)
        read_at = words + (slot * NV + h0) * (KD * VD // WIDE) + row[:, None] * (VD // WIDE) + word[None, :]
        readable = tile_masks(is_row, word < VD // WIDE)
        # Not in a branch, which the first token would have to arrive before.
        loaded = load_parts(read_at, SLAB * VD // WIDE, each_and(readable, has_state), DROP)
        # A row that the ring has no room for writes its states.
        committed = end - start > RING_LEN
        updates = tl.where(committed | (HEADS == 1), end, end - 1)
        ring_slot = tl.load(ring_slot_idx + b)
        recorded = (ring_slot >= 0) & (ring_slot < RING_ROWS) & (committed == 0)
        row_at = ring + tl.cast(ring_slot, tl.int64) * (NK * RING_LEN * STRIDE)
        for h in range(h0, h0 + HEADS):
            state = float_state(loaded, WIDE)
            record = row_at + h // GROUP * (RING_LEN * STRIDE)
            out_at = out + tl.cast(start, tl.int64) * (NV * VD) + h * VD + v0
            for t in range(start, updates):
                key, query, value, d, bt = float_token(token)
                at = token_after(at, tl.where(t + 1 < end, 1, 0), NK, NV, KD, VD)
                token = load_token(at, key_index, is_key, column, is_value)
                against_key, against_query, key_slabs = sums_with_state(state, key, query, SLAB, COLUMNS)
                o, factor = token_output(against_key, against_query, key, query, value, d, bt, SPREAD, SCALE)
                # With heads in turn, a last token that needs no new state comes below.
                if (HEADS > 1) | committed | (t + 1 < end):
                    state = update_parts(state, key_slabs, factor, d)
                store_token(
                    out_at, record, o, key, factor, d, column, is_value, key_index, is_key, v0, h % GROUP, True,
                    recorded, GROUP, KD, VD,
                )  # fmt: skip
                record += STRIDE
                out_at += NV * VD
            if committed:
                state_at = pool + (slot * NV + h) * (KD * VD) + v0 + row[:, None] * VD + column[None, :]
                store_parts(state_at, SLAB * VD, state, tile_masks(is_row, is_value), DROP)
            if HEADS > 1:
                # The last token; of a row that is committed once more, for nothing.
                key, query, value, d, bt = float_token(token)
                more = h + 1 < h0 + HEADS
                at = token_at(qkv, decay, beta, start, tl.where(more, h + 1, h), v0, NK, NV, KD, VD)
                token = load_token(at, key_index, is_key, column, is_value)
                read_at += KD * VD // WIDE
                if NARROW:
                    loaded = load_state(read_at, SLAB * VD // WIDE, readable, has_state & more, DROP)
                against_key, against_query, _ = sums_with_state(state, key, query, SLAB, COLUMNS)
                if not NARROW:
                    loaded = load_state(read_at, SLAB * VD // WIDE, readable, has_state & more, DROP)
                o, factor = token_output(against_key, against_query, key, query, value, d, bt, SPREAD, SCALE)
                store_token(
                    out_at, record, o, key, factor, d, column, is_value, key_index, is_key, v0, h % GROUP,
                    committed == 0, recorded, GROUP, KD, VD,
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
    tiles, _, constants = row_launch(qkv, recurrent_state, batch)
    heads = heads_in_turn(tiles, nv)
    (out,), (pool, ring) = triton_call(
        verify_kernel,
        [*operands, qkv.shape[0], batch, max_slots, ring.shape[0]],
        [recurrent_state, ring],
        [jax.ShapeDtypeStruct((qkv.shape[0], nv * vd), qkv.dtype)],
        grid=(tiles // heads,),
        HEADS=heads,
        WIDE=2 if recurrent_state.dtype == jnp.bfloat16 and vd % 2 == 0 else 1,
        RING_LEN=ring.shape[2],
        STRIDE=ring.shape[3],
        **constants,
    )
    return out, ring, pool
