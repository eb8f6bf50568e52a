"""Rounding that does not depend on what a compiler sees around an operation."""

import jax
import jax.numpy as jnp
from jax import lax


def rounded(product: jax.Array, factor: jax.Array) -> jax.Array:
    """`product`, kept from being contracted into the sum that it feeds; `factor` is one of its factors.

    A compiler may fuse a product and a sum into one multiply-add, and where two products meet, either of them. Which it
    does depends on the loop that it stands in, and so on shapes and on what else is computed there. A selection in
    between, which changes no value (NaN stays NaN), leaves it no choice.
    """
    return jnp.where(factor == factor, product, factor)


def sum_by_halves(x: jax.Array, axis: int) -> jax.Array:
    """The sum along `axis`, the two halves added until one element is left.

    The order of a `reduce` is the compiler's to choose, and it chooses by the shapes of the other axes; here the order
    is part of the program. It is also the faster form on a CPU, and its rounding error grows with the logarithm of the
    size.
    """
    x = jnp.moveaxis(x, axis, 0)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        odd = x[2 * half :]
        x = x[:half] + x[half : 2 * half]
        if odd.shape[0]:
            x = jnp.concatenate([x, odd])
    return x[0]


def inverse_sqrt(x: jax.Array) -> jax.Array:
    """`1 / sqrt(x)` in two IEEE roundings.

    An `rsqrt` is an approximation that differs between the vector and the scalar part of one loop; the barrier keeps a
    compiler from making one of this.
    """
    return 1.0 / lax.optimization_barrier(jnp.sqrt(x))
