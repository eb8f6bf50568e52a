"""Inputs that broke other Gated DeltaNet stacks, one test for each."""

# Arguments are NumPy arrays as often as JAX arrays, and come unpacked from tuples.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import itertools
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gdn_jax
from gdn_jax.flax import GatedDeltaNet, GatedDeltaNetConfig
from tests import oracle, shapes
from tests.conftest import VARIANTS
from tests.harness import (
    OUTPUT_BUDGET,
    POISONS,
    Implementation,
    assert_close,
    assert_other_rows_kept,
    assert_same_bits,
    assert_zero,
    memory_of,
    poisoned,
    programs_of,
    ring_of,
    small_heads,
    state_budget,
)

SMALL = shapes.HEADS["small"]
RING_LEN = 8


# --- slots


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    "slots", [np.array([-1, 3], np.int32), np.array([2**32 - 1, 3], np.uint32)], ids=["int", "uint"]
)
def test_slots_1(implementation, slots, poison):
    """A padding row of -1 does not wrap onto the last slot."""
    tokens = shapes.trained_tokens(SMALL, 8, seed=1)
    offsets = shapes.row_offsets((5, 3))
    pool = poisoned(shapes.state_pool(SMALL, 5), [3], poison)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets)

    out, new_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm="recurrent")
    assert_zero(out[:5])
    assert_close(out, expected_out, 2e-6)
    assert_close(new_pool[3], expected_pool[3], 2e-6)
    assert_other_rows_kept(new_pool, pool, [3])

    x, weight, bias, windows = shapes.conv_inputs(SMALL, 8, 5)
    windows = poisoned(windows, [3], poison)
    out, new_windows = implementation.conv1d(x, weight, windows, slots, offsets, bias=bias)
    expected, _ = oracle.conv1d(x, weight, windows, slots, offsets, bias=bias)
    assert_zero(out[:5])
    assert_close(out, expected, 2e-6)
    assert_other_rows_kept(new_windows, windows, [3])

    ring = ring_of(SMALL, 5, RING_LEN, fill=POISONS[poison])
    out, new_ring, kept = implementation.verify(tokens, pool, ring, slots, slots, offsets)
    assert_zero(out[:5])
    assert_close(out, expected_out, 2e-6)
    assert_same_bits(kept, pool)
    assert_other_rows_kept(new_ring, ring, [3], "ring")

    accepted = np.array([3, 3], np.int32)
    named = np.array([[1, 3]], np.int32)
    for row_ids, ring_row_ids in ((slots[None], named), (named, slots[None])):
        folded = implementation.fold(pool, new_ring, row_ids, ring_row_ids, accepted)
        assert_close(folded[3], expected_pool[3], 2e-6)
        assert_other_rows_kept(folded, pool, [3])


def test_slots_2(implementation):
    """A batch padded to 8 rows gives the bits of the batch of 5."""
    max_slots = 11
    lengths = (1, 9, 0, 3, 12)
    tokens = shapes.trained_tokens(SMALL, sum(lengths), seed=2)
    pool = shapes.state_pool(SMALL, max_slots)
    windows = shapes.conv_inputs(SMALL, sum(lengths), max_slots)
    slots = shapes.spread_slots(5, max_slots)
    offsets = shapes.row_offsets(lengths)
    padded_slots = np.array([*slots, -1, max_slots, 2**31 - 1], np.int32)
    one_past = np.array([*slots, max_slots + 1, -1, -1], np.int32)
    padded_offsets = np.array([*offsets, *[offsets[-1]] * 3], np.int32)

    def everything(slots, offsets, ring_slots):
        ring = ring_of(SMALL, max_slots, RING_LEN)
        out, new_pool = gdn_jax.gated_delta_recurrence_fwd(
            *tokens, pool, slots, offsets, implementation=implementation.name
        )
        x, weight, bias, conv_pool = windows
        conv_out, new_windows = gdn_jax.gated_delta_conv1d_fwd(
            x, weight, conv_pool, slots, offsets, bias=bias, implementation=implementation.name
        )
        verified, ring, _ = gdn_jax.gated_delta_recurrence_verify_ring(
            *tokens, pool, ring, slots, ring_slots, offsets, implementation=implementation.name
        )
        folded = gdn_jax.gated_delta_state_fold(
            pool,
            ring,
            slots[None],
            ring_slots[None],
            jnp.full(slots.shape, 1, jnp.int32),
            implementation=implementation.name,
        )
        return out, new_pool, conv_out, new_windows, verified, ring, folded

    everything = jax.jit(everything)
    exact = everything(slots, offsets, slots)
    for padding in (padded_slots, one_past):
        for value, reference in zip(everything(padding, padded_offsets, padding), exact, strict=True):
            assert_same_bits(value, reference)


def test_slots_3(implementation):
    """A slot that a finished request left as NaN does not reach the next request in it."""
    tokens = shapes.trained_tokens(SMALL, 20, seed=3)
    x, weight, bias, windows = shapes.conv_inputs(SMALL, 20, 4)
    clean, clean_windows = np.zeros(SMALL.state_shape(4), np.float32), np.zeros_like(windows)
    slots, offsets = np.array([2], np.int32), np.array([0, 20], np.int32)
    fresh = np.array([False])

    _, used = implementation.recurrence(tokens, clean, slots, offsets)
    expected_out, expected_pool = implementation.recurrence(tokens, clean, slots, offsets)
    conv_out, conv_windows = implementation.conv1d(x, weight, clean_windows, slots, offsets, bias=bias)
    # The slot alone, and every other one too: an implementation that reads a stand-in row must not mind it either.
    for nan_rows in ([2], [0, 1, 2, 3]):
        used = np.array(used)
        used[nan_rows] = np.nan
        out, new_pool = implementation.recurrence(tokens, used, slots, offsets, has_initial_state=fresh)
        assert_same_bits(out, expected_out)
        assert_same_bits(new_pool[2], expected_pool[2])
        assert_other_rows_kept(new_pool, used, [2])

        windows = clean_windows.copy()
        windows[nan_rows] = np.nan
        out, new_windows = implementation.conv1d(x, weight, windows, slots, offsets, bias=bias, has_initial_state=fresh)
        assert_same_bits(out, conv_out)
        assert_same_bits(new_windows[2], conv_windows[2])
        assert_other_rows_kept(new_windows, windows, [2])


