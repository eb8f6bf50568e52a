"""Causal depthwise convolution in Pallas Mosaic GPU: one launch, parallel over rows and over the tokens of long rows.

Two kinds of programs share the grid. A *row program* owns one row of the batch on some channels: it alone reads the
slot's old window, computes the row's first tokens (those whose history reaches into the window) and writes the new
window, so no two programs order their accesses to a window. A *block program* owns a fixed block of tokens and
computes those that need only tokens; it finds the rows that reach into its block by looking at all offsets at once,
and zeroes the tokens that belong to no row.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import compiler_params, is_row_of, load, store

_THREADS = 128
_LOG2_E = 1.4426950408889634
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_KERNEL_SIZE = 8
_MAX_HEAD_TOKENS = 8
"""Most tokens of a row that its row program computes (at least K - 1)."""
_BLOCK_TOKENS = 16
_BLOCK_BYTES_PER_THREAD = 8
_ROW_CHANNELS_PER_THREAD = 4


def unsupported(
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
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del slot_idx, input_row_offsets, has_initial_state, write_state
    conv_dim, kernel_size = weight.shape
    if conv_dim % 16:
        return f"mosaic_gpu serves a conv_dim that is a multiple of 16; it is {conv_dim}."
    if not 2 <= kernel_size <= _MAX_KERNEL_SIZE:
        return f"mosaic_gpu serves a kernel_size from 2 to {_MAX_KERNEL_SIZE}; it is {kernel_size}."
    if activation not in (None, "silu"):
        return f"mosaic_gpu does not serve the activation {activation!r}."
    for name, array in (
        ("qkv_input_ragged", qkv),
        ("conv_weight", weight),
        ("bias", bias),
        ("conv_state", conv_state),
    ):
        if array.dtype not in _FLOATS:
            return f"mosaic_gpu does not serve a {name} of {array.dtype}."
    return None


def _column_layout(unit):
    """Layout of [n * unit, 1]: one row a thread, repeated where `unit` is less than the 128 threads.

    Its `reduce(1)` is the layout of the vector [n * unit] in that column.
    """
    lanes = min(unit, 32)
    warps = unit // lanes
    repeat_lanes = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    repeat_warps = () if warps == 4 else (plgpu.Replicated(4 // warps),)
    if warps == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((unit, 1),)), repeat_warps, (*repeat_lanes, -2), -1
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((unit, 1), (lanes, 1))), (*repeat_warps, -4), (-2,), -1
    )


def _vector_layout(unit, vec):
    """Layout of a vector [n * unit * vec]: `vec` neighbours a thread, repeated below 128 threads."""
    if vec == 1:
        return _column_layout(unit).reduce(1)
    lanes = min(unit, 32)
    warps = unit // lanes
    repeat_lanes = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    repeat_warps = () if warps == 4 else (plgpu.Replicated(4 // warps),)
    if warps == 1:
        tiling = plgpu.Tiling(((unit * vec,), (vec,)))
        return plgpu.Layout.TILED(tiling, repeat_warps, (*repeat_lanes, -2), -1)
    tiling = plgpu.Tiling(((unit * vec,), (lanes * vec,), (vec,)))
    return plgpu.Layout.TILED(tiling, (*repeat_warps, -3), (-2,), -1)


def _column(ref, j, layout):
    """Column `j` of a [channels, taps] ref in global memory, as a float32 vector."""
    return jnp.sum(load(ref.at[:, pl.ds(j, 1)], layout), axis=1)


def _set_column(ref, j, value, layout):
    column = lax.broadcast_in_dim(value, (value.shape[0], 1), (0,))
    store(ref.at[:, pl.ds(j, 1)], plgpu.layout_cast(column, layout))


def _activate(y, activation):
    if activation is None:
        return y
    # 1 / d as rsqrt(d)^2: both steps are single instructions, where a division is a subroutine.
    r = lax.rsqrt(1.0 + lax.exp2(y * -_LOG2_E))
    return y * (r * r)


def _taps(history, weights, bias, activation, dtype):
    """One token's output from its last K inputs, oldest first."""
    y = bias
    for x, w in zip(history, weights, strict=True):
        y = y + x.astype(jnp.float32) * w
    return _activate(y, activation).astype(dtype)


