"""The contract, one suite for every implementation: accuracy, rows, slots, padding, dtypes."""

# Arguments are NumPy arrays as often as JAX arrays, and come unpacked from tuples.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from tests import oracle, shapes
from tests.harness import (
    OUTPUT_BUDGET,
    POISONS,
    POOL_ROUNDING,
    Implementation,
    assert_close,
    assert_other_rows_kept,
    assert_same_bits,
    assert_zero,
    poisoned,
    ring_of,
    small_heads,
    state_budget,
)

SMALL = shapes.HEADS["small"]
MIXED = shapes.ROWS["mixed"]
MAX_SLOTS = 9
DTYPES = tuple(shapes.FLOAT_DTYPES)
# One shape for most tests below: few compilations.
NUM_TOKENS = sum(MIXED)
OFFSETS = shapes.row_offsets(MIXED)
SLOTS = shapes.spread_slots(len(MIXED), MAX_SLOTS)
# The empty row's slot is named, and must keep its bits all the same.
WRITTEN = [int(slot) for slot, length in zip(SLOTS, MIXED, strict=True) if length]


def check_recurrence(
    variant,
    heads,
    tokens,
    pool,
    slot_idx,
    offsets,
    *,
    has_initial_state=None,
    budgets=None,
    **options,
):
    """Run, compare with the oracle, and require every row that nobody wrote bit-unchanged."""
    implementation, algorithm = variant
    token_dtype, pool_dtype = tokens.qkv.dtype.name, pool.dtype.name
    out, new_pool = implementation.recurrence(
        tokens,
        pool,
        slot_idx,
        offsets,
        has_initial_state=has_initial_state,
        algorithm=algorithm,
        **options,
    )
    assert out.shape == (tokens.qkv.shape[0], heads.value_dim)
    assert out.dtype == tokens.qkv.dtype
    assert new_pool.shape == pool.shape
    assert new_pool.dtype == pool.dtype
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slot_idx, offsets, has_initial_state)
    owned = oracle.owners(slot_idx, offsets, pool.shape[0], tokens.qkv.shape[0])
    assert_zero(out[owned == 0], "outputs of tokens in no live row")
    if budgets is None:
        budgets = (
            OUTPUT_BUDGET[algorithm, token_dtype],
            state_budget(algorithm, token_dtype, pool_dtype),
        )
    assert_close(out[owned == 1], expected_out[owned == 1], budgets[0], "outputs")
    written = sorted(
        int(slot)
        for slot, (start, end) in zip(slot_idx, oracle.row_bounds(offsets, len(owned)), strict=False)
        if 0 <= int(slot) < pool.shape[0] and end > start
    )
    for slot in written:
        assert_close(new_pool[slot], expected_pool[slot], budgets[1], f"state of slot {slot}")
    assert_other_rows_kept(new_pool, pool, written)
    return out, new_pool


# --- accuracy


@pytest.mark.parametrize("heads_name", ["small", "ungrouped", "wide_key", "wide_value", "full_head"])
def test_recurrence_accuracy_by_heads(variant, heads_name):
    heads = shapes.HEADS[heads_name]
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=1)
    pool = shapes.state_pool(heads, MAX_SLOTS)
    check_recurrence(variant, heads, tokens, pool, SLOTS, OFFSETS)


@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("token_dtype", DTYPES)
def test_recurrence_accuracy_by_dtype(variant, token_dtype, pool_dtype):
    heads = small_heads(variant)
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, token_dtype, seed=2)
    pool = shapes.state_pool(heads, MAX_SLOTS, pool_dtype)
    check_recurrence(variant, heads, tokens, pool, SLOTS, OFFSETS)


HARD_INPUTS = {
    "resets": shapes.resetting_tokens,
    "repeated keys": shapes.repeated_keys,
    "zero rows": shapes.zero_rows,
}


@pytest.mark.parametrize("token_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hard", HARD_INPUTS)
def test_recurrence_accuracy_on_hard_inputs(variant, hard, token_dtype):
    heads = small_heads(variant)
    tokens = HARD_INPUTS[hard](heads, 256, token_dtype, seed=3)
    pool = shapes.state_pool(heads, 4)
    offsets = shapes.row_offsets((200, 56))
    check_recurrence(variant, heads, tokens, pool, np.array([2, 0], np.int32), offsets)


@pytest.mark.parametrize("token_dtype", ["float32", "bfloat16"])
def test_recurrence_accuracy_over_a_long_row(variant, token_dtype):
    heads = shapes.HEADS["ungrouped"]
    tokens = shapes.trained_tokens(heads, 32768, token_dtype, seed=4)
    pool = shapes.state_pool(heads, 2)
    offsets = np.array([0, 32768], np.int32)
    check_recurrence(variant, heads, tokens, pool, np.array([1], np.int32), offsets)


@pytest.mark.parametrize("hard", [None, *HARD_INPUTS])
def test_chunked_at_highest_precision(chunked, hard):
    heads = small_heads(chunked)
    make = shapes.trained_tokens if hard is None else HARD_INPUTS[hard]
    tokens = make(heads, 256, seed=5)
    pool = shapes.state_pool(heads, 4)
    check_recurrence(
        chunked,
        heads,
        tokens,
        pool,
        np.array([2, 0], np.int32),
        shapes.row_offsets((200, 56)),
        budgets=(1e-5, 1e-5),
        precision="highest",
    )