def test_slots_4(implementation):
    """A slot past the pool is not taken modulo the pool."""
    tokens = shapes.trained_tokens(SMALL, 8, seed=4)
    pool = shapes.state_pool(SMALL, 26)
    both = np.array([5, 6947], np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, both, shapes.row_offsets((3, 5)))
    alone_out, alone_pool = implementation.recurrence(tokens[:3], pool, both[:1], shapes.row_offsets((3,)))
    assert_same_bits(out[:3], alone_out)
    assert_zero(out[3:])
    assert_same_bits(new_pool, alone_pool)


def test_slots_5(implementation):
    """Two rows that name one slot leave every other slot exact."""
    tokens = shapes.trained_tokens(SMALL, 12, seed=5)
    pool = shapes.state_pool(SMALL, 5)
    slots, offsets = np.array([3, 3, 1], np.int32), shapes.row_offsets((4, 3, 5))
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets)
    out, new_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm="recurrent")
    assert_close(out[7:], expected_out[7:], 2e-6)
    assert_close(new_pool[1], expected_pool[1], 2e-6)
    assert_other_rows_kept(new_pool, pool, [1, 3])

    x, weight, _, windows = shapes.conv_inputs(SMALL, 12, 5)
    out, new_windows = implementation.conv1d(x, weight, windows, slots, offsets)
    expected_out, expected_windows = oracle.conv1d(x, weight, windows, slots, offsets)
    assert_close(out[7:], expected_out[7:], 2e-6)
    assert_close(new_windows[1], expected_windows[1], 2e-6)
    assert_other_rows_kept(new_windows, windows, [1, 3])


# --- widths


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["xla", "mosaic_gpu", None])
def test_width_1(name):
    """Rows of a pool whose elements pass 2**31 (8.6 GB) are the rows they say they are."""
    heads = shapes.HEADS["qwen3.5_large"]
    rows, slots = 2733, np.array([2730, 2731, 2732], np.int32)
    tokens = shapes.trained_tokens(heads, 9, "bfloat16", seed=6)
    offsets = jnp.asarray(shapes.row_offsets((4, 2, 3)))
    held = jnp.asarray(shapes.state_pool(heads, 3))
    tokens = [jnp.asarray(array) for array in tokens]

    def recurrence(pool, slots):
        return gdn_jax.gated_delta_recurrence_fwd(
            *tokens, pool, slots, offsets, algorithm="recurrent", implementation=name
        )

    expected_out, expected = jax.jit(recurrence)(held, jnp.arange(3, dtype=jnp.int32))
    make = jax.jit(lambda held: jnp.zeros(heads.state_shape(rows)).at[slots].set(held))
    pool = make(held)
    out, pool = jax.jit(recurrence, donate_argnums=0)(pool, jnp.asarray(slots))
    assert_same_bits(out, expected_out)
    assert_same_bits(pool[2730:], expected)
    assert not jnp.any(pool[:2730]).item()


@pytest.mark.parametrize("batch_size", [1366, 2048])
def test_width_2(implementation, batch_size):
    """B * nv past 65,535."""
    check_width_2(implementation, "recurrent", batch_size)


def test_width_2_chunked(chunked):
    check_width_2(*chunked, 1366)


def check_width_2(implementation, algorithm, batch_size):
    heads = shapes.HEADS["many_heads"]
    assert batch_size * heads.num_value_heads > 65535
    tokens = shapes.trained_tokens(heads, batch_size, seed=7)
    pool = shapes.state_pool(heads, batch_size + 1)
    slots = shapes.spread_slots(batch_size, batch_size + 1)
    offsets = np.arange(batch_size + 1, dtype=np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets)
    assert_close(out, expected_out, OUTPUT_BUDGET[algorithm, "float32"])
    # Row by row: one wrong row of thousands must not drown.
    errors = np.linalg.norm((new_pool - expected_pool).reshape(batch_size + 1, -1), axis=1)
    norms = np.linalg.norm(expected_pool.reshape(batch_size + 1, -1), axis=1)
    assert np.max(errors / norms) <= state_budget(algorithm, "float32", "float32")
    assert_other_rows_kept(new_pool, pool, slots)


# --- verify and fold


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accepted", [3, 4, 5, 8])
def test_verify_1(implementation, accepted, pool_dtype):
    """A fold of part of a window is the forward over that part, also where it wraps no ring."""
    windows = tuple(length for length in (5, 6, 7, 8) if length >= accepted)
    # One shape for all four counts.
    lengths = windows + (0,) * (4 - len(windows))
    tokens = shapes.trained_tokens(SMALL, 26, seed=8)
    pool = shapes.state_pool(SMALL, 6, pool_dtype)
    slots, ring_slots = np.array([5, 0, 3, 1], np.int32), np.array([2, 3, 0, 1], np.int32)
    offsets = shapes.row_offsets(lengths)
    ring = ring_of(SMALL, 4, RING_LEN)
    _, ring, kept = implementation.verify(tokens, pool, ring, slots, ring_slots, offsets)
    assert_same_bits(kept, pool)
    counts = np.where(np.array(lengths) > 0, accepted, 0).astype(np.int32)
    folded = implementation.fold(pool, ring, slots[None], ring_slots[None], counts)
    for b, length in enumerate(lengths):
        if not length:
            continue
        prefix = np.array([offsets[b], offsets[b] + accepted], np.int32)
        _, expected = implementation.recurrence(tokens, pool, slots[b : b + 1], prefix, algorithm="recurrent")
        assert_same_bits(folded[slots[b]], expected[slots[b]], f"window of {length}")


