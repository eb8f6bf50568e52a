"""Heads over one axis of a mesh, requests over the other: values, collectives, donation, and two processes."""

from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import gdn_jax
from gdn_jax.flax import HEAD_AXIS, GatedDeltaCache, GatedDeltaNet, GatedDeltaNetConfig
from gdn_jax.serving import Window, commit, init_pools, verify
from gdn_jax.sharding import fused_channel_order, over_devices
from tests import oracle, shapes
from tests.harness import assert_close, assert_same_bits, devices, memory_of

HEADS = shapes.Heads(4, 8, 32, 16)
GEOMETRY = (HEADS.num_key_heads, HEADS.num_value_heads, HEADS.key_head_dim, HEADS.value_head_dim)
# What each group of devices along "data" has: rows of its own lengths, among them an empty and a padding one.
LENGTHS = ((5, 0, 2, 1), (1, 3, 1, 3))
NUM_TOKENS, BATCH, SLOTS, RING_LEN = 8, 4, 64, 4
SLOT_IDX = np.array([[7, 1, 0, -1], [3, 63, 2, 9]], np.int32)
RING_SLOTS = np.array([[1, 0, 3, 2], [0, 1, 2, 4]], np.int32)
ACCEPTED = np.array([[2, 1, 2, 1], [1, 0, 1, 3]], np.int32)
CONTINUES = np.array([[True, True, False, True], [True, True, True, False]])
ON_GPU = pytest.mark.gpu
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")

on_axis_types = pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=["auto", "explicit"])
on_meshes = pytest.mark.parametrize(
    ("data", "model"),
    [
        pytest.param(1, 2, id="tp2"),
        pytest.param(1, 4, id="tp4"),
        pytest.param(2, 1, id="dp2"),
        pytest.param(2, 2, id="dp2-tp2"),
        pytest.param(1, 2, marks=ON_GPU, id="gpu-tp2"),
        pytest.param(2, 1, marks=ON_GPU, id="gpu-dp2"),
    ],
)


def mesh_of(data, model, axis_type=AxisType.Auto):
    axes = {"axis_types": (axis_type,) * 2, "devices": devices(data * model)}
    return jax.make_mesh((data, model), ("data", "model"), **axes)


def placed_on(mesh, given):
    """The arguments split over the mesh, each in its way."""
    return {n: jax.device_put(x, NamedSharding(mesh, SPECS.get(n, P("data", "model")))) for n, x in given.items()}