@pytest.mark.parametrize("lengths", [(1,) * 6, (130,), (7, 3)])
def test_automatic_algorithm(implementation, lengths):
    """Whatever ``auto`` picks from the shapes, the looser of the two budgets holds."""
    num_tokens = sum(lengths)
    tokens = shapes.trained_tokens(SMALL, num_tokens, seed=6)
    pool = shapes.state_pool(SMALL, MAX_SLOTS)
    slots = shapes.spread_slots(len(lengths), MAX_SLOTS)
    offsets = shapes.row_offsets(lengths)
    out, new_pool = implementation.recurrence(tokens, pool, slots, offsets)
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets)
    assert_close(out, expected_out, OUTPUT_BUDGET["chunked", "float32"], "outputs")
    assert_close(new_pool, expected_pool, OUTPUT_BUDGET["chunked", "float32"], "states")


def test_no_implementation_named():
    """The automatic choice, on whatever platform the suite runs."""
    tokens = shapes.trained_tokens(SMALL, NUM_TOKENS, seed=6)
    pool = shapes.state_pool(SMALL, MAX_SLOTS)
    out, new_pool = gdn_jax.gated_delta_recurrence_fwd(*map(jnp.asarray, (*tokens, pool, SLOTS, OFFSETS)))
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, SLOTS, OFFSETS)
    assert_close(out, expected_out, OUTPUT_BUDGET["chunked", "float32"], "outputs")
    assert_close(new_pool, expected_pool, OUTPUT_BUDGET["chunked", "float32"], "states")


def test_decay_and_beta_of_lower_precision_are_upcast(variant):
    """Only the rounding of the inputs themselves may show."""
    heads = small_heads(variant)
    bfloat16 = shapes.FLOAT_DTYPES["bfloat16"]
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=7)
    rounded = shapes.Tokens(tokens.qkv, tokens.decay.astype(bfloat16), tokens.beta.astype(np.float16))
    pool = shapes.state_pool(heads, MAX_SLOTS)
    check_recurrence(variant, heads, rounded, pool, SLOTS, OFFSETS)


# --- rows and slots


@pytest.mark.parametrize("poison", POISONS)
def test_rows_that_are_not_named_keep_their_bits(variant, poison):
    heads = small_heads(variant)
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=8)
    pool = poisoned(shapes.state_pool(heads, MAX_SLOTS), WRITTEN, poison)
    check_recurrence(variant, heads, tokens, pool, SLOTS, OFFSETS)


@pytest.mark.parametrize("pool_dtype", ["bfloat16", "float16"])
def test_rows_of_a_low_precision_pool_keep_their_bits(variant, pool_dtype):
    """Every bit pattern of 16 bits, the NaNs with payloads among them, outlives a call."""
    heads = small_heads(variant)
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=8)
    pool = shapes.state_pool(heads, MAX_SLOTS, pool_dtype)
    patterns = np.arange(2**16, dtype=np.uint16).view(pool.dtype)
    for row in np.setdiff1d(np.arange(MAX_SLOTS), WRITTEN):
        pool[row] = np.resize(np.roll(patterns, -4000 * row), pool[row].shape)
    check_recurrence(variant, heads, tokens, pool, SLOTS, OFFSETS)


# Every row has tokens here, so that every foreign slot has outputs to get wrong.
FULL_OFFSETS = shapes.row_offsets((5, 2, 1, 68, 17, 3))
FOREIGN_SLOTS = {
    "int32": np.array([-1, MAX_SLOTS, 2**31 - 1, -(2**31), 6947], np.int32),
    "uint32": np.array([2**32 - 1, MAX_SLOTS, 2**31 - 1, 2**31, 2**31 + 3], np.uint32),
}


@pytest.mark.parametrize("index_dtype", FOREIGN_SLOTS)
@pytest.mark.parametrize("poison", POISONS)
def test_foreign_slots_read_and_write_nothing(variant, index_dtype, poison):
    heads = small_heads(variant)
    foreign = FOREIGN_SLOTS[index_dtype]
    slots = np.array([*foreign, 4], dtype=index_dtype)
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=9)
    qkv = tokens.qkv.copy()
    qkv[: FULL_OFFSETS[5]] = np.nan  # The tokens of padding rows.
    tokens = shapes.Tokens(qkv, tokens.decay, tokens.beta)
    pool = poisoned(shapes.state_pool(heads, MAX_SLOTS), [4], poison)
    check_recurrence(variant, heads, tokens, pool, slots, FULL_OFFSETS.astype(index_dtype))


def test_a_batch_of_padding_only(variant):
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=9)
    pool = shapes.state_pool(heads, MAX_SLOTS)
    slots = np.full(len(MIXED), -1, np.int32)
    out, new_pool = implementation.recurrence(tokens, pool, slots, OFFSETS, algorithm=algorithm)
    assert_zero(out)
    assert_same_bits(new_pool, pool)


@pytest.mark.parametrize(("start", "spare"), [(0, 7), (7, 0), (3, 4)])
def test_tokens_outside_every_row(variant, start, spare):
    """NaN before the first offset and after the last reaches nothing."""
    heads = small_heads(variant)
    lengths = (5, 0, 1, 63, 17, 3)
    offsets = shapes.row_offsets(lengths, start)
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=10)
    assert offsets[-1] + spare == NUM_TOKENS
    outside = np.r_[0:start, offsets[-1] : NUM_TOKENS]
    for array in tokens:
        array[outside] = np.nan
    pool = shapes.state_pool(heads, MAX_SLOTS)
    check_recurrence(variant, heads, tokens, pool, SLOTS, offsets)