def test_verify_2(implementation):
    """What an earlier, longer window left in the ring is not folded."""
    first = shapes.trained_tokens(SMALL, 4, seed=9)
    second = shapes.trained_tokens(SMALL, 1, seed=10)
    pool = shapes.state_pool(SMALL, 4)
    slot, ring_slot = np.array([2], np.int32), np.array([1], np.int32)
    ring = ring_of(SMALL, 3, RING_LEN)
    _, ring, _ = implementation.verify(first, pool, ring, slot, ring_slot, np.array([0, 4], np.int32))
    one = np.array([0, 1], np.int32)
    _, ring, _ = implementation.verify(second, pool, ring, slot, ring_slot, one)
    fold = lambda count: implementation.fold(  # noqa: E731
        pool, ring, slot[None], ring_slot[None], np.array([count], np.int32)
    )
    assert_same_bits(fold(0), pool)
    _, expected = implementation.recurrence(second, pool, slot, one, algorithm="recurrent")
    assert_same_bits(fold(1), expected)


def test_verify_3(implementation):
    """Records past the accepted count never enter, not even multiplied by zero."""
    tokens = shapes.trained_tokens(SMALL, 2, seed=11)
    pool = shapes.state_pool(SMALL, 3)
    slot, ring_slot = np.array([0], np.int32), np.array([1], np.int32)
    offsets = np.array([0, 2], np.int32)
    for fill in (np.nan, np.inf, -np.inf):
        ring = ring_of(SMALL, 2, RING_LEN, fill=fill)
        _, ring, _ = implementation.verify(tokens, pool, ring, slot, ring_slot, offsets)
        ring = ring.copy()
        ring[1, :, 1] = fill
        one = np.array([1], np.int32)
        folded = implementation.fold(pool, ring, slot[None], ring_slot[None], one)
        assert np.isfinite(folded).all()
        expected, _ = oracle.recurrence(*tokens, pool, slot, np.array([0, 1], np.int32))[::-1]
        assert_close(folded, expected, 2e-6)


def test_verify_4(implementation):
    """Windows longer than the ring commit themselves; a fold of their length skips them."""
    lengths = (1, 4, RING_LEN, RING_LEN + 1, 600)
    tokens = shapes.trained_tokens(SMALL, sum(lengths), seed=12)
    pool = shapes.state_pool(SMALL, 8)
    slots = np.array([6, 1, 4, 0, 3], np.int32)
    ring_slots = np.array([0, 2, 4, 1, 3], np.int32)
    offsets = shapes.row_offsets(lengths)
    ring = ring_of(SMALL, 6, RING_LEN, fill=777.0)
    out, new_ring, new_pool = implementation.verify(tokens, pool, ring, slots, ring_slots, offsets)
    forward_out, forward_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm="recurrent")
    assert_same_bits(out, forward_out)
    assert_same_bits(new_pool[slots[3:]], forward_pool[slots[3:]], "long rows")
    assert_other_rows_kept(new_pool, pool, slots[3:])
    assert_other_rows_kept(new_ring, ring, ring_slots[:3], "ring")
    for b in range(3):
        window = slice(offsets[b], offsets[b + 1])
        alone_out, alone_ring, _ = implementation.verify(
            tokens[window],
            pool,
            ring,
            slots[b : b + 1],
            ring_slots[b : b + 1],
            np.array([0, lengths[b]], np.int32),
        )
        assert_same_bits(out[window], alone_out)
        assert_same_bits(new_ring[ring_slots[b]], alone_ring[ring_slots[b]])
    folded = implementation.fold(new_pool, new_ring, slots[None], ring_slots[None], np.array(lengths, np.int32))
    assert_same_bits(folded, forward_pool)


@pytest.mark.parametrize("count", [0, -1, RING_LEN + 1, 2**31 - 1])
def test_verify_5(implementation, count):
    """Counts that name no records leave the row's bits alone, fresh or not."""
    pool = shapes.state_pool(SMALL, 3)
    pool[1, 0, 0, 0] = np.nan
    for fill in (np.nan, 777.0):
        ring = ring_of(SMALL, 2, RING_LEN, fill=fill)
        for flag in (True, False):
            folded = implementation.fold(
                pool,
                ring,
                np.array([[1]], np.int32),
                np.array([[0]], np.int32),
                np.array([count], np.int32),
                has_initial_state=np.array([flag]),
            )
            assert_same_bits(folded, pool)


# --- splits

SPLITS = [(130,), (64, 66), (1, 129), (129, 1), (3, 127), (2,) * 65]


