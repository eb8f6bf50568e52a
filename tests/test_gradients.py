"""Derivatives against central differences of the float64 oracle, one argument at a time."""

# Arguments are NumPy arrays as often as JAX arrays, and come unpacked from tuples.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from tests import oracle, shapes
from tests.harness import assert_close, assert_zero, relative_error

HEADS = shapes.Heads(1, 2, 16, 16)
LENGTHS = (9, 0, 1, 35, 3)
NUM_TOKENS, MAX_SLOTS, RING_LEN = sum(LENGTHS), 6, 4
OFFSETS = shapes.row_offsets(LENGTHS)
SLOTS = np.array([4, 1, -1, 0, 2], np.int32)
FLAGS = np.array([True, True, True, True, False])
# The tangents are float32 sums over a row's tokens; the differences themselves are good to 1e-8.
BUDGET = 2e-5


def recurrence_inputs(seed=80, make=shapes.trained_tokens):
    tokens = make(HEADS, NUM_TOKENS, seed=seed)
    return (*tokens, shapes.state_pool(HEADS, MAX_SLOTS))


def conv_inputs():
    x, weight, bias, windows = shapes.conv_inputs(HEADS, NUM_TOKENS, MAX_SLOTS, seed=81)
    return x, weight, bias, windows


def problem(operation, implementation, algorithm="recurrent"):
    """``(package function, oracle function, float arrays, their names)`` of the differentiable arguments."""
    options = {"has_initial_state": FLAGS}
    named = {"implementation": implementation}
    if operation == "recurrence":
        return (
            lambda *xs: gdn_jax.gated_delta_recurrence_fwd(
                *xs, SLOTS, OFFSETS, has_initial_state=jnp.asarray(FLAGS), algorithm=algorithm, **named
            ),
            lambda *xs: oracle.recurrence(*xs, SLOTS, OFFSETS, FLAGS),
            recurrence_inputs(),
            ("qkv", "decay", "beta", "recurrent_state"),
        )
    if operation == "verify_ring":
        ring = np.zeros(HEADS.ring_shape(5, RING_LEN, padding=2), np.float32)
        rows = np.array([0, 1, 2, 3, 4], np.int32)
        return (
            lambda *xs: gdn_jax.gated_delta_recurrence_verify_ring(
                *xs, SLOTS, rows, OFFSETS, has_initial_state=jnp.asarray(FLAGS), **named
            ),
            lambda *xs: oracle.verify_ring(*xs, SLOTS, rows, OFFSETS, FLAGS),
            (*recurrence_inputs(), ring),
            ("qkv", "decay", "beta", "recurrent_state", "ring"),
        )
    if operation == "state_fold":
        ring = np.random.default_rng(82).standard_normal(HEADS.ring_shape(5, RING_LEN), np.float32)
        rows, rings = SLOTS[None], np.array([[3, 0, 1, 4, 2]], np.int32)
        accepted = np.array([4, 0, 2, 1, 3], np.int32)
        return (
            lambda *xs: (gdn_jax.gated_delta_state_fold(*xs, rows, rings, accepted, **named),),
            lambda *xs: (oracle.state_fold(*xs, rows, rings, accepted),),
            (shapes.state_pool(HEADS, MAX_SLOTS), ring),
            ("recurrent_state", "ring"),
        )
    return (
        lambda x, weight, bias, windows: gdn_jax.gated_delta_conv1d_fwd(
            x,
            weight,
            windows,
            SLOTS,
            OFFSETS,
            bias=bias,
            activation="silu",
            has_initial_state=jnp.asarray(FLAGS),
            **named,
        ),
        lambda x, weight, bias, windows: oracle.conv1d(
            x, weight, windows, SLOTS, OFFSETS, bias=bias, activation="silu", **options
        ),
        conv_inputs(),
        ("qkv", "weight", "bias", "conv_state"),
    )