MALFORMED_OFFSETS = {
    "decreasing": ([0, 20, 10, 10, 40, 60, NUM_TOKENS], np.int32),
    "decreasing at the end": ([0, 20, 40, 60, 80, 90, 30], np.int32),
    "past the end": ([0, 20, 40, 60, 80, NUM_TOKENS + 5, 2**31 - 1], np.int32),
    "negative": ([-5, -1, 3, 40, -(2**31), 60, NUM_TOKENS], np.int32),
    "far past the end": ([0, 20, 40, 60, 80, 90, 2**32 - 1], np.uint32),
    "all at the end": ([NUM_TOKENS] * 7, np.int32),
    "all past the end": ([NUM_TOKENS + 1] * 7, np.int32),
}


@pytest.mark.parametrize("malformed", MALFORMED_OFFSETS)
def test_malformed_offsets(variant, malformed):
    heads = small_heads(variant)
    values, dtype = MALFORMED_OFFSETS[malformed]
    offsets = np.array(values, dtype)
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=11)
    owned = oracle.owners(SLOTS, offsets, MAX_SLOTS, NUM_TOKENS)
    for array in tokens:
        array[owned == 0] = np.nan
    pool = shapes.state_pool(heads, MAX_SLOTS)
    check_recurrence(variant, heads, tokens, pool, SLOTS, offsets)


def test_rows_that_start_from_zeros(variant):
    heads = small_heads(variant)
    has_initial_state = np.array([True, True, False, False, True, False])
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=12)
    pool = shapes.state_pool(heads, MAX_SLOTS)
    pool[SLOTS[~has_initial_state]] = np.nan
    check_recurrence(variant, heads, tokens, pool, SLOTS, OFFSETS, has_initial_state=has_initial_state)


def test_an_empty_row_that_starts_from_zeros_keeps_its_slot(variant):
    heads = small_heads(variant)
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=12)
    pool = shapes.state_pool(heads, MAX_SLOTS)
    has_initial_state = np.zeros(len(MIXED), bool)
    _, new_pool = check_recurrence(variant, heads, tokens, pool, SLOTS, OFFSETS, has_initial_state=has_initial_state)
    assert_same_bits(new_pool[SLOTS[1]], pool[SLOTS[1]])


def test_no_flags_means_that_every_row_reads_its_slot(variant):
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=13)
    pool = shapes.state_pool(heads, MAX_SLOTS)
    run = lambda **options: implementation.recurrence(  # noqa: E731
        tokens, pool, SLOTS, OFFSETS, algorithm=algorithm, **options
    )
    for value, reference in zip(run(), run(has_initial_state=np.ones(6, bool)), strict=True):
        assert_same_bits(value, reference)


@pytest.mark.parametrize(("num_tokens", "batch_size", "max_slots"), [(0, 3, 5), (4, 0, 5), (4, 2, 0)])
def test_empty_dimensions(variant, num_tokens, batch_size, max_slots):
    heads = small_heads(variant)
    implementation, algorithm = variant
    tokens = shapes.trained_tokens(heads, num_tokens)
    pool = shapes.state_pool(heads, max_slots)
    slots = np.arange(batch_size, dtype=np.int32)
    offsets = np.full(batch_size + 1, num_tokens, np.int32)
    offsets[0] = 0
    out, new_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm=algorithm)
    assert out.shape == (num_tokens, heads.value_dim)
    assert_zero(out)
    assert_same_bits(new_pool, pool)


# --- verify and fold

RING_LEN = 8
WINDOWS = shapes.ROWS["windows"]
WINDOW_OFFSETS = shapes.row_offsets(WINDOWS)
WINDOW_SLOTS = np.array([3, 7, 0, 8, 2], np.int32)
RING_ROWS = 6
RING_SLOTS = np.array([4, 0, 1, 2, 5], np.int32)


def window_inputs(token_dtype="float32", pool_dtype="float32", seed=20, heads=SMALL):
    tokens = shapes.trained_tokens(heads, sum(WINDOWS), token_dtype, seed)
    return tokens, shapes.state_pool(heads, MAX_SLOTS, pool_dtype)


@pytest.mark.parametrize("padding", [0, 1, 13])
@pytest.mark.parametrize("poison", POISONS)
def test_verify_against_the_oracle(implementation, padding, poison):
    tokens, pool = window_inputs()
    pool = poisoned(pool, WINDOW_SLOTS, poison)
    ring = ring_of(SMALL, RING_ROWS, RING_LEN, padding, POISONS[poison])
    out, new_ring, new_pool = implementation.verify(tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS)
    expected_out, expected_ring, _ = oracle.verify_ring(*tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS)
    assert_close(out, expected_out, 2e-6, "outputs")
    assert_same_bits(new_pool, pool, "the state pool")
    recorded = np.zeros(ring.shape, bool)
    for ring_slot, length in zip(RING_SLOTS, WINDOWS, strict=True):
        recorded[ring_slot, :, :length, : SMALL.record_elements] = True
    assert_close(new_ring[recorded], expected_ring[recorded], 2e-6, "records")
    assert_same_bits(new_ring[~recorded], ring[~recorded], "what is no record")


def test_records_hold_the_raw_key_and_the_decay_exactly(implementation):
    tokens, pool = window_inputs()
    ring = ring_of(SMALL, RING_ROWS, RING_LEN)
    _, new_ring, _ = implementation.verify(tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS)
    _, key, _ = oracle.split_heads(tokens.qkv, pool.shape)
    decay = tokens.decay.reshape(-1, SMALL.num_key_heads, SMALL.group_size)
    at_decay = SMALL.key_head_dim + SMALL.group_size * SMALL.value_head_dim
    for b, ring_slot in enumerate(RING_SLOTS):
        window = slice(WINDOW_OFFSETS[b], WINDOW_OFFSETS[b + 1])
        records = new_ring[ring_slot, :, : WINDOWS[b]]
        assert_same_bits(
            records[..., : SMALL.key_head_dim],
            key[window].swapaxes(0, 1).astype(np.float32),
            "raw keys",
        )
        assert_same_bits(records[..., at_decay:], decay[window].swapaxes(0, 1), "decays")


