"""Pools and lanes that are parts of larger arrays: one layer of stacked pools, batches folded under `vmap`."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from gdn_jax._ragged import fold_rows
from tests import oracle, shapes
from tests.harness import assert_same_bits, ring_of

HEADS = shapes.Heads(1, 2, 16, 16)
LAYERS, SLOTS, RING_LEN = 3, 4, 4


def operations(name):
    """Of each operation: a function from one layer's pools to `(outputs, new pools)`, and those pools of all layers."""
    rows, offsets = jnp.array([2, 0, -1], jnp.int32), jnp.array([0, 3, 3, 7], jnp.int32)
    qkv, decay, beta = map(jnp.asarray, shapes.trained_tokens(HEADS, 7, seed=91))
    pool = jnp.asarray(np.stack([shapes.state_pool(HEADS, SLOTS, seed=n) for n in range(LAYERS)]))
    ring = jnp.asarray(np.stack([ring_of(HEADS, SLOTS, RING_LEN, fill=n) for n in range(LAYERS)]))
    conv = [shapes.conv_inputs(HEADS, 7, SLOTS, seed=n) for n in range(LAYERS)]
    x, weight, bias = map(jnp.asarray, conv[0][:3])
    accepted = jnp.array([3, 0, 2], jnp.int32)
    windows = jnp.asarray(np.stack([layer[3] for layer in conv]))

    def recurrence(pool):
        out, pool = gdn_jax.gated_delta_recurrence_fwd(
            qkv, decay, beta, pool, rows, offsets, algorithm="recurrent", implementation=name
        )
        return out, (pool,)

    def verify(pool, ring):
        out, *pools = gdn_jax.gated_delta_recurrence_verify_ring(
            qkv, decay, beta, pool, ring, rows, rows, offsets, implementation=name
        )
        return out, pools[::-1]

    def fold(pool, ring):
        return (), (
            gdn_jax.gated_delta_state_fold(pool, ring, rows[None], rows[None], accepted, implementation=name),
            ring,
        )

    def conv1d(windows):
        out, windows = gdn_jax.gated_delta_conv1d_fwd(x, weight, windows, rows, offsets, bias=bias, implementation=name)
        return out, (windows,)

    return {
        "recurrence": (recurrence, (pool,)),
        "verify_ring": (verify, (pool, ring)),
        "state_fold": (fold, (pool, ring)),
        "conv1d": (conv1d, (windows,)),
    }


OPERATIONS = ["recurrence", "verify_ring", "state_fold", "conv1d"]


def by_scan(run, pools):
    return jax.lax.scan(lambda carry, layer: (carry, run(*layer)), 0, pools)[1]


def unrolled(run, pools):
    outs, kept = [], list(pools)
    for n in range(LAYERS):
        out, new = run(*(pool[n] for pool in kept))
        outs.append(out)
        kept = [pool.at[n].set(layer) for pool, layer in zip(kept, new, strict=True)]
    return jax.tree.map(lambda *layers: jnp.stack(layers), *outs), tuple(kept)


def indexed(run, pools):
    """The stacked pools as what a loop carries."""

    def step(kept, n):
        out, new = run(*(pool[n] for pool in kept))
        return tuple(pool.at[n].set(layer) for pool, layer in zip(kept, new, strict=True)), out

    kept, outs = jax.lax.scan(step, tuple(pools), jnp.arange(LAYERS))
    return outs, kept


@pytest.mark.parametrize("loop", [by_scan, unrolled, indexed])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_layers_of_stacked_pools(implementation, operation, loop):
    """One program over all layers gives what a call for each layer gives, and leaves what it was passed alone."""
    run, pools = operations(implementation.name)[operation]
    layers = [run(*(pool[n] for pool in pools)) for n in range(LAYERS)]
    expected = jax.tree.map(lambda *xs: np.stack(xs), *((out, tuple(new)) for out, new in layers))
    before = [np.array(pool) for pool in pools]
    outs, new = jax.jit(lambda *pools: loop(run, pools))(*pools)
    jax.tree.map(assert_same_bits, (outs, tuple(new)), expected)
    for pool, kept in zip(pools, before, strict=True):
        assert_same_bits(pool, kept)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_take_pools_from_behind_a_barrier(operation):
    """What keeps XLA from fusing a slice of stacked pools into a call that updates it in place."""
    run, pools = operations("mosaic_gpu")[operation]
    text = jax.jit(run).trace(*(pool[0] for pool in pools)).lower(lowering_platforms=("cuda",)).as_text()
    barriers = {"recurrence": 2, "verify_ring": 4, "state_fold": 3, "conv1d": 2}
    assert text.count("= stablehlo.optimization_barrier") == barriers[operation]
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1


@pytest.mark.parametrize(
    "offsets",
    [
        [[0, 4, 4, 10], [0, 3, 9, 10], [2, 3, 4, 7]],
        [[0, 4, 4, 10], [2, 3, 9, 5], [0, 10, 10, 12]],
        [[5, 0, 3, 9], [-7, 3, 9, 10], [0, 0, 0, 0]],
        [[10, 10, 0, 0], [-(2**31), 2**31 - 1, 2, 2], [1, 2, 3, 4]],
    ],
)
def test_folded_lanes_share_no_token_with_the_rows_between_them(offsets):
    lanes, total = 3, 10
    offsets = np.array(offsets, np.int32)
    slots = np.arange(9, dtype=np.int32).reshape(lanes, 3)
    fields = (jnp.asarray(slots), -1), (jnp.asarray(slots >= 0), False)
    flat, folded, flags = map(np.asarray, fold_rows(jnp.asarray(offsets), total, *fields))
    assert folded.shape == flags.shape == (lanes * 4 - 1,)
    assert ((folded >= 0) == flags).all()
    rows = {int(slot): bounds for slot, bounds in zip(folded, oracle.row_bounds(flat, lanes * total), strict=True)}
    live = np.zeros(lanes * total, int)
    for lane in range(lanes):
        for slot, (start, end) in zip(slots[lane], oracle.row_bounds(offsets[lane], total), strict=True):
            got = rows[int(slot)]
            assert max(got[1] - got[0], 0) == max(end - start, 0)
            if end > start:
                assert got == (start + lane * total, end + lane * total)
                live[start + lane * total : end + lane * total] += 1
    for slot, (start, end) in zip(folded, oracle.row_bounds(flat, lanes * total), strict=True):
        if slot < 0:
            assert not live[start : max(start, end)].any()