def _geometry(total_seq_len, batch, conv_dim, kernel_size, itemsize):
    """Tokens of a row program, tokens and channels of a block program, channels of a row program; from shapes alone."""
    head_tokens = min(max(kernel_size - 1, total_seq_len // batch), max(kernel_size - 1, _MAX_HEAD_TOKENS))
    block_tokens = min(_BLOCK_TOKENS, total_seq_len)
    vec = math.gcd(_BLOCK_BYTES_PER_THREAD // itemsize, conv_dim)
    while vec > 1 and conv_dim % (_THREADS * vec):
        vec //= 2
    block_unit = math.gcd(_THREADS, conv_dim // vec)
    row_unit = math.gcd(_THREADS, conv_dim)
    row_channels = row_unit * math.gcd(_ROW_CHANNELS_PER_THREAD, conv_dim // row_unit)
    return head_tokens, block_tokens, vec, block_unit, row_unit, row_channels


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
    interpret=None,
):
    """See `gdn_jax.gated_delta_conv1d_fwd`."""
    f32 = jnp.float32
    total, conv_dim = qkv.shape
    max_slots, _, window = conv_state.shape
    taps = window + 1
    batch = slot_idx.shape[0]
    head_tokens, block_tokens, vec, block_unit, row_unit, row_channels = _geometry(
        total, batch, conv_dim, taps, qkv.dtype.itemsize
    )
    block_channels = block_unit * vec
    row_groups, block_groups = conv_dim // row_channels, conv_dim // block_channels
    blocks = -(-total // block_tokens)
    column_layout = _column_layout(row_unit)
    row_layout = column_layout.reduce(1)
    block_layout = _vector_layout(block_unit, vec)
    weight_layout = _column_layout(math.gcd(_THREADS, block_channels))

    def zero(layout, channels):
        return plgpu.layout_cast(jnp.zeros((channels,), qkv.dtype), layout)

    def row_program(i, x_g, w_g, bias_g, slot_g, off_g, has_g, out_g, state_g):
        b = lax.div(i, row_groups)
        channels = pl.ds(lax.rem(i, row_groups) * row_channels, row_channels)
        start, end = (jnp.clip(off_g[b + k], 0, total) for k in (0, 1))
        slot = slot_g[b]
        length = end - start
        live = is_row_of(slot, max_slots)

        @pl.when((length > 0) & live)
        def _():
            state = state_g.at[slot, channels]

            def zeros():
                return [plgpu.layout_cast(jnp.zeros((row_channels,), f32), row_layout)] * window

            def read():
                return [_column(state, j, column_layout) for j in range(window)]

            weights = [_column(w_g.at[channels], j, column_layout) for j in range(taps)]
            offset = load(bias_g.at[channels], row_layout)

            def token(t):
                return load(x_g.at[t, channels], row_layout)

            head = [token(jnp.minimum(start + p, end - 1)) for p in range(head_tokens)]
            tail = [token(jnp.maximum(end - window + j, start)) for j in range(window)]
            old = lax.cond(has_g[b], read, zeros)
            history = [*old, *head]

            if write_state:
                for j in range(window):
                    value = tail[j]
                    for n in range(1, window - j):  # a row of n tokens keeps window - n of the old inputs
                        keep = lax.broadcast_in_dim(length == n, (row_channels,), ())
                        value = jnp.where(keep, old[j + n], value)
                    _set_column(state, j, value, column_layout)

            for p in range(head_tokens):

                @pl.when(p < length)
                def _(p=p):
                    y = _taps(history[p : p + taps], weights, offset, activation, qkv.dtype)
                    store(out_g.at[start + p, channels], y)

        @pl.when((length > 0) & jnp.logical_not(live))
        def _():
            def clear(t, _):
                store(out_g.at[t, channels], zero(row_layout, row_channels))
                return 0

            lax.fori_loop(start, jnp.minimum(end, start + head_tokens), clear, 0)

    def over_rows(off_g, hits):
        """The first and last row that `hits(start, end)` names (batch, -1 if none), and the greatest offset."""
        width = min(_THREADS, 1 << (batch.bit_length() - 1))
        if width < 16:
            first, last, top = jnp.int32(batch), jnp.int32(-1), jnp.clip(off_g[0], 0, total)
            for b in range(batch):
                start, end = (jnp.clip(off_g[b + k], 0, total) for k in (0, 1))
                hit = hits(start, end)
                first = jnp.where(hit, jnp.minimum(first, b), first)
                last = jnp.where(hit, b, last)
                top = jnp.maximum(top, end)
            return first, last, top
        layout = _vector_layout(width, 1)

        def scan(i, carry):
            first, last, top = carry
            at = jnp.minimum(i * width, batch - width)  # the last step may look at some rows again
            start, end = (
                jnp.clip(plgpu.load(off_g.at[pl.ds(at + k, width)], layout=layout, optimized=False), 0, total)
                for k in (0, 1)
            )
            row = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout) + at
            hit = hits(start, end)
            return (
                jnp.minimum(first, jnp.where(hit, row, batch)),
                jnp.maximum(last, jnp.where(hit, row, -1)),
                jnp.maximum(top, end),
            )

        init = [
            plgpu.layout_cast(jnp.full((width,), x, jnp.int32), layout) for x in (batch, -1, 0)
        ]
        first, last, top = lax.fori_loop(0, -(-batch // width), scan, tuple(init))
        return jnp.min(first), jnp.max(last), jnp.maximum(jnp.max(top), jnp.clip(off_g[0], 0, total))

    def block_program(i, x_g, w_g, bias_g, slot_g, off_g, out_g, weights_s):
        group = lax.rem(i, block_groups)
        low = lax.div(i, block_groups) * block_tokens
        high = jnp.minimum(low + block_tokens, total)
        channels = pl.ds(group * block_channels, block_channels)

        def body_of(start, end):
            return jnp.maximum(start + head_tokens, low), jnp.minimum(end, high)

        def clear(t, _):
            store(out_g.at[t, channels], zero(block_layout, block_channels))
            return 0

        def has_body(start, end):
            first, last = body_of(start, end)
            return first < last

        first, last, top = over_rows(off_g, has_body)

        @pl.when(first <= last)
        def _():
            for j in range(taps):
                w = _column(w_g.at[channels], j, weight_layout)
                store(weights_s.at[j], w)
            plgpu.commit_smem()
            weights = [load(weights_s.at[j], block_layout) for j in range(taps)]
            offset = load(bias_g.at[channels], block_layout)

            def row(b, _):
                begin, end = body_of(*(jnp.clip(off_g[b + k], 0, total) for k in (0, 1)))
                live = is_row_of(slot_g[b], max_slots)

                @pl.when((begin < end) & live)
                def _():
                    # Tokens past the piece are read as its last one and not stored: no load waits for another.
                    xs = [
                        plgpu.load(
                            x_g.at[jnp.minimum(begin - window + p, end - 1), channels],
                            layout=block_layout,
                            optimized=False,
                        )
                        for p in range(block_tokens + window)
                    ]
                    for p in range(block_tokens):

                        @pl.when(begin + p < end)
                        def _(p=p):
                            y = _taps(xs[p : p + taps], weights, offset, activation, qkv.dtype)
                            store(out_g.at[begin + p, channels], y)

                @pl.when((begin < end) & jnp.logical_not(live))
                def _():
                    lax.fori_loop(begin, end, clear, 0)

                return 0

            lax.fori_loop(first, last + 1, row, 0)

        # Offsets that only grow leave no gap between rows, and whatever they do, every token from the first offset
        # to the greatest lies in a row.
        lax.fori_loop(jnp.maximum(low, top), high, clear, 0)

        def clear_uncovered(t, _):
            some, _, _ = over_rows(off_g, lambda start, end: (start <= t) & (t < end))

            @pl.when(some == batch)
            def _():
                clear(t, 0)

            return 0

        lax.fori_loop(low, jnp.minimum(jnp.clip(off_g[0], 0, total), high), clear_uncovered, 0)

    row_programs = batch * row_groups

    def body(x_g, w_g, bias_g, slot_g, off_g, has_g, state_g, out_g, weights_s):
        i = lax.axis_index("program")

        @pl.when(i < row_programs)
        def _():
            row_program(i, x_g, w_g, bias_g, slot_g, off_g, has_g, out_g, state_g)

        @pl.when(i >= row_programs)
        def _():
            block_program(i - row_programs, x_g, w_g, bias_g, slot_g, off_g, out_g, weights_s)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((total, conv_dim), qkv.dtype),
        grid=(row_programs + blocks * block_groups,),
        grid_names=("program",),
        scratch_types=[plgpu.SMEM((taps, block_channels), f32)],
        compiler_params=compiler_params(),
        interpret=interpret,
    )
    state = jax.new_ref(conv_state)
    out = kernel(qkv, weight, bias, slot_idx, input_row_offsets, has_initial_state, state)
    return out, jax.freeze(state)
