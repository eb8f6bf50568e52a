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

from gdn_jax._mosaic import after_previous, compiler_params, cond, is_row_of, load, store, when

_THREADS = 128
_LOG2_E = 1.4426950408889634
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_KERNEL_SIZE = 8
_MAX_HEAD_TOKENS = 8
"""Most tokens of a row that its row program computes (at least K - 1)."""
_ROW_CHANNELS = 256
_MANY_ROW_PROGRAMS = 4096
"""Of rows of one token: from here on a row program has more to do, because they do not all fit at once."""
_MANY_ROWS, _MANY_CHANNELS = 2, 512
"""What it then has: rows that share its weights, and channels."""
_BLOCK_BYTES = 16384
_VEC = 2
"""Neighbouring channels of a thread in a block program."""
_STEP = 8
"""Tokens that a block program computes between two branches."""
_BULK_UNIT_BYTES = 128
"""What the size of a bulk copy to shared memory must be a multiple of."""


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


def _rows_layout(unit, width):
    """Layout of [n * unit, width]: whole rows a thread, repeated where `unit` is less than the 128 threads.

    Its `reduce(1)` is the layout of a vector [n * unit], one element a thread.
    """
    lanes = min(unit, 32)
    warps = unit // lanes
    repeat_lanes = () if lanes == 32 else (plgpu.Replicated(32 // lanes),)
    repeat_warps = () if warps == 4 else (plgpu.Replicated(4 // warps),)
    if warps == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((unit, width),)), repeat_warps, (*repeat_lanes, -2), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((unit, width), (lanes, width))), (*repeat_warps, -4), (-2,), -1)


def _vector_layout(unit, vec):
    """Layout of a vector [n * unit * vec]: `vec` neighbours a thread, repeated below 128 threads."""
    if vec == 1:
        return _rows_layout(unit, 1).reduce(1)
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


def _columns(ref, unit):
    """All columns of a [channels, taps] ref in global memory, as float32 vectors."""
    channels, taps = ref.shape
    column_layout = _rows_layout(unit, 1)
    if taps & (taps - 1):
        return [_column(ref, j, column_layout) for j in range(taps)]
    # A vector access needs a power of two. The selection costs one addition a column, a load by columns one access.
    layout = _rows_layout(unit, taps)
    rows = load(ref, layout)
    tap = plgpu.broadcasted_iota(jnp.int32, (channels, taps), 1, layout=layout)
    return [
        plgpu.layout_cast(jnp.sum(jnp.where(tap == j, rows, 0.0), axis=1), column_layout.reduce(1)) for j in range(taps)
    ]


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


class _Geometry:
    """How the work is cut into programs: a function of shapes and dtypes alone.

    Attributes:
        head_tokens: tokens of a row that its row program computes.
        block_tokens, block_channels, block_unit: size of a block program, and its threads that differ.
        rows, row_channels, row_unit: the same for a row program.
        eager: whether a block program asks for its tokens before it has looked at the offsets.
    """

    def __init__(self, total_seq_len, batch, conv_dim, kernel_size, itemsize):
        mean = total_seq_len // batch
        self.head_tokens = max(kernel_size - 1, min(mean, _MAX_HEAD_TOKENS))
        self.eager = mean > self.head_tokens
        longest = _BLOCK_BYTES // (_THREADS * _VEC * itemsize)
        # Where row programs do most of the work, a smaller block leaves more of them room in shared memory.
        fitting = min(longest, 1 << mean.bit_length()) if self.eager else longest // 2
        self.block_tokens = min(fitting, total_seq_len)
        self.block_unit = math.gcd(_THREADS, conv_dim // _VEC)
        self.block_channels = self.block_unit * _VEC
        self.row_unit = math.gcd(_THREADS, conv_dim)
        self.rows, self.row_channels = 1, math.gcd(_ROW_CHANNELS, conv_dim)
        if mean <= 1 and batch * (conv_dim // self.row_channels) >= _MANY_ROW_PROGRAMS:
            self.rows, self.row_channels = _MANY_ROWS, math.gcd(_MANY_CHANNELS, conv_dim)


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
    cut = _Geometry(total, batch, conv_dim, taps, qkv.dtype.itemsize)
    head_tokens, block_tokens, rows = cut.head_tokens, cut.block_tokens, cut.rows
    row_channels, block_channels = cut.row_channels, cut.block_channels
    row_groups, block_groups = conv_dim // row_channels, conv_dim // block_channels
    row_programs, block_programs = -(-batch // rows) * row_groups, -(-total // block_tokens) * block_groups
    tile_tokens = min(block_tokens + window, total)
    step = math.gcd(block_tokens, _STEP)
    bulk_tokens = tile_tokens * block_channels * qkv.dtype.itemsize % _BULK_UNIT_BYTES == 0
    # The windows of a row program's channels as one run; no axis of a bulk copy may be longer than 256.
    width = math.gcd(row_channels, 256)
    run = (row_channels * window // width, width)
    run_bytes = row_channels * window * conv_state.dtype.itemsize
    # The interpreter knows no reshaped views of shared memory.
    bulk_window = interpret is None and run_bytes % _BULK_UNIT_BYTES == 0
    column_layout = _rows_layout(cut.row_unit, 1)
    row_layout = column_layout.reduce(1)
    block_layout = _vector_layout(cut.block_unit, _VEC)

    def clear_tokens(out_g, channels, layout, start, end):
        def clear(t, _):
            store(out_g.at[t, channels], plgpu.layout_cast(jnp.zeros((channels.size,), qkv.dtype), layout))
            return 0

        lax.fori_loop(start, end, clear, 0)

    def row_program(i, x_g, w_g, bias_g, slot_g, off_g, has_g, out_g, state_g, windows_s, arrived):
        base, group = lax.div(i, row_groups) * rows, lax.rem(i, row_groups)
        channels = pl.ds(group * row_channels, row_channels)

        def row_at(b):
            start, end = (jnp.clip(off_g[b + k], 0, total) for k in (0, 1))
            return start, end, slot_g[b], has_g[b]

        members = [row_at(jnp.minimum(base + r, batch - 1)) for r in range(rows)]
        weights = _columns(w_g.at[channels], cut.row_unit)
        offset = load(bias_g.at[channels], row_layout)

        def token(t):
            return load(x_g.at[t, channels], row_layout)

        def output(t, history):
            store(out_g.at[t, channels], _taps(history, weights, offset, activation, qkv.dtype))

        # The K - 1 inputs of a channel are neighbours: only whole runs of channels move well.
        def home(slot):
            return state_g.at[slot, pl.ds(group * run[0], run[0])]

        def moved(r):
            return windows_s.at[r].reshape(*run)

        def columns(r, slot):
            return windows_s.at[r].reshape(row_channels, window) if bulk_window else state_g.at[slot, channels]

        def ask_window(r, slot, has_window):
            if bulk_window:

                @when(has_window)
                def _():
                    plgpu.copy_gmem_to_smem(home(slot), moved(r), arrived.at[r])

        def read_window(r, slot, has_window):
            def zeros():
                return [plgpu.layout_cast(jnp.zeros((row_channels,), f32), row_layout)] * window

            def read():
                if bulk_window:
                    plgpu.barrier_wait(arrived.at[r])
                return [_column(columns(r, slot), j, column_layout) for j in range(window)]

            return cond(has_window, read, zeros)

        def write_windows(new):
            """Writes windows, given as `(r, slot, values)`."""
            if write_state:
                if cut.row_unit < _THREADS:
                    # Several threads have the same channel: none may write its window before all have read it.
                    plgpu.commit_smem()
                for r, slot, values in new:
                    for j, value in enumerate(values):
                        _set_column(columns(r, slot), j, value, column_layout)
                if bulk_window:
                    plgpu.commit_smem()
                    for r, slot, _ in new:
                        plgpu.copy_smem_to_gmem(moved(r), home(slot))

        def finish_windows():
            if write_state and bulk_window:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def single_tokens():
            for r, (_, _, slot, has_window) in enumerate(members):
                ask_window(r, slot, has_window)
            new = [token(start) for start, *_ in members]
            old = [read_window(r, slot, has_window) for r, (_, _, slot, has_window) in enumerate(members)]
            histories = [[*inputs, x] for inputs, x in zip(old, new, strict=True)]
            write_windows([(r, members[r][2], history[1:]) for r, history in enumerate(histories)])
            for (start, *_), history in zip(members, histories, strict=True):
                output(start, history)
            finish_windows()

        def any_row(r, start, end, slot, has_window):
            length = end - start
            live = is_row_of(slot, max_slots)

            @when((length > 0) & live)
            def _():
                ask_window(r, slot, has_window)
                head = [token(jnp.minimum(start + p, end - 1)) for p in range(head_tokens)]
                tail = [token(jnp.maximum(end - window + j, start)) for j in range(window)]
                old = read_window(r, slot, has_window)

                def kept(j):
                    value = tail[j]
                    # A row of n tokens keeps window - n of the old inputs. Here a row of one is beside another row.
                    for n in range(1 if rows > 1 else 2, window - j):
                        short = lax.broadcast_in_dim(length == n, (row_channels,), ())
                        value = jnp.where(short, old[j + n], value)
                    return value

                write_windows([(r, slot, [kept(j) for j in range(window)])])
                history = [*old, *head]
                for p in range(head_tokens):

                    @when(p < length)
                    def _(p=p):
                        output(start + p, history[p : p + taps])

                finish_windows()

            @when((length > 0) & jnp.logical_not(live))
            def _():
                clear_tokens(out_g, channels, row_layout, start, jnp.minimum(end, start + head_tokens))

        single = base + rows <= batch
        for start, end, slot, _ in members:
            single &= (end - start == 1) & is_row_of(slot, max_slots)

        @when(single)
        def _():
            single_tokens()

        @when(jnp.logical_not(single))
        def _():
            if rows == 1:
                any_row(0, *members[0])
                return

            def one(b, _):
                any_row(b - base, *row_at(b))
                return 0

            lax.fori_loop(base, jnp.minimum(base + rows, batch), one, 0)

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

        init = [plgpu.layout_cast(jnp.full((width,), x, jnp.int32), layout) for x in (batch, -1, 0)]
        first, last, top = lax.fori_loop(0, -(-batch // width), scan, tuple(init))
        return jnp.min(first), jnp.max(last), jnp.maximum(jnp.max(top), jnp.clip(off_g[0], 0, total))

    def block_program(i, x_g, w_g, bias_g, slot_g, off_g, out_g, tokens_s, weights_s, arrived):
        low = lax.div(i, block_groups) * block_tokens
        high = jnp.minimum(low + block_tokens, total)
        base = jnp.clip(low - window, 0, total - tile_tokens)
        channels = pl.ds(lax.rem(i, block_groups) * block_channels, block_channels)

        def ask_inputs():
            if bulk_tokens:
                plgpu.copy_gmem_to_smem(x_g.at[pl.ds(base, tile_tokens), channels], tokens_s, arrived)
            else:

                def fetch(p, _):
                    x = plgpu.load(x_g.at[base + p, channels], layout=block_layout, optimized=False)
                    store(tokens_s.at[p], x)
                    return 0

                lax.fori_loop(0, tile_tokens, fetch, 0)
            columns = _columns(w_g.at[channels], math.gcd(_THREADS, block_channels))
            for j, column in enumerate(columns):
                store(weights_s.at[j], column)
            plgpu.commit_smem()
            weights = [load(weights_s.at[j], block_layout) for j in range(taps)]
            return weights, load(bias_g.at[channels], block_layout)

        def body_of(b):
            start, end = (jnp.clip(off_g[b + k], 0, total) for k in (0, 1))
            return jnp.maximum(start + head_tokens, low), jnp.minimum(end, high)

        def has_body(start, end):
            return jnp.maximum(start + head_tokens, low) < jnp.minimum(end, high)

        def compute(first, last, weights, offset):
            def token(t):
                return load(tokens_s.at[t - base], block_layout)

            def before(t):
                return tuple(token(t - window + j) for j in range(window))

            def advance(t, history):
                history = (*history, token(t))
                y = _taps(history, weights, offset, activation, qkv.dtype)
                store(out_g.at[t, channels], y)
                return history[1:]

            def steps(j, history):
                for p in range(step):
                    history = advance(low + j * step + p, history)
                return history

            def row(b, _):
                begin, stop = body_of(b)
                live = is_row_of(slot_g[b], max_slots)

                @when(live & (begin < stop))
                def _():
                    lax.fori_loop(begin, stop, advance, before(begin))

                @when(jnp.logical_not(live))
                def _():
                    clear_tokens(out_g, channels, block_layout, begin, stop)

                return 0

            begin, stop = body_of(first)
            whole = (begin == low) & (stop == low + block_tokens) & is_row_of(slot_g[first], max_slots)

            @when(whole)
            def _():
                lax.fori_loop(0, block_tokens // step, steps, before(low))

            @when(jnp.logical_not(whole))
            def _():
                lax.fori_loop(first, last + 1, row, 0)

        def wait_inputs():
            if bulk_tokens:
                plgpu.barrier_wait(arrived)

        # Most blocks lie inside one row, so where rows are long the tokens are asked for before it is known whose
        # they are.
        inputs = ask_inputs() if cut.eager else None
        first, last, top = over_rows(off_g, has_body)

        @when(first <= last)
        def _():
            ready = inputs or ask_inputs()
            wait_inputs()
            compute(first, last, *ready)

        if cut.eager:

            @when(first > last)
            def _():
                wait_inputs()

        # Whatever the offsets do, every token from the first offset to the greatest lies in a row; if they only
        # grow, no token before the first does.
        clear_tokens(out_g, channels, block_layout, jnp.maximum(low, top), high)

        def clear_uncovered(t, _):
            holder = over_rows(off_g, lambda start, end: (start <= t) & (t < end))[0]

            @when(holder == batch)
            def _():
                clear_tokens(out_g, channels, block_layout, t, t + 1)

            return 0

        lax.fori_loop(low, jnp.minimum(jnp.clip(off_g[0], 0, total), high), clear_uncovered, 0)

    # The kind with fewer programs goes first: its latency then hides behind the other.
    rows_first = row_programs <= block_programs
    leading = row_programs if rows_first else block_programs

    def body(
        x_g, w_g, bias_g, slot_g, off_g, has_g, state_g, out_g, tokens_s, weights_s, windows_s, tokens_in, windows_in
    ):
        i = lax.axis_index("program")

        def of_rows(i):
            row_program(i, x_g, w_g, bias_g, slot_g, off_g, has_g, out_g, state_g, windows_s, windows_in)

        def of_tokens(i):
            block_program(i, x_g, w_g, bias_g, slot_g, off_g, out_g, tokens_s, weights_s, tokens_in)

        @when(i < leading)
        def _():
            (of_rows if rows_first else of_tokens)(i)

        @when(i >= leading)
        def _():
            (of_tokens if rows_first else of_rows)(i - leading)

    kernel = plgpu.kernel(
        after_previous(body, interpret),
        out_type=jax.ShapeDtypeStruct((total, conv_dim), qkv.dtype),
        grid=(row_programs + block_programs,),
        grid_names=("program",),
        scratch_types=[
            plgpu.SMEM((tile_tokens, block_channels), qkv.dtype),
            plgpu.SMEM((taps, block_channels), f32),
            plgpu.SMEM((rows, row_channels * window), conv_state.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=rows),
        ],
        # Approximate here means the single instructions for exp2 and rsqrt, good to 2^-22.
        compiler_params=compiler_params().replace(approx_math=True),
        interpret=interpret,
    )
    runs = (max_slots, row_groups * run[0], run[1]) if bulk_window else conv_state.shape
    state = jax.new_ref(conv_state.reshape(runs))
    out = kernel(qkv, weight, bias, slot_idx, input_row_offsets, has_initial_state, state)
    return out, jax.freeze(state).reshape(conv_state.shape)