@pytest.mark.parametrize(
    ("heads_name", "token_dtype", "pool_dtype"),
    [
        *(("small", token_dtype, pool_dtype) for token_dtype in DTYPES[:2] for pool_dtype in DTYPES[:2]),
        ("full_head", "float32", "float32"),
        ("full_head", "bfloat16", "bfloat16"),
        ("wide_value", "bfloat16", "float32"),
    ],
)
def test_verify_and_fold_agree_with_the_forward_bit_for_bit(implementation, heads_name, token_dtype, pool_dtype):
    heads = shapes.HEADS[heads_name]
    tokens, pool = window_inputs(token_dtype, pool_dtype, heads=heads)
    ring = ring_of(heads, RING_ROWS, RING_LEN)
    flags = np.array([True, False, True, True, False])
    out, ring, kept = implementation.verify(
        tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS, has_initial_state=flags
    )
    assert_same_bits(kept, pool, "the state pool")
    forward_out, forward_pool = implementation.recurrence(
        tokens,
        pool,
        WINDOW_SLOTS,
        WINDOW_OFFSETS,
        algorithm="recurrent",
        has_initial_state=flags,
    )
    assert_same_bits(out, forward_out, "outputs")
    folded = implementation.fold(
        pool,
        ring,
        WINDOW_SLOTS[None],
        RING_SLOTS[None],
        np.array(WINDOWS, np.int32),
        has_initial_state=flags,
    )
    assert_same_bits(folded, forward_pool, "all accepted")
    # Accepting a part: the same tokens, each row cut short where it was accepted.
    accepted = np.array([2, 1, 0, 7, 3], np.int32)
    pieces = [np.arange(start, start + count) for start, count in zip(WINDOW_OFFSETS[:-1], accepted, strict=True)]
    _, prefix_pool = implementation.recurrence(
        tokens[np.concatenate(pieces)],
        pool,
        WINDOW_SLOTS,
        shapes.row_offsets(accepted),
        algorithm="recurrent",
        has_initial_state=flags,
    )
    folded = implementation.fold(pool, ring, WINDOW_SLOTS[None], RING_SLOTS[None], accepted, has_initial_state=flags)
    assert_same_bits(folded, prefix_pool, "a part accepted")


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", DTYPES[:2])
def test_many_windows(implementation, pool_dtype):
    """So many that a GPU's programs take several states in turn; some rows are empty, padding, fresh, or too long."""
    heads, rng = shapes.HEADS["qwen3.5"], np.random.default_rng(3)
    lengths = rng.integers(0, RING_LEN + 2, 40).astype(np.int32)
    offsets = shapes.row_offsets(lengths)
    tokens = shapes.trained_tokens(heads, sum(lengths), "bfloat16", 21)
    slots = rng.permutation(len(lengths)).astype(np.int32)
    flags = rng.random(len(lengths)) < 0.7
    pool = poisoned(shapes.state_pool(heads, len(lengths), pool_dtype), slots[flags], "nan")
    slots[5] = -1
    ring_rows = rng.permutation(len(lengths)).astype(np.int32)
    ring = ring_of(heads, len(lengths), RING_LEN)
    out, ring, kept = implementation.verify(tokens, pool, ring, slots, ring_rows, offsets, has_initial_state=flags)
    forward_out, forward_pool = implementation.recurrence(
        tokens, pool, slots, offsets, algorithm="recurrent", has_initial_state=flags
    )
    assert_same_bits(out, forward_out, "outputs")
    too_long = lengths > RING_LEN
    accepted = np.where(too_long, 0, lengths)
    folded = implementation.fold(kept, ring, slots[None], ring_rows[None], accepted, has_initial_state=flags)
    assert_same_bits(folded, forward_pool, "all accepted, or committed")


@pytest.mark.gpu
@pytest.mark.parametrize("many", [28, 56])
@pytest.mark.parametrize("pool_dtype", DTYPES[:2])
@pytest.mark.parametrize("name", ["mosaic_gpu", "triton"])
def test_many_rows_have_the_bits_of_few(name, pool_dtype, many):
    """States of few rows fit into a GPU's cache, or nearly, for which its kernels may have other tiles and policies."""
    implementation, heads, few = Implementation(name), shapes.HEADS["qwen3.5"], 8
    tokens = shapes.trained_tokens(heads, many, "bfloat16", 23)
    pool, slots = shapes.state_pool(heads, many, pool_dtype), shapes.spread_slots(many, many, 24)
    out, new_pool = implementation.recurrence(
        tokens, pool, slots, shapes.row_offsets((1,) * many), algorithm="recurrent"
    )
    few_out, few_pool = implementation.recurrence(
        tokens[:few], pool, slots[:few], shapes.row_offsets((1,) * few), algorithm="recurrent"
    )
    assert_same_bits(few_out, out[:few], "outputs")
    assert_same_bits(few_pool[slots[:few]], new_pool[slots[:few]], "states")


@pytest.mark.parametrize("index_dtype", ["int32", "uint32"])
def test_foreign_ring_rows_drop_their_records_and_nothing_else(implementation, index_dtype):
    tokens, pool = window_inputs()
    ring = ring_of(SMALL, RING_ROWS, RING_LEN)
    wide = -1 if index_dtype == "int32" else 2**32 - 1
    ring_slots = np.array([wide, RING_ROWS, 1, 2**31 - 1, 5], index_dtype)  # The third window is empty.
    out, new_ring, new_pool = implementation.verify(
        tokens, pool, ring, WINDOW_SLOTS.astype(index_dtype), ring_slots, WINDOW_OFFSETS
    )
    named_out, named_ring, _ = implementation.verify(tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS)
    assert_same_bits(out, named_out, "outputs")
    assert_same_bits(new_pool, pool, "the state pool")
    assert_same_bits(new_ring[5], named_ring[5], "records of the live ring row")
    assert_same_bits(new_ring[:5], ring[:5], "ring rows nobody named")


