"""Pass 2: the gated delta rule over a ragged batch, on a pool of states.

For token t, value head h of key head `h // group_size`, and the float32 state `S [key_head_dim, value_head_dim]`:

    S     <- decay[t, h] * S
    kv    =  S^T k_hat            k_hat = k * rsqrt(sum(k*k) + 1e-6)
    delta =  beta[t, h] * (v[t, h] - kv)
    S     <- S + k_hat delta^T
    out   =  S^T q_hat            q_hat = q * rsqrt(sum(q*q) + 1e-6) / sqrt(key_head_dim)

Source of the rule: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); of its
chunked form: Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length" (2024).

`scan.py` is the equations, `xla.py` serves every backend, the folders `mosaic_gpu` and `mosaic_gpu_chunked` have the
kernels for Hopper, token by token and in chunks, `triton.py` and `triton_chunked.py` those for other GPUs.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gdn_jax._checks import FLOATS, Arguments
from gdn_jax._primitive import Implementation, Operation, hopper_kernel, triton_kernel
from gdn_jax._ragged import fold_rows, fold_slots
from gdn_jax.recurrence.xla import differentiable_recurrence

Algorithm = Literal["auto", "recurrent", "chunked"]
Precision = Literal["highest"]


def _out_avals(qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state, **_):
    _, nv, _, vd = recurrent_state.shape
    out = qkv.update(shape=(qkv.shape[0], nv * vd), weak_type=False)
    return [out, recurrent_state.update(weak_type=False)]


def _batch(bind, lanes, args, is_batched):
    qkv, decay, beta, state, slot_idx, offsets, has_state = (
        x if m else jnp.broadcast_to(x, (lanes, *x.shape)) for x, m in zip(args, is_batched, strict=True)
    )
    total_seq_len, max_slots = qkv.shape[1], state.shape[1]
    offsets, slot_idx, has_state = fold_rows(
        offsets, total_seq_len, (fold_slots(slot_idx, max_slots), -1), (has_state, True)
    )
    out, new = bind(
        *(x.reshape(-1, *x.shape[2:]) for x in (qkv, decay, beta, state)),
        slot_idx,
        offsets,
        has_state,
    )
    return [out.reshape(lanes, total_seq_len, -1), new.reshape(state.shape)]


def own_heads(args, shard, shards):
    """The arguments with the fused rows of all heads cut down to one shard's. The pool is the shard's already."""
    qkv, *rest = args
    _, nv, _, vd = rest[2].shape
    value_dim = nv * vd
    key_dim = (qkv.shape[1] - value_dim * shards) // 2 // shards
    blocks = ((0, key_dim), (shards * key_dim, key_dim), (2 * shards * key_dim, value_dim))
    cut = [jax.lax.dynamic_slice_in_dim(qkv, first + shard * size, size, axis=1) for first, size in blocks]
    return [jnp.concatenate(cut, axis=1), *rest]


recurrence = Operation(
    "recurrence",
    public_name="gated_delta_recurrence_fwd",
    out_avals=_out_avals,
    implementations=[
        hopper_kernel("gdn_jax.recurrence.mosaic_gpu_chunked"),
        hopper_kernel("gdn_jax.recurrence.mosaic_gpu"),
        triton_kernel("gdn_jax.recurrence.triton"),
        Implementation("xla", "gdn_jax.recurrence.xla"),
        Implementation("scan", "gdn_jax.recurrence.scan"),
    ],
    batch=_batch,
    differentiable=differentiable_recurrence,
    head_axes=(
        {
            "qkv_conv_output": None,
            "decay_per_token": 1,
            "beta_per_token": 1,
            "recurrent_state": 1,
            "slot_idx": None,
            "input_row_offsets": None,
            "has_initial_state": None,
        },
        (1, 1),
    ),
    own_heads=own_heads,
)


def gated_delta_recurrence_fwd(
    qkv_conv_output: ArrayLike,
    decay_per_token: ArrayLike,
    beta_per_token: ArrayLike,
    recurrent_state: ArrayLike,
    slot_idx: ArrayLike,
    input_row_offsets: ArrayLike,
    *,
    has_initial_state: ArrayLike | None = None,
    algorithm: Algorithm = "auto",
    precision: Precision | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run the gated delta rule over every row of a ragged batch and advance the states of the rows' slots.

    Inside `jax.jit` with `recurrent_state` donated, the pool is updated in its own buffer.

    Args:
        qkv_conv_output: `[total_seq_len, conv_dim]`, float32, bfloat16 or float16: fused rows `[Q | K | V]`, each
            head-major, `conv_dim = 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim`. Raw: the L2
            norms and the query scale are part of this operation. On an explicit mesh whose pool is split by heads,
            every device takes its own heads' channels from these rows; rows that come split are gathered for that. Call
            it inside `jax.shard_map` to hand each device the fused rows of its own heads.
        decay_per_token: `[total_seq_len, num_value_heads]`: factor on the state, in [0, 1]. Used in float32.
        beta_per_token: `[total_seq_len, num_value_heads]`: write strength, in [0, 1]. Used in float32.
        recurrent_state: `[max_slots, num_value_heads, key_head_dim, value_head_dim]`, float32, bfloat16 or float16,
            whatever the tokens are. A state is float32 while its row is computed and rounded once at the end.
        slot_idx: `[batch_size]` int32 or uint32: the pool row of each batch row. A slot outside `[0, max_slots)` marks
            padding: nothing is read or written, and the outputs of its tokens are zero. If two rows name one slot, that
            slot's result is unspecified.
        input_row_offsets: `[batch_size + 1]` int32 or uint32: row b spans tokens `[offsets[b], offsets[b+1])`. Values
            past the tokens are clamped; where they decrease the row is empty, and if rows overlap because of it, the
            outputs of the shared tokens and the derivatives are unspecified (in chunks the states of such rows, too).
            Tokens in no row get zero outputs and influence nothing.
        has_initial_state: `[batch_size]` bool: rows where it is False start from zeros, whatever their slot holds.
        algorithm: "recurrent" goes token by token and is bit-repeatable however a sequence is cut into calls; "chunked"
            is the WY form, for long rows; "auto" decides by shapes alone, under `vmap` by those of all lanes together.
        precision: "highest" holds float32 tokens to 1e-5 in the chunked form too.
        implementation: a name from the table in the README, or None for the best that serves the call.

    Returns:
        `(recurrence_output [total_seq_len, num_value_heads * value_head_dim], recurrent_state)`, in the dtypes of the
        tokens and of the pool.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it, before anything runs.
        NotImplementedError: the named implementation cannot serve this call; the message says why.
    """
    args = Arguments("gated_delta_recurrence_fwd")
    args.implementation(implementation)
    args.choice("algorithm", algorithm, ("auto", "recurrent", "chunked"))
    args.choice("precision", precision, (None, "highest"))
    operands = token_operands(
        args, qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets
    )
    qkv, state = operands[0], operands[3]
    has_state = args.flags("has_initial_state", has_initial_state, args.sizes["batch_size"])
    options = {"algorithm": algorithm, "precision": precision, "implementation": implementation}
    recurrence.check_implementation(*operands, has_state, **options)
    if 0 in (*qkv.shape, *state.shape, args.sizes["batch_size"]):
        return empty_output(args, qkv), state
    out, state = recurrence(*operands, has_state, **options)
    return out, state


