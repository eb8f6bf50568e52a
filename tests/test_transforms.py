"""The operations under JAX's transformations: the same values, wherever they are traced, mapped, split or exported."""

# Arguments are NumPy arrays as often as JAX arrays, and come unpacked from tuples.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gdn_jax
from tests import oracle, shapes
from tests.conftest import IMPLEMENTATIONS
from tests.harness import OUTPUT_BUDGET, assert_close, assert_same_bits, devices

# Heads that eight devices can split, and a batch with an empty row and a padding row.
HEADS = shapes.Heads(8, 16, 16, 32)
LENGTHS = (4, 1, 0, 8, 5)
NUM_TOKENS, BATCH, MAX_SLOTS = sum(LENGTHS), len(LENGTHS), 7
RING_ROWS, RING_LEN = 6, 8
SLOTS = jnp.array([3, -1, 6, 0, 2], jnp.int32)
RING_SLOTS = jnp.array([1, 0, 4, 5, 2], jnp.int32)
OFFSETS = jnp.asarray(shapes.row_offsets(LENGTHS))
FLAGS = jnp.array([True, True, False, False, True])
ACCEPTED = jnp.array([2, 1, 0, 8, 3], jnp.int32)


def arguments(operation):
    """Positional arguments of each operation, as JAX arrays."""
    tokens = [jnp.asarray(array) for array in shapes.trained_tokens(HEADS, NUM_TOKENS, seed=60)]
    pool = jnp.asarray(shapes.state_pool(HEADS, MAX_SLOTS))
    ring = jnp.full(HEADS.ring_shape(RING_ROWS, RING_LEN, padding=3), 7.0)
    x, weight, bias, windows = map(jnp.asarray, shapes.conv_inputs(HEADS, NUM_TOKENS, MAX_SLOTS))
    if operation == "recurrence":
        return (*tokens, pool, SLOTS, OFFSETS, FLAGS)
    if operation == "verify_ring":
        return (*tokens, pool, ring, SLOTS, RING_SLOTS, OFFSETS, FLAGS)
    if operation == "state_fold":
        rng = np.random.default_rng(61)
        ring = jnp.asarray(rng.standard_normal(ring.shape, np.float32))
        return (pool, ring, SLOTS[None], RING_SLOTS[None], ACCEPTED, FLAGS)
    return (x, weight, windows, SLOTS, OFFSETS, bias, FLAGS)


def function(operation, implementation, algorithm="recurrent"):
    """The operation with every array positional."""

    def recurrence(*xs):
        return gdn_jax.gated_delta_recurrence_fwd(
            *xs[:-1], has_initial_state=xs[-1], algorithm=algorithm, implementation=implementation
        )

    def verify_ring(*xs):
        return gdn_jax.gated_delta_recurrence_verify_ring(
            *xs[:-1], has_initial_state=xs[-1], implementation=implementation
        )

    def state_fold(*xs):
        return (gdn_jax.gated_delta_state_fold(*xs[:-1], has_initial_state=xs[-1], implementation=implementation),)

    def conv1d(*xs):
        return gdn_jax.gated_delta_conv1d_fwd(
            *xs[:-2], bias=xs[-2], has_initial_state=xs[-1], activation="silu", implementation=implementation
        )

    return {"recurrence": recurrence, "verify_ring": verify_ring, "state_fold": state_fold, "conv1d": conv1d}[operation]


OPERATIONS = ("recurrence", "verify_ring", "state_fold", "conv1d")
CASES = [
    *(
        pytest.param((operation, *entry.values, "recurrent"), marks=entry.marks, id=f"{operation}-{entry.id}")
        for operation in OPERATIONS
        for entry in IMPLEMENTATIONS
    ),
    pytest.param(("recurrence", "xla", "chunked"), id="recurrence-xla-chunked"),
]


@pytest.fixture(params=CASES)
def case(request):
    """``(function, arguments, operation)`` of one operation on one implementation."""
    operation, name, algorithm = request.param
    return function(operation, name, algorithm), arguments(operation), operation


# Which axis of each argument and of each result runs over heads (or their channels).
HEAD_AXES = {
    "recurrence": ((1, 1, 1, 1, None, None, None), (1, 1)),
    "verify_ring": ((1, 1, 1, 1, 1, None, None, None, None), (1, 1, 1)),
    "state_fold": ((1, 1, None, None, None, None), (1,)),
    "conv1d": ((1, 0, 1, None, None, 0, None), (1, 1)),
}


def specs(axes):
    return tuple(P() if axis is None else P(*[None] * axis, "heads") for axis in axes)