def test_split_1(variant):
    """However a sequence is cut into calls, outputs and states are the same."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.trained_tokens(heads, 130, seed=13)
    pool = shapes.state_pool(heads, 2)
    slot = np.array([1], np.int32)
    whole = implementation.recurrence(tokens, pool, slot, np.array([0, 130], np.int32), algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slot, [0, 130])
    for split in SPLITS:
        offsets = shapes.row_offsets(split)
        outs, state = [], pool
        for start, end in itertools.pairwise(offsets):
            if algorithm == "recurrent":
                # A buffer of exactly these tokens: what a caller's prefill and decode would pass.
                part, row = tokens[start:end], [0, end - start]
            else:
                # One buffer for all pieces spares a compilation for each length.
                part, row = tokens, [start, end]
            out, state = implementation.recurrence(part, state, slot, np.array(row, np.int32), algorithm=algorithm)
            out = out if algorithm == "recurrent" else out[start:end]
            outs.append(out)
        out = np.concatenate(outs)
        if algorithm == "recurrent":
            assert_same_bits(out, whole[0], f"outputs of {split}")
            assert_same_bits(state, whole[1], f"states of {split}")
        assert_close(out, expected_out, OUTPUT_BUDGET[algorithm, "float32"], f"{split}")
        budget = state_budget(algorithm, "float32", "float32")
        assert_close(state[1], expected_pool[1], budget, f"{split}")


def test_split_1_conv(implementation):
    x, weight, bias, pool = shapes.conv_inputs(SMALL, 130, 2)
    slot = np.array([1], np.int32)
    options = {"bias": bias, "activation": "silu"}
    whole = implementation.conv1d(x, weight, pool, slot, np.array([0, 130], np.int32), **options)
    expected_out, expected_pool = oracle.conv1d(x, weight, pool, slot, [0, 130], **options)
    assert_close(whole[0], expected_out, 2e-6)
    assert_close(whole[1], expected_pool, 0)
    for split in SPLITS:
        offsets = shapes.row_offsets(split)
        outs, state = [], pool
        for start, end in itertools.pairwise(offsets):
            row = np.array([0, end - start], np.int32)
            out, state = implementation.conv1d(x[start:end], weight, state, slot, row, **options)
            outs.append(out)
        assert_same_bits(np.concatenate(outs), whole[0], f"outputs of {split}")
        assert_same_bits(state, whole[1], f"states of {split}")


SPLIT_2_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200)


@pytest.mark.parametrize("token_dtype", ["float32", "bfloat16"])
def test_split_2(chunked, token_dtype):
    """A chunked prefill of any length, then decode, stays within the budget."""
    heads = small_heads(chunked)
    implementation, algorithm = chunked
    pool = shapes.state_pool(heads, 2)
    slot = np.array([1], np.int32)
    longest = max(SPLIT_2_LENGTHS)
    tokens = shapes.trained_tokens(heads, longest + 8, token_dtype, seed=14)
    # A buffer of exactly the row for three of the lengths; the rest share one buffer, and so one compilation.
    for length in SPLIT_2_LENGTHS:
        size = length if length in (1, 65, longest) else longest
        out, state = implementation.recurrence(
            tokens[:size], pool, slot, np.array([0, length], np.int32), algorithm=algorithm
        )
        outs = [out[:length]]
        for t in range(length, length + 8):
            out, state = implementation.recurrence(
                tokens[t : t + 1], state, slot, np.array([0, 1], np.int32), algorithm="recurrent"
            )
            outs.append(out)
        expected_out, expected_pool = oracle.recurrence(*tokens[: length + 8], pool, slot, [0, length + 8])
        budget = OUTPUT_BUDGET[algorithm, token_dtype]
        assert_close(np.concatenate(outs), expected_out, budget, f"outputs of {length}")
        assert_close(state[1], expected_pool[1], budget, f"states of {length}")


def test_split_3():
    """Rows of a right-padded batch come out of the Flax layer as each does alone."""
    config = GatedDeltaNetConfig(hidden_size=24, num_key_heads=2, num_value_heads=6, key_head_dim=16, value_head_dim=8)
    layer = GatedDeltaNet(config, rngs=nnx.Rngs(0), algorithm="recurrent")
    lengths = [8, 5, 1, 0]
    x = np.random.default_rng(30).standard_normal((4, 8, 24), np.float32)
    for b, length in enumerate(lengths):
        x[b, length:] = np.nan
    padded = layer(jnp.asarray(x), lengths=jnp.asarray(lengths, jnp.int32))
    for b, length in enumerate(lengths):
        assert_zero(padded[b, length:])
        if length:
            alone = layer(jnp.asarray(x[b : b + 1, :length]))
            assert_close(padded[b, :length], alone[0], 2e-6, f"row of {length}")


# --- ragged batches


@pytest.mark.parametrize("poison", POISONS)
def test_ragged_1(variant, poison):
    """Empty rows change no bit, wherever they stand, and a call without tokens returns."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    lengths = (0, 5, 0, 4, 0)
    slots = np.array([4, 2, 0, 5, 1], np.int32)
    tokens = shapes.trained_tokens(heads, 9, seed=15)
    pool = poisoned(shapes.state_pool(heads, 6), [2, 5], poison)
    offsets = shapes.row_offsets(lengths)
    out, new_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets)
    assert_close(out, expected_out, OUTPUT_BUDGET[algorithm, "float32"])
    assert_close(new_pool[[2, 5]], expected_pool[[2, 5]], OUTPUT_BUDGET[algorithm, "float32"])
    assert_other_rows_kept(new_pool, pool, [2, 5])

    nothing = shapes.trained_tokens(heads, 0)
    for batch_size in (5, 1):
        rows = np.zeros(batch_size + 1, np.int32)
        out, new_pool = implementation.recurrence(nothing, pool, slots[:batch_size], rows, algorithm=algorithm)
        assert out.shape == (0, heads.value_dim)
        assert_same_bits(new_pool, pool)


def test_ragged_1_conv(implementation):
    slots = np.array([4, 2, 0, 5, 1], np.int32)
    offsets = shapes.row_offsets((0, 5, 0, 4, 0))
    x, weight, _, pool = shapes.conv_inputs(SMALL, 9, 6)
    pool = poisoned(pool, [2, 5], "nan")
    out, new_pool = implementation.conv1d(x, weight, pool, slots, offsets)
    expected_out, expected_pool = oracle.conv1d(x, weight, pool, slots, offsets)
    assert_close(out, expected_out, 2e-6)
    assert_close(new_pool[[2, 5]], expected_pool[[2, 5]], 0)
    assert_other_rows_kept(new_pool, pool, [2, 5])
    for batch_size in (5, 1):
        rows = np.zeros(batch_size + 1, np.int32)
        out, new_pool = implementation.conv1d(x[:0], weight, pool, slots[:batch_size], rows)
        assert out.shape == (0, SMALL.conv_dim)
        assert_same_bits(new_pool, pool)