CASES = [
    ("recurrence", "xla", "recurrent"),
    ("recurrence", "xla", "chunked"),
    ("recurrence", "scan", "recurrent"),
    ("verify_ring", "xla", "recurrent"),
    ("state_fold", "xla", "recurrent"),
    ("conv1d", "xla", "recurrent"),
    ("conv1d", "scan", "recurrent"),
]
CASES = [
    *(pytest.param(case, id="-".join(case)) for case in CASES),
    *(
        pytest.param((operation, None, "auto"), marks=pytest.mark.gpu, id=f"{operation}-on-gpu")
        for operation in ("recurrence", "verify_ring", "state_fold", "conv1d")
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_jvp_and_vjp_against_central_differences(case):
    function, exact, arrays, names = problem(*case)
    rng = np.random.default_rng(83)
    tangents = [rng.standard_normal(array.shape).astype(np.float32) for array in arrays]

    @jax.jit
    def jvp(arrays, tangents):
        return jax.jvp(function, arrays, tangents)[1]

    @jax.jit
    def vjp(arrays, cotangents):
        return jax.vjp(function, *arrays)[1](cotangents)

    outs = function(*map(jnp.asarray, arrays))
    cotangents = tuple(jnp.asarray(rng.standard_normal(out.shape), out.dtype) for out in outs)
    gradients = vjp(tuple(map(jnp.asarray, arrays)), cotangents)
    for i, name in enumerate(names):
        alone = tuple(t if j == i else np.zeros_like(t) for j, t in enumerate(tangents))
        step = 1e-6
        ahead, behind = (
            exact(*(array.astype(np.float64) + sign * step * t for array, t in zip(arrays, alone, strict=True)))
            for sign in (1, -1)
        )
        expected = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
        for j, (value, reference) in enumerate(zip(jvp(tuple(arrays), alone), expected, strict=True)):
            assert_close(value, reference, BUDGET, f"result {j} by {name}")
        # The transpose: <cotangent, J tangent> = <J^T cotangent, tangent>, in relation to what was summed.
        terms = [np.asarray(c, np.float64) * e for c, e in zip(cotangents, expected, strict=True)]
        product = float(np.sum(np.asarray(gradients[i], np.float64) * alone[i]))
        scale = np.sqrt(sum(np.sum(term**2) for term in terms))
        assert abs(product - sum(np.sum(term) for term in terms)) <= 10 * BUDGET * scale, name


def check_gradient_entries(gradient, value_of, array, entries, budget=1e-4):
    """Single entries of a gradient against differences: a transpose that is right on average can still misplace."""
    step = 1e-6
    expected = []
    for entry in entries:
        moved = [array.astype(np.float64).copy() for _ in range(2)]
        moved[0][entry] += step
        moved[1][entry] -= step
        expected.append((value_of(moved[0]) - value_of(moved[1])) / (2 * step))
    got = np.array([np.asarray(gradient)[entry] for entry in entries], np.float64)
    assert relative_error(got, np.array(expected)) <= budget


@functools.cache
def gradient_of_weighted_sums(algorithm):
    """``d (sum(out * w0) + sum(pool * w1))`` by the arrays, as a function of ``(w0, w1, *arrays)``."""

    def loss(out_weights, pool_weights, *xs):
        out, pool = gdn_jax.gated_delta_recurrence_fwd(*xs, SLOTS, OFFSETS, algorithm=algorithm)
        return jnp.sum(out * out_weights) + jnp.sum(pool * pool_weights)

    return jax.jit(jax.grad(loss, argnums=(2, 3, 4, 5)))


NO_POOL_WEIGHTS = np.zeros(HEADS.state_shape(MAX_SLOTS), np.float32)


@pytest.mark.parametrize("algorithm", ["recurrent", "chunked"])
def test_single_entries_of_the_gradient(algorithm):
    arrays = recurrence_inputs(84)
    rng = np.random.default_rng(85)
    weights = rng.standard_normal((NUM_TOKENS, HEADS.value_dim)), rng.standard_normal(arrays[3].shape)

    gradients = gradient_of_weighted_sums(algorithm)(*(w.astype(np.float32) for w in weights), *arrays)
    for i, gradient in enumerate(gradients):
        assert gradient.dtype == jnp.float32

        def value_of(moved, i=i):
            out, pool = oracle.recurrence(*arrays[:i], moved, *arrays[i + 1 :], SLOTS, OFFSETS)
            return np.sum(out * weights[0]) + np.sum(pool * weights[1])

        flat = rng.choice(arrays[i].size, 12, replace=False)
        entries = [tuple(int(n) for n in np.unravel_index(f, arrays[i].shape)) for f in flat]
        check_gradient_entries(gradient, value_of, arrays[i], entries)
    # Padding, and the tokens of padding, have no part in anything but their own rows of the pool.
    padding = slice(OFFSETS[2], OFFSETS[3])
    for gradient in gradients[:3]:
        assert_zero(np.asarray(gradient)[padding])
    np.testing.assert_array_equal(np.asarray(gradients[3])[[1, 3, 5]], weights[1][[1, 3, 5]].astype(np.float32))


@pytest.mark.parametrize("algorithm", ["recurrent", "chunked"])
def test_gradients_of_zero_rows_are_finite(algorithm):
    """q = k = 0 and rows of norm 1e-4: the epsilon stands under the root."""
    arrays = recurrence_inputs(86, shapes.zero_rows)
    weights = np.random.default_rng(87).standard_normal((NUM_TOKENS, HEADS.value_dim)).astype(np.float32)

    gradients = gradient_of_weighted_sums(algorithm)(weights, NO_POOL_WEIGHTS, *arrays)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    # Row 0 is zero in q and k; its derivative is that of x * rsqrt(sum(x*x) + epsilon), 1000 times what it multiplies.
    assert np.abs(np.asarray(gradients[0])[0, : HEADS.key_head_dim]).max() > 0

    def value_of(qkv):
        return np.sum(oracle.recurrence(qkv, *arrays[1:], SLOTS, OFFSETS)[0] * weights)

    # Derivatives in q and k of tokens 0 (zero) and 1 (short), where the scale of a step is that of the root of epsilon.
    entries = [(token, channel) for token in (0, 1) for channel in (0, 5, 17, 30)]
    check_gradient_entries(gradients[0], value_of, arrays[0], entries, budget=1e-3)


@pytest.mark.parametrize("algorithm", ["recurrent", "chunked"])
def test_gradients_with_resets(algorithm):
    """Decays of 0 and of next to nothing: finite everywhere, and right by the tokens."""
    arrays = recurrence_inputs(88, shapes.resetting_tokens)
    weights = np.random.default_rng(89).standard_normal((NUM_TOKENS, HEADS.value_dim)).astype(np.float32)

    gradients = gradient_of_weighted_sums(algorithm)(weights, NO_POOL_WEIGHTS, *arrays)
    for gradient in gradients:
        assert np.isfinite(gradient).all()

    def value_of(qkv):
        return np.sum(oracle.recurrence(qkv, *arrays[1:], SLOTS, OFFSETS)[0] * weights)

    entries = [(token, channel) for token in (0, 4, 20, 40) for channel in (3, 20, 40, 60)]
    check_gradient_entries(gradients[0], value_of, arrays[0], entries)


@pytest.mark.parametrize("algorithm", ["recurrent", "chunked"])
def test_gradients_ignore_what_lies_outside_every_row(algorithm):
    """NaN in the tail and in fresh rows' slots reaches no derivative either."""
    qkv, decay, beta, pool = recurrence_inputs(90)
    offsets = np.minimum(OFFSETS, NUM_TOKENS - 2)
    clean = [np.array(x) for x in (qkv, decay, beta, pool)]
    for array in (qkv, decay, beta):
        array[-2:] = np.nan
    pool[SLOTS[4]] = np.nan

    def loss(*xs):
        out, new_pool = gdn_jax.gated_delta_recurrence_fwd(
            *xs, SLOTS, offsets, has_initial_state=jnp.asarray(FLAGS), algorithm=algorithm
        )
        return jnp.sum(out**2) + jnp.sum(new_pool**2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    poisoned, expected = gradient(qkv, decay, beta, pool), gradient(*clean)
    for value, reference in zip(poisoned, expected, strict=True):
        assert np.isfinite(value).all()
        assert_close(value, reference, 1e-6)


@pytest.mark.parametrize("operation", ["conv1d", "verify_ring", "state_fold"])
def test_gradients_of_the_other_operations_ignore_it_too(operation):
    """NaN in the tail, in slots that are not read, in records that were not accepted."""
    function, _, arrays, names = problem(operation, None)
    offsets = np.minimum(OFFSETS, NUM_TOKENS - 2)
    poisoned, clean = [np.array(x) for x in arrays], [np.array(x) for x in arrays]
    if operation == "state_fold":
        accepted, rings = (4, 0, 2, 1, 3), (3, 0, 1, 4, 2)
        for ring_row, count in zip(rings, accepted, strict=True):
            poisoned[1][ring_row, :, count:] = np.nan
            clean[1][ring_row, :, count:] = 0
    else:
        poisoned[names.index("qkv")][-2:] = np.nan
        state = names.index("conv_state" if operation == "conv1d" else "recurrent_state")
        poisoned[state][SLOTS[4]] = np.nan  # A fresh row's.
        clean[state][SLOTS[4]] = 0

    def call(*xs):
        if operation == "state_fold":
            return function(*xs)
        options = {"has_initial_state": jnp.asarray(FLAGS)}
        if operation == "conv1d":
            x, weight, bias, windows = xs
            return gdn_jax.gated_delta_conv1d_fwd(x, weight, windows, SLOTS, offsets, bias=bias, **options)
        rows = np.array([0, 1, 2, 3, 4], np.int32)
        out, ring, pool = gdn_jax.gated_delta_recurrence_verify_ring(*xs, SLOTS, rows, offsets, **options)
        # A window leaves its pool row alone, NaN included: that row is no result of this call.
        return out, ring, pool.at[SLOTS[4]].set(0)

    def loss(*xs):
        return sum(jnp.sum(x**2) for x in call(*xs))

    gradient = jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays)))))
    for name, value, reference in zip(names, gradient(*poisoned), gradient(*clean), strict=True):
        assert np.isfinite(value).all(), name
        assert_close(value, reference, 1e-6, name)