def collectives(compiled) -> dict[str, int]:
    """How many of each collective a compiled program has."""
    text = compiled.as_text()
    counts = {name: len(re.findall(rf"[\])}}] {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}


def assert_aliased(compiled, pools):
    """Every pool's part on a device is updated in its own buffer, and nothing of its size is beside it."""
    text, memory = compiled.as_text(), memory_of(compiled)
    parts = [pool.addressable_shards[0].data.nbytes for pool in pools]
    assert text.split("\n", 1)[0].count("-alias)") == len(pools)
    assert memory.alias_size_in_bytes == sum(parts)
    assert memory.temp_size_in_bytes < min(parts)
    for pool in pools:
        part = ",".join(map(str, pool.addressable_shards[0].data.shape))
        assert not re.search(rf"\[{part}\]\S* copy(?:-start)?\(", text)


# --- the order of fused rows


def test_each_piece_is_the_fused_row_of_its_heads():
    order = fused_channel_order(*GEOMETRY, head_shards=2)
    row = np.arange(HEADS.conv_dim)
    q, k, v = np.split(row, [128, 256])
    assert_same_bits(row[order], np.concatenate([q[:64], k[:64], v[:64], q[64:], k[64:], v[64:]]))
    assert_same_bits(row[order][np.argsort(order)], row)
    assert_same_bits(fused_channel_order(*GEOMETRY, head_shards=1), row)


@pytest.mark.parametrize(
    ("geometry", "shards", "message"),
    [
        ((2, 8, 16, 16), 4, r"head_shards is 4, must divide num_key_heads = 2"),
        ((4, 6, 16, 16), 4, r"head_shards is 4, must divide num_value_heads = 6"),
        ((4, 8, 16, 16), 0, r"head_shards is 0, must divide num_key_heads = 4"),
    ],
)
def test_orders_that_do_not_exist(geometry, shards, message):
    with pytest.raises(ValueError, match=message):
        fused_channel_order(*geometry, head_shards=shards)


# --- the operations

POOLS = ("recurrent_state", "ring", "conv_state")
SPECS = {"conv_weight": P("model"), "bias": P("model"), "row_ids": P(None, "data"), "ring_row_ids": P(None, "data")}
SPECS |= dict.fromkeys(("slot_idx", "ring_slot_idx", "input_row_offsets", "has_initial_state"), P("data"))
SPECS |= {"num_accepted": P("data")}


def end_to_end(groups, data, axis=0):
    return np.concatenate(groups[:data], axis=axis)


def arguments(operation, data):
    """The arguments of an operation for `data` groups of devices, by name, fused rows as `[Q | K | V]`."""
    tokens = shapes.trained_tokens(HEADS, data * NUM_TOKENS, seed=80)
    pool = shapes.state_pool(HEADS, data * SLOTS)
    ring = np.random.default_rng(81).standard_normal(HEADS.ring_shape(data * SLOTS, RING_LEN, 3), np.float32)
    x, weight, bias, windows = shapes.conv_inputs(HEADS, data * NUM_TOKENS, data * SLOTS)
    batch = {
        "slot_idx": end_to_end(SLOT_IDX, data),
        "input_row_offsets": end_to_end([shapes.row_offsets(rows) for rows in LENGTHS], data),
        "has_initial_state": end_to_end(CONTINUES, data),
    }
    gated = {"qkv_conv_output": tokens.qkv, "decay_per_token": tokens.decay, "beta_per_token": tokens.beta}
    gated |= {"recurrent_state": pool}
    if operation == "conv1d":
        return {"qkv_input_ragged": x, "conv_weight": weight, "conv_state": windows, "bias": bias, **batch}
    if operation == "recurrence":
        return gated | batch
    if operation == "verify_ring":
        return gated | {"ring": ring, "ring_slot_idx": end_to_end(RING_SLOTS, data)} | batch
    return {
        "recurrent_state": pool,
        "ring": ring,
        "row_ids": end_to_end(SLOT_IDX[:, None], data, axis=1),
        "ring_row_ids": end_to_end(RING_SLOTS[:, None], data, axis=1),
        "num_accepted": end_to_end(ACCEPTED, data),
        "has_initial_state": end_to_end(CONTINUES, data),
    }


OPERATIONS = {
    "conv1d": (gdn_jax.gated_delta_conv1d_fwd, oracle.conv1d, {"activation": "silu"}),
    "recurrence": (gdn_jax.gated_delta_recurrence_fwd, oracle.recurrence, {"algorithm": "recurrent"}),
    "verify_ring": (gdn_jax.gated_delta_recurrence_verify_ring, oracle.verify_ring, {}),
    "state_fold": (gdn_jax.gated_delta_state_fold, oracle.state_fold, {}),
}


def expected_of(operation, given, data):
    """The float64 oracle on each group alone, the results end to end."""
    reference = OPERATIONS[operation][1]
    names = {"qkv_conv_output": "qkv", "decay_per_token": "decay", "beta_per_token": "beta", "input_row_offsets": None}
    names |= {"qkv_input_ragged": "x", "conv_weight": "weight", "conv_state": "pool", "recurrent_state": "pool"}
    names |= {"input_row_offsets": "offsets"}
    results = []
    for group in range(data):
        own = {}
        for name, value in given.items():
            axis = {"row_ids": 1, "ring_row_ids": 1, "conv_weight": None, "bias": None}.get(name, 0)
            own[names.get(name, name)] = value if axis is None else np.split(value, data, axis)[group]
        result = reference(**own, **({"activation": "silu"} if operation == "conv1d" else {}))
        results.append(result if isinstance(result, tuple) else (result,))
    return [np.concatenate(parts) for parts in zip(*results, strict=True)]


@on_axis_types
@on_meshes
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_over_devices(operation, data, model, axis_type):
    """Values of the oracle, no collective at all, and each device's part of a donated pool in its own buffer."""
    mesh = mesh_of(data, model, axis_type)
    call, _, options = OPERATIONS[operation]
    given = arguments(operation, data)
    expected = expected_of(operation, given, data)
    order = fused_channel_order(*GEOMETRY, head_shards=model)
    for name, axis in (("qkv_input_ragged", 1), ("qkv_conv_output", 1), ("conv_weight", 0), ("bias", 0)):
        if name in given:
            given[name] = np.take(given[name], order, axis)
    if operation == "conv1d":
        given["conv_state"] = given["conv_state"][:, order]
        expected = [expected[0][:, order], expected[1][:, order]]
    with jax.set_mesh(mesh):
        # Arrays that JAX owns: the buffer of a NumPy array could not be given away.
        placed = {name: jnp.copy(value) for name, value in placed_on(mesh, given).items()}
        donated = [name for name in POOLS if name in given and (operation, name) != ("state_fold", "ring")]
        split = over_devices(call, heads="model", data="data")
        step = jax.jit(split, donate_argnames=donated, static_argnames=list(options))
        compiled = step.lower(**placed, **options).compile()
        assert collectives(compiled) == {}
        assert_aliased(compiled, [placed[name] for name in donated])
        before = [shard.data.unsafe_buffer_pointer() for shard in placed[donated[0]].addressable_shards]
        results = compiled(**placed)
    results = results if isinstance(results, tuple) else (results,)
    for result, reference in zip(results, expected, strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), result.ndim)
        assert_close(result, reference, 2e-6)
    assert [shard.data.unsafe_buffer_pointer() for shard in results[-1].addressable_shards] == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"recurrent_state": (6, 6, 32, 16), "decay_per_token": (8, 6), "beta_per_token": (8, 6)},
            r"gated_delta_recurrence_fwd: .* has num_value_heads = 6, must be a multiple of 4, the size of mesh axis",
        ),
        (
            {"qkv_conv_output": (8, 2 * 2 * 32 + 8 * 16)},
            r"qkv_conv_output of shape \(8, 256\) has num_key_heads = 2, must be a multiple of 4",
        ),
        ({"slot_idx": (3,)}, r"slot_idx of shape \(3,\) has dimension 0 = 3, must be a multiple of 2, .* axis 'data'"),
        ({"recurrent_state": (5, 8, 32, 16)}, r"recurrent_state of shape \(5, 8, 32, 16\) has dimension 0 = 5"),
        ({"decay_per_token": (8,)}, r"decay_per_token has shape \(8,\), must have at least 2 dimensions"),
        ({"recurrent_state": ()}, r"recurrent_state has shape \(\), must have at least 2 dimensions"),
        ({"recurrent_state": (4, 8, 0, 16)}, "key_head_dim|qkv_conv_output"),
    ],
)
def test_what_does_not_divide_is_named(change, message):
    step = over_devices(gdn_jax.gated_delta_recurrence_fwd, heads="model", data="data")
    given = arguments("recurrence", 2)
    given |= {name: np.zeros(shape, given[name].dtype) for name, shape in change.items()}
    with jax.set_mesh(mesh_of(2, 4)), pytest.raises(ValueError, match=message):
        step(**given)


