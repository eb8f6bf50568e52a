"""The recurrence in Triton, called through jax-triton: for GPUs that the Mosaic GPU kernels do not serve.

Token by token, each program takes one tile of a state through its row; in chunks, see `triton_chunked.py`.
"""

# What Triton compiles is not typed as Python is.
# pyright: reportArgumentType=false

import jax

from gdn_jax._compat import triton_call
from gdn_jax._triton import row_launch, run_row, tl, triton, unsupported_head_dims
from gdn_jax.recurrence import triton_chunked


@triton.jit
def forward_kernel(
    qkv, decay, beta, slot_idx, offsets, has_initial_state, T, B, MAX_SLOTS, pool, out,
    pool_again: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr, KD: tl.constexpr,
    VD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPREAD: tl.constexpr,
    SCALE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    run_row(
        qkv, decay, beta, slot_idx, offsets, has_initial_state, pool, out, None, None, T, B, MAX_SLOTS, 0, NK, NV, KD,
        VD, ROWS, COLUMNS, SPREAD, SCALE, AHEAD, -1, 0,
    )  # fmt: skip


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
    (out,), (pool,) = triton_call(
        forward_kernel,
        [*operands, qkv.shape[0], slot_idx.shape[0], recurrent_state.shape[0]],
        [recurrent_state],
        [jax.ShapeDtypeStruct((qkv.shape[0], nv * vd), qkv.dtype)],
        **row_launch(qkv, recurrent_state, slot_idx.shape[0]),
    )
    return out, pool
