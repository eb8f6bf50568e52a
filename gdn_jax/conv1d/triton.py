"""Causal depthwise convolution in Triton: one launch, parallel over rows and over blocks of tokens.

Two kinds of programs share the grid. A row program owns one row of the batch on some channels: it alone reads the
slot's old window, computes the tokens whose history reaches into it, and writes the new window. A block program owns a
block of tokens and computes those that need only tokens; it zeroes the tokens of no row.
"""

# What Triton compiles is not typed as Python is.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import jax

from gdn_jax._compat import triton_call
from gdn_jax._triton import last_row_with, load_float, row_of, tl, triton

_BLOCK_TOKENS = 32
_CHANNELS = 128
_MAX_KERNEL_SIZE = 8


@triton.jit
def activate(y, SILU: tl.constexpr):
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    return y


@triton.jit
def row_program(
    qkv, weight, bias, slot_idx, offsets, has_initial_state, conv_state, out, b, channel, T, MAX_SLOTS,
    C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    slot, start, end, live = row_of(slot_idx, offsets, b, T, MAX_SLOTS)
    length = end - start
    inside = channel < C
    has_state = (tl.load(has_initial_state + b) != 0) & live
    window = conv_state + slot * (C * (K - 1)) + channel * (K - 1)
    tokens = qkv + tl.cast(start, tl.int64) * C + channel
    for p in tl.static_range(K - 1):
        if p < length:
            y = load_float(bias + channel, inside)
            for j in tl.static_range(K):
                if p + j < K - 1:
                    x = load_float(window + (p + j), inside & has_state)
                else:
                    x = load_float(tokens + (p + j - (K - 1)) * C, inside & live)
                y += x * load_float(weight + channel * K + j, inside)
            y = tl.where(live, activate(y, SILU), 0.0)
            at = out + (tl.cast(start, tl.int64) + p) * C + channel
            tl.store(at, y.to(out.dtype.element_ty), inside)
    if WRITE and (live & (length > 0)):
        # The last K - 1 inputs: of the row's tokens and, where there are fewer, the old window.
        tap = tl.arange(0, TAPS)
        kept = inside[:, None] & (tap < K - 1)[None, :]
        old = kept & (length + tap < K - 1)[None, :]
        new = kept & (length + tap >= K - 1)[None, :]
        value = load_float(window[:, None] + (length + tap)[None, :], old & has_state)
        at = (tl.cast(length + tap, tl.int64) - (K - 1)) * C
        value += load_float(tokens[:, None] + at[None, :], new)
        # All threads have read the old window before one writes the new.
        tl.debug_barrier()
        tl.store(window[:, None] + tap[None, :], value.to(conv_state.dtype.element_ty), kept)


@triton.jit
def block_program(
    qkv, weight, bias, slot_idx, offsets, out, block, channel, T, B, MAX_SLOTS,
    C: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    token = block * TOKENS + tl.arange(0, TOKENS)
    exists = token < T
    owner = last_row_with(offsets, token, B, ROWS)
    owned = exists & (owner >= 0)
    position = token - tl.maximum(tl.load(offsets + owner, mask=owned, other=0), 0)
    slot = tl.load(slot_idx + owner, mask=owned, other=-1)
    body = owned & (position >= K - 1) & (slot >= 0) & (slot < MAX_SLOTS)
    # The first tokens of a row are its row program's.
    mine = exists & ((owner < 0) | (position >= K - 1))
    if tl.max(mine.to(tl.int32), 0) > 0:
        inside = channel < C
        at = tl.cast(token, tl.int64)[:, None] * C + channel[None, :]
        read = body[:, None] & inside[None, :]
        y = tl.zeros((TOKENS, channel.shape[0]), tl.float32) + load_float(bias + channel, inside)[None, :]
        for j in tl.static_range(K):
            x = load_float(qkv + at + (j - (K - 1)) * C, read)
            y += x * load_float(weight + channel * K + j, inside)[None, :]
        y = tl.where(body[:, None], activate(y, SILU), 0.0)
        tl.store(out + at, y.to(out.dtype.element_ty), mine[:, None] & inside[None, :])


@triton.jit
def conv1d_kernel(
    qkv, weight, bias, slot_idx, offsets, has_initial_state, T, B, MAX_SLOTS, conv_state, out,
    state_again: tl.constexpr, C: tl.constexpr, K: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    channel = tl.program_id(0) % GROUPS * CHANNELS + tl.arange(0, CHANNELS)
    item = tl.program_id(0) // GROUPS
    if item < B:
        row_program(
            qkv, weight, bias, slot_idx, offsets, has_initial_state, conv_state, out, item, channel, T, MAX_SLOTS,
            C, K, TAPS, SILU, WRITE,
        )  # fmt: skip
    else:
        block_program(
            qkv, weight, bias, slot_idx, offsets, out, item - B, channel, T, B, MAX_SLOTS, C, K, TOKENS, ROWS, SILU
        )


def unsupported(
    qkv, weight, bias, conv_state, slot_idx, input_row_offsets, has_initial_state, *, activation, write_state
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del qkv, bias, conv_state, slot_idx, input_row_offsets, has_initial_state, activation, write_state
    if weight.shape[1] > _MAX_KERNEL_SIZE:
        return f"triton serves a kernel_size up to {_MAX_KERNEL_SIZE}; it is {weight.shape[1]}"
    return None


def conv1d(
    qkv,
    weight,
    bias,
    conv_state,
    slot_idx,
    input_row_offsets,
    has_initial_state,
    *,
    activation,
    write_state,
):
    """See `gdn_jax.gated_delta_conv1d_fwd`."""
    tokens, channels = qkv.shape
    batch, kernel_size = slot_idx.shape[0], weight.shape[1]
    (out,), (pool,) = triton_call(
        conv1d_kernel,
        [qkv, weight, bias, slot_idx, input_row_offsets, has_initial_state, tokens, batch, conv_state.shape[0]],
        [conv_state],
        [jax.ShapeDtypeStruct(qkv.shape, qkv.dtype)],
        grid=((batch + triton.cdiv(tokens, _BLOCK_TOKENS)) * triton.cdiv(channels, _CHANNELS),),
        num_warps=4,
        num_stages=1,
        C=channels,
        K=kernel_size,
        TAPS=triton.next_power_of_2(kernel_size - 1),
        TOKENS=_BLOCK_TOKENS,
        CHANNELS=_CHANNELS,
        ROWS=min(triton.next_power_of_2(batch), 64),
        SILU=activation == "silu",
        WRITE=write_state,
    )
    return out, pool