def test_lists_are_arrays_to_a_mesh_too():
    step = over_devices(gdn_jax.gated_delta_recurrence_fwd, heads="model", data="data")
    given = arguments("recurrence", 2)
    with jax.set_mesh(mesh_of(2, 2)):
        expected = step(**given)
        results = step(**{**given, "slot_idx": np.asarray(given["slot_idx"]).tolist()})
    for result, reference in zip(results, expected, strict=True):
        assert_same_bits(result, reference)


@pytest.mark.parametrize("head_shards", [None, 2.0])
def test_head_shards_of_another_type(head_shards):
    with pytest.raises(TypeError, match=r"head_shards is .*, must be an int"):
        fused_channel_order(2, 4, 16, 16, head_shards=head_shards)


def test_an_axis_or_an_operation_that_is_not_there():
    step = over_devices(gdn_jax.gated_delta_recurrence_fwd, heads="tensor")
    with (
        jax.set_mesh(mesh_of(1, 2)),
        pytest.raises(ValueError, match=r"heads is 'tensor', must be an axis of the mesh"),
    ):
        step(**arguments("recurrence", 1))
    with pytest.raises(TypeError, match=r"operation is gated_delta_gates, must be one that takes a pool"):
        over_devices(gdn_jax.gated_delta_gates)