@pytest.mark.parametrize("last", [50, 0])
def test_ragged_2(variant, last):
    """A buffer longer than its rows: NaN in the tail reaches nothing."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    offsets = np.array([0, min(last, 30), last], np.int32)
    tokens = shapes.trained_tokens(heads, 64, seed=16)
    for array in tokens:
        array[last:] = np.nan
    pool = shapes.state_pool(heads, 3)
    slots = np.array([2, 0], np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets)
    assert_zero(out[last:])
    assert_close(out, expected_out, OUTPUT_BUDGET[algorithm, "float32"])
    assert_close(new_pool, expected_pool, OUTPUT_BUDGET[algorithm, "float32"])
    if not last:
        assert_same_bits(new_pool, pool)


def random_offsets(rng, batch_size, num_tokens):
    cuts = np.sort(rng.integers(0, num_tokens + 1, batch_size - 1))
    return np.array([0, *cuts, num_tokens], np.int32)


def test_ragged_3(implementation):
    """1000 splits through one compiled function, each right."""
    heads, batch_size, num_tokens = shapes.Heads(1, 2, 16, 16), 4, 12
    tokens = shapes.trained_tokens(heads, num_tokens, seed=17)
    pool = shapes.state_pool(heads, 6)
    traces = []

    @jax.jit
    def recurrence(slots, offsets):
        traces.append(None)
        return gdn_jax.gated_delta_recurrence_fwd(*tokens, pool, slots, offsets, implementation=implementation.name)

    rng = np.random.default_rng(18)
    for _ in range(1000):
        slots = rng.permutation(6)[:batch_size].astype(np.int32)
        offsets = random_offsets(rng, batch_size, num_tokens)
        out, new_pool = recurrence(slots, offsets)
        expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets)
        assert_close(out, expected_out, 2e-6, f"{slots} {offsets}")
        assert_close(new_pool, expected_pool, 2e-6, f"{slots} {offsets}")
    assert len(traces) == 1
    assert programs_of(recurrence) == 1


# --- gates, norms, heads


@pytest.mark.parametrize("length", [64, 200])
def test_gate_1(variant, length):
    """Decays whose products underflow; a decay of 0 is a reset."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.resetting_tokens(heads, length, seed=19)
    pool = shapes.state_pool(heads, 2)
    slot, offsets = np.array([0], np.int32), np.array([0, length], np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slot, offsets, algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slot, offsets)
    budget = OUTPUT_BUDGET[algorithm, "float32"]
    # Head by head, so that a head that lost its past cannot hide among the others.
    by_head = lambda x: np.asarray(x).reshape(length, heads.num_value_heads, -1).swapaxes(0, 1)  # noqa: E731
    for head, (value, reference) in enumerate(zip(by_head(out), by_head(expected_out), strict=True)):
        assert_close(value, reference, budget, f"head {head}")
        assert_close(new_pool[0, head], expected_pool[0, head], budget, f"state of head {head}")


def test_gate_1_reset(variant):
    """After a decay of 0, what came before has no influence, infinite or not a number though it be."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.trained_tokens(heads, 40, seed=20)
    tokens.decay[17] = 0
    slot, offsets = np.array([0], np.int32), np.array([0, 40], np.int32)
    out, new_pool = implementation.recurrence(tokens, shapes.state_pool(heads, 2), slot, offsets, algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens[17:], np.zeros(heads.state_shape(2)), slot, [0, 23])
    assert_close(out[17:], expected_out, OUTPUT_BUDGET[algorithm, "float32"])
    assert_close(new_pool[0], expected_pool[0], OUTPUT_BUDGET[algorithm, "float32"])


@pytest.mark.parametrize("alternate", [False, True])
def test_gate_2(variant, alternate):
    """One key 256 times with beta 1: the powers that a careless inverse takes overflow."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.repeated_keys(heads, 256, seed=21, alternate=alternate)
    pool = shapes.state_pool(heads, 2)
    slot, offsets = np.array([0], np.int32), np.array([0, 256], np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slot, offsets, algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slot, offsets)
    assert_close(out, expected_out, OUTPUT_BUDGET[algorithm, "float32"])
    assert_close(new_pool[0], expected_pool[0], OUTPUT_BUDGET[algorithm, "float32"])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norm_1(variant, scale):
    """The length of q and k does not matter, but for the epsilon."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.trained_tokens(heads, 70, seed=22)
    qkv = tokens.qkv.copy()
    qkv[:, : heads.conv_dim - heads.value_dim] *= np.float32(scale)
    scaled = shapes.Tokens(qkv, tokens.decay, tokens.beta)
    pool = shapes.state_pool(heads, 2)
    slot, offsets = np.array([0], np.int32), np.array([0, 70], np.int32)
    out, new_pool = implementation.recurrence(scaled, pool, slot, offsets, algorithm=algorithm)
    budget = OUTPUT_BUDGET[algorithm, "float32"]
    expected_out, expected_pool = oracle.recurrence(*scaled, pool, slot, offsets)
    assert_close(out, expected_out, budget)
    assert_close(new_pool[0], expected_pool[0], budget)
    if scale >= 1:
        unscaled_out, _ = oracle.recurrence(*tokens, pool, slot, offsets)
        assert_close(out, unscaled_out, max(budget, 1e-5))


def test_norm_2(variant):
    """The epsilon stands on the sum of squares; rows of zeros are no division by zero."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.zero_rows(heads, 60, seed=23)
    pool = shapes.state_pool(heads, 2)
    slot, offsets = np.array([0], np.int32), np.array([0, 60], np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slot, offsets, algorithm=algorithm)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slot, offsets)
    budget = OUTPUT_BUDGET[algorithm, "float32"]
    # A third of the rows each: of length 0, of length 1e-4, of ordinary length.
    assert_zero(out[0::3])
    assert_close(out[1::3], expected_out[1::3], budget, "short rows")
    assert_close(out[2::3], expected_out[2::3], budget, "ordinary rows")
    assert_close(new_pool[0], expected_pool[0], budget)


