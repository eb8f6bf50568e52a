"""Validation of arguments: each message names the argument, says what it is and what it must be."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax._primitive import IMPLEMENTATIONS

FLOATS = ("float32", "bfloat16", "float16")
INDICES = ("int32", "uint32")


class Arguments:
    """The array arguments of one call.

    Every dimension has a name. The first array that has it fixes its size, and later arrays must agree.
    """

    def __init__(self, operation: str):
        self.operation = operation
        self.sizes: dict[str, int] = {}
        self._fixed_by: dict[str, str] = {}

    def array(self, name: str, value, dims: Sequence[str], dtypes: Sequence[str]) -> jax.Array:
        """`value` as a JAX array, with its rank, shape and dtype checked."""
        if isinstance(value, (list, tuple)):
            try:
                value = np.asarray(value, None if value else dtypes[0])
            except ValueError as error:
                raise TypeError(
                    f"{self._where(name)} is a list, must be an array [{', '.join(dims)}]: {error}"
                ) from None
        if not isinstance(value, (np.ndarray, np.generic, jax.Array)) and not hasattr(value, "__jax_array__"):
            raise TypeError(f"{self._where(name)} is {value!r}, must be an array [{', '.join(dims)}]")
        if dtypes is INDICES and value.dtype in (np.int64, np.uint64) and not isinstance(value, jax.Array):
            # NumPy's default integer. Out-of-range values stay out of range: narrowing must not wrap one onto a live
            # row.
            lowest = -1 if value.dtype == np.int64 else 0
            value = np.clip(value, lowest, np.iinfo(np.int32).max).astype(np.int32)
        if isinstance(value, np.ndarray) and np.dtype(value.dtype).kind in "OSUMm":
            raise TypeError(f"{self._where(name)} has dtype {value.dtype}, must be {' or '.join(dtypes)}")
        value = jnp.asarray(value)
        if value.dtype.name not in dtypes:
            raise TypeError(f"{self._where(name)} has dtype {value.dtype.name}, must be {' or '.join(dtypes)}")
        self.shape(name, value.shape, dims)
        return value

    def rank(self, value) -> int:
        """The rank of an array that is yet to be checked; 1 if it is none."""
        return max(np.ndim(value), 1) if isinstance(value, (list, tuple, np.ndarray, jax.Array)) else 1

    def indices(self, name: str, value, dims: Sequence[str]) -> jax.Array:
        """An int32 array of row numbers; unsigned ones past int32 become negative, which is foreign as well."""
        return self.array(name, value, dims, INDICES).astype(jnp.int32)

    def offsets(self, name: str, value, dims: Sequence[str], total_seq_len: int) -> jax.Array:
        """An int32 array of token offsets; unsigned ones past int32 become `total_seq_len`."""
        offsets = self.array(name, value, dims, INDICES)
        if offsets.dtype == jnp.uint32:
            offsets = jnp.minimum(offsets, jnp.uint32(total_seq_len)).astype(jnp.int32)
        return offsets

    def flags(self, name: str, value, batch_size: int) -> jax.Array:
        """A bool array `[batch_size]`; None is all true."""
        if value is None:
            if not isinstance(batch_size, int):  # a symbolic dimension under jax.export
                return jnp.ones((batch_size,), bool)
            return jnp.asarray(np.ones((batch_size,), bool))  # a constant of the program, not an operation in it
        return self.array(name, value, ("batch_size",), ("bool",))

    def shape(self, name: str, shape: tuple[int, ...], dims: Sequence[str]) -> None:
        """Check one shape against named dimensions."""
        if len(shape) != len(dims):
            raise ValueError(
                f"{self._where(name)} has shape {shape}, must be [{', '.join(dims)}] ({len(dims)} dimensions)"
            )
        for size, dim in zip(shape, dims, strict=True):
            expected = self.sizes.setdefault(dim, size)
            source = self._fixed_by.setdefault(dim, name)
            if size != expected:
                raise ValueError(
                    f"{self._where(name)} has shape {shape}, must be [{', '.join(dims)}] with {dim} = {expected} "
                    f"(from {source})"
                )

    def derive(self, dim: str, size: int, source: str) -> None:
        """Fix a dimension that follows from another one."""
        self.sizes.setdefault(dim, size)
        self._fixed_by.setdefault(dim, source)

    def wrong_shape(self, name: str, shape: tuple[int, ...], must_be: str) -> ValueError:
        """The error for a shape that no comparison of dimensions describes."""
        return ValueError(f"{self._where(name)} has shape {shape}, must be {must_be}")

    def choice(self, name: str, value, choices: Sequence) -> None:
        """Check an option against its allowed values."""
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ValueError(f"{self._where(name)} is {value!r}, must be one of {', '.join(map(repr, choices))}")

    def implementation(self, value: str | None) -> None:
        """Check the name of an implementation."""
        self.choice("implementation", value, (None, *IMPLEMENTATIONS))

    def fused_rows(self, name: str, conv_dim: int, shape: tuple[int, ...]) -> None:
        """Derive num_key_heads from a fused `[Q | K | V]` row and the pool's heads, which must be known already."""
        nv, kd, vd = (self.sizes[d] for d in ("num_value_heads", "key_head_dim", "value_head_dim"))
        key_channels = conv_dim - nv * vd
        nk = key_channels // (2 * kd) if kd else 0
        if key_channels <= 0 or nk * 2 * kd != key_channels or nv % nk:
            raise self.wrong_shape(
                name,
                shape,
                "[total_seq_len, 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim] with "
                f"num_value_heads = {nv}, key_head_dim = {kd}, value_head_dim = {vd} (from recurrent_state) and a "
                "num_key_heads that divides num_value_heads",
            )
        self.derive("num_key_heads", nk, name)

    def _where(self, name: str) -> str:
        return f"{self.operation}: {name}"
