"""Named shapes, and the inputs that tests and benchmarks run on them.

A shape is a geometry of heads (``HEADS``) and a ragged batch (``ROWS``). Inputs come as NumPy
arrays from a seed, so that the oracle, an implementation and another library's can be given the
same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np

FLOAT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True)
class Heads:
    """The geometry of one layer's mixer."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int = 4

    @property
    def group_size(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.value_dim

    @property
    def record_elements(self) -> int:
        return self.key_head_dim + self.group_size * (self.value_head_dim + 1)

    def state_shape(self, max_slots: int) -> tuple[int, int, int, int]:
        return (max_slots, self.num_value_heads, self.key_head_dim, self.value_head_dim)

    def conv_state_shape(self, max_slots: int) -> tuple[int, int, int]:
        return (max_slots, self.conv_dim, self.kernel_size - 1)

    def ring_shape(self, ring_rows: int, ring_len: int, padding: int = 0) -> tuple[int, ...]:
        return (ring_rows, self.num_key_heads, ring_len, self.record_elements + padding)


HEADS = {
    "small": Heads(2, 6, 32, 32),
    "small_64": Heads(2, 6, 64, 64),
    "ungrouped": Heads(2, 2, 16, 16),
    "wide_key": Heads(2, 4, 64, 32),
    "wide_value": Heads(2, 4, 32, 64),
    "full_head": Heads(1, 2, 128, 128),
    "many_heads": Heads(16, 48, 16, 16),
    # Qwen3.5 and Qwen3-Next layers, whole and as one rank of eight holds them.
    "qwen3.5": Heads(16, 32, 128, 128),
    "qwen3.5_large": Heads(16, 48, 128, 128),
    "qwen3.5_rank": Heads(2, 8, 128, 128),
}

ROWS = {
    # What the tests run.
    "mixed": (5, 0, 1, 70, 17, 3),
    "windows": (4, 1, 0, 8, 5),
    # What the benchmarks run.
    **{f"decode_{batch}": (1,) * batch for batch in (1, 8, 32, 64, 128, 256)},
    **{f"window4_{batch}": (4,) * batch for batch in (1, 8, 32, 64, 128, 256)},
    **{f"prefill_1x{length}": (length,) for length in (512, 1024, 2048, 8192, 32768)},
    "prefill_8x1024": (1024,) * 8,
    "prefill_4x8192": (8192,) * 4,
    "prefill_64x128": (128,) * 64,
}


def row_offsets(lengths: Sequence[int], start: int = 0) -> np.ndarray:
    """Cumulative ``int32`` offsets of rows of these lengths, the first beginning at ``start``."""
    return np.cumsum([start, *lengths], dtype=np.int32)


def spread_slots(batch_size: int, max_slots: int, seed: int = 0) -> np.ndarray:
    """Distinct slots in no particular order."""
    return np.random.default_rng(seed).permutation(max_slots)[:batch_size].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What one layer feeds the recurrence for ``T`` tokens."""

    qkv: np.ndarray  # [T, conv_dim]
    decay: np.ndarray  # [T, nv] float32
    beta: np.ndarray  # [T, nv] float32

    def __getitem__(self, tokens) -> Tokens:
        return Tokens(self.qkv[tokens], self.decay[tokens], self.beta[tokens])

    def __iter__(self):
        return iter((self.qkv, self.decay, self.beta))


def trained_tokens(heads: Heads, num_tokens: int, dtype: str = "float32", seed: int = 0) -> Tokens:
    """Inputs like a trained model's: decay in 0.9..1, most of it near 1, and beta in 0..1."""
    rng = np.random.default_rng(seed)
    nv = heads.num_value_heads
    qkv = rng.standard_normal((num_tokens, heads.conv_dim), np.float32)
    decay = 1.0 - 0.1 * rng.random((num_tokens, nv)) ** 3
    beta = rng.random((num_tokens, nv))
    return Tokens(qkv.astype(FLOAT_DTYPES[dtype]), decay.astype(np.float32), beta.astype(np.float32))


def resetting_tokens(heads: Heads, num_tokens: int, dtype: str = "float32", seed: int = 0) -> Tokens:
    """Decays of exactly 0, of numbers that products underflow on, and of 1, mixed."""
    tokens = trained_tokens(heads, num_tokens, dtype, seed)
    rng = np.random.default_rng(seed + 1)
    values = np.array([0.0, 1e-45, 1e-38, 1e-12, 1.0], np.float32)
    decay = rng.choice(values, tokens.decay.shape, p=[0.05, 0.05, 0.05, 0.05, 0.8])
    return dataclasses.replace(tokens, decay=decay)


def repeated_keys(
    heads: Heads, num_tokens: int, dtype: str = "float32", seed: int = 0, alternate: bool = False
) -> Tokens:
    """One key for every token (its sign alternating, if asked), beta 1 and decay 1."""
    tokens = trained_tokens(heads, num_tokens, dtype, seed)
    qkv = tokens.qkv.copy()
    keys = slice(heads.num_key_heads * heads.key_head_dim, 2 * heads.num_key_heads * heads.key_head_dim)
    qkv[:, keys] = qkv[:1, keys]
    if alternate:
        qkv[1::2, keys] = -qkv[1::2, keys]
    return Tokens(qkv, np.ones_like(tokens.decay), np.ones_like(tokens.beta))


def zero_rows(heads: Heads, num_tokens: int, dtype: str = "float32", seed: int = 0) -> Tokens:
    """Every third token has q = k = 0, every third a q and k of norm about 1e-4."""
    tokens = trained_tokens(heads, num_tokens, dtype, seed)
    qkv = tokens.qkv.copy()
    queries_and_keys = slice(0, 2 * heads.num_key_heads * heads.key_head_dim)
    qkv[0::3, queries_and_keys] = 0
    small = qkv[1::3, queries_and_keys].astype(np.float32) * 1e-4 / heads.key_head_dim**0.5
    qkv[1::3, queries_and_keys] = small.astype(qkv.dtype)
    return dataclasses.replace(tokens, qkv=qkv)


def state_pool(heads: Heads, max_slots: int, dtype: str = "float32", seed: int = 100) -> np.ndarray:
    rng = np.random.default_rng(seed)
    pool = 0.3 * rng.standard_normal(heads.state_shape(max_slots), np.float32)
    return pool.astype(FLOAT_DTYPES[dtype])


def conv_inputs(
    heads: Heads,
    num_tokens: int,
    max_slots: int,
    dtype: str = "float32",
    state_dtype: str = "float32",
    weight_dtype: str = "float32",
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``(tokens, weight, bias, window pool)`` of the conv pass."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, heads.conv_dim), np.float32)
    weight = 0.5 * rng.standard_normal((heads.conv_dim, heads.kernel_size), np.float32)
    bias = 0.1 * rng.standard_normal(heads.conv_dim, np.float32)
    pool = rng.standard_normal(heads.conv_state_shape(max_slots), np.float32)
    return (
        x.astype(FLOAT_DTYPES[dtype]),
        weight.astype(FLOAT_DTYPES[weight_dtype]),
        bias.astype(FLOAT_DTYPES[weight_dtype]),
        pool.astype(FLOAT_DTYPES[state_dtype]),
    )