def test_norm_2_in_closed_form(variant):
    """One token on an empty state, against the formula itself."""
    implementation, algorithm = variant
    heads = shapes.HEADS["ungrouped"]
    tokens = shapes.trained_tokens(heads, 1, seed=24)
    tokens.qkv[:, :64] *= np.float32(1e-4)
    pool = np.zeros(heads.state_shape(1), np.float32)
    slot, offsets = np.array([0], np.int32), np.array([0, 1], np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slot, offsets, algorithm=algorithm)
    q, k, v = (x.astype(np.float64).reshape(2, 16) for x in np.split(tokens.qkv[0], 3))
    k_hat = k / np.sqrt(np.sum(k * k, axis=1, keepdims=True) + 1e-6)
    q_hat = q / np.sqrt(np.sum(q * q, axis=1, keepdims=True) + 1e-6) / 4.0
    delta = tokens.beta[0].astype(np.float64)[:, None] * v
    budget = OUTPUT_BUDGET[algorithm, "float32"]
    assert_close(new_pool[0], k_hat[:, :, None] * delta[:, None, :], budget)
    assert_close(out[0].reshape(2, 16), np.sum(q_hat * k_hat, 1, keepdims=True) * delta, budget)


def test_heads_1(variant):
    """Value head h reads key head h // group_size."""
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.trained_tokens(heads, 30, seed=25)
    qkv = tokens.qkv.copy()
    second_key = 3 * heads.key_head_dim
    qkv[:, second_key : second_key + heads.key_head_dim] = 0
    third_value = 3 * heads.value_head_dim
    without = shapes.Tokens(qkv, tokens.decay, tokens.beta)
    pool = shapes.state_pool(heads, 2)
    slot, offsets = np.array([0], np.int32), np.array([0, 30], np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slot, offsets, algorithm=algorithm)
    out_without, pool_without = implementation.recurrence(without, pool, slot, offsets, algorithm=algorithm)
    assert_same_bits(out_without[:, :third_value], out[:, :third_value], "value heads 0..2")
    assert_same_bits(pool_without[0, :3], new_pool[0, :3], "states 0..2")
    expected_out, expected_pool = oracle.recurrence(*without, pool, slot, offsets)
    budget = OUTPUT_BUDGET[algorithm, "float32"]
    assert_close(out_without[:, third_value:], expected_out[:, third_value:], budget, "value heads 3..5")
    assert_close(pool_without[0, 3:], expected_pool[0, 3:], budget, "states 3..5")


@pytest.mark.parametrize("heads_name", ["small", "wide_key"])
def test_heads_2(variant, heads_name):
    """From zeros, one token leaves ``outer(k_hat, delta)``, ``[KD, VD]`` and not its transpose."""
    implementation, algorithm = variant
    heads = shapes.HEADS[heads_name]
    tokens = shapes.trained_tokens(heads, 1, seed=26)
    pool = np.zeros(heads.state_shape(1), np.float32)
    _, new_pool = implementation.recurrence(
        tokens, pool, np.array([0], np.int32), np.array([0, 1], np.int32), algorithm=algorithm
    )
    _, k, v = oracle.split_heads(tokens.qkv, pool.shape)
    k_hat = np.repeat(k[0] / np.sqrt((k[0] ** 2).sum(-1, keepdims=True) + 1e-6), heads.group_size, 0)
    delta = tokens.beta[0].astype(np.float64)[:, None] * v[0]
    for head in range(heads.num_value_heads):
        expected = np.outer(k_hat[head], delta[head])
        assert_close(new_pool[0, head], expected, OUTPUT_BUDGET[algorithm, "float32"])


HEAD_DIMS = [
    *((dim, dim) for dim in (1, 8, 16, 24, 48, 64, 80, 96, 128, 192, 256)),
    *((128, 64), (64, 128), (24, 80), (256, 16), (1, 128), (96, 1)),
]


# The chunked form on a CPU is matrix products of any size, and slow to compile: fewer dims will do there.
FEWER_HEAD_DIMS = [(1, 1), (24, 24), (80, 80), (256, 256), (128, 64), (24, 80), (1, 128)]


@pytest.mark.parametrize(
    ("variant", "dims"),
    [
        pytest.param(entry.values[0], dims, marks=entry.marks, id=f"{entry.id}-{dims[0]}-{dims[1]}")
        for entry in VARIANTS
        for dims in (FEWER_HEAD_DIMS if entry.id == "xla-chunked" else HEAD_DIMS)
    ],
    indirect=["variant"],
)
def test_heads_3(variant, dims):
    """Every lane of every head counts: served exactly, or refused by name."""
    implementation, algorithm = variant
    key_head_dim, value_head_dim = dims
    heads = shapes.Heads(1, 2, key_head_dim, value_head_dim)
    tokens = shapes.trained_tokens(heads, 5, seed=27)
    last_lanes = tokens.qkv.copy()
    last_lanes[:, 2 * key_head_dim - 1] += 1  # The last lane of k.
    pool = shapes.state_pool(heads, 2)
    slot, offsets = np.array([1], np.int32), np.array([0, 5], np.int32)
    budget = OUTPUT_BUDGET[algorithm, "float32"]
    for qkv in (tokens.qkv, last_lanes):
        batch = shapes.Tokens(qkv, tokens.decay, tokens.beta)
        out, new_pool = implementation.recurrence(batch, pool, slot, offsets, algorithm=algorithm)
        expected_out, expected_pool = oracle.recurrence(*batch, pool, slot, offsets)
        assert_close(out, expected_out, budget)
        assert_close(new_pool[1], expected_pool[1], budget)
        assert_other_rows_kept(new_pool, pool, [1])


@pytest.mark.parametrize(("key_head_dim", "value_head_dim"), [(1, 1), (24, 80), (48, 48), (256, 16)])
def test_heads_3_verify_and_fold(implementation, key_head_dim, value_head_dim):
    heads = shapes.Heads(1, 2, key_head_dim, value_head_dim)
    tokens = shapes.trained_tokens(heads, 5, seed=27)
    pool = shapes.state_pool(heads, 2)
    slot, offsets = np.array([1], np.int32), np.array([0, 5], np.int32)
    forward_out, forward_pool = implementation.recurrence(tokens, pool, slot, offsets, algorithm="recurrent")
    ring = ring_of(heads, 1, RING_LEN)
    out, ring, _ = implementation.verify(tokens, pool, ring, slot, slot - 1, offsets)
    assert_same_bits(out, forward_out)
    folded = implementation.fold(pool, ring, slot[None], slot[None] - 1, np.array([5], np.int32))
    assert_same_bits(folded, forward_pool)


