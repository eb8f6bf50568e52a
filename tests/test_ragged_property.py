"""Any ragged batch: rows, slots, paddings, flags and splits that hypothesis thinks of, against the oracle."""

# Arguments are NumPy arrays as often as JAX arrays, and come unpacked from tuples.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests import oracle, shapes
from tests.harness import (
    OUTPUT_BUDGET,
    assert_close,
    assert_other_rows_kept,
    assert_same_bits,
    assert_zero,
    ring_of,
    state_budget,
)

# One shape for all examples: what varies are values, so that nothing compiles twice.
HEADS = shapes.HEADS["ungrouped"]
NUM_TOKENS, BATCH, MAX_SLOTS = 24, 5, 7
RING_ROWS, RING_LEN = 6, 4
TOKENS = shapes.trained_tokens(HEADS, NUM_TOKENS, seed=110)
POOL = shapes.state_pool(HEADS, MAX_SLOTS)
CONV = shapes.conv_inputs(HEADS, NUM_TOKENS, MAX_SLOTS, seed=111)
FOREIGN = (-1, -(2**31), MAX_SLOTS, MAX_SLOTS + 1, 2**31 - 1)

well_formed_offsets = st.lists(st.integers(0, NUM_TOKENS), min_size=BATCH + 1, max_size=BATCH + 1).map(sorted)
any_offsets = st.lists(
    st.one_of(st.integers(-3, NUM_TOKENS + 3), st.sampled_from([-(2**31), 2**31 - 1])),
    min_size=BATCH + 1,
    max_size=BATCH + 1,
)


@st.composite
def slot_lists(draw, rows=MAX_SLOTS):
    """Live slots each at most once, foreign ones anywhere."""
    live = draw(st.permutations(range(rows)))[:BATCH]
    foreign = draw(st.lists(st.one_of(st.none(), st.sampled_from(FOREIGN)), min_size=BATCH, max_size=BATCH))
    return np.array([s if f is None else f for s, f in zip(live, foreign, strict=True)], np.int32)


@st.composite
def batches(draw, offsets=any_offsets):
    """``(offsets, slots, flags)``."""
    flags = draw(st.lists(st.booleans(), min_size=BATCH, max_size=BATCH))
    return np.array(draw(offsets), np.int32), draw(slot_lists()), np.array(flags)


def holders(slots, offsets):
    """``(rows, live rows)`` that hold each token: what overlapping rows share is not specified."""
    rows = oracle.owners(np.zeros(BATCH, int), offsets, 1, NUM_TOKENS)
    return rows, oracle.owners(slots, offsets, MAX_SLOTS, NUM_TOKENS)


def written_slots(slots, offsets):
    bounds = oracle.row_bounds(offsets, NUM_TOKENS)
    return [int(s) for s, (start, end) in zip(slots, bounds, strict=True) if 0 <= s < MAX_SLOTS and start < end]


def poisoned_inputs(slots, offsets, flags, arrays, pool):
    """NaN wherever the contract says that nothing is read."""
    _, live = holders(slots, offsets)
    arrays = [array.copy() for array in arrays]
    for array in arrays:
        array[live == 0] = np.nan
    pool = pool.copy()
    read = [int(s) for s, flag in zip(slots, flags, strict=True) if flag and 0 <= s < MAX_SLOTS]
    pool[np.setdiff1d(np.arange(MAX_SLOTS), read)] = np.nan
    return arrays, pool


@hypothesis.given(batches())
def test_recurrence(variant, batch):
    implementation, algorithm = variant
    offsets, slots, flags = batch
    arrays, pool = poisoned_inputs(slots, offsets, flags, TOKENS, POOL)
    tokens = shapes.Tokens(*arrays)
    out, new_pool = implementation.recurrence(
        tokens, pool, slots, offsets, has_initial_state=flags, algorithm=algorithm
    )
    expected_out, expected_pool = oracle.recurrence(*tokens, pool, slots, offsets, flags)
    rows, live = holders(slots, offsets)
    assert_zero(out[live == 0])
    once = (rows == 1) & (live == 1)
    assert_close(out[once], expected_out[once], OUTPUT_BUDGET[algorithm, "float32"], "outputs")
    written = written_slots(slots, offsets)
    for slot in written:
        assert_close(new_pool[slot], expected_pool[slot], state_budget(algorithm, "float32", "float32"), f"slot {slot}")
    assert_other_rows_kept(new_pool, pool, written)


@hypothesis.given(batches(), st.booleans())
def test_conv(implementation, batch, write_state):
    offsets, slots, flags = batch
    x, weight, bias, windows = CONV
    (x,), windows = poisoned_inputs(slots, offsets, flags, [x], windows)
    options = {"bias": bias, "has_initial_state": flags, "write_state": write_state, "activation": "silu"}
    out, new_windows = implementation.conv1d(x, weight, windows, slots, offsets, **options)
    expected_out, expected_windows = oracle.conv1d(x, weight, windows, slots, offsets, **options)
    rows, live = holders(slots, offsets)
    assert_zero(out[live == 0])
    once = (rows == 1) & (live == 1)
    assert_close(out[once], expected_out[once], 2e-6, "outputs")
    written = written_slots(slots, offsets) if write_state else []
    assert_same_bits(new_windows[written], expected_windows[written].astype(np.float32), "windows")
    assert_other_rows_kept(new_windows, windows, written, "windows")