# --- what XLA splits by itself


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_automatic_mesh_gathers_no_pool(operation):
    """Arrays that are split by heads, and nothing else said: XLA moves tokens where they belong, never a pool."""
    mesh = mesh_of(1, 4)
    call, _, options = OPERATIONS[operation]
    given = arguments(operation, 1)
    placed = placed_on(mesh, given)
    step = jax.jit(call, static_argnames=list(options))
    compiled = step.lower(**placed, **options).compile()
    assert "all-gather" not in collectives(compiled)
    results = compiled(**placed)
    results = results if isinstance(results, tuple) else (results,)
    for result, reference in zip(results, expected_of(operation, given, 1), strict=True):
        assert_close(result, reference, 2e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_kernel_where_xla_would_gather_for_it(operation):
    """XLA cannot split a kernel, so its own operations serve the call, and a kernel by name is refused."""
    mesh = mesh_of(1, 2)
    call, _, options = OPERATIONS[operation]
    given = arguments(operation, 1)
    placed = placed_on(mesh, given)
    step = jax.jit(call, static_argnames=[*options, "implementation"])
    assert "mosaic_gpu" not in step.trace(**placed, **options).lower(lowering_platforms=("cuda",)).as_text()
    named = step.trace(**placed, **options, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"2 devices by XLA; call it inside jax.shard_map .*over_devices"):
        named.lower(lowering_platforms=("cuda",))
    # Inside shard_map each device runs a kernel of its own.
    hopper = AbstractDevice("NVIDIA H200", None, "cuda")
    mesh = AbstractMesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, abstract_device=hopper)
    shaped = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))
        for n, x in placed.items()
    }
    with use_abstract_mesh(mesh):
        split = jax.jit(over_devices(call, heads="model", data="data"), static_argnames=list(options))
        assert "mosaic_gpu" in split.trace(**shaped, **options).lower(lowering_platforms=("cuda",)).as_text()


def test_a_mesh_that_is_half_manual_is_refused():
    """Rows end at different times on different devices: a collective of XLA's in that loop would never return."""
    given = arguments("recurrence", 2)

    def call(*xs):
        return gdn_jax.gated_delta_recurrence_fwd(*xs)

    del given["has_initial_state"]
    with jax.set_mesh(mesh_of(2, 2)):
        split = jax.shard_map(call, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        with pytest.raises(ValueError, match=r"mesh axis 'model' is automatic inside a jax.shard_map over \('data',\)"):
            jax.jit(split)(*given.values())


# --- the layer

CONFIG = GatedDeltaNetConfig(hidden_size=48, num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=16)
RULES = [(HEAD_AXIS, "model")]


@pytest.fixture(scope="module")
def alone():
    return GatedDeltaNet(CONFIG, rngs=nnx.Rngs(0), algorithm="recurrent")


def on_mesh(mesh, weights):
    """A layer under the mesh and the rules in force, and the same weights in it."""
    layer = GatedDeltaNet(CONFIG, rngs=nnx.Rngs(1), head_shards=mesh.shape["model"], algorithm="recurrent")
    layer.load_hf(weights)
    return layer


def hidden(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, CONFIG.hidden_size)).astype(np.float32)


