"""The gates of Gated DeltaNet: how much of the state a token keeps, and how much of its value it writes."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gdn_jax._checks import FLOATS, Arguments


def gated_delta_gates(
    a: ArrayLike, b: ArrayLike, A_log: ArrayLike, dt_bias: ArrayLike, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Decay and write strength of every token and value head, in float32 whatever the inputs are.

    `decay = exp(-exp(A_log) * softplus(a + dt_bias))` and `beta = sigmoid(b)`, as in Gated Delta Networks (Yang, Kautz,
    Hatamizadeh, 2024) with the discretisation of Mamba-2.

    Args:
        a: `[.., num_value_heads]`, float32, bfloat16 or float16: the projection that sets the step size.
        b: `[.., num_value_heads]`, the shape of `a`: the projection that sets the write strength.
        A_log: `[num_value_heads]`: logarithm of the decay rate.
        dt_bias: `[num_value_heads]`: bias of the step size.
        implementation: None, "xla" or "scan", which are one and the same here.

    Returns:
        `(decay, beta)`, both float32 with the shape of `a`; decay lies in [0, 1], beta in [0, 1].

    Raises:
        ValueError: a shape does not agree. TypeError: a dtype is not one of the three. NotImplementedError: a GPU
            kernel was asked for by name.
    """
    args = Arguments("gated_delta_gates")
    args.implementation(implementation)
    if implementation not in (None, "xla", "scan"):
        raise NotImplementedError(
            f"gated_delta_gates has no implementation={implementation!r}: it is elementwise, and XLA fuses it"
        )
    lead = [f"dimension {i}" for i in range(args.rank(a) - 1)]
    a = args.array("a", a, (*lead, "num_value_heads"), FLOATS).astype(jnp.float32)
    b = args.array("b", b, (*lead, "num_value_heads"), FLOATS).astype(jnp.float32)
    A_log = args.array("A_log", A_log, ("num_value_heads",), FLOATS).astype(jnp.float32)
    dt_bias = args.array("dt_bias", dt_bias, ("num_value_heads",), FLOATS).astype(jnp.float32)
    A_log, dt_bias = (x.reshape((1,) * len(lead) + x.shape) for x in (A_log, dt_bias))
    return jnp.exp(-jnp.exp(A_log) * jax.nn.softplus(a + dt_bias)), jax.nn.sigmoid(b)