def token_operands(args: Arguments, qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets) -> list[jax.Array]:
    """The checked arguments that the forward and the verify share, in the order of their primitives."""
    state_dims = ("max_slots", "num_value_heads", "key_head_dim", "value_head_dim")
    state = args.array("recurrent_state", recurrent_state, state_dims, FLOATS)
    qkv = args.array("qkv_conv_output", qkv, ("total_seq_len", "conv_dim"), FLOATS)
    args.fused_rows("qkv_conv_output", qkv.shape[1], qkv.shape)
    gate_dims = ("total_seq_len", "num_value_heads")
    decay = args.array("decay_per_token", decay, gate_dims, FLOATS).astype(jnp.float32)
    beta = args.array("beta_per_token", beta, gate_dims, FLOATS).astype(jnp.float32)
    slot_idx = args.indices("slot_idx", slot_idx, ("batch_size",))
    args.derive("batch_size + 1", args.sizes["batch_size"] + 1, "slot_idx")
    offsets = args.offsets("input_row_offsets", input_row_offsets, ("batch_size + 1",), qkv.shape[0])
    return [qkv, decay, beta, state, slot_idx, offsets]


def empty_output(args: Arguments, qkv: jax.Array) -> jax.Array:
    """The output of a call in which no token belongs to a live row."""
    return jnp.zeros((qkv.shape[0], args.sizes["num_value_heads"] * args.sizes["value_head_dim"]), qkv.dtype)