def assert_all_same_bits(values, references, what=""):
    for i, (value, reference) in enumerate(zip(values, references, strict=True)):
        assert_same_bits(value, reference, f"{what} result {i}")


def test_eager_is_jit(case):
    call, arrays, _ = case
    assert_all_same_bits(jax.jit(call)(*arrays), call(*arrays))


def test_eval_shape(case):
    call, arrays, _ = case
    outs = jax.eval_shape(call, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    for abstract, value in zip(outs, call(*arrays), strict=True):
        assert (abstract.shape, abstract.dtype) == (value.shape, value.dtype)
        assert not abstract.weak_type


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_eval_shape_keeps_the_dtypes_apart(dtype):
    """Tokens decide the outputs' dtype, a pool its own."""
    qkv, *rest = arguments("recurrence")
    out, pool = jax.eval_shape(function("recurrence", None), qkv.astype(dtype), *rest)
    assert (out.dtype, pool.dtype) == (jnp.dtype(dtype), jnp.float32)
    x, weight, windows, *rest = arguments("conv1d")
    out, windows = jax.eval_shape(function("conv1d", None), x, weight, windows.astype(dtype), *rest)
    assert (out.dtype, windows.dtype) == (jnp.float32, jnp.dtype(dtype))


def decode_steps(num_steps, seed=62):
    tokens = shapes.trained_tokens(HEADS, num_steps * BATCH, seed=seed)
    return [jnp.asarray(array).reshape(num_steps, BATCH, -1) for array in tokens]


ONE_TOKEN_EACH = jnp.arange(BATCH + 1, dtype=jnp.int32)


def decode(implementation):
    def step(pool, qkv, decay, beta):
        out, pool = gdn_jax.gated_delta_recurrence_fwd(
            qkv, decay, beta, pool, SLOTS, ONE_TOKEN_EACH, algorithm="recurrent", implementation=implementation
        )
        return pool, out

    return step


def test_inside_scan(implementation):
    step, steps = decode(implementation.name), decode_steps(6)
    pool = jnp.asarray(shapes.state_pool(HEADS, MAX_SLOTS))
    scanned, outs = jax.jit(lambda pool, *xs: jax.lax.scan(lambda p, x: step(p, *x), pool, xs))(pool, *steps)
    for i in range(6):
        pool, out = step(pool, *(x[i] for x in steps))
        assert_same_bits(outs[i], out, f"step {i}")
    assert_same_bits(scanned, pool)


def test_inside_fori_loop(implementation):
    step, steps = decode(implementation.name), decode_steps(6)
    pool = jnp.asarray(shapes.state_pool(HEADS, MAX_SLOTS))

    def loop(count, pool, *xs):
        return jax.lax.fori_loop(0, count, lambda i, p: step(p, *(x[i] for x in xs))[0], pool)

    looped = jax.jit(loop)(6, pool, *steps)
    for i in range(6):
        pool, _ = step(pool, *(x[i] for x in steps))
    assert_same_bits(looped, pool)


def test_inside_cond_and_while(implementation):
    """Control flow that depends on values: a step that may not happen."""
    step, steps = decode(implementation.name), decode_steps(2)
    pool = jnp.asarray(shapes.state_pool(HEADS, MAX_SLOTS))
    tokens = [x[0] for x in steps]

    @jax.jit
    def maybe(take, pool):
        return jax.lax.cond(take, lambda p: step(p, *tokens)[0], lambda p: p, pool)

    assert_same_bits(maybe(False, pool), pool)
    assert_same_bits(maybe(True, pool), jax.jit(step)(pool, *tokens)[0])


# --- many devices


def device_mesh(axis_type):
    """Eight devices, or two where there are fewer: both divide the heads."""
    count = 8 if len(jax.devices()) >= 8 else 2
    return jax.make_mesh((count,), ("heads",), axis_types=(axis_type,), devices=devices(count))


def by_shard(array, count, axis):
    """Fused rows whose block for each device is a fused row of that device's heads."""
    q, k, v = jnp.split(array, np.cumsum([HEADS.num_key_heads * HEADS.key_head_dim] * 2), axis=axis)
    blocks = zip(*(jnp.split(x, count, axis) for x in (q, k, v)), strict=True)
    return jnp.concatenate([x for block in blocks for x in block], axis=axis)


@pytest.mark.parametrize(
    ("axis_type", "check_vma"),
    [(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, True)],
    ids=["auto-vma", "auto-no-vma", "explicit-vma"],
)
def test_shard_map_over_heads(case, check_vma, axis_type):
    """Each device runs its heads: a device's argument is the fused row of its own heads."""
    call, arrays, operation = case
    mesh = device_mesh(axis_type)
    in_specs, out_specs = map(specs, HEAD_AXES[operation])
    expected = call(*arrays)
    if operation in ("recurrence", "verify_ring"):
        arrays = (by_shard(arrays[0], mesh.size, 1), *arrays[1:])
    with jax.set_mesh(mesh):
        split = jax.jit(
            jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma),
        )
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, in_specs, strict=True)]
        results = split(*placed)
    for result, reference, spec in zip(results, expected, out_specs, strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim)
        assert_close(result, reference, 2e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_requests(implementation, check_vma):
    """Data parallel: each device has slots and requests of its own, and replicated nothing."""
    mesh = device_mesh(AxisType.Auto)
    heads = shapes.HEADS["ungrouped"]
    tokens = [jnp.asarray(x) for x in shapes.trained_tokens(heads, mesh.size * 6, seed=63)]
    pools = jnp.asarray(shapes.state_pool(heads, mesh.size * 3))
    slots = jnp.asarray(np.tile(np.array([2, -1], np.int32), mesh.size))
    offsets = jnp.asarray(np.tile(np.array([0, 4, 6], np.int32), mesh.size))

    def call(*xs):
        return gdn_jax.gated_delta_recurrence_fwd(*xs, algorithm="recurrent", implementation=implementation.name)

    split = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("heads"), out_specs=P("heads"), check_vma=check_vma))
    out, new_pools = split(*tokens, pools, slots, offsets)
    for device in range(mesh.size):
        own = slice(device * 6, device * 6 + 6)
        expected_out, expected_pool = call(
            *(x[own] for x in tokens), pools[device * 3 : device * 3 + 3], slots[:2], offsets[:3]
        )
        assert_same_bits(out[own], expected_out)
        assert_same_bits(new_pools[device * 3 : device * 3 + 3], expected_pool)


