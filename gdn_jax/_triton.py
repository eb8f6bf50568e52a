"""What the Triton kernels of this package share: rows, padding, and the token step.

Head dims need not be powers of two: tiles are, and what lies past a head is masked. Every sum over a state or a key is
written out as sums of two, in an order that follows from the key head dim and the pool's dtype alone, so that kernels
with different tiles and warps sum alike; products are never contracted into sums (see `gdn_jax._compat.triton_call`),
except where `tl.fma` says so. Together that makes the recurrence, the verify and the fold agree bit for bit.
"""

# What Triton compiles is not typed as Python is.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

EPS = tl.constexpr(1e-6)
ZERO_CHUNK = tl.constexpr(16)
"""Tokens whose cover by rows one program looks at together."""
PARTS = tl.constexpr(4)
"""A key or a query is a tuple of that many vectors, one below the other."""
SLABS = 16
"""A tile of a state is a tuple of that many, one below the other: sums over its rows begin as chains of `fma`."""
MAX_HEAD_DIM = 256
_CACHE_BYTES = 50 * 1024 * 1024
"""Of an H200's L2 cache."""


def unsupported_head_dims(key_head_dim: int, value_head_dim: int) -> str | None:
    for name, dim in (("key_head_dim", key_head_dim), ("value_head_dim", value_head_dim)):
        if dim > MAX_HEAD_DIM:
            return f"triton serves head dims up to {MAX_HEAD_DIM}; {name} is {dim}"
    return None


