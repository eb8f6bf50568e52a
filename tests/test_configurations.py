"""JAX's own switches: the operations work under each of them, whoever turned it on."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from gdn_jax.recurrence import Algorithm
from tests import shapes

HEADS = shapes.HEADS["small"]
NUM_TOKENS = 40
SLOTS = np.array([1, 3], np.int32)
OFFSETS = np.array([0, 20, 40], np.int32)

SWITCHES = {
    "x64": lambda: jax.enable_x64(True),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug nans": lambda: jax.debug_nans(True),
    "no tracer leaks": jax.checking_leaks,
}


def every_operation(implementation):
    """Each public operation once, with a derivative and a vmap; the float outputs."""
    qkv, decay, beta = (jnp.asarray(x) for x in shapes.trained_tokens(HEADS, NUM_TOKENS))
    pool = jnp.asarray(shapes.state_pool(HEADS, 5))
    x, weight, _, windows = (jnp.asarray(a) for a in shapes.conv_inputs(HEADS, NUM_TOKENS, 5))
    ring = jnp.zeros(HEADS.ring_shape(2, 24), jnp.float32)
    rows = np.array([0, 1], np.int32)

    def forward(qkv, algorithm: Algorithm = "auto"):
        return gdn_jax.gated_delta_recurrence_fwd(
            qkv, decay, beta, pool, SLOTS, OFFSETS, algorithm=algorithm, implementation=implementation
        )

    rates = jnp.zeros(decay.shape[1], jnp.float32)
    gates = gdn_jax.gated_delta_gates(decay, beta, rates, rates)
    conv = gdn_jax.gated_delta_conv1d_fwd(
        x, weight, windows, SLOTS, OFFSETS, activation="silu", implementation=implementation
    )
    out, ring, state = gdn_jax.gated_delta_recurrence_verify_ring(
        qkv, decay, beta, pool, ring, SLOTS, rows, OFFSETS, implementation=implementation
    )
    folded = gdn_jax.gated_delta_state_fold(
        pool, ring, SLOTS[None], rows[None], np.array([3, 20], np.int32), implementation=implementation
    )
    gradient = jax.grad(lambda qkv: forward(qkv)[0].sum())(qkv)
    lanes = jax.vmap(forward)(jnp.stack([qkv, qkv]))
    return [*gates, *conv, out, ring, state, folded, *forward(qkv, "recurrent"), *forward(qkv), gradient, *lanes]


@pytest.fixture(scope="module")
def plain():
    return every_operation("xla")


@pytest.mark.parametrize(("name", "switch"), [("scan", "x64"), *(("xla", switch) for switch in SWITCHES)])
def test_same_values_and_dtypes_under(name, switch, plain):
    with contextlib.ExitStack() as stack:
        stack.enter_context(SWITCHES[switch]())
        results = every_operation(name)
    for result, reference in zip(results, plain, strict=True):
        assert result.dtype == reference.dtype
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


def test_unsigned_64_bit_slots_are_not_wrapped():
    qkv, decay, beta = shapes.trained_tokens(HEADS, NUM_TOKENS)
    pool = jnp.asarray(shapes.state_pool(HEADS, 5))
    slots = np.array([2**32 + 1, 2**63], np.uint64)
    out, state = gdn_jax.gated_delta_recurrence_fwd(qkv, decay, beta, pool, slots, OFFSETS)
    assert not out.any()
    np.testing.assert_array_equal(state, pool)