def batch_of(mesh, data):
    """`(slots, offsets, flags)` of all groups, placed."""
    groups = SLOT_IDX, np.stack([shapes.row_offsets(rows) for rows in LENGTHS]), CONTINUES
    return [jax.device_put(end_to_end(x, data), NamedSharding(mesh, P("data"))) for x in groups]


def cache_of(mesh, data, seed=5):
    rng = np.random.default_rng(seed)
    geometry = (CONFIG.conv_dim, CONFIG.conv_kernel_size - 1), HEADS.state_shape(1)[1:]
    pools = [rng.standard_normal((data * SLOTS, *shape), np.float32) for shape in geometry]
    return GatedDeltaCache(*pools), jax.device_put(GatedDeltaCache(*pools), NamedSharding(mesh, P("data", "model")))


def usual_order(layer, windows):
    """Windows as a layer without shards has them."""
    return np.asarray(windows)[:, np.argsort(layer.channel_order)]


@on_axis_types
@on_meshes
def test_layers_on_a_mesh(alone, data, model, axis_type):
    """Two layers, heads by `model`, requests by `data`: one device's values, and one sum a layer for communication."""
    mesh = mesh_of(data, model, axis_type)
    x = hidden(data * NUM_TOKENS)
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        layers = [on_mesh(mesh, alone.to_hf()) for _ in range(2)]
        assert layers[0].in_proj_qkv.kernel.sharding.spec == P(None, "model")
        assert layers[0].out_proj.kernel.sharding.spec[0] == "model"
        graph, weights = nnx.split(layers)

        def local(weights, x, caches, slots, offsets, flags):
            new = []
            for layer, cache in zip(nnx.merge(graph, weights), caches, strict=True):
                y, cache = layer(x, cache, slot_idx=slots, input_row_offsets=offsets, has_initial_state=flags)
                x, new = x + y, [*new, cache]
            return x, new

        own = P("data")
        split = jax.shard_map(
            local, in_specs=(P(), own, own, own, own, own), out_specs=own, axis_names={"data"}, check_vma=False
        )
        caches, placed = zip(*(cache_of(mesh, data, seed) for seed in (5, 6)), strict=True)
        args = weights, jax.device_put(x, NamedSharding(mesh, own)), list(placed), *batch_of(mesh, data)
        compiled = jax.jit(split, donate_argnums=2).lower(*args).compile()
        pools = jax.tree.leaves(placed)
        if model > 1:
            assert collectives(compiled) == {"all-reduce": 2}
        else:
            assert collectives(compiled) == {}
        assert memory_of(compiled).alias_size_in_bytes == sum(p.nbytes for p in pools) // (data * model)
        assert (compiled.as_text() or "").split("\n", 1)[0].count("-alias)") == len(pools)
        y, new = compiled(*args)
        assert new[0].recurrent_state.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 4)
        y, new = jax.tree.map(np.asarray, (y, new))
        for group in range(data):
            rows, part = slice(group * NUM_TOKENS, (group + 1) * NUM_TOKENS), slice(group * SLOTS, (group + 1) * SLOTS)
            expected = x[rows]
            for cache, result in zip(caches, new, strict=True):
                # The windows of the random cache are in the order of the layer's channels.
                mine = GatedDeltaCache(usual_order(layers[0], cache.conv_state)[part], cache.recurrent_state[part])
                out, mine = one_device(alone, expected, mine, group)
                expected = expected + out
                assert_close(result.recurrent_state[part], mine.recurrent_state, 4e-6)
                assert_close(usual_order(layers[0], result.conv_state)[part], mine.conv_state, 4e-6)
            assert_close(y[rows], expected, 4e-6)


@nnx.jit
def cached_step(layer, x, cache, slots, offsets, flags):
    return layer(x, cache, slot_idx=slots, input_row_offsets=offsets, has_initial_state=flags)


def one_device(layer, x, cache, group):
    """The layer on the first device alone, outside every mesh."""
    offsets = shapes.row_offsets(LENGTHS[group])
    x, cache = jax.tree.map(np.asarray, (x, cache))
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])):
        y, cache = cached_step(layer, x, cache, SLOT_IDX[group], offsets, CONTINUES[group])
    return jax.tree.map(np.asarray, (y, cache))