def test_gradients_have_the_dtypes_of_their_arguments():
    dtype = "bfloat16"
    qkv, decay, beta, pool = map(jnp.asarray, recurrence_inputs(91))

    def loss(*xs):
        out, new_pool = gdn_jax.gated_delta_recurrence_fwd(*xs, SLOTS, OFFSETS, algorithm="recurrent")
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(new_pool**2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 3)))
    rounded = gradient(qkv.astype(dtype), decay, beta, pool)
    expected = gradient(qkv.astype(dtype).astype(jnp.float32), decay, beta, pool)
    assert rounded[0].dtype == jnp.dtype(dtype)
    assert rounded[1].dtype == jnp.float32
    for value, reference in zip(rounded, expected, strict=True):
        assert_close(value, reference, 1e-2)


def test_gradient_through_a_scan_of_steps():
    """Decode steps in a loop have the gradient of the one call over their tokens."""
    heads, steps = HEADS, 5
    tokens = shapes.trained_tokens(heads, steps, seed=92)
    pool = jnp.asarray(shapes.state_pool(heads, 2))
    slot = jnp.array([1], jnp.int32)

    def whole(qkv, pool):
        out, pool = gdn_jax.gated_delta_recurrence_fwd(
            qkv, tokens.decay, tokens.beta, pool, slot, jnp.array([0, steps]), algorithm="recurrent"
        )
        return jnp.sum(out**3) + jnp.sum(pool**2)

    def stepwise(qkv, pool):
        def step(pool, x):
            out, pool = gdn_jax.gated_delta_recurrence_fwd(
                *(y[None] for y in x), pool, slot, jnp.array([0, 1]), algorithm="recurrent"
            )
            return pool, out

        pool, outs = jax.lax.scan(step, pool, (qkv, tokens.decay, tokens.beta))
        return jnp.sum(outs**3) + jnp.sum(pool**2)

    expected = jax.jit(jax.grad(whole, argnums=(0, 1)))(jnp.asarray(tokens.qkv), pool)
    values = jax.jit(jax.grad(stepwise, argnums=(0, 1)))(jnp.asarray(tokens.qkv), pool)
    for value, reference in zip(values, expected, strict=True):
        assert_close(value, reference, 1e-5)


