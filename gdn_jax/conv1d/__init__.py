"""Pass 1: the short causal convolution in front of the recurrence, over a ragged batch, on a pool of windows.

A depthwise convolution of `kernel_size` taps along each row's tokens. What came before a row's first token is its
slot's window: the last `kernel_size - 1` inputs, oldest first.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gdn_jax._checks import FLOATS, Arguments
from gdn_jax._primitive import Implementation, Operation, hopper_kernel, triton_kernel
from gdn_jax._ragged import fold_rows, fold_slots
from gdn_jax.conv1d.xla import differentiable_conv1d

Activation = Literal["silu"]


def _out_avals(qkv, weight, bias, conv_state, *_, **__):
    return [qkv.update(weak_type=False), conv_state.update(weak_type=False)]


def _batch(bind, lanes, args, is_batched):
    qkv, weight, bias, state, slot_idx, offsets, has_state = args
    if is_batched[1] or is_batched[2]:  # lanes with weights of their own are no longer one batch of requests
        batched = [x for x, m in zip(args, is_batched, strict=True) if m]

        def lane(xs):
            xs = iter(xs)
            return bind(*(next(xs) if m else x for x, m in zip(args, is_batched, strict=True)))

        return jax.lax.map(lane, batched)
    qkv, state, slot_idx, offsets, has_state = (
        x if m else jnp.broadcast_to(x, (lanes, *x.shape))
        for x, m in zip((qkv, state, slot_idx, offsets, has_state), (is_batched[0], *is_batched[3:]), strict=True)
    )
    total_seq_len, max_slots = qkv.shape[1], state.shape[1]
    offsets, slot_idx, has_state = fold_rows(
        offsets, total_seq_len, (fold_slots(slot_idx, max_slots), -1), (has_state, True)
    )
    out, new = bind(
        qkv.reshape(-1, *qkv.shape[2:]),
        weight,
        bias,
        state.reshape(-1, *state.shape[2:]),
        slot_idx,
        offsets,
        has_state,
    )
    return [out.reshape(qkv.shape), new.reshape(state.shape)]


conv1d = Operation(
    "conv1d",
    public_name="gated_delta_conv1d_fwd",
    out_avals=_out_avals,
    implementations=[
        hopper_kernel("gdn_jax.conv1d.mosaic_gpu"),
        triton_kernel("gdn_jax.conv1d.triton"),
        Implementation("xla", "gdn_jax.conv1d.xla"),
        Implementation("scan", "gdn_jax.conv1d.scan"),
    ],
    batch=_batch,
    differentiable=differentiable_conv1d,
    head_axes=(
        {
            "qkv_input_ragged": 1,
            "conv_weight": 0,
            "bias": 0,
            "conv_state": 1,
            "slot_idx": None,
            "input_row_offsets": None,
            "has_initial_state": None,
        },
        (1, 1),
    ),
)


def gated_delta_conv1d_fwd(
    qkv_input_ragged: ArrayLike,
    conv_weight: ArrayLike,
    conv_state: ArrayLike,
    slot_idx: ArrayLike,
    input_row_offsets: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    has_initial_state: ArrayLike | None = None,
    write_state: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve every row of a ragged batch with its history, and advance the windows of the rows' slots.

        out[t, c] = activation(bias[c] + sum_j conv_weight[c, j] * x[t - (kernel_size - 1) + j, c])

    in float32. Inside `jax.jit` with `conv_state` donated, the pool is updated in its own buffer.

    Args:
        qkv_input_ragged: `[total_seq_len, conv_dim]`, float32, bfloat16 or float16: the projected tokens.
        conv_weight: `[conv_dim, kernel_size]`, one of the three dtypes; `kernel_size` at least 2; the last tap meets
            the token itself.
        conv_state: `[max_slots, conv_dim, kernel_size - 1]`, one of the three dtypes: the windows, oldest input first.
        slot_idx: `[batch_size]` int32 or uint32: the pool row of each batch row; one outside `[0, max_slots)` marks
            padding, which reads and writes nothing and gives zero outputs.
        input_row_offsets: `[batch_size + 1]` int32 or uint32: row b spans tokens `[offsets[b], offsets[b+1])`, clamped
            to the tokens; empty where they decrease. Tokens in no row get zero outputs and influence nothing.
        bias: `[conv_dim]`, one of the three dtypes, or None.
        activation: None or "silu".
        has_initial_state: `[batch_size]` bool: rows where it is False start from a window of zeros.
        write_state: False leaves the windows as they are, for a speculative window that may be replayed.
        implementation: a name from the table in the README, or None for the best that serves the call.

    Returns:
        `(conv_output [total_seq_len, conv_dim], conv_state)`, in the dtypes of the tokens and of the pool.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it, before anything runs.
        NotImplementedError: the named implementation cannot serve this call; the message says why.
    """
    args = Arguments("gated_delta_conv1d_fwd")
    args.implementation(implementation)
    args.choice("activation", activation, (None, "silu"))
    args.choice("write_state", write_state, (True, False))
    qkv = args.array("qkv_input_ragged", qkv_input_ragged, ("total_seq_len", "conv_dim"), FLOATS)
    weight = args.array("conv_weight", conv_weight, ("conv_dim", "kernel_size"), FLOATS)
    if weight.shape[1] < 2:
        raise args.wrong_shape("conv_weight", weight.shape, "[conv_dim, kernel_size] with kernel_size at least 2")
    args.derive("kernel_size - 1", weight.shape[1] - 1, "conv_weight")
    state = args.array("conv_state", conv_state, ("max_slots", "conv_dim", "kernel_size - 1"), FLOATS)
    slot_idx = args.indices("slot_idx", slot_idx, ("batch_size",))
    args.derive("batch_size + 1", args.sizes["batch_size"] + 1, "slot_idx")
    offsets = args.offsets("input_row_offsets", input_row_offsets, ("batch_size + 1",), qkv.shape[0])
    # A missing bias is a constant of the program, not an operation in it.
    no_bias = np.zeros((qkv.shape[1],), weight.dtype)
    bias = args.array("bias", no_bias if bias is None else bias, ("conv_dim",), FLOATS)
    has_state = args.flags("has_initial_state", has_initial_state, args.sizes["batch_size"])
    operands = (qkv, weight, bias, state, slot_idx, offsets, has_state)
    options = {"activation": activation, "write_state": write_state, "implementation": implementation}
    conv1d.check_implementation(*operands, **options)
    if 0 in (*qkv.shape, *state.shape, args.sizes["batch_size"]):
        return jnp.zeros_like(qkv), state
    out, state = conv1d(*operands, **options)
    return out, state
