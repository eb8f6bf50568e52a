"""Slots of requests, checkpoints of slots, and the speculative step."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from gdn_jax.flax import HEAD_AXIS, GatedDeltaCache, GatedDeltaNet, GatedDeltaNetConfig, layer_slots
from gdn_jax.serving import (
    SlotPool,
    Window,
    accepted_lengths,
    accepted_row_plan,
    commit,
    fork_slots,
    grow_cache,
    init_pools,
    restore_slots,
    save_slots,
    verify,
)
from tests.harness import assert_close, assert_same_bits, assert_zero, bits

CONFIG = GatedDeltaNetConfig(hidden_size=24, num_key_heads=2, num_value_heads=6, key_head_dim=16, value_head_dim=8)
NUM_LAYERS = 3
MAX_SLOTS = 8
RING_LEN = 5


def tokens(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, CONFIG.hidden_size)).astype(np.float32)


def make_layers(**options):
    return nnx.List(
        [GatedDeltaNet(CONFIG, rngs=nnx.Rngs(i), algorithm="recurrent", **options) for i in range(NUM_LAYERS)]
    )


@pytest.fixture(scope="module")
def layers():
    return make_layers()


def make_pools(layers, fill=np.nan, **options):
    pools = init_pools(
        layers[0], num_layers=NUM_LAYERS, max_slots=MAX_SLOTS, max_batch_size=8, ring_len=RING_LEN, **options
    )
    return jax.tree.map(lambda pool: jnp.full_like(pool, fill), pools)


@nnx.jit(donate_argnames="pools")
def plain(layers, x, pools, window):
    """The layers on top of one another, without speculation."""
    cache = pools.cache
    for i, layer in enumerate(layers):
        slots = layer_slots(window.slot_idx, i, NUM_LAYERS, cache.conv_state.shape[0])
        x, cache = layer(
            x,
            cache,
            slot_idx=slots,
            input_row_offsets=window.input_row_offsets,
            has_initial_state=window.has_initial_state,
        )
    return x, dataclasses.replace(pools, cache=cache)


def verified(layers, x, pools, window):
    conv_inputs = []
    for i, layer in enumerate(layers):
        x, pools, conv_input = verify(layer, x, pools, window, i)
        conv_inputs.append(conv_input)
    return x, pools, conv_inputs


@nnx.jit(donate_argnames="pools")
def speculative(layers, x, pools, window, num_accepted):
    x, pools, conv_inputs = verified(layers, x, pools, window)
    return x, commit(pools, window, conv_inputs, num_accepted)


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


# Slots


def test_slot_pool():
    pool = SlotPool(3)
    assert [pool.allocate(request) for request in "abc"] == [0, 1, 2]
    assert len(pool) == 3
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match=r"no slot is free for request 'd': all 3 are taken"):
        pool.allocate("d")
    with pytest.raises(ValueError, match=r"request 'a' already owns slot 0"):
        pool.allocate("a")
    assert pool.free("b") == 1
    assert "b" not in pool
    with pytest.raises(KeyError, match=r"request 'b' owns no slot: .* freed already"):
        pool.free("b")
    for use in (pool.slot, pool.reset, lambda r: pool.mark_started(["a", r]), lambda r: pool.slot_idx([r])):
        with pytest.raises(KeyError, match=r"request 'b' owns no slot"):
            use("b")
    assert not pool.has_initial_state(["a"])[0], "a failed mark_started must mark nobody"

    pool.mark_started(["a", "c"])
    assert pool.allocate("d") == 1
    idx, started = pool.slot_idx(["c", "d", "a"], pad_to=5), pool.has_initial_state(["c", "d", "a"], pad_to=5)
    assert idx.dtype == np.int32
    np.testing.assert_array_equal(idx, [2, 1, 0, -1, -1])
    np.testing.assert_array_equal(started, [True, False, True, False, False])
    pool.reset("a")
    pool.free("c")
    assert pool.allocate("c") == 2
    np.testing.assert_array_equal(pool.has_initial_state(["a", "c"]), [False, False])

    pool.grow(5)
    assert [pool.allocate(request) for request in "ef"] == [3, 4]
    with pytest.raises(ValueError, match=r"max_slots is 4, must be an integer of at least 5"):
        pool.grow(4)
    with pytest.raises(ValueError, match=r"max_slots is 0, must be an integer of at least 1"):
        SlotPool(0)
    with pytest.raises(ValueError, match=r"must not name one request twice"):
        pool.slot_idx(["a", "a"])
    with pytest.raises(ValueError, match=r"pad_to is 1, must be at least the number of requests, 2"):
        pool.slot_idx(["a", "c"], pad_to=1)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "grow"]), st.integers(0, 7)), max_size=60))
def test_slot_pool_never_shares(operations):
    pool, owned = SlotPool(2), {}
    for operation, request in operations:
        if operation == "grow":
            pool.grow(pool.max_slots + 1)
        elif operation == "allocate" and request not in owned and pool.num_free:
            owned[request] = pool.allocate(request)
            assert not pool.has_initial_state([request])[0]
            pool.mark_started([request])
        elif operation == "free" and request in owned:
            assert pool.free(request) == owned.pop(request)
        assert len(set(owned.values())) == len(owned)
        assert all(0 <= slot < pool.max_slots for slot in owned.values())
        assert {request: pool.slot(request) for request in owned} == owned
        assert pool.num_free + len(pool) == pool.max_slots


def test_a_reused_slot_starts_clean(layers):
    """A request in a slot that another one left behind, NaN and all, equals one in a clean pool."""
    pool, outputs = SlotPool(2), []
    dirty, clean = make_pools(layers), make_pools(layers, fill=0)
    pool.allocate("old")
    pool.free("old")
    pool.allocate("new")
    for pools in (dirty, clean):
        window = Window(pool.slot_idx(["new"]), np.array([0, 4]), pool.has_initial_state(["new"]))
        y, pools = plain(layers, tokens(4), pools, window)
        y, pools = speculative(
            layers, tokens(4), pools, dataclasses.replace(window, has_initial_state=None), np.array([2])
        )
        outputs.append((y, save_slots(pools.cache, np.array([0]), num_layers=NUM_LAYERS)))
    for ours, theirs in zip(*map(jax.tree.leaves, outputs), strict=True):
        assert_same_bits(ours, theirs)


def test_grow_cache(layers):
    cache = make_pools(layers, fill=3.0).cache
    grown = grow_cache(cache, MAX_SLOTS + 2, num_layers=NUM_LAYERS)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(grown), strict=True):
        assert new.shape == ((MAX_SLOTS + 2) * NUM_LAYERS, *old.shape[1:])
        assert_same_bits(new[: old.shape[0]], old)
        assert_zero(new[old.shape[0] :])
    # Slots keep their rows: the layers of a slot lie side by side.
    for layer in range(NUM_LAYERS):
        rows = [
            layer_slots(np.array([1, 7]), layer, NUM_LAYERS, leaf.recurrent_state.shape[0]) for leaf in (cache, grown)
        ]
        np.testing.assert_array_equal(rows[0], rows[1])
    with pytest.raises(ValueError, match=r"max_slots is 7, must be at least 8, as now"):
        grow_cache(cache, MAX_SLOTS - 1, num_layers=NUM_LAYERS)


# Checkpoints


@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_checkpoints(layers, state_dtype):
    pools = make_pools(layers, fill=0, state_dtype=state_dtype)
    window = Window(np.array([2, 5]), np.array([0, 4, 8]))
    _, pools = plain(layers, tokens(8), pools, window)
    checkpoint = save_slots(pools.cache, np.array([2, 99]), num_layers=NUM_LAYERS)
    assert checkpoint.recurrent_state.shape == (2, NUM_LAYERS, 6, 16, 8)
    assert checkpoint.recurrent_state.dtype == state_dtype
    kept = jax.tree.map(np.array, checkpoint)
    assert all(np.any(leaf[0] != 0) and np.all(leaf[1] == 0) for leaf in jax.tree.leaves(kept))

    first, pools = plain(layers, tokens(8, seed=1), pools, window)
    for now, then in zip(jax.tree.leaves(checkpoint), jax.tree.leaves(kept), strict=True):
        assert_same_bits(now, then, "a checkpoint after a step on its slot")

    # Back into its slot, and into another one: both go on from there. Nothing is written for a foreign slot.
    before = jax.tree.map(np.array, pools.cache)
    restored = restore_slots(pools.cache, checkpoint, np.array([2, -1], np.int32), num_layers=NUM_LAYERS)
    restored = restore_slots(restored, checkpoint, np.array([7, 4294967295], np.uint32), num_layers=NUM_LAYERS)
    rows = np.arange(MAX_SLOTS * NUM_LAYERS) // NUM_LAYERS
    for now, then in zip(jax.tree.leaves(restored), jax.tree.leaves(before), strict=True):
        others = ~np.isin(rows, [2, 7])
        assert_same_bits(np.asarray(now)[others], then[others], "slots that were not restored")
    pools = dataclasses.replace(pools, cache=restored)
    x = np.concatenate([tokens(8, seed=1)[:4]] * 2)
    again, _ = plain(layers, x, pools, Window(np.array([2, 7]), np.array([0, 4, 8])))
    assert_same_bits(again[:4], first[:4])
    assert_same_bits(again[4:], first[:4])


def test_fork(layers):
    pools = make_pools(layers, fill=0)
    _, pools = plain(layers, tokens(8), pools, Window(np.array([2, 5]), np.array([0, 4, 8])))
    before = jax.tree.map(np.array, pools.cache)
    place = pointers(pools.cache)

    fork = jax.jit(
        lambda cache, source, target: fork_slots(cache, source, target, num_layers=NUM_LAYERS), donate_argnums=0
    )
    forked = fork(pools.cache, np.array([2, 2, 5, -1, 5]), np.array([0, 7, 2, 1, -1]))
    assert pointers(forked) == place
    for now, then in zip(jax.tree.leaves(forked), jax.tree.leaves(before), strict=True):
        now, then = (np.asarray(leaf).reshape(MAX_SLOTS, NUM_LAYERS, -1) for leaf in (now, then))
        for slot, source in {0: 2, 7: 2, 2: 5}.items():
            assert_same_bits(now[slot], then[source])
        kept = [1, 3, 4, 5, 6]
        assert_same_bits(now[kept], then[kept])


def test_checkpoint_errors(layers):
    cache = make_pools(layers).cache
    checkpoint = save_slots(cache, np.array([1]), num_layers=NUM_LAYERS)
    with pytest.raises(
        ValueError, match=r"checkpoint has an array float32\[1, 3, 112, 3\], must be float32\[2, 3, 112, 3\]"
    ):
        restore_slots(cache, checkpoint, np.array([1, 2]), num_layers=NUM_LAYERS)
    with pytest.raises(ValueError, match=r"cache has 24 rows, must be a multiple of num_layers = 5"):
        save_slots(cache, np.array([1]), num_layers=5)
    with pytest.raises(TypeError, match=r"slot_idx has dtype float32"):
        save_slots(cache, np.array([1.0], np.float32))
    with pytest.raises(ValueError, match=r"target_idx has shape \(1,\)"):
        fork_slots(cache, np.array([1, 2]), np.array([1]))


# Row plans


def expected_plan(offsets, num_accepted, total, last):
    lengths, replay = [], []
    for start, end, n in zip(offsets[:-1], offsets[1:], num_accepted, strict=True):
        start, end = min(max(start, 0), total), min(max(end, 0), total)
        length = max(end - start, 0)
        lengths.append(length if length > RING_LEN else min(max(n, 0), length))
        replay.append(list(range(start, start + lengths[-1]))[-last:])
    return lengths, replay


@partial(jax.jit, static_argnames="last")
def plan(offsets, num_accepted, last):
    lengths = accepted_lengths(num_accepted, offsets, ring_len=RING_LEN, total_seq_len=20)
    return lengths, *accepted_row_plan(lengths, offsets, last=last, total_seq_len=20)


@given(
    st.lists(st.integers(-2, 26), min_size=7, max_size=7),
    st.booleans(),
    st.lists(st.integers(-3, 9), min_size=6, max_size=6),
    st.sampled_from([1, 3]),
)
def test_accepted_row_plan(offsets, well_formed, num_accepted, last):
    offsets = sorted(offsets) if well_formed else offsets
    lengths, replay = expected_plan(offsets, num_accepted, 20, last)
    got, token_idx, row_offsets = plan(np.array(offsets, np.int32), np.array(num_accepted, np.int32), last)
    np.testing.assert_array_equal(got, lengths)
    assert token_idx.shape == (6 * last,)
    assert got.dtype == token_idx.dtype == row_offsets.dtype == jnp.int32
    for b, tokens_of_row in enumerate(replay):
        np.testing.assert_array_equal(token_idx[row_offsets[b] : row_offsets[b + 1]], tokens_of_row)
    assert_zero(token_idx[row_offsets[-1] :])


# The speculative step

ROWS = {  # slot, length, started, ring slot, accepted, expected to stay
    "no drafts": (3, 1, True, 0, 1, 1),
    "all accepted": (0, 5, True, 1, 5, 5),
    "only the known token": (6, 4, True, 2, 1, 1),
    "some accepted": (1, 4, True, 7, 3, 3),
    "none at all": (4, 3, True, 4, 0, 0),
    "prompt longer than the ring": (2, 9, False, 5, 0, 9),
    "prompt within the ring": (5, 2, False, 3, 2, 2),
    "count past the row": (7, 3, True, 6, 4, 3),
}


def step_of(rows, seed):
    """`(x, window, num_accepted)` of rows as in `ROWS`."""
    slots, lengths, started, ring_slots, num_accepted, _ = (np.array(column) for column in zip(*rows, strict=True))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return tokens(offsets[-1], seed), Window(slots, offsets, started, ring_slots), num_accepted


def started_pools(layers, **options):
    """Pools in which every slot has seen 4 tokens."""
    window = Window(np.arange(MAX_SLOTS), np.arange(MAX_SLOTS + 1) * 4, np.zeros(MAX_SLOTS, bool))
    _, pools = plain(layers, tokens(4 * MAX_SLOTS, seed=9), make_pools(layers, **options), window)
    return pools


def accepted_only(window, stay):
    """The window with every row cut off after its accepted tokens, and the others left to padding rows.

    Each token keeps its place in the buffer: a matrix product need not round a row alike in every place.
    """
    start, end = window.input_row_offsets[:-1], window.input_row_offsets[1:]
    offsets = np.append(np.stack([start, start + stay], axis=1), end[-1])
    slots = np.stack([window.slot_idx, np.full_like(window.slot_idx, -1)], axis=1)
    return Window(slots.reshape(-1), offsets, np.repeat(window.has_initial_state, 2))


@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_commit_equals_the_accepted_tokens(layers, state_dtype):
    """Outputs, states and windows, bit for bit, over three steps in a row with another order of rows each time."""
    pools, reference = (started_pools(layers, state_dtype=state_dtype) for _ in range(2))
    for step in range(3):
        rows = list(ROWS.values())[step:] + list(ROWS.values())[:step]
        x, window, num_accepted = step_of(rows, seed=step)
        whole = jax.tree.map(jnp.copy, reference)
        y, pools = speculative(layers, x, pools, window, num_accepted)
        assert_same_bits(y, plain(layers, x, whole, window)[0], "outputs of the verify")
        _, reference = plain(layers, x, reference, accepted_only(window, [row[-1] for row in rows]))
        assert_same_bits(pools.cache.recurrent_state, reference.cache.recurrent_state, f"states after step {step}")
        assert_same_bits(pools.cache.conv_state, reference.cache.conv_state, f"windows after step {step}")


def test_verify_alone_changes_no_state(layers):
    pools = started_pools(layers)
    before = jax.tree.map(np.array, pools.cache)
    x, window, _ = step_of([row for row in ROWS.values() if row[1] <= RING_LEN], seed=0)
    _, after, _ = nnx.jit(verified)(layers, x, pools, window)
    for now, then in zip(jax.tree.leaves(after.cache), jax.tree.leaves(before), strict=True):
        assert_same_bits(now, then)


def test_padding_rows_and_foreign_ring_slots(layers):
    pools = started_pools(layers)
    before = jax.tree.map(np.array, pools.cache)
    rows = [
        (-1, 2, True, 0, 2, 0),  # padding
        (3, 3, True, -1, 3, 0),  # nowhere to record: stays as it was
        (MAX_SLOTS, 9, False, 1, 9, 0),  # padding longer than the ring
        (5, 7, False, 99, 7, 7),  # needs no record
        (2, 0, True, 2, 0, 0),
        (6, 2, True, 3, 2, 2),
    ]
    x, window, num_accepted = step_of(rows, seed=0)
    x[:2] = x[5:14] = np.nan
    y, pools = speculative(layers, x, pools, window, num_accepted)
    assert_zero(y[:2])
    assert_zero(y[5:14])
    assert np.isfinite(y).all()
    rows = np.arange(MAX_SLOTS * NUM_LAYERS) // NUM_LAYERS
    for now, then in zip(jax.tree.leaves(pools.cache), jax.tree.leaves(before), strict=True):
        now, kept = np.asarray(now), ~np.isin(rows, [5, 6])
        assert_same_bits(now[kept], then[kept])
        changed = (bits(now) != bits(then)).reshape(len(rows), -1).any(axis=1)
        assert changed[~kept].all()


def test_one_program_without_the_host(layers):
    """One fold and one conv pass commit all layers; counts and splits neither compile anew nor visit the host."""
    pools = started_pools(layers)
    x, window, num_accepted = step_of(ROWS.values(), seed=0)
    _, after, conv_inputs = jax.eval_shape(lambda: verified(layers, x, pools, window))
    jaxpr = str(jax.make_jaxpr(commit)(after, window, conv_inputs, num_accepted))
    assert jaxpr.count("gdn_state_fold[") == 1
    assert jaxpr.count("gdn_conv1d[") == 1
    assert "callback" not in jaxpr

    traces = 0

    @jax.jit
    def step(state, x, pools, window, num_accepted):
        nonlocal traces
        traces += 1
        x, pools, conv_inputs = verified(nnx.merge(graph, state), x, pools, window)
        return x, commit(pools, window, conv_inputs, num_accepted)

    graph, state = nnx.split(layers)
    batches = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        shuffled = [(slot, 4, *rest) for (slot, _, *rest) in ROWS.values()]
        x, window, _ = step_of([shuffled[i] for i in rng.permutation(len(shuffled))], seed)
        offsets = np.sort(rng.integers(0, len(x), len(ROWS) + 1))
        window = dataclasses.replace(window, input_row_offsets=offsets)
        batches.append(jax.device_put((x, window, rng.integers(0, 5, len(ROWS)))))
    with jax.transfer_guard("disallow"):
        for x, window, num_accepted in batches:
            _, pools = step(state, x, pools, window, num_accepted)
    jax.block_until_ready(pools)
    assert traces == 1


def test_in_place(layers):
    pools = started_pools(layers, fill=0)
    place = pointers(pools)
    for seed in range(3):
        x, window, num_accepted = step_of(ROWS.values(), seed)
        _, pools = speculative(layers, x, pools, window, num_accepted)
    assert pointers(pools) == place


def test_layers_in_a_scan(layers):
    """Stacked layers, pools as the carry, `conv_inputs` as one array: the same as the layers one by one."""
    graph, _ = nnx.split(layers[0])
    stacked = nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *[nnx.state(layer) for layer in layers]))
    x, window, num_accepted = step_of(ROWS.values(), seed=0)

    @nnx.jit(donate_argnames="pools")
    def step(stacked, x, pools, window, num_accepted):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
        def block(carry, layer, i):
            y, pools, conv_input = verify(layer, carry[0], carry[1], window, i)
            return (y, pools), conv_input

        (y, pools), conv_inputs = block((x, pools), stacked, jnp.arange(NUM_LAYERS))
        return y, commit(pools, window, conv_inputs, num_accepted)

    pools = started_pools(layers, fill=0)
    place = pointers(pools)
    y, pools = step(stacked, x, pools, window, num_accepted)
    assert pointers(pools) == place
    expected, expected_pools = speculative(layers, x, started_pools(layers, fill=0), window, num_accepted)
    assert_close(y, expected, 2e-6)
    for ours, theirs in zip(jax.tree.leaves(pools.cache), jax.tree.leaves(expected_pools.cache), strict=True):
        assert_close(ours, theirs, 2e-6)


def test_on_an_explicit_mesh(layers):
    mesh = jax.make_mesh((2,), (HEAD_AXIS,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    x, window, num_accepted = step_of(ROWS.values(), seed=0)
    with jax.set_mesh(mesh):
        sharded = make_layers(head_shards=2)
        for ours, theirs in zip(sharded, layers, strict=True):
            ours.load_hf(theirs.to_hf())
        pools = started_pools(sharded, fill=0)
        y, pools = speculative(sharded, x, pools, window, num_accepted)
        assert pools.ring.sharding.spec[1] == HEAD_AXIS
    expected, expected_pools = speculative(layers, x, started_pools(layers, fill=0), window, num_accepted)
    assert_close(y, expected, 2e-6)
    assert_close(pools.cache.recurrent_state, expected_pools.cache.recurrent_state, 2e-6)


def test_speculation_errors(layers):
    pools = started_pools(layers, fill=0)
    x, window, num_accepted = step_of(ROWS.values(), seed=0)
    _, after, conv_inputs = verified(layers, x, pools, window)
    with pytest.raises(ValueError, match=r"conv_inputs has 2 layers, must have num_layers = 3"):
        commit(after, window, conv_inputs[:2], num_accepted)
    with pytest.raises(ValueError, match=r"num_accepted has shape \(7,\)"):
        commit(after, window, conv_inputs, num_accepted[:7])
    with pytest.raises(TypeError, match=r"num_accepted has dtype float"):
        commit(after, window, conv_inputs, num_accepted * 1.0)
    with pytest.raises(ValueError, match=r"input_row_offsets has shape \(8,\)"):
        verify(layers[0], x, pools, dataclasses.replace(window, input_row_offsets=np.arange(8)), 0)
    with pytest.raises(ValueError, match=r"ring_slot_idx has shape \(3,\)"):
        verify(layers[0], x, pools, dataclasses.replace(window, ring_slot_idx=np.arange(3)), 0)
    nine = Window(np.arange(9), np.arange(10) * 3)
    with pytest.raises(ValueError, match=r"slot_idx has 9 rows, must have at most max_batch_size = 8"):
        verify(layers[0], x, pools, nine, 0)
    cache = GatedDeltaCache(pools.cache.conv_state[:23], pools.cache.recurrent_state[:23])
    with pytest.raises(ValueError, match=r"rows is 23, must be a multiple of num_layers = 3"):
        verify(layers[0], x, dataclasses.replace(pools, cache=cache), window, 0)