def test_gradient_of_the_rule():
    """By q, k, v, log decay, beta and the initial state, at a scale and without the norm."""
    rng = np.random.default_rng(93)
    shape = (1, 12, 2, 16)
    q, k, v = (0.3 * rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    g = np.log(1 - 0.1 * rng.random(shape[:3])).astype(np.float32)
    beta = rng.random(shape[:3]).astype(np.float32)
    state = rng.standard_normal((1, 2, 16, 16)).astype(np.float32)
    arrays = (q, k, v, g, beta, state)
    weights = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(state.shape).astype(np.float32)
    for normalise in (True, False):

        def loss(*xs, normalise=normalise):
            o, final = gdn_jax.gated_delta_rule(
                *xs[:-1],
                initial_state=xs[-1],
                scale=0.5,
                output_final_state=True,
                use_qk_l2norm_in_kernel=normalise,
            )
            assert final is not None
            return jnp.sum(o * weights[0]) + jnp.sum(final * weights[1])

        gradients = jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*map(jnp.asarray, arrays))
        for i, gradient in enumerate(gradients):

            def value_of(moved, i=i, normalise=normalise):
                xs = [*arrays[:i], moved, *arrays[i + 1 :]]
                o, final = oracle.delta_rule(*xs[:-1], initial_state=xs[-1], scale=0.5, normalise=normalise)
                return np.sum(o * weights[0]) + np.sum(final * weights[1])

            flat = rng.choice(arrays[i].size, 8, replace=False)
            entries = [tuple(int(n) for n in np.unravel_index(f, arrays[i].shape)) for f in flat]
            check_gradient_entries(gradient, value_of, arrays[i], entries)


def test_gradient_of_the_gates():
    rng = np.random.default_rng(94)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((7, 3), (7, 3), (3,), (3,))]
    weights = rng.standard_normal((2, 7, 3)).astype(np.float32)

    def loss(*xs):
        return sum(jnp.sum(x * w) for x, w in zip(gdn_jax.gated_delta_gates(*xs), weights, strict=True))

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*map(jnp.asarray, arrays))
    for i, gradient in enumerate(gradients):

        def value_of(moved, i=i):
            values = oracle.gates(*arrays[:i], moved, *arrays[i + 1 :])
            return sum(np.sum(x * w) for x, w in zip(values, weights, strict=True))

        entries = [tuple(int(n) for n in entry) for entry in np.ndindex(arrays[i].shape)]
        check_gradient_entries(gradient, value_of, arrays[i], entries)
