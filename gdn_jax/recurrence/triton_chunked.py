"""The chunked gated delta rule in Triton, two kernels.

Chunks are blocks of the token array, whatever rows lie in them. For a block of tokens and a value head, with the keys
and queries normalised and G[i, j] the product of the decays after token j up to token i,

    L = tril(beta K K^T * G, -1)        T = (I + L)^-1 diag(beta)        W = tril(Q K^T * G) T

need no state: the first kernel writes T and W for all blocks in parallel. L is triangular, so the part of T and W
between two tokens of a row is what the row's own tokens alone would give. The second kernel takes each state through
the blocks that its row reaches into, with gamma the products of decays since the row's first token in the block:

    D = V - gamma K S        out = gamma Q S + W D        S <- gamma_end S + (K to_end)^T (T D)

gamma and gamma_end are products of decays: a decay of 0 is a reset. So is G for float32 tokens. For others it is an
exponential of a difference of cumulative logarithms, with at least MIN_LOG2 for a token. No quotient underflows.

With one key repeated and beta 1, T D is the differences of neighbouring values, which K^T sums up again, and with them
a block's roundings. So T D is rounded to two bfloat16 numbers each, and outputs do not go through it: W, the product of
the two, is rounded instead.
"""

# What Triton compiles is not typed as Python is.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp

from gdn_jax._compat import has_local_device, triton_call
from gdn_jax._triton import (
    EPS,
    MAX_HEAD_DIM,
    head_sizes,
    load_float,
    product,
    row_of,
    tl,
    triton,
    zero_tokens,
    zero_uncovered,
)

CHUNK = 64
CHUNKED_FROM = 24
"""Average tokens of a row from which algorithm="auto" takes the chunked form."""
_MULTIPROCESSORS = 128
"""Tiles are halved where there are fewer."""
MIN_LOG2 = tl.constexpr(-32.0)
"""What a token counts for behind a smaller decay, 0 among them, is nothing in 16 bits; and sums keep their digits."""
_OPERANDS = {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}
_LARGEST_ENTRY = {"bfloat16": 2.25, "float16": 2.25, "float32": 256.0}
"""What an entry of L and A may be, by the dtype of tokens. Within the contract that is about 1; but tokens outside all
bounds may share a block with others, whose results they must not reach, and their own are NaN."""


def unsupported(qkv, recurrent_state) -> str | None:
    """Why the chunked form cannot serve the call, None when it can."""
    limit = MAX_HEAD_DIM // 2
    if recurrent_state.shape[2] > limit:
        return f"triton serves a key_head_dim up to {limit} in chunks of {qkv.dtype}; it is {recurrent_state.shape[2]}"
    return None


