"""The recurrent gated delta rule in Pallas Mosaic GPU: ragged rows, the pool updated in place.

A program takes one tile of value columns of one state `[key_head_dim, tile]` through the tokens of its
row, the tile in float32 registers. `step.py` has the step of a token, `plan.py` how a call is
cut into programs. There are three kernels, for rows token by token (`direct.py`), in short windows
(`windowed.py`) and in long ones (`streamed.py`); their bits are the same.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import after_previous, compiler_params
from gdn_jax.recurrence.mosaic_gpu import direct, streamed, windowed
from gdn_jax.recurrence.mosaic_gpu.plan import SHORT_WINDOW, Call, plan_rows

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def unsupported(
    qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, *, algorithm, precision
) -> str | None:
    """One sentence saying why this backend cannot serve the call, None when it can."""
    del decay, beta, slot_idx, input_row_offsets, has_initial_state, precision
    if algorithm == "chunked":
        return "this kernel goes token by token."
    return unsupported_operands(qkv, recurrent_state)


def unsupported_operands(qkv, recurrent_state) -> str | None:
    """What the forward and the verify both refuse."""
    for name, dim in zip(("key_head_dim", "value_head_dim"), recurrent_state.shape[2:], strict=True):
        if dim % 16 or not 16 <= dim <= 256:
            return f"mosaic_gpu serves head dims that are multiples of 16 from 16 to 256; {name} is {dim}."
    for name, dtype in (("qkv_conv_output", qkv.dtype), ("recurrent_state", recurrent_state.dtype)):
        if dtype not in _DTYPES:
            return f"mosaic_gpu does not serve a {name} of {dtype}."
    return None


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
    interpret=None,
):
    """See `gdn_jax.gated_delta_recurrence_fwd`."""
    del algorithm, precision
    pool = jax.new_ref(recurrent_state)
    tokens = (qkv, decay, beta)
    rows = (slot_idx, input_row_offsets, has_initial_state)
    out = run_rows(tokens, rows, pool, interpret=interpret)
    return out, jax.freeze(pool)


def run_rows(tokens, rows, pool, ring=None, ring_slot_idx=None, *, plan=None, interpret=None):
    """Runs every row over `pool`, a Ref, and returns the outputs `[T, num_value_heads * value_head_dim]`.

    `tokens` are qkv, decay and beta, `rows` are slot_idx, input_row_offsets and has_initial_state. With `ring`, a
    Ref, rows of at most RING_LEN tokens leave the pool alone and write one record a token and key head instead.
    """
    qkv = tokens[0]
    num_tokens, conv_dim = qkv.shape
    max_slots, num_value_heads, key_dim, value_dim = pool.shape
    batch = rows[0].shape[0]
    num_key_heads = (conv_dim - num_value_heads * value_dim) // (2 * key_dim)
    records = ring is not None
    if plan is None:
        dtypes = (qkv.dtype, pool.dtype)
        plan = plan_rows(num_tokens, batch, num_key_heads, num_value_heads, key_dim, value_dim, dtypes, records)
    call = Call(
        num_tokens=num_tokens,
        batch=batch,
        max_slots=max_slots,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        token_dtype=qkv.dtype,
        pool_dtype=pool.dtype,
        plan=plan,
        records=records,
        interpret=interpret,
    )
    if not plan.window:
        kind, blocks, threads = direct, call.num_programs // plan.run, {}
    else:
        kind = windowed if plan.window == SHORT_WINDOW else streamed
        blocks, threads = call.num_blocks, {"num_threads": plan.warpgroups, "thread_name": "warpgroup"}
    kernel = plgpu.kernel(
        after_previous(kind.body(call), interpret),
        out_type=jax.ShapeDtypeStruct((num_tokens, num_value_heads * value_dim), qkv.dtype),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=kind.scratch_types(call),
        compiler_params=compiler_params(),
        interpret=interpret,
        **threads,
    )
    if ring is None:
        return kernel(*tokens, *rows, pool)
    return kernel(*tokens, *rows, ring_slot_idx, pool, ring)