@pytest.mark.parametrize("fused_rows", ["split", "whole"])
def test_explicit_mesh(case, fused_rows):
    """On an explicit mesh with pools split over heads, values are those of the arrays and results stay split."""
    call, arrays, operation = case
    mesh = device_mesh(AxisType.Explicit)
    in_axes, out_axes = HEAD_AXES[operation]
    if fused_rows == "whole" and operation in ("recurrence", "verify_ring"):
        in_axes = (None, *in_axes[1:])
    expected = call(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs(in_axes), strict=True)]
        results = jax.jit(call)(*placed)
    for result, reference, spec in zip(results, expected, specs(out_axes), strict=True):
        assert_close(result, reference, 2e-6)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim), result.sharding


def test_explicit_mesh_refuses_what_it_cannot_split(implementation):
    """A pool split over slots, or over two axes at once, is an error that names it, not a gather."""
    mesh = device_mesh(AxisType.Explicit)
    arrays = list(arguments("recurrence"))
    arrays[3] = jnp.zeros(HEADS.state_shape(8))
    with jax.set_mesh(mesh):
        arrays[3] = jax.device_put(arrays[3], NamedSharding(mesh, P("heads")))
        rest = [jax.device_put(x, NamedSharding(mesh, P())) for x in arrays]
        rest[3] = arrays[3]
        with pytest.raises(ValueError, match=r"recurrent_state of shape .* is sharded as"):
            function("recurrence", implementation.name)(*rest)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_auto_mesh(operation):
    """Arrays on a mesh of automatic axes: XLA decides, the values stay."""
    call, arrays = function(operation, None), arguments(operation)
    mesh = device_mesh(AxisType.Auto)
    in_axes, _ = HEAD_AXES[operation]
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs(in_axes), strict=True)]
    for result, reference in zip(jax.jit(call)(*placed), call(*arrays), strict=True):
        assert_close(result, reference, 2e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_explicit_mesh_without_jit(operation):
    call, arrays = function(operation, None), arguments(operation)
    mesh = device_mesh(AxisType.Explicit)
    in_axes, out_axes = HEAD_AXES[operation]
    expected = call(*arrays)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs(in_axes), strict=True)]
        results = call(*placed)
    for result, reference, spec in zip(results, expected, specs(out_axes), strict=True):
        assert_close(result, reference, 2e-6)
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), result.ndim), result.sharding


# --- export