def test_a_foreign_slot_records_nothing(implementation):
    tokens, pool = window_inputs()
    ring = ring_of(SMALL, RING_ROWS, RING_LEN, fill=777.0)
    slots = np.array([-1, 7, 0, MAX_SLOTS, 2], np.int32)
    out, new_ring, new_pool = implementation.verify(tokens, pool, ring, slots, RING_SLOTS, WINDOW_OFFSETS)
    assert_same_bits(new_pool, pool, "the state pool")
    assert_same_bits(new_ring[[4, 1, 2]], ring[[4, 1, 2]], "ring rows of padding")
    owned = oracle.owners(slots, WINDOW_OFFSETS, MAX_SLOTS, sum(WINDOWS))
    assert_zero(out[owned == 0], "outputs of padding")
    expected, _, _ = oracle.verify_ring(*tokens, pool, ring, slots, RING_SLOTS, WINDOW_OFFSETS)
    assert_close(out, expected, 2e-6, "outputs")


def test_verify_starts_fresh_rows_from_zeros(implementation):
    tokens, pool = window_inputs()
    flags = np.array([True, False, True, False, False])
    pool[WINDOW_SLOTS[~flags]] = np.nan
    ring = ring_of(SMALL, RING_ROWS, RING_LEN)
    arguments = (tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS)
    out, new_ring, new_pool = implementation.verify(*arguments, has_initial_state=flags)
    expected_out, expected_ring, _ = oracle.verify_ring(*tokens, *arguments[1:], has_initial_state=flags)
    assert_close(out, expected_out, 2e-6, "outputs")
    recorded = ~np.isnan(expected_ring)
    assert_close(new_ring[recorded], expected_ring[recorded], 2e-6, "records")
    assert_same_bits(new_pool, pool, "the state pool")


def test_verify_ignores_tokens_outside_every_row(implementation):
    tokens, pool = window_inputs()
    offsets = shapes.row_offsets((3, 1, 0, 6, 4), start=2)
    outside = np.r_[0:2, offsets[-1] : sum(WINDOWS)]
    for array in tokens:
        array[outside] = np.nan
    ring = ring_of(SMALL, RING_ROWS, RING_LEN)
    arguments = (tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, offsets)
    out, new_ring, new_pool = implementation.verify(*arguments)
    expected_out, expected_ring, _ = oracle.verify_ring(*tokens, *arguments[1:])
    assert_zero(out[outside], "outputs outside")
    assert_close(out, expected_out, 2e-6, "outputs")
    recorded = ~np.isnan(expected_ring)
    assert not np.isnan(new_ring[recorded]).any()
    assert np.isnan(new_ring[~recorded]).all()
    assert_same_bits(new_pool, pool, "the state pool")


@pytest.mark.parametrize(("num_tokens", "batch_size"), [(0, 3), (4, 0)])
def test_verify_of_nothing(implementation, num_tokens, batch_size):
    tokens, pool = shapes.trained_tokens(SMALL, num_tokens), shapes.state_pool(SMALL, 4)
    ring = ring_of(SMALL, 3, RING_LEN)
    rows = np.arange(batch_size, dtype=np.int32)
    offsets = np.zeros(batch_size + 1, np.int32)
    out, new_ring, new_pool = implementation.verify(tokens, pool, ring, rows, rows, offsets)
    assert_zero(out)
    assert_same_bits(new_ring, ring)
    assert_same_bits(new_pool, pool)


@pytest.mark.parametrize(("ring_rows", "ring_len"), [(0, 4), (3, 0)])
def test_a_ring_without_rows_or_positions(implementation, ring_rows, ring_len):
    """Without rows every record is dropped; without positions every row is longer than the ring."""
    tokens, pool = window_inputs()
    ring = np.zeros(SMALL.ring_shape(ring_rows, ring_len), np.float32)
    arguments = (tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS)
    out, new_ring, new_pool = implementation.verify(*arguments)
    expected_out, _, expected_pool = oracle.verify_ring(*tokens, *arguments[1:])
    assert_close(out, expected_out, 2e-6, "outputs")
    assert_close(new_pool, expected_pool, 2e-6, "states")
    assert_same_bits(new_ring, ring)
    accepted = np.full(len(WINDOWS), 1, np.int32)
    assert_same_bits(implementation.fold(pool, ring, WINDOW_SLOTS[None], RING_SLOTS[None], accepted), pool)


def test_a_ring_of_bfloat16(implementation):
    """Works, and costs the rounding of the records: the fold is not bit-exact then."""
    tokens, pool = window_inputs()
    ring = ring_of(SMALL, RING_ROWS, RING_LEN).astype(shapes.FLOAT_DTYPES["bfloat16"])
    out, ring, _ = implementation.verify(tokens, pool, ring, WINDOW_SLOTS, RING_SLOTS, WINDOW_OFFSETS)
    assert ring.dtype == shapes.FLOAT_DTYPES["bfloat16"]
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, WINDOW_SLOTS, WINDOW_OFFSETS)
    assert_close(out, expected_out, 2e-6, "outputs")
    accepted = np.array(WINDOWS, np.int32)
    folded = implementation.fold(pool, ring, WINDOW_SLOTS[None], RING_SLOTS[None], accepted)
    expected_fold = oracle.state_fold(pool, ring, WINDOW_SLOTS[None], RING_SLOTS[None], accepted)
    assert_close(folded, expected_fold, 2e-6, "the fold of these records")
    assert_close(folded, expected_pool, 1e-2, "the states")


