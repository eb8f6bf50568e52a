"""The call that users of flash-linear-attention know, on dense `[B, T, H, D]` tensors without a pool."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gdn_jax._checks import FLOATS, Arguments
from gdn_jax.recurrence import Algorithm, Precision, gated_delta_recurrence_fwd
from gdn_jax.recurrence.scan import EPS


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    output_final_state: bool = False,
    cu_seqlens: ArrayLike | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    algorithm: Algorithm = "auto",
    precision: Precision | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gated delta rule over `[B, T, H, D]` tensors, differentiable.

    Args:
        q, k: `[B, T, num_key_heads, key_head_dim]`, float32, bfloat16 or float16, one dtype for q, k and v.
        v: `[B, T, num_value_heads, value_head_dim]`; `num_value_heads` a multiple of `num_key_heads`.
        g: `[B, T, num_value_heads]`: logarithm of the decay, at most 0.
        beta: `[B, T, num_value_heads]`: write strength.
        scale: factor on the queries; None is `key_head_dim ** -0.5`.
        initial_state: `[N, num_value_heads, key_head_dim, value_head_dim]` with N = B, or the number of sequences in
            `cu_seqlens`; None is zeros.
        output_final_state: whether to return the states after the last tokens.
        cu_seqlens: `[N + 1]` int32: with B = 1, sequence n spans tokens `[cu_seqlens[n], cu_seqlens[n+1])` of the one
            row.
        use_qk_l2norm_in_kernel: True, the default here, normalises q and k by `x * rsqrt(sum(x*x) + 1e-6)`; False takes
            them as they are (in float32: the norms move into v and beta, which bfloat16 would round).
        algorithm, precision, implementation: as in `gated_delta_recurrence_fwd`.

    Returns:
        `(o [B, T, num_value_heads, value_head_dim], final_state)`; the state is float32, or None.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it, before anything runs.
        NotImplementedError: the named implementation cannot serve this call; the message says why.
    """
    args = Arguments("gated_delta_rule")
    args.implementation(implementation)
    args.choice("algorithm", algorithm, ("auto", "recurrent", "chunked"))
    args.choice("precision", precision, (None, "highest"))
    if scale is not None and jnp.ndim(scale) != 0:
        raise args.wrong_shape("scale", jnp.shape(scale), "a number or None")
    key_dims = ("B", "T", "num_key_heads", "key_head_dim")
    q = args.array("q", q, key_dims, FLOATS)
    k = args.array("k", k, key_dims, (q.dtype.name,))
    v = args.array("v", v, ("B", "T", "num_value_heads", "value_head_dim"), (q.dtype.name,))
    g = args.array("g", g, ("B", "T", "num_value_heads"), FLOATS).astype(jnp.float32)
    beta = args.array("beta", beta, ("B", "T", "num_value_heads"), FLOATS).astype(jnp.float32)
    batch, length, nv, vd = v.shape
    nk, kd = q.shape[2:]
    if 0 in (nk, kd):
        raise args.wrong_shape("q", q.shape, "[B, T, num_key_heads, key_head_dim], neither heads nor dim 0")
    if nv % nk:
        raise args.wrong_shape("v", v.shape, f"[B, T, num_value_heads, value_head_dim], heads a multiple of q's {nk}")
    if cu_seqlens is None:
        offsets = jnp.arange(batch + 1, dtype=jnp.int32) * length
    else:
        if batch != 1:
            raise args.wrong_shape("q", q.shape, "[1, T, num_key_heads, key_head_dim] when cu_seqlens is given")
        offsets = args.offsets("cu_seqlens", cu_seqlens, ("N + 1",), length)
        if offsets.shape[0] == 0:
            raise args.wrong_shape("cu_seqlens", offsets.shape, "[N + 1]")
    args.derive("N", offsets.shape[0] - 1, "q" if cu_seqlens is None else "cu_seqlens")
    state_dims = ("N", "num_value_heads", "key_head_dim", "value_head_dim")
    if initial_state is None:
        initial_state = jnp.zeros((args.sizes["N"], nv, kd, vd), jnp.float32)
    state = args.array("initial_state", initial_state, state_dims, FLOATS).astype(jnp.float32)

    out_scale = 1.0 if scale is None else scale * kd**0.5
    dtype = q.dtype
    if not use_qk_l2norm_in_kernel:
        # With c = sqrt(sum(k*k) + eps), the rule on k is the rule on k / c with v / c for v and beta * c**2 for beta.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k_square = jnp.repeat(jnp.sum(k * k, -1) + EPS, nv // nk, axis=-1)
        v, beta = v * jax.lax.rsqrt(k_square)[..., None], beta * k_square
        out_scale = out_scale * jnp.repeat(jnp.sqrt(jnp.sum(q * q, -1) + EPS), nv // nk, axis=-1)[..., None]
    tokens = batch * length
    out, state = gated_delta_recurrence_fwd(
        jnp.concatenate([x.reshape(tokens, x.shape[2] * x.shape[3]) for x in (q, k, v)], axis=-1),
        jnp.exp(g).reshape(tokens, nv),
        beta.reshape(tokens, nv),
        state,
        jnp.arange(args.sizes["N"], dtype=jnp.int32),
        offsets,
        algorithm=algorithm,
        precision=precision,
        implementation=implementation,
    )
    out = (out.reshape(v.shape) * out_scale).astype(dtype)
    return out, state if output_final_state else None
