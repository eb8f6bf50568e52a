"""The convolution in array operations that every backend compiles: all tokens at once."""

import jax.numpy as jnp

from gdn_jax._ragged import is_live, read_rows, row_bounds, token_rows, write_rows
from gdn_jax._rounding import rounded
from gdn_jax.conv1d.scan import activate


def unsupported(*_, **__) -> str | None:
    return None


def conv1d(qkv, weight, bias, conv_state, slot_idx, input_row_offsets, has_initial_state, *, activation, write_state):
    total_seq_len = qkv.shape[0]
    history = weight.shape[1] - 1
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    starts, lengths = row_bounds(input_row_offsets, total_seq_len)
    live = is_live(slot_idx, conv_state.shape[0]) & (lengths > 0)
    window = read_rows(conv_state, slot_idx, live & has_initial_state)

    row = token_rows(starts, jnp.where(live, lengths, 0), total_seq_len)
    # What lies outside the live rows must not reach the derivatives either, where zero times NaN would be NaN.
    qkv = jnp.where((row >= 0)[:, None], qkv, 0)
    position = jnp.arange(total_seq_len) - starts[row]
    y = bias[None]
    for tap in range(history + 1):
        back = history - tap
        from_row = jnp.pad(qkv, ((back, 0), (0, 0)))[:total_seq_len].astype(jnp.float32)
        from_window = window[row, :, jnp.clip(position + tap, 0, history - 1)]
        x = jnp.where((position >= back)[:, None], from_row, from_window)
        y = y + rounded(weight[None, :, tap] * x, x)
    out = jnp.where((row >= 0)[:, None], activate(y, activation), 0.0).astype(qkv.dtype)
    if not write_state:
        return out, conv_state

    # The last `history` inputs of window ++ row.
    source = lengths[:, None] - history + jnp.arange(history)[None]
    from_row = qkv[jnp.clip(starts[:, None] + source, 0, total_seq_len - 1)].swapaxes(1, 2).astype(jnp.float32)
    from_window = jnp.take_along_axis(window, jnp.clip(source + history, 0, history - 1)[:, None, :], axis=2)
    window = jnp.where((source >= 0)[:, None, :], from_row, from_window)
    return out, write_rows(conv_state, slot_idx, window, live)


def differentiable_conv1d(*args, activation, write_state):
    return list(conv1d(*args, activation=activation, write_state=write_state))
