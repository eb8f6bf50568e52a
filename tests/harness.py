"""How tests call an operation, what "equal" means, and what poison is."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from tests import shapes

# The contract's budgets: relative error against the oracle, by algorithm and token dtype.
OUTPUT_BUDGET = {
    ("recurrent", "float32"): 2e-6,
    ("recurrent", "bfloat16"): 3e-3,
    ("recurrent", "float16"): 5e-4,
    ("chunked", "float32"): 1e-3,
    ("chunked", "bfloat16"): 6e-3,
    ("chunked", "float16"): 6e-3,
}
# One rounding of the final state to the pool's dtype, on top of what the algorithm costs.
POOL_ROUNDING = {"float32": 0.0, "bfloat16": 3e-3, "float16": 5e-4}


def state_budget(algorithm: str, token_dtype: str, pool_dtype: str) -> float:
    """Recurrent states are float32 throughout, whatever the tokens were rounded to."""
    if algorithm == "recurrent":
        return OUTPUT_BUDGET["recurrent", "float32"] + POOL_ROUNDING[pool_dtype]
    return OUTPUT_BUDGET[algorithm, token_dtype] + POOL_ROUNDING[pool_dtype]


def relative_error(value, reference) -> float:
    value = np.asarray(value).astype(np.float64)
    reference = np.asarray(reference).astype(np.float64)
    assert value.shape == reference.shape, (value.shape, reference.shape)
    norm = np.linalg.norm(reference)
    distance = np.linalg.norm(value - reference)
    return float(distance / norm) if norm else float(distance)


def assert_close(value, reference, budget: float, what: str = "") -> None:
    error = relative_error(value, reference)
    # Written so that NaN fails.
    assert error <= budget, f"{what}: relative error {error:.3g} is over the budget {budget:.3g}"


def bits(array) -> np.ndarray:
    array = np.ascontiguousarray(np.asarray(array))
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(value, reference, what: str = "") -> None:
    value, reference = np.asarray(value), np.asarray(reference)
    assert value.shape == reference.shape, (what, value.shape, reference.shape)
    assert value.dtype == reference.dtype, (what, value.dtype, reference.dtype)
    differs = bits(value) != bits(reference)
    if differs.any():
        where = tuple(int(i) for i in np.argwhere(differs)[0])
        raise AssertionError(
            f"{what}: {differs.sum()} of {differs.size} elements differ in their bits, "
            f"first at {where}: {value[where]!r} against {reference[where]!r}"
        )


def assert_zero(value, what: str = "") -> None:
    value = np.asarray(value).astype(np.float64)
    assert np.all(value == 0), f"{what}: {np.count_nonzero(value != 0)} elements are not zero"


POISONS = {"nan": np.nan, "sentinel": 777.0}


def poisoned(pool: np.ndarray, live_rows, poison: str) -> np.ndarray:
    """The pool with every row outside ``live_rows`` filled with NaN or with a finite sentinel."""
    dead = np.setdiff1d(np.arange(pool.shape[0]), np.asarray(live_rows, int))
    pool = pool.copy()
    pool[dead] = POISONS[poison]
    return pool


def assert_other_rows_kept(new_pool, pool, live_rows, what: str = "pool") -> None:
    dead = np.setdiff1d(np.arange(pool.shape[0]), np.asarray(live_rows, int))
    assert_same_bits(np.asarray(new_pool)[dead], pool[dead], f"{what} rows nobody named")


def memory_of(compiled):
    """The memory analysis of a compiled program, which every platform that the suite runs on has."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis


def programs_of(jitted: Any) -> int:
    """How many programs a jitted function has compiled."""
    return jitted._cache_size()


def devices(count: int) -> list:
    """The first devices. `conftest.py` makes as many of a CPU as tests ask for; of GPUs there may be one."""
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} GPUs, this machine has {len(jax.devices())}")
    return jax.devices()[:count]


def ring_of(heads, ring_rows: int, ring_len: int, padding: int = 0, fill: float = np.nan):
    return np.full(heads.ring_shape(ring_rows, ring_len, padding), fill, np.float32)


def small_heads(variant):
    """A small geometry that this (implementation, algorithm) serves."""
    implementation, algorithm = variant
    small = shapes.HEADS["small"]
    return small if implementation.name_for(small, algorithm) else shapes.HEADS["small_64"]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One row of the implementation table, called by name, NumPy in and NumPy out.

    A GPU kernel refuses shapes that it does not serve. Such a call is still a test: it must refuse
    by name, and the automatic choice must give the right value.
    """

    name: str

    def serves(self, heads: tuple[int, int], algorithm: str = "auto", precision: str | None = None) -> bool:
        """Whether the recurrence, its verify and its fold take these ``(key_head_dim, value_head_dim)``."""
        if self.name != "mosaic_gpu":
            return True
        if algorithm == "chunked":
            return precision is None and all(dim in (64, 128, 256) for dim in heads)
        return all(dim % 16 == 0 and 16 <= dim <= 256 for dim in heads)

    def name_for(self, heads, algorithm: str = "auto") -> str | None:
        """The name to ask for, or None, the automatic choice, where this implementation would refuse."""
        dims = heads.key_head_dim, heads.value_head_dim
        return self.name if self.serves(dims, algorithm) else None

    def refuses(self, operation: str, arguments, options) -> bool:
        if operation == "gated_delta_conv1d_fwd":
            return False
        kernel = self.name in ("mosaic_gpu", "triton")
        if operation == "gated_delta_recurrence_verify_ring" and kernel and 0 in arguments[4].shape:
            return True
        pool = arguments[0] if operation == "gated_delta_state_fold" else arguments[3]
        if self.name == "triton":
            return options.get("algorithm") == "chunked" and np.shape(pool)[-2] > 128
        selection = {name: options[name] for name in ("algorithm", "precision") if name in options}
        return not self.serves(np.shape(pool)[-2:], **selection)

    def call(self, operation: str, *arguments, **options) -> tuple[np.ndarray, ...]:
        function = getattr(gdn_jax, operation)
        arguments = [jnp.asarray(argument) for argument in arguments]
        options = {
            name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()
        }
        chosen: str | None = self.name
        if self.refuses(operation, arguments, options):
            with pytest.raises(NotImplementedError, match=self.name):
                function(*arguments, implementation=self.name, **options)
            chosen = None
        results = function(*arguments, implementation=chosen, **options)
        if not isinstance(results, tuple):
            results = (results,)
        return tuple(np.asarray(result) for result in results)

    def recurrence(self, tokens, pool, slot_idx, offsets, **options) -> Any:
        return self.call("gated_delta_recurrence_fwd", *tokens, pool, slot_idx, offsets, **options)

    def verify(self, tokens, pool, ring, slot_idx, ring_slot_idx, offsets, **options) -> Any:
        return self.call(
            "gated_delta_recurrence_verify_ring",
            *tokens,
            pool,
            ring,
            slot_idx,
            ring_slot_idx,
            offsets,
            **options,
        )

    def fold(self, pool, ring, row_ids, ring_row_ids, num_accepted, **options) -> np.ndarray:
        (pool,) = self.call("gated_delta_state_fold", pool, ring, row_ids, ring_row_ids, num_accepted, **options)
        return pool

    def conv1d(self, x, weight, pool, slot_idx, offsets, **options) -> Any:
        return self.call("gated_delta_conv1d_fwd", x, weight, pool, slot_idx, offsets, **options)