@pytest.mark.parametrize("model", [2, pytest.param(2, marks=ON_GPU, id="gpu-2")])
def test_a_speculative_step_on_a_mesh(alone, model):
    """Verify and commit with requests and heads split: the states of the accepted tokens, as one device has them."""
    data = 2 if len(jax.devices()) >= 4 else 1
    mesh = mesh_of(data, model, AxisType.Explicit)
    x = hidden(data * NUM_TOKENS)
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        layer = on_mesh(mesh, alone.to_hf())
        graph, weights = nnx.split(layer)
        sizes = {"num_layers": 1, "max_slots": data * SLOTS, "max_batch_size": data * BATCH, "ring_len": RING_LEN}
        pools = jax.device_put(init_pools(layer, **sizes), NamedSharding(mesh, P("data", "model")))

        def local(weights, x, pools, slots, offsets, flags, accepted):
            window = Window(slots, offsets, flags)
            y, pools, conv_input = verify(nnx.merge(graph, weights), x, pools, window, 0)
            return y, commit(pools, window, [conv_input], accepted)

        own = P("data")
        split = jax.shard_map(local, in_specs=(P(), *(own,) * 6), out_specs=own, axis_names={"data"}, check_vma=False)
        fresh = jax.device_put(np.zeros(data * BATCH, bool), NamedSharding(mesh, own))
        slots, offsets, _ = batch_of(mesh, data)
        accepted = jax.device_put(end_to_end(ACCEPTED, data), NamedSharding(mesh, own))
        args = weights, jax.device_put(x, NamedSharding(mesh, own)), pools, slots, offsets, fresh, accepted
        compiled = jax.jit(split, donate_argnums=2).lower(*args).compile()
        assert collectives(compiled) == {"all-reduce": 1}
        y, new = jax.tree.map(np.asarray, compiled(*args))
    for group in range(data):
        reference = init_pools(alone, num_layers=1, max_slots=SLOTS, max_batch_size=BATCH, ring_len=RING_LEN)
        window = Window(SLOT_IDX[group], shapes.row_offsets(LENGTHS[group]), np.zeros(BATCH, bool))
        rows, part = slice(group * NUM_TOKENS, (group + 1) * NUM_TOKENS), slice(group * SLOTS, (group + 1) * SLOTS)
        with jax.default_matmul_precision("highest"):
            expected, reference, conv_input = verify(alone, x[rows], reference, window, 0)
            reference = commit(reference, window, [conv_input], ACCEPTED[group])
        assert_close(y[rows], expected, 4e-6)
        assert_close(new.cache.recurrent_state[part], reference.cache.recurrent_state, 4e-6)
        assert_close(usual_order(layer, new.cache.conv_state)[part], reference.cache.conv_state, 4e-6)


@on_axis_types
def test_heads_that_do_not_divide_are_named(axis_type):
    config = GatedDeltaNetConfig(hidden_size=8, num_key_heads=2, num_value_heads=8, key_head_dim=16, value_head_dim=16)
    with (
        jax.set_mesh(mesh_of(1, 4, axis_type)),
        nnx.logical_axis_rules(RULES),
        pytest.raises(
            ValueError, match=r"num_key_heads is 2, must be a multiple of 4, the size of the mesh axis 'model'"
        ),
    ):
        GatedDeltaNet(config, rngs=nnx.Rngs(0), head_shards=2)


# --- the README


def test_the_example_of_the_readme():
    mesh_of(4, 2)
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    section = readme.split("## Many GPUs\n", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict = {}
    exec(block, names)
    assert names["y"].shape == (20, 1024)
    assert names["cache"].recurrent_state.sharding.spec == P("data", "heads", None, None)
    assert np.isfinite(names["y"]).all()


# --- two processes


def test_two_processes():
    """Prefill, decode, verify, fold and the layer on one mesh of two processes; each checks what it holds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.two_processes", address, str(process)],
            cwd=pathlib.Path(__file__).parent.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.splitlines()[-1] == "ok", output