# --- JAX


def test_jax_1(variant):
    """``vmap`` over any choice of arguments equals ``lax.map``."""
    implementation, algorithm = variant
    lanes = 3
    heads = shapes.HEADS["ungrouped"]
    # In one lane the last offset decreases: no lane's malformed rows may reach the next lane's.
    offsets = np.array([[0, 4, 4, 10], [2, 3, 9, 5], [0, 10, 10, 12]], np.int32)
    slots = np.array([[2, -1, 0], [1, 3, 4], [0, 1, 2]], np.int32)
    batches = [shapes.trained_tokens(heads, 10, seed=28 + lane) for lane in range(lanes)]
    qkv, decay, beta = (np.stack(arrays) for arrays in zip(*batches, strict=True))
    pools = np.stack([shapes.state_pool(heads, 4, seed=lane) for lane in range(lanes)])
    full = {
        "qkv": qkv,
        "decay": decay,
        "beta": beta,
        "pool": pools,
        "slots": slots,
        "offsets": offsets,
        "flags": np.array([[True, True, False], [True, False, True], [False, True, True]]),
    }

    def recurrence(qkv, decay, beta, pool, slots, offsets, flags):
        return gdn_jax.gated_delta_recurrence_fwd(
            qkv,
            decay,
            beta,
            pool,
            slots,
            offsets,
            has_initial_state=flags,
            algorithm=algorithm,
            implementation=implementation.name_for(heads, algorithm),
        )

    def compare(values, references, what):
        for value, reference in zip(values, references, strict=True):
            if algorithm == "recurrent":
                assert_same_bits(value, reference, what)
            else:
                assert_close(value, reference, OUTPUT_BUDGET[algorithm, "float32"], what)

    # Called without jit: whatever is mapped, the lanes fold into one and the same larger batch, compiled once.
    for mapped in ({"decay"}, {"qkv"}, {"pool"}, {"slots", "offsets"}, set(full)):
        arguments = [jnp.asarray(value if name in mapped else value[0]) for name, value in full.items()]
        axes = [0 if name in mapped else None for name in full]
        out, new_pool = jax.vmap(recurrence, in_axes=axes)(*arguments)
        for lane in range(lanes):
            what = f"lane {lane}, mapped over {sorted(mapped)}"
            own = [x if axis is None else x[lane] for x, axis in zip(arguments, axes, strict=True)]
            compare((out[lane], new_pool[lane]), recurrence(*own), what)
            oracle_out, oracle_pool = oracle.recurrence(*own)
            budget = OUTPUT_BUDGET[algorithm, "float32"]
            assert_close(out[lane], oracle_out, budget, what)
            assert_close(new_pool[lane], oracle_pool, budget, what)

    # The last of them, mapped over everything, as one program each.
    compare(jax.jit(jax.vmap(recurrence))(*arguments), (out, new_pool), "under jit")
    by_lane = jax.jit(lambda *xs: jax.lax.map(lambda x: recurrence(*x), xs))
    compare(by_lane(*arguments), (out, new_pool), "lax.map")

    # Nested: over pools outside, over decays inside.
    inner = jax.vmap(recurrence, in_axes=(None, 0, None, None, None, None, None))
    outer = jax.vmap(inner, in_axes=(None, None, None, 0, None, None, None))
    one = {name: jnp.asarray(value[0]) for name, value in full.items()}
    out, new_pool = outer(*(one | {"decay": jnp.asarray(decay), "pool": jnp.asarray(pools)}).values())
    for i, j in np.ndindex(lanes, lanes):
        single = recurrence(*(one | {"decay": jnp.asarray(decay[j]), "pool": jnp.asarray(pools[i])}).values())
        compare((out[i, j], new_pool[i, j]), single, "nested")