@triton.jit
def dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def unit_lower_inverse(L, SIZE: tl.constexpr, STEPS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + L)^-1` for strictly lower triangular L.

    Blocks on the diagonal double in size: X <- X - X L' X with L' the part of L between the halves of a block. No power
    of L is formed, which would overflow on repeated keys.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    X = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, L, 0.0)
    for step in tl.static_range(1, STEPS):
        between = (row ^ column) >> step == 1
        X -= dot(dot(X, tl.where(between, L, 0.0), OPERAND, PRECISION), X, OPERAND, PRECISION)
    return X


@triton.jit
def in_live_rows(slot_idx, offsets, token, B, MAX_SLOTS, ROWS: tl.constexpr):
    """Whether each token, and each pair of tokens, is in one row whose slot is one of the pool's. ROWS rows a step."""
    live = tl.zeros(token.shape, tl.int32)
    shared = tl.zeros((token.shape[0], token.shape[0]), tl.float32)
    for first in range(0, B, ROWS):
        rows = first + tl.arange(0, ROWS)
        slot = tl.load(slot_idx + rows, mask=rows < B, other=-1)
        start = tl.load(offsets + rows, mask=rows < B, other=0)
        end = tl.load(offsets + rows + 1, mask=rows < B, other=0)
        holds = (token[:, None] >= start[None, :]) & (token[:, None] < end[None, :])
        holds = holds & ((slot >= 0) & (slot < MAX_SLOTS))[None, :]
        live = tl.maximum(live, tl.max(holds.to(tl.int32), 1))
        shared = tl.dot(holds.to(tl.float16), tl.trans(holds.to(tl.float16)), shared)
    return live > 0, shared > 0


@triton.jit
def load_decays(decay, token, inside, last, NV: tl.constexpr):
    """Decays of a block's tokens, 1 where not inside; and those of the tokens after them, 1 for the last's."""
    at = decay + tl.cast(token, tl.int64) * NV
    return tl.load(at, mask=inside, other=1.0), tl.load(at + NV, mask=inside & (token < last), other=1.0)


@triton.jit
def factors(d, next_d, key_scale, query_scale):
    """What K S, Q S and the changes of a block are multiplied by, and the state itself."""
    gamma, to_end = tl.cumprod(d, 0), tl.cumprod(next_d, 0, reverse=True)
    return gamma * key_scale, gamma * query_scale, to_end * key_scale, tl.reduce(d, 0, product)


@triton.jit
def prepare_kernel(
    qkv, decay, beta, slot_idx, offsets, T, B, MAX_SLOTS, solved, weights, scales, gates, spans,
    NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr, SEARCH: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, INVERSE: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Of one block and key head: T and W `[blocks, NV, SIZE, SIZE]`, the norms' factors `[2, T, NK]`, and `factors`
    `[blocks, NV, 3, SIZE]` and `[blocks, NV]` for rows that go through the whole block."""
    GROUP: tl.constexpr = NV // NK
    block, hk = tl.program_id(0) // NK, tl.program_id(0) % NK
    index = tl.arange(0, SIZE)
    token = block * SIZE + index
    # What lies in a token of no row, or of a padding row, is not even read.
    is_live, together = in_live_rows(slot_idx, offsets, token, B, MAX_SLOTS, SEARCH)
    live = (token < T) & is_live
    key_index = tl.arange(0, ROWS)
    # Offsets within a block are 32 bits.
    WIDTH: tl.constexpr = 2 * NK * KD + NV * VD
    at = qkv + tl.cast(block, tl.int64) * (SIZE * WIDTH) + (index[:, None] * WIDTH + key_index[None, :])
    inside = live[:, None] & (key_index < KD)[None, :]
    query = tl.load(at + hk * KD, mask=inside, other=0.0)
    key = tl.load(at + (NK + hk) * KD, mask=inside, other=0.0)
    key_square = tl.sum(key.to(tl.float32) * key.to(tl.float32), 1)
    query_square = tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
    key_scale = tl.math.rsqrt(key_square + EPS)
    query_scale = tl.math.rsqrt(query_square + EPS) * SCALE
    scale_at = scales + tl.cast(token, tl.int64) * NK + hk
    tl.store(scale_at, key_scale, token < T)
    tl.store(scale_at + tl.cast(T, tl.int64) * NK, query_scale, token < T)
    transposed = tl.trans(key)
    keys_keys = dot(key, transposed, OPERAND, PRECISION) * key_scale[:, None] * key_scale[None, :]
    queries_keys = dot(query, transposed, OPERAND, PRECISION) * query_scale[:, None] * key_scale[None, :]
    row, column = index[:, None], index[None, :]
    for member in range(GROUP):
        h = hk * GROUP + member
        head = tl.cast(block, tl.int64) * NV + h
        d, next_d = load_decays(decay + h, token, live, tl.minimum((block + 1) * SIZE, T) - 1, NV)
        bt = tl.load(beta + tl.cast(block, tl.int64) * (SIZE * NV) + h + index * NV, mask=live, other=0.0)
        from_keys, from_queries, to_keys, span = factors(d, next_d, key_scale, query_scale)
        gate_at = gates + head * (3 * SIZE) + index
        tl.store(gate_at, from_keys)
        tl.store(gate_at + SIZE, from_queries)
        tl.store(gate_at + 2 * SIZE, to_keys)
        tl.store(spans + head, span)
        if OPERAND.primitive_bitwidth == 16:
            total = tl.cumsum(tl.maximum(tl.math.log2(d), MIN_LOG2), 0)
            G = tl.math.exp2(tl.minimum(total[:, None] - total[None, :], 0.0))
        else:
            G = tl.cumprod(tl.where(row > column, tl.broadcast_to(d[:, None], (SIZE, SIZE)), 1.0), 0)
        L = tl.where(row > column, keys_keys * G * bt[:, None], 0.0)
        A = tl.where(row >= column, queries_keys * G, 0.0)
        sound = (tl.abs(L) <= LARGEST) & (tl.abs(A) <= LARGEST)
        X = unit_lower_inverse(tl.where(sound, L, 0.0), SIZE, STEPS, INVERSE, PRECISION)
        W = dot(tl.where(sound, A, 0.0), X, INVERSE, PRECISION)
        # A row with such a token is told so; the others are as if it were not there.
        factor = tl.where(sound, tl.broadcast_to(bt[None, :], (SIZE, SIZE)), float("nan"))
        to = row * SIZE + column
        tl.store(solved + head * (SIZE * SIZE) + to, tl.where(together, X * factor, 0.0).to(solved.dtype.element_ty))
        tl.store(weights + head * (SIZE * SIZE) + to, tl.where(together, W * factor, 0.0).to(weights.dtype.element_ty))


@triton.jit
def times(a, b, TRANSPOSED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """`a b`, with b and the product transposed or not."""
    if TRANSPOSED:
        return dot(b, tl.trans(a), OPERAND, PRECISION)
    else:
        return dot(a, b, OPERAND, PRECISION)


@triton.jit
def each_token(x, TRANSPOSED: tl.constexpr):
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def advance_kernel(
    qkv, decay, slot_idx, offsets, has_initial_state, solved, weights, scales, gates, spans, T, B, MAX_SLOTS, pool, out,
    pool_again: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr,
    VD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Takes one tile of one state through the blocks of its row.

    Transposed, the state, the residuals and the changes are left operands: those may be in registers. But a Hopper's
    products have at least 64 rows, which half a tile has not.
    """
    TILES: tl.constexpr = (VD + COLUMNS - 1) // COLUMNS
    WIDTH: tl.constexpr = 2 * NK * KD + NV * VD
    program = tl.program_id(0)
    value_index = program % TILES * COLUMNS + tl.arange(0, COLUMNS)
    h = program // TILES % NV
    b = program // (TILES * NV)
    hk = h // (NV // NK)
    slot, start, end, live = row_of(slot_idx, offsets, b, T, MAX_SLOTS)
    has_state = tl.load(has_initial_state + b) != 0
    key_index, index = tl.arange(0, ROWS), tl.arange(0, SIZE)
    is_key, is_value = key_index < KD, value_index < VD
    if live & (end > start):
        state_at = pool + (slot * NV + h) * (KD * VD) + key_index[:, None] * VD + value_index[None, :]
        inside = is_key[:, None] & is_value[None, :]
        S = load_float(state_at, inside & has_state)
        if TRANSPOSED:
            S = tl.trans(S)
        for block in tl.range(start // SIZE, (end + SIZE - 1) // SIZE, num_stages=STAGES):
            token = block * SIZE + index
            in_row = (token >= start) & (token < end)
            at = qkv + tl.cast(token, tl.int64)[:, None] * WIDTH
            keys_inside = in_row[:, None] & is_key[None, :]
            values_inside = in_row[:, None] & is_value[None, :]
            query = tl.load(at + (hk * KD + key_index)[None, :], mask=keys_inside, other=0.0)
            key = tl.load(at + ((NK + hk) * KD + key_index)[None, :], mask=keys_inside, other=0.0)
            value = tl.load(at + (2 * NK * KD + h * VD + value_index)[None, :], mask=values_inside, other=0.0)
            square = ((tl.cast(block, tl.int64) * NV + h) * SIZE + index[:, None]) * SIZE + index[None, :]
            T_block = tl.load(solved + square, mask=in_row[:, None], other=0.0)
            W_block = tl.load(weights + square, mask=in_row[:, None], other=0.0)
            head = tl.cast(block, tl.int64) * NV + h
            gate_at = gates + head * (3 * SIZE) + index
            from_keys, from_queries, to_keys = tl.load(gate_at), tl.load(gate_at + SIZE), tl.load(gate_at + 2 * SIZE)
            span = tl.load(spans + head)
            if (block * SIZE < start) | (block * SIZE + SIZE > end):
                d, next_d = load_decays(decay + h, token, in_row, tl.minimum((block + 1) * SIZE, end) - 1, NV)
                scale_at = scales + tl.cast(token, tl.int64) * NK + hk
                key_scale = tl.load(scale_at, mask=in_row, other=0.0)
                query_scale = tl.load(scale_at + tl.cast(T, tl.int64) * NK, mask=in_row, other=0.0)
                from_keys, from_queries, to_keys, span = factors(d, next_d, key_scale, query_scale)
            state = S.to(OPERAND)
            residual = (tl.trans(value) if TRANSPOSED else value).to(tl.float32)
            residual -= each_token(from_keys, TRANSPOSED) * times(key, state, TRANSPOSED, OPERAND, PRECISION)
            residual = residual.to(OPERAND)
            o = each_token(from_queries, TRANSPOSED) * times(query, state, TRANSPOSED, OPERAND, PRECISION)
            change = each_token(to_keys, TRANSPOSED) * times(T_block, residual, TRANSPOSED, OPERAND, PRECISION)
            o += times(W_block, residual, TRANSPOSED, OPERAND, PRECISION)
            keys = tl.trans(key)
            S = span * S + times(keys, change, TRANSPOSED, OPERAND, PRECISION)
            if OPERAND.primitive_bitwidth == 16:
                rest = change - change.to(OPERAND).to(tl.float32)
                S += times(keys, rest, TRANSPOSED, OPERAND, PRECISION)
            out_at = out + tl.cast(token, tl.int64)[:, None] * (NV * VD) + (h * VD + value_index)[None, :]
            tl.store(out_at, (tl.trans(o) if TRANSPOSED else o).to(out.dtype.element_ty), values_inside)
        tl.store(state_at, (tl.trans(S) if TRANSPOSED else S).to(pool.dtype.element_ty), inside)
    if not live:
        zero_tokens(out, start, end, h * VD + value_index, is_value, NV * VD)
    zero_uncovered(offsets, out, h * VD + value_index, is_value, b, B, T, NV * VD)


def recurrence(operands, recurrent_state):
    """Outputs and pool. `operands` are qkv, decay, beta, slot_idx, input_row_offsets and has_initial_state."""
    qkv, decay, beta, slot_idx, offsets, has_initial_state = operands
    max_slots, nv, kd, vd = recurrent_state.shape
    num_tokens, batch = qkv.shape[0], slot_idx.shape[0]
    sizes = head_sizes(qkv, recurrent_state)
    nk, blocks = sizes["NK"], triton.cdiv(num_tokens, CHUNK)
    rows = max(triton.next_power_of_2(kd), 32)
    # A product with float16 operands would bound the states by what float16 can hold.
    half = qkv.dtype == jnp.bfloat16
    # Wider tiles of float32 do not fit into registers: small ones are compiled to nothing but spills.
    columns = min(max(triton.next_power_of_2(vd), 16), 64 if half else 32 if rows > 32 else 16)
    few = batch * nv * triton.cdiv(vd, columns) < _MULTIPROCESSORS
    if few:
        columns = min(columns, 32)
    # One product of float32 operands as tf32 cuts their last 13 bits off, and misses the budget; three keep them.
    rocm = has_local_device("rocm")
    exact = "ieee" if rocm else "tf32x3" if qkv.dtype == jnp.float32 else "tf32"
    common = {"num_stages": 1, "SIZE": CHUNK, **sizes}
    shape = jax.ShapeDtypeStruct
    squares = shape((blocks, nv, CHUNK, CHUNK), qkv.dtype)
    prepared, _ = triton_call(
        prepare_kernel,
        [qkv, decay, beta, slot_idx, offsets, num_tokens, batch, max_slots],
        [],
        [squares, squares]
        + [shape(dims, jnp.float32) for dims in ((2, num_tokens, nk), (blocks, nv, 3, CHUNK), (blocks, nv))],
        grid=(blocks * nk,),
        num_warps=4,
        ROWS=rows,
        STEPS=CHUNK.bit_length() - 1,
        SCALE=kd**-0.5,
        SEARCH=min(max(triton.next_power_of_2(batch), 16), 32),
        OPERAND=_OPERANDS[qkv.dtype.name],
        PRECISION=exact,
        # Half precision rounds, where tf32 cuts off; what it cannot hold is out of bounds anyway.
        INVERSE=tl.float32 if qkv.dtype == jnp.float32 else tl.float16,
        LARGEST=_LARGEST_ENTRY[qkv.dtype.name],
        **common,
    )
    (out,), (pool,) = triton_call(
        advance_kernel,
        [qkv, decay, slot_idx, offsets, has_initial_state, *prepared, num_tokens, batch, max_slots],
        [recurrent_state],
        [shape((num_tokens, nv * vd), qkv.dtype)],
        grid=(batch * nv * triton.cdiv(vd, columns),),
        num_warps=4 if half and rows <= 128 else 8,
        ROWS=rows,
        COLUMNS=columns,
        OPERAND=tl.bfloat16 if half else tl.float32,
        PRECISION=exact,
        # AMD's 64 KB of shared memory hold one stage.
        STAGES=1 if rocm or not half else 3 if few else 2,
        TRANSPOSED=not (half and few),
        **common,
    )
    return out, pool