def head_sizes(qkv, recurrent_state) -> dict[str, int]:
    """Numbers of key and value heads, and their dims, as the kernels name them."""
    _, nv, kd, vd = recurrent_state.shape
    return {"NK": (qkv.shape[1] - nv * vd) // (2 * kd), "NV": nv, "KD": kd, "VD": vd}


def row_launch(qkv, recurrent_state, batch: int) -> tuple[int, bool, dict]:
    """How many tiles there are, whether rows are longer than a token, and warps and constants for going token by token.

    128 elements of a state a thread. Rows of one token wait for memory: their tiles are 256 bytes wide, two lines of
    the cache, or one line where the cache is all they wait for. Longer ones compute: one warp each, which waits for no
    other.
    """
    sizes = head_sizes(qkv, recurrent_state)
    itemsize = recurrent_state.dtype.itemsize
    cached = batch * sizes["NV"] * sizes["KD"] * sizes["VD"] * itemsize <= _CACHE_BYTES
    rows = max(triton.next_power_of_2(sizes["KD"]), PARTS.value)
    longer = qkv.shape[0] > batch
    columns = min(
        triton.next_power_of_2(sizes["VD"]), 128 * 32 // rows if longer else (128 if cached else 256) // itemsize
    )
    tiles = batch * sizes["NV"] * triton.cdiv(sizes["VD"], columns)
    constants = {
        "num_warps": max(rows * columns // (128 * 32), 1),
        "num_stages": 1,
        "ROWS": rows,
        "COLUMNS": columns,
        "SLAB": max(rows // SLABS, 1),
        # Over how many rows of a slab the threads are spread: those below one another in a thread are summed up first.
        "SPREAD": max(rows // (8 * itemsize), 1),
        "SCALE": sizes["KD"] ** -0.5,
        # States that fit into the cache are there when the next call comes: no hint which of them go first.
        "CACHED": cached,
        **sizes,
    }
    return tiles, longer, constants


@triton.jit
def sum_of_two(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def sum_of_three(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def sums_of_vectors(a, b, c):
    """The sum of each, halves onto one another."""
    size: tl.constexpr = a.shape[0]
    if size <= 2:
        return tl.reduce((a, b, c), 0, sum_of_three)
    else:
        shape: tl.constexpr = (2, size // 2)
        halves = tl.reshape(a, shape), tl.reshape(b, shape), tl.reshape(c, shape)
        return sums_of_vectors(*tl.reduce(halves, 0, sum_of_three))


@triton.jit
def sum_last(x):
    """The sum over the last of three axes, pairs of neighbours first."""
    size: tl.constexpr = x.shape[2]
    if size == 1:
        return tl.reshape(x, (x.shape[0], x.shape[1]))
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], size // 2, 2)))
        return sum_last(even + odd)


@triton.jit
def sums_over_rows(a, b, SPREAD: tl.constexpr):
    """The sums of the rows of each: halves onto one another until SPREAD are left, and then neighbours.

    Those are turned, so that a thread has a column of both: one way through shared memory, instead of a butterfly
    between threads for each column that a thread has.
    """
    rows: tl.constexpr = a.shape[0]
    if rows > SPREAD:
        shape: tl.constexpr = (2, rows // 2, a.shape[1])
        a, b = tl.reduce((tl.reshape(a, shape), tl.reshape(b, shape)), 0, sum_of_two)
        return sums_over_rows(a, b, SPREAD)
    else:
        # Sums of one: from here on other threads have the columns, and Triton is not to carry that back to the state.
        one: tl.constexpr = (1, rows, a.shape[1])
        a, b = tl.reduce((tl.reshape(a, one), tl.reshape(b, one)), 0, sum_of_two)
        return tl.split(sum_last(tl.permute(tl.join(a, b), (1, 2, 0))))


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def row_of(slot_idx, offsets, b, T, MAX_SLOTS):
    """Slot (64-bit), first token, end, and whether the slot is one of the pool's."""
    slot = tl.load(slot_idx + b)
    start = tl.minimum(tl.maximum(tl.load(offsets + b), 0), T)
    end = tl.minimum(tl.maximum(tl.load(offsets + b + 1), start), T)
    return tl.cast(slot, tl.int64), start, end, (slot >= 0) & (slot < MAX_SLOTS)


@triton.jit
def load_float(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def zero_tokens(out, start, end, columns, column_mask, STRIDE: tl.constexpr):
    for first in range(start, end, ZERO_CHUNK):
        tokens = first + tl.arange(0, ZERO_CHUNK)
        at = tl.cast(tokens, tl.int64)[:, None] * STRIDE + columns[None, :]
        tl.store(out + at, tl.zeros_like(at).to(out.dtype.element_ty), (tokens < end)[:, None] & column_mask[None, :])


@triton.jit
def tokens_uncovered(offsets, B, T):
    """Whether there may be tokens of no row.

    If the offsets begin at the first token and end at the last, every token lies in a row, however they run between.
    """
    return (tl.load(offsets) > 0) | (tl.load(offsets + B) < T)


@triton.jit
def zero_uncovered(offsets, out, columns, column_mask, b, B, T, STRIDE: tl.constexpr):
    """Zeroes the tokens of no row among the chunks `b, b + B, ..` of the token array."""
    if tokens_uncovered(offsets, B, T):
        for first in range(b * ZERO_CHUNK, T, B * ZERO_CHUNK):
            tokens = first + tl.arange(0, ZERO_CHUNK)
            bare = tokens < T
            for row in range(B):
                bare = bare & ((tokens < tl.load(offsets + row)) | (tokens >= tl.load(offsets + row + 1)))
            at = tl.cast(tokens, tl.int64)[:, None] * STRIDE + columns[None, :]
            tl.store(out + at, tl.zeros_like(at).to(out.dtype.element_ty), bare[:, None] & column_mask[None, :])


@triton.jit
def last_row_with(offsets, tokens, B, ROWS: tl.constexpr):
    """The last row that holds each token, -1 if none does. Looks at ROWS rows together."""
    owner = tl.full(tokens.shape, -1, tl.int32)
    for first in range(0, B, ROWS):
        rows = first + tl.arange(0, ROWS)
        start = tl.load(offsets + rows, mask=rows < B, other=0)
        end = tl.load(offsets + rows + 1, mask=rows < B, other=0)
        holds = (tokens[:, None] >= start[None, :]) & (tokens[:, None] < end[None, :])
        owner = tl.maximum(owner, tl.max(tl.where(holds, rows[None, :], -1), 1))
    return owner


@triton.jit
def update(state, key, factor, decay):
    """`fma(key, factor^T, state * decay)`: with exactly these two roundings, the forward and the fold round alike."""
    scaled = state * decay
    key = tl.broadcast_to(key, state.shape)
    factor = tl.broadcast_to(factor[None, :], state.shape)
    return tl.fma(key, factor, scaled)


@triton.jit
def row_masks(row, COUNT: tl.constexpr, LIMIT: tl.constexpr):
    """For each of COUNT parts, which of its rows are below LIMIT; `row` numbers those of the first."""
    masks = ()
    for i in tl.static_range(COUNT):
        masks += (row + i * row.shape[0] < LIMIT,)
    return masks


@triton.jit
def tile_masks(is_row, is_column):
    masks = ()
    for i in tl.static_range(len(is_row)):
        masks += (is_row[i][:, None] & is_column[None, :],)
    return masks


@triton.jit
def load_parts(at, step, masks, EVICTION: tl.constexpr):
    parts = ()
    for i in tl.static_range(len(masks)):
        parts += (tl.load(at + i * step, mask=masks[i], other=0.0, eviction_policy=EVICTION),)
    return parts


@triton.jit
def float_parts(parts):
    floats = ()
    for i in tl.static_range(len(parts)):
        floats += (parts[i].to(tl.float32),)
    return floats


@triton.jit
def store_parts(at, step, parts, masks, EVICTION: tl.constexpr):
    for i in tl.static_range(len(parts)):
        tl.store(at + i * step, parts[i].to(at.dtype.element_ty), masks[i], eviction_policy=EVICTION)


@triton.jit
def each_and(masks, condition):
    both = ()
    for i in tl.static_range(len(masks)):
        both += (masks[i] & condition,)
    return both


@triton.jit
def update_parts(state, key, factor, decay):
    parts = ()
    for i in tl.static_range(len(state)):
        parts += (update(state[i], key[i], factor, decay),)
    return parts


@triton.jit
def in_slabs(x, SLAB: tl.constexpr):
    """SLAB rows each: other names for registers, nothing moves."""
    rows: tl.constexpr = x.shape[0]
    if rows <= SLAB:
        return (x,)
    else:
        upper, lower = tl.split(tl.permute(tl.reshape(x, (2, rows // 2, x.shape[1])), (1, 2, 0)))
        return in_slabs(upper, SLAB) + in_slabs(lower, SLAB)


@triton.jit
def across(vector, SLAB: tl.constexpr, COLUMNS: tl.constexpr):
    """A vector with each element across COLUMNS columns, in slabs as a state is.

    It is loaded and handed to the threads that have its rows in few parts, each of which costs them a wait.
    """
    slabs = ()
    for i in tl.static_range(PARTS):
        slabs += in_slabs(tl.broadcast_to(vector[i][:, None], (vector[i].shape[0], COLUMNS)), SLAB)
    return slabs


@triton.jit
def product_of_vectors(a, b):
    """Elements whose sum is the inner product."""
    total = a[0] * b[0]
    for i in tl.static_range(1, PARTS):
        total = tl.fma(a[i], b[i], total)
    return total


@triton.jit
def product_with_state(state, slabs):
    """Rows whose sum is `state^T vector`."""
    total = state[0] * slabs[0]
    for i in tl.static_range(1, len(state)):
        total = tl.fma(state[i], slabs[i], total)
    return total


@triton.jit
def token_output(
    against_key, against_query, key, query, value, decay, beta, SPREAD: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """One token over a tile of a state: the output, and what the raw key is multiplied by in the update.

    Both sums over the state, with the key and with the query (`product_with_state`), are of the old one, in one sweep:

        S'^T q = decay * S^T q + (k . q) * factor        where        S' = decay * S + k factor^T
    """
    squares = product_of_vectors(key, key), product_of_vectors(query, query), product_of_vectors(key, query)
    key_square, query_square, key_query = sums_of_vectors(*squares)
    key_scale = tl.math.rsqrt(key_square + EPS)
    query_scale = tl.math.rsqrt(query_square + EPS) * SCALE
    against_key, against_query = sums_over_rows(against_key, against_query, SPREAD)
    factor = (value - against_key * (decay * key_scale)) * (beta * key_scale)
    return (against_query * decay + key_query * factor) * query_scale, factor


@triton.jit
def token_at(
    qkv, decay, beta, t, h, v0,
    NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """Where the query, the key, the value (from column v0 on), decay and beta of value head h of a token begin."""
    hk = h // (NV // NK)
    at = qkv + tl.cast(t, tl.int64) * (2 * NK * KD + NV * VD)
    gate = tl.cast(t, tl.int64) * NV + h
    return at + hk * KD, at + (NK + hk) * KD, at + 2 * NK * KD + h * VD + v0, decay + gate, beta + gate


@triton.jit
def load_token(at, key_index, is_key, column, is_value):
    """Key and query in parts, value (a tile of it), decay and beta: as they are, a conversion would wait for them."""
    query, key, value, decay, beta = at
    query = load_parts(query + key_index, key_index.shape[0], is_key, "")
    key = load_parts(key + key_index, key_index.shape[0], is_key, "")
    return key, query, tl.load(value + column, mask=is_value, other=0.0), tl.load(decay), tl.load(beta)


@triton.jit
def float_token(token):
    key, query, value, decay, beta = token
    return float_parts(key), float_parts(query), value.to(tl.float32), decay, beta