@hypothesis.given(
    batches(), slot_lists(RING_ROWS), st.lists(st.integers(-2, RING_LEN + 2), min_size=BATCH, max_size=BATCH)
)
def test_verify_then_fold(implementation, batch, ring_slots, accepted):
    """Verify is the forward without its states; fold is the forward over what was accepted."""
    offsets, slots, flags = batch
    ring_slots[ring_slots == RING_ROWS - 1] = RING_ROWS  # One ring row is nobody's.
    accepted = np.array(accepted, np.int32)
    arrays, pool = poisoned_inputs(slots, offsets, flags, TOKENS, POOL)
    tokens = shapes.Tokens(*arrays)
    ring = ring_of(HEADS, RING_ROWS, RING_LEN, padding=1)
    out, new_ring, new_pool = implementation.verify(
        tokens, pool, ring, slots, ring_slots, offsets, has_initial_state=flags
    )
    forward = {"has_initial_state": flags, "algorithm": "recurrent"}
    expected_out, expected_pool = implementation.recurrence(tokens, pool, slots, offsets, **forward)
    rows, live = holders(slots, offsets)
    assert_zero(out[live == 0])
    once = (rows == 1) & (live == 1)
    assert_same_bits(out[once], expected_out[once], "outputs")

    bounds = oracle.row_bounds(offsets, NUM_TOKENS)
    lengths = np.array([end - start for start, end in bounds])
    in_pool = (slots >= 0) & (slots < MAX_SLOTS)
    in_ring = (ring_slots >= 0) & (ring_slots < RING_ROWS)
    long = in_pool & (lengths > RING_LEN)
    assert_same_bits(new_pool[slots[long]], expected_pool[slots[long]], "long rows")
    assert_other_rows_kept(new_pool, pool, slots[long])
    recorded = in_pool & in_ring & (lengths > 0) & (lengths <= RING_LEN)
    assert_other_rows_kept(new_ring, ring, ring_slots[recorded], "ring")
    for b in np.flatnonzero(recorded):
        records = new_ring[ring_slots[b], :, :, : HEADS.record_elements]
        assert np.isfinite(records[:, : lengths[b]]).all()
        assert np.isnan(records[:, lengths[b] :]).all()
        assert np.isnan(new_ring[ring_slots[b], :, :, HEADS.record_elements :]).all()

    # Where a row recorded less than was "accepted", its NaN records may enter its own state and no other.
    folded = implementation.fold(new_pool, new_ring, slots[None], ring_slots[None], accepted, has_initial_state=flags)
    taken = in_pool & in_ring & (accepted > 0) & (accepted <= RING_LEN)
    assert_other_rows_kept(folded, new_pool, slots[taken])
    for b in np.flatnonzero(taken & recorded & (accepted <= lengths)):
        start = bounds[b][0]
        _, prefix = implementation.recurrence(
            tokens,
            pool,
            np.array([slots[b], *[-1] * (BATCH - 1)], np.int32),
            np.array([start, *[start + accepted[b]] * BATCH], np.int32),
            has_initial_state=np.array([flags[b]] * BATCH),
            algorithm="recurrent",
        )
        assert_same_bits(folded[slots[b]], prefix[slots[b]], f"row {b}")


@hypothesis.given(st.lists(st.integers(0, NUM_TOKENS), min_size=0, max_size=6).map(sorted), st.integers(0, BATCH - 1))
def test_splits(implementation, cuts, place):
    """One sequence, cut anywhere (pieces of nothing included), in any place of a padded batch."""
    slots = np.full(BATCH, -1, np.int32)
    slots[place] = 3

    def run(call, pool, start, end):
        offsets = np.full(BATCH + 1, end, np.int32)
        offsets[: place + 1] = start
        return call(pool, slots, offsets)

    x, weight, bias, windows = CONV

    def recurrence(pool, slots, offsets):
        return implementation.recurrence(TOKENS, pool, slots, offsets, algorithm="recurrent")

    def conv(pool, slots, offsets):
        return implementation.conv1d(x, weight, pool, slots, offsets, bias=bias, activation="silu")

    for call, pool in ((recurrence, POOL), (conv, windows)):
        whole_out, whole_pool = run(call, pool, 0, NUM_TOKENS)
        for start, end in zip([0, *cuts], [*cuts, NUM_TOKENS], strict=True):
            out, pool = run(call, pool, start, end)
            assert_same_bits(out[start:end], whole_out[start:end], f"outputs of {call.__name__}")
            assert_zero(out[:start])
            assert_zero(out[end:])
        assert_same_bits(pool, whole_pool, f"states of {call.__name__}")


@pytest.mark.parametrize("batch_size", [2, 3, 5, 7, 8, 9, 16])
def test_a_row_does_not_depend_on_the_batch_around_it(implementation, batch_size):
    """The recurrent algorithm's bits for one row, whatever the batch size."""
    for heads in (HEADS, shapes.HEADS["small"], shapes.Heads(4, 8, 64, 64)):
        tokens = shapes.trained_tokens(heads, 3 * 16, seed=112)
        pool = shapes.state_pool(heads, 17)
        offsets = (3 * np.arange(batch_size + 1)).astype(np.int32)
        slots = np.arange(batch_size, dtype=np.int32)
        out, new_pool = implementation.recurrence(tokens, pool, slots, offsets, algorithm="recurrent")
        alone_out, alone_pool = implementation.recurrence(tokens, pool, slots[:1], offsets[:2], algorithm="recurrent")
        assert_same_bits(out[:3], alone_out[:3])
        assert_same_bits(new_pool[0], alone_pool[0])