@pytest.mark.parametrize("operation", OPERATIONS)
def test_export_for_two_platforms(operation):
    """One exported program holds the best implementation for each platform, survives its bytes, and runs."""
    call, arrays = function(operation, None), arguments(operation)
    donated = {"recurrence": 3, "verify_ring": (3, 4), "state_fold": 0, "conv1d": 2}[operation]
    exported = jax.export.export(jax.jit(call, donate_argnums=donated), platforms=("cpu", "cuda"))(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    )
    assert set(exported.platforms) == {"cpu", "cuda"}
    restored = jax.export.deserialize(exported.serialize())
    results = jax.jit(restored.call)(*arrays)
    for result, reference in zip(results, jax.jit(call)(*arrays), strict=True):
        assert_close(result, reference, 2e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cross_lowering_to_a_gpu(operation):
    """Lowered for CUDA on a machine without one, the automatic choice is the GPU kernel, the pool aliased."""
    heads = shapes.HEADS["qwen3.5_rank"]
    tokens = shapes.trained_tokens(heads, BATCH, "bfloat16")
    x, weight, bias, windows = shapes.conv_inputs(heads, BATCH, MAX_SLOTS, "bfloat16")
    pool, ring = shapes.state_pool(heads, MAX_SLOTS), np.zeros(heads.ring_shape(RING_ROWS, RING_LEN), np.float32)
    offsets = ONE_TOKEN_EACH
    arrays = {
        "recurrence": (*tokens, pool, SLOTS, offsets, FLAGS),
        "verify_ring": (*tokens, pool, ring, SLOTS, RING_SLOTS, offsets, FLAGS),
        "state_fold": (pool, ring, SLOTS[None], RING_SLOTS[None], ACCEPTED, FLAGS),
        "conv1d": (x, weight, windows, SLOTS, offsets, bias, FLAGS),
    }[operation]
    donated = {"recurrence": (3,), "verify_ring": (3, 4), "state_fold": (0,), "conv1d": (2,)}[operation]
    texts = {}
    for name in (None, "mosaic_gpu", "xla"):
        traced = jax.jit(function(operation, name, "auto"), donate_argnums=donated).trace(*arrays)
        texts[name] = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in (None, "mosaic_gpu"):
        assert "mosaic_gpu" in texts[name]
        assert "output_operand_alias" in texts[name]
        assert texts[name].count("tf.aliasing_output") >= len(donated)
    assert "mosaic_gpu" not in texts["xla"]


def test_cross_lowering_without_a_kernel_takes_the_next_best():
    """Head dims that no GPU kernel serves still lower for CUDA."""
    heads = shapes.Heads(1, 2, 24, 40)
    tokens, pool = shapes.trained_tokens(heads, 5), shapes.state_pool(heads, 3)
    slot, offsets = np.array([1], np.int32), np.array([0, 5], np.int32)
    traced = jax.jit(gdn_jax.gated_delta_recurrence_fwd).trace(*tokens, pool, slot, offsets)
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cuda",)).as_text()


# --- the call without a pool


def rule_arguments():
    rng = np.random.default_rng(64)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    q, k, v = draw(2, 20, 2, 16), draw(2, 20, 2, 16), draw(2, 20, 4, 16)
    g = jnp.asarray(np.log(1 - 0.1 * rng.random((2, 20, 4))), jnp.float32)
    return q, k, v, g, jnp.asarray(rng.random((2, 20, 4)), jnp.float32)


def test_the_rule_is_the_same_under_jit_and_vmap():
    call = functools.partial(gdn_jax.gated_delta_rule, output_final_state=True, algorithm="recurrent")
    arrays = rule_arguments()
    expected = call(*arrays)
    assert_all_same_bits(jax.jit(call)(*arrays), expected, "jit")
    # A batch of two is two lanes of one.
    lanes = jax.vmap(lambda *xs: call(*(x[None] for x in xs)))(*arrays)
    assert_all_same_bits([lane[:, 0] for lane in jax.tree.leaves(lanes)], expected, "vmap")


@pytest.mark.parametrize("algorithm", ["recurrent", "chunked"])
def test_the_rule_agrees_with_the_oracle_under_vmap(algorithm):
    arrays = rule_arguments()
    call = functools.partial(gdn_jax.gated_delta_rule, output_final_state=True, algorithm=algorithm)
    o, final = jax.tree.leaves(jax.vmap(call)(*(jnp.stack([x, x[::-1]]) for x in arrays)))
    expected_o, expected_final = oracle.delta_rule(*arrays)
    budget = OUTPUT_BUDGET[algorithm, "float32"]
    assert_close(o[0], expected_o, budget)
    assert_close(o[1], expected_o[::-1], budget)
    assert_close(final[1], expected_final[::-1], budget)