def test_jax_1_other_operations(implementation):
    """Verify, fold and conv under ``vmap``: slots shift by lane, padding stays padding."""
    lanes, ring_len = 3, 4
    heads = shapes.HEADS["ungrouped"]
    name = implementation.name
    offsets = np.array([[0, 4, 4, 10], [2, 3, 9, 5], [0, 3, 10, 12]], np.int32)
    slots = np.array([[2, -1, 0], [1, 3, 4], [0, 1, 2]], np.int32)
    rings = np.array([[0, 1, -1], [2, 1, 0], [3, 0, 2]], np.int32)
    batches = [shapes.trained_tokens(heads, 10, seed=28 + lane) for lane in range(lanes)]
    tokens = [jnp.asarray(np.stack(arrays)) for arrays in zip(*batches, strict=True)]
    pools = jnp.asarray(np.stack([shapes.state_pool(heads, 4, seed=lane) for lane in range(lanes)]))
    ring = jnp.full((lanes, *heads.ring_shape(3, ring_len)), 7.0)

    def verify(*arguments):
        return gdn_jax.gated_delta_recurrence_verify_ring(*arguments, implementation=name)

    def fold(*arguments):
        return gdn_jax.gated_delta_state_fold(*arguments, implementation=name)

    def conv(x, weight, pool, slots, offsets):
        return gdn_jax.gated_delta_conv1d_fwd(x, weight, pool, slots, offsets, implementation=name)

    def check(function, arguments, axes):
        results = jax.tree.leaves(jax.vmap(function, in_axes=axes)(*arguments))
        for lane in range(lanes):
            own = [x if axis is None else x[lane] for x, axis in zip(arguments, axes, strict=True)]
            for result, expected in zip(results, jax.tree.leaves(function(*own)), strict=True):
                assert_same_bits(result[lane], expected, f"{function.__name__}, lane {lane}, {axes}")
        return results

    slots, rings, offsets = map(jnp.asarray, (slots, rings, offsets))
    _, ring, _ = check(verify, (*tokens, pools, ring, slots, rings, offsets), (0,) * 8)
    check(verify, (*tokens, pools[0], ring[0], slots, rings[0], offsets[0]), (0, 0, 0, None, None, 0, None, None))
    accepted = jnp.array([[4, 0, 2], [1, 2, 3], [3, 4, 5]], jnp.int32)
    # Two layers, the second of which names what the first leaves alone.
    rows = jnp.stack([slots.at[:, 2].set(-1), jnp.full_like(slots, -1).at[:, 1].set(slots[:, 2])], 1)
    ring_rows = jnp.stack([rings, rings[:, ::-1]], 1)
    check(fold, (pools, ring, rows, ring_rows, accepted), (0, 0, 0, 0, 0))
    check(fold, (pools, ring[0], rows[0], ring_rows[0], accepted), (0, None, None, None, 0))
    x = jnp.asarray(np.stack([shapes.conv_inputs(heads, 10, 4, seed=lane)[0] for lane in range(lanes)]))
    weights = jnp.asarray(np.stack([shapes.conv_inputs(heads, 10, 4, seed=lane)[1] for lane in range(lanes)]))
    windows = jnp.asarray(np.stack([shapes.conv_inputs(heads, 10, 4, seed=lane)[3] for lane in range(lanes)]))
    check(conv, (x, weights[0], windows, slots, offsets), (0, None, 0, 0, 0))
    check(conv, (x, weights[0], windows[0], slots[0], offsets[0]), (0, None, None, None, None))
    check(conv, (x, weights, windows, slots, offsets), (0, 0, 0, 0, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mosaic_gpu", "xla"])
def test_jax_2(name):
    """A donated pool of 8 GiB with one slot named: no copy of it, in any loop."""
    heads = shapes.HEADS["qwen3.5"]
    rows = 2**33 // (heads.num_value_heads * heads.key_head_dim * heads.value_head_dim * 4)
    tokens = [jnp.asarray(array) for array in shapes.trained_tokens(heads, 1, "bfloat16")]
    slot, offsets = jnp.array([rows - 1], jnp.int32), jnp.array([0, 1], jnp.int32)

    def step(pool):
        return gdn_jax.gated_delta_recurrence_fwd(*tokens, pool, slot, offsets, implementation=name)[1]

    programs = {
        "jit": step,
        "scan": lambda pool: jax.lax.scan(lambda p, _: (step(p), None), pool, length=4)[0],
        "fori_loop": lambda pool: jax.lax.fori_loop(0, 4, lambda _, p: step(p), pool),
    }
    pool = jnp.zeros(heads.state_shape(rows), jnp.float32)
    for what, program in programs.items():
        compiled = jax.jit(program, donate_argnums=0).lower(pool).compile()
        memory = memory_of(compiled)
        assert memory.alias_size_in_bytes == pool.nbytes, what
        assert memory.temp_size_in_bytes < 2**26, what
        pointer = pool.unsafe_buffer_pointer()
        pool = compiled(pool)
        assert pool.unsafe_buffer_pointer() == pointer, what
    assert not jnp.any(pool[:-1]).item()
    assert jnp.any(pool[-1]).item()


def resident_bytes() -> int:
    """The process's peak of resident memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_jax_3():
    """500 ragged splits at one shape: one compilation, and memory does not grow."""
    heads = shapes.HEADS["ungrouped"]
    tokens = [jnp.asarray(array) for array in shapes.trained_tokens(heads, 64)]
    pool = jnp.asarray(shapes.state_pool(heads, 9))
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compilations.append(event) if "backend_compile" in event else None
    )
    traces = []

    def recurrence(pool, slots, offsets):
        traces.append(None)
        return gdn_jax.gated_delta_recurrence_fwd(*tokens, pool, slots, offsets)

    recurrence = jax.jit(recurrence, donate_argnums=0)
    rng = np.random.default_rng(29)
    after_warm_up = None
    try:
        for call in range(500):
            slots = jnp.asarray(rng.permutation(9)[:8].astype(np.int32))
            offsets = jnp.asarray(random_offsets(rng, 8, 64))
            out, pool = recurrence(pool, slots, offsets)
            if call == 50:
                out.block_until_ready()
                after_warm_up = resident_bytes(), len(jax.live_arrays()), len(compilations)
        pool.block_until_ready()
        assert after_warm_up is not None
        assert resident_bytes() - after_warm_up[0] < 2**24
        assert len(jax.live_arrays()) <= after_warm_up[1]
        assert len(compilations) == after_warm_up[2]
        assert len(traces) == 1
        assert programs_of(recurrence) == 1
    finally:
        jax.monitoring.clear_event_listeners()


THIRD_DTYPE = {"float32": "bfloat16", "bfloat16": "float16", "float16": "float32"}


@pytest.mark.parametrize("state_dtype", shapes.FLOAT_DTYPES)
@pytest.mark.parametrize("token_dtype", shapes.FLOAT_DTYPES)
def test_jax_4(implementation: Implementation, token_dtype, state_dtype):
    """Tokens, windows and weights in any mixture; the pool keeps its dtype."""
    remaining = set(shapes.FLOAT_DTYPES) - {token_dtype, state_dtype}
    weight_dtype = min(remaining) if len(remaining) == 1 else THIRD_DTYPE[token_dtype]
    assert weight_dtype not in (token_dtype, state_dtype)
    x, weight, bias, pool = shapes.conv_inputs(SMALL, 24, 5, token_dtype, state_dtype, weight_dtype)
    slots, offsets = np.array([3, 0, 4], np.int32), shapes.row_offsets((2, 21, 1))
    options = {"bias": bias, "activation": "silu"}
    out, new_pool = implementation.conv1d(x, weight, pool, slots, offsets, **options)
    assert out.dtype == x.dtype
    assert new_pool.dtype == pool.dtype
    expected_out, expected_pool = oracle.conv1d(x, weight, pool, slots, offsets, **options)
    assert_close(out, expected_out, OUTPUT_BUDGET["recurrent", token_dtype])
    assert_same_bits(new_pool[slots], expected_pool[slots].astype(pool.dtype), "windows")
    assert_other_rows_kept(new_pool, pool, slots)