def random_ring(ring_rows=RING_ROWS, seed=30):
    rng = np.random.default_rng(seed)
    ring = rng.standard_normal(SMALL.ring_shape(ring_rows, RING_LEN)).astype(np.float32)
    ring[..., -SMALL.group_size :] = rng.random((ring_rows, 2, RING_LEN, SMALL.group_size))
    return ring


LAYER_ROWS = np.array([[0, 5, 7], [1, 3, 8], [2, 4, 6]], np.int32)
LAYER_RINGS = np.array([[0, 2, 4], [1, 3, 5], [6, 7, 8]], np.int32)


@pytest.mark.parametrize("pool_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("poison", POISONS)
def test_fold_of_several_layers(implementation, pool_dtype, poison):
    pool = shapes.state_pool(SMALL, 12, pool_dtype)
    ring = random_ring(9)
    accepted = np.array([3, RING_LEN, 1], np.int32)
    written = LAYER_ROWS.ravel()
    pool = poisoned(pool, written, poison)
    for b, count in enumerate(accepted):
        ring[LAYER_RINGS[:, b], :, count:] = POISONS[poison]
    new_pool = implementation.fold(pool, ring, LAYER_ROWS, LAYER_RINGS, accepted)
    assert new_pool.dtype == pool.dtype
    expected = oracle.state_fold(pool, ring, LAYER_ROWS, LAYER_RINGS, accepted)
    budget = 2e-6 + POOL_ROUNDING[pool_dtype]
    assert_close(new_pool[written], expected[written], budget, "folded rows")
    assert_other_rows_kept(new_pool, pool, written)


@pytest.mark.parametrize("count", [0, -1, RING_LEN + 1, 2**31 - 1, -(2**31)])
def test_fold_of_counts_outside_the_ring(implementation, count):
    pool = shapes.state_pool(SMALL, 12)
    ring = random_ring(9)
    accepted = np.array([3, count, 1], np.int32)
    ring[LAYER_RINGS[:, 1]] = np.nan
    new_pool = implementation.fold(pool, ring, LAYER_ROWS, LAYER_RINGS, accepted)
    written = LAYER_ROWS[:, [0, 2]].ravel()
    expected = oracle.state_fold(pool, ring, LAYER_ROWS, LAYER_RINGS, accepted)
    assert_close(new_pool[written], expected[written], 2e-6, "folded rows")
    assert_other_rows_kept(new_pool, pool, written)


@pytest.mark.parametrize("index_dtype", ["int32", "uint32"])
def test_fold_of_foreign_rows(implementation, index_dtype):
    wide = -1 if index_dtype == "int32" else 2**32 - 1
    rows, rings = LAYER_ROWS.astype(index_dtype), LAYER_RINGS.astype(index_dtype)
    rows[0, 0], rows[1, 2], rows[2, 1] = wide, 12, 2**31 - 1
    rings[0, 1], rings[2, 2], rings[1, 0] = wide, 9, 2**31 - 1
    pool, ring = shapes.state_pool(SMALL, 12), random_ring(9)
    accepted = np.array([2, 4, 8]).astype(index_dtype)
    new_pool = implementation.fold(pool, ring, rows, rings, accepted)
    written = [LAYER_ROWS[0, 2], LAYER_ROWS[1, 1], LAYER_ROWS[2, 0]]
    expected = oracle.state_fold(pool, ring, rows, rings, accepted)
    assert_close(new_pool[written], expected[written], 2e-6, "folded rows")
    assert_other_rows_kept(new_pool, pool, written)


def test_fold_of_fresh_requests_starts_from_zeros(implementation):
    pool, ring = shapes.state_pool(SMALL, 12), random_ring(9)
    flags = np.array([False, True, False])
    pool[LAYER_ROWS[:, ~flags].ravel()] = np.nan
    accepted = np.array([2, 4, 8], np.int32)
    arguments = (pool, ring, LAYER_ROWS, LAYER_RINGS, accepted)
    new_pool = implementation.fold(*arguments, has_initial_state=flags)
    expected = oracle.state_fold(*arguments, flags)
    written = LAYER_ROWS.ravel()
    assert_close(new_pool[written], expected[written], 2e-6, "folded rows")
    assert_other_rows_kept(new_pool, pool, written)


@pytest.mark.parametrize(("num_layers", "batch_size"), [(0, 3), (2, 0)])
def test_fold_of_nothing(implementation, num_layers, batch_size):
    pool, ring = shapes.state_pool(SMALL, 4), random_ring()
    rows = np.zeros((num_layers, batch_size), np.int32)
    new_pool = implementation.fold(pool, ring, rows, rows, np.ones(batch_size, np.int32))
    assert_same_bits(new_pool, pool)


def test_ring_record_elements():
    assert gdn_jax.gated_delta_ring_record_elements(128, 128, 2) == 386
    assert gdn_jax.gated_delta_ring_record_elements(64, 32, 3) == 64 + 3 * 33
    assert gdn_jax.gated_delta_ring_record_elements(1, 1, 1) == 3


# --- the conv pass


def check_conv(implementation, x, weight, pool, slot_idx, offsets, *, budget=2e-6, **options):
    out, new_pool = implementation.conv1d(x, weight, pool, slot_idx, offsets, **options)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert new_pool.dtype == pool.dtype
    expected_out, expected_pool = oracle.conv1d(x, weight, pool, slot_idx, offsets, **options)
    owned = oracle.owners(slot_idx, offsets, pool.shape[0], x.shape[0])
    assert_zero(out[owned == 0], "outputs of tokens in no live row")
    assert_close(out[owned == 1], expected_out[owned == 1], budget, "outputs")
    written = [
        int(slot)
        for slot, (start, end) in zip(slot_idx, oracle.row_bounds(offsets, len(owned)), strict=False)
        if 0 <= int(slot) < pool.shape[0] and end > start and options.get("write_state", True)
    ]
    # A window holds inputs, so all that may happen to them is one rounding to the pool's dtype.
    assert_same_bits(new_pool[written], expected_pool[written].astype(pool.dtype), "windows")
    assert_other_rows_kept(new_pool, pool, written)
    return out, new_pool


@pytest.mark.parametrize("kernel_size", [2, 3, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_conv_accuracy(implementation, kernel_size, activation):
    heads = shapes.Heads(2, 6, 32, 32, kernel_size)
    x, weight, some_bias, pool = shapes.conv_inputs(heads, NUM_TOKENS, MAX_SLOTS)
    for bias in (None, some_bias):
        check_conv(implementation, x, weight, pool, SLOTS, OFFSETS, bias=bias, activation=activation)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("index_dtype", FOREIGN_SLOTS)
def test_conv_foreign_slots(implementation, index_dtype, poison):
    slots = np.array([*FOREIGN_SLOTS[index_dtype], 4], dtype=index_dtype)
    x, weight, bias, pool = shapes.conv_inputs(SMALL, NUM_TOKENS, MAX_SLOTS)
    x[: FULL_OFFSETS[5]] = np.nan
    pool = poisoned(pool, [4], poison)
    # The bias must not show in what is padding either.
    check_conv(implementation, x, weight, pool, slots, FULL_OFFSETS.astype(index_dtype), bias=bias)


@pytest.mark.parametrize("malformed", MALFORMED_OFFSETS)
def test_conv_malformed_offsets(implementation, malformed):
    values, dtype = MALFORMED_OFFSETS[malformed]
    offsets = np.array(values, dtype)
    x, weight, bias, pool = shapes.conv_inputs(SMALL, NUM_TOKENS, MAX_SLOTS)
    x[oracle.owners(SLOTS, offsets, MAX_SLOTS, NUM_TOKENS) == 0] = np.nan
    check_conv(implementation, x, weight, pool, SLOTS, offsets, bias=bias, activation="silu")


@pytest.mark.parametrize(("start", "spare"), [(0, 7), (7, 0), (3, 4)])
def test_conv_tokens_outside_every_row(implementation, start, spare):
    offsets = shapes.row_offsets((5, 0, 1, 63, 17, 3), start)
    x, weight, bias, pool = shapes.conv_inputs(SMALL, NUM_TOKENS, MAX_SLOTS)
    x[np.r_[0:start, offsets[-1] : NUM_TOKENS]] = np.nan
    check_conv(implementation, x, weight, pool, SLOTS, offsets, bias=bias)


def test_conv_rows_that_start_from_zeros(implementation):
    flags = np.array([True, True, False, False, True, False])
    x, weight, _, pool = shapes.conv_inputs(SMALL, NUM_TOKENS, MAX_SLOTS)
    pool[SLOTS[~flags]] = np.nan
    # Shorter than the window: what is left of it are zeros, not what the slot held.
    offsets = shapes.row_offsets((5, 0, 1, 2, 17, 3))
    check_conv(implementation, x, weight, pool, SLOTS, offsets, has_initial_state=flags)


def test_conv_without_writing_the_state(implementation):
    x, weight, _, pool = shapes.conv_inputs(SMALL, NUM_TOKENS, MAX_SLOTS)
    out, new_pool = check_conv(implementation, x, weight, pool, SLOTS, OFFSETS, write_state=False, activation="silu")
    assert_same_bits(new_pool, pool)
    written_out, _ = implementation.conv1d(x, weight, pool, SLOTS, OFFSETS, activation="silu")
    assert_same_bits(out, written_out, "outputs")


@pytest.mark.parametrize(("num_tokens", "batch_size", "max_slots"), [(0, 3, 5), (4, 0, 5), (4, 2, 0)])
def test_conv_empty_dimensions(implementation, num_tokens, batch_size, max_slots):
    x, weight, bias, pool = shapes.conv_inputs(SMALL, num_tokens, max_slots)
    slots = np.arange(batch_size, dtype=np.int32)
    offsets = np.full(batch_size + 1, num_tokens, np.int32)
    offsets[0] = 0
    out, new_pool = implementation.conv1d(x, weight, pool, slots, offsets, bias=bias)
    assert out.shape == x.shape
    assert_zero(out)
    assert_same_bits(new_pool, pool)


# --- the gates


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype):
    rng = np.random.default_rng(40)
    a, b = (rng.normal(0, 3, (2, 17, 6)).astype(shapes.FLOAT_DTYPES[dtype]) for _ in range(2))
    a_log = np.log(rng.uniform(1, 16, 6)).astype(np.float32)
    dt_bias = rng.normal(0, 1, 6).astype(np.float32)
    decay, beta = gdn_jax.gated_delta_gates(*map(jnp.asarray, (a, b, a_log, dt_bias)))
    assert decay.dtype == beta.dtype == jnp.float32
    assert decay.shape == beta.shape == a.shape
    expected_decay, expected_beta = oracle.gates(a, b, a_log, dt_bias)
    assert_close(decay, expected_decay, 2e-6, "decay")
    assert_close(beta, expected_beta, 2e-6, "beta")


def test_gates_at_the_ends_of_their_range():
    a = np.array([[-200.0, -20.0, 0.0, 20.0, 200.0, 3e38]], np.float32)
    b = np.array([[-3e38, -200.0, -1e-30, 1e-30, 200.0, 3e38]], np.float32)
    zeros = np.zeros(6, np.float32)
    decay, beta = map(np.asarray, gdn_jax.gated_delta_gates(*map(jnp.asarray, (a, b, zeros, zeros))))
    expected_decay, expected_beta = oracle.gates(a, b, zeros, zeros)
    np.testing.assert_allclose(decay, expected_decay, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(beta, expected_beta, rtol=1e-5, atol=1e-37)
    assert decay[0, 0] == 1
    assert decay[0, -1] == 0
    assert beta[0, 0] == 0
    assert beta[0, -1] == 1


# --- the call that flash-linear-attention's users know


def rule_inputs(batch, num_tokens, nk, nv, key_dim, value_dim, dtype="float32", seed=50):
    rng = np.random.default_rng(seed)
    cast = lambda x: x.astype(shapes.FLOAT_DTYPES[dtype])  # noqa: E731
    q, k = (cast(rng.standard_normal((batch, num_tokens, nk, key_dim))) for _ in range(2))
    v = cast(rng.standard_normal((batch, num_tokens, nv, value_dim)))
    g = np.log(1 - 0.1 * rng.random((batch, num_tokens, nv))).astype(np.float32)
    beta = rng.random((batch, num_tokens, nv)).astype(np.float32)
    return q, k, v, g, beta


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_initial_state", [False, True])
def test_delta_rule(dtype, with_initial_state):
    arguments = rule_inputs(2, 70, 2, 6, 32, 16, dtype)
    initial = None
    if with_initial_state:
        initial = np.random.default_rng(51).standard_normal((2, 6, 32, 16), np.float32)
    o, final = gdn_jax.gated_delta_rule(
        *map(jnp.asarray, arguments),
        initial_state=None if initial is None else jnp.asarray(initial),
        output_final_state=True,
    )
    expected_o, expected_final = oracle.delta_rule(*arguments, initial_state=initial)
    assert o.dtype == arguments[2].dtype
    assert final is not None
    assert final.dtype == jnp.float32
    assert_close(o, expected_o, OUTPUT_BUDGET["chunked", dtype], "outputs")
    assert_close(final, expected_final, OUTPUT_BUDGET["chunked", dtype], "final states")


def test_delta_rule_without_final_state():
    arguments = rule_inputs(1, 5, 1, 2, 16, 16)
    o, final = gdn_jax.gated_delta_rule(*map(jnp.asarray, arguments))
    assert final is None
    assert_close(o, oracle.delta_rule(*arguments)[0], 1e-3)


def test_delta_rule_of_packed_sequences():
    offsets = np.array([0, 7, 7, 60, 70], np.int32)
    arguments = rule_inputs(1, 70, 2, 6, 32, 16)
    initial = np.random.default_rng(52).standard_normal((4, 6, 32, 16), np.float32)
    o, final = gdn_jax.gated_delta_rule(
        *map(jnp.asarray, arguments),
        initial_state=jnp.asarray(initial),
        output_final_state=True,
        cu_seqlens=jnp.asarray(offsets),
    )
    expected_o, expected_final = oracle.delta_rule(*arguments, initial_state=initial, offsets=offsets)
    assert_close(o, expected_o, 1e-3, "outputs")
    assert_close(final, expected_final, 1e-3, "final states")
    assert final is not None
    assert_same_bits(final[1], initial[1], "the state of an empty sequence")


@pytest.mark.parametrize("normalise", [True, False])
def test_delta_rule_scale_and_norm(normalise):
    q, k, v, g, beta = rule_inputs(2, 20, 2, 4, 16, 16)
    if not normalise:
        k = k / np.linalg.norm(k, axis=-1, keepdims=True) * np.float32(0.9)
    arguments = (q, k, v, g, beta)
    options = {"scale": 0.37, "use_qk_l2norm_in_kernel": normalise}
    o, final = gdn_jax.gated_delta_rule(*map(jnp.asarray, arguments), output_final_state=True, **options)
    expected_o, expected_final = oracle.delta_rule(*arguments, scale=0.37, normalise=normalise)
    assert_close(o, expected_o, 1e-3, "outputs")
    assert_close(final, expected_final, 1e-3, "final states")


@pytest.mark.parametrize("pattern", ["zeros between", "alternating", "tiny"])
def test_chunked_at_highest_precision_on_mixed_decays(chunked, pattern):
    """Resets next to ordinary decays: a form that takes differences of summed logarithms loses these digits."""
    implementation, algorithm = chunked
    heads = small_heads(chunked)
    position = np.arange(NUM_TOKENS)
    decay = {
        "zeros between": np.where(position % 17 < 16, 0.0, 0.99),
        "alternating": np.where(position % 2 == 0, 0.0, 0.99),
        "tiny": np.where(position % 21 < 20, 1e-12, 0.9),
    }[pattern]
    tokens = shapes.trained_tokens(heads, NUM_TOKENS, seed=12)
    decay = np.broadcast_to(decay[:, None], tokens.decay.shape).astype(np.float32)
    pool = shapes.state_pool(heads, 1)
    rows, offsets = np.array([0], np.int32), np.array([0, NUM_TOKENS], np.int32)
    tokens = shapes.Tokens(tokens.qkv, decay, tokens.beta)
    out, new_pool = implementation.recurrence(tokens, pool, rows, offsets, algorithm=algorithm, precision="highest")
    expected, expected_pool = oracle.recurrence(tokens.qkv, decay, tokens.beta, pool, rows, offsets)
    assert_close(out, expected, 1e-5)
    assert_close(new_pool, expected_pool, 1e-5)
