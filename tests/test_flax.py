"""The Flax layer: rows, caches, in-place updates, weights in and out, and the transformations of nnx."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gdn_jax.flax import HEAD_AXIS, GatedDeltaCache, GatedDeltaNet, GatedDeltaNetConfig, HeldCache, layer_slots
from tests import oracle
from tests.harness import assert_close, assert_same_bits, assert_zero

CONFIG = GatedDeltaNetConfig(hidden_size=24, num_key_heads=2, num_value_heads=6, key_head_dim=16, value_head_dim=8)
RECURRENT = 2e-6


def make_layer(config=CONFIG, seed=0, **options):
    """A layer whose every parameter matters: norm weights off one, decays well below one."""
    layer = GatedDeltaNet(config, rngs=nnx.Rngs(seed), **options)
    rng = np.random.default_rng(seed)
    layer.norm_weight[...] += rng.normal(0, 0.2, layer.norm_weight.shape).astype(layer.norm_weight.dtype)
    layer.dt_bias[...] += 1.0
    return layer


@pytest.fixture(scope="module")
def layer():
    return make_layer(algorithm="recurrent")


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, CONFIG.hidden_size)).astype(np.float32)


dense = nnx.jit(lambda layer, x: layer(x))
dense_lengths = nnx.jit(lambda layer, x, lengths: layer(x, lengths=lengths))
dense_mask = nnx.jit(lambda layer, x, mask: layer(x, attention_mask=mask))


@nnx.jit(donate_argnames="cache")
def ragged(layer, x, cache, slot_idx, offsets, has_initial_state=None):
    return layer(x, cache, slot_idx=slot_idx, input_row_offsets=offsets, has_initial_state=has_initial_state)


def exact_layer(layer, x):
    """One sequence `[T, hidden]` through the layer in NumPy and float64: the output, and the state after it."""
    c = layer.config
    w = {name: oracle.exact(array) for name, array in layer.to_hf().items()}
    x = oracle.exact(x)
    qkv, z, b, a = (x @ w[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
    taps = w["conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((c.conv_kernel_size - 1, c.conv_dim)), qkv])
    conv = np.sum([padded[i : i + len(x)] * taps[:, i] for i in range(c.conv_kernel_size)], axis=0)
    conv = conv * oracle.sigmoid(conv)
    decay, beta = oracle.gates(a, b, w["A_log"], w["dt_bias"])
    pool = np.zeros((1, c.num_value_heads, c.key_head_dim, c.value_head_dim))
    out, pool = oracle.recurrence(conv, decay, beta, pool, [0], [0, len(x)])[:2]
    out = out.reshape(len(x), c.num_value_heads, c.value_head_dim)
    out = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + c.rms_norm_eps) * w["norm.weight"]
    z = z.reshape(out.shape)
    gate = {"silu": z * oracle.sigmoid(z), "sigmoid": oracle.sigmoid(z)}[c.output_gate]
    return (out * gate).reshape(len(x), -1) @ w["out_proj.weight"].T, pool[0]


# Configuration


def test_config_from_hugging_face():
    fields = {
        "hidden_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_attention_heads": 3,
    }
    assert GatedDeltaNetConfig.from_hf(fields) == CONFIG
    assert GatedDeltaNetConfig.from_hf(types.SimpleNamespace(**fields)) == CONFIG
    # A multimodal configuration has the hidden size of something else at the top.
    assert GatedDeltaNetConfig.from_hf({"hidden_size": 7, "text_config": fields}) == CONFIG
    nested = types.SimpleNamespace(text_config=types.SimpleNamespace(**fields))
    assert GatedDeltaNetConfig.from_hf(nested) == CONFIG
    assert GatedDeltaNetConfig.from_hf(fields | {"output_gate_type": "sigmoid"}).output_gate == "sigmoid"
    assert GatedDeltaNetConfig.from_hf(fields | {"output_gate_type": None}).output_gate == "silu"
    with pytest.raises(ValueError, match=r"no field linear_num_key_heads, linear_key_head_dim"):
        GatedDeltaNetConfig.from_hf({k: v for k, v in fields.items() if "_key_" not in k})
    with pytest.raises(ValueError, match=r"hidden_act is 'gelu', must be 'silu'"):
        GatedDeltaNetConfig.from_hf(fields | {"hidden_act": "gelu"})
    with pytest.raises(ValueError, match=r"output_gate_type is 'tanh', must be one of"):
        GatedDeltaNetConfig.from_hf(fields | {"output_gate_type": "tanh"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_value_heads": 5}, r"num_value_heads is 5, must be a multiple of num_key_heads = 2"),
        ({"num_key_heads": 0}, r"num_key_heads is 0, must be an integer of at least 1"),
        ({"conv_kernel_size": 1}, r"conv_kernel_size is 1, must be an integer of at least 2"),
        ({"key_head_dim": 16.0}, r"key_head_dim is 16.0, must be an integer"),
        ({"output_gate": "tanh"}, r"output_gate is 'tanh', must be one of"),
    ],
)
def test_config_errors(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# What the layer computes


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, output_gate="sigmoid", conv_kernel_size=2, rms_norm_eps=1e-2),
    ],
    ids=["silu", "sigmoid"],
)
def test_equals_float64(config):
    layer = make_layer(config, algorithm="recurrent")
    x = tokens(2, 9)
    y = dense(layer, x)
    for b in range(2):
        assert_close(y[b], exact_layer(layer, x[b])[0], RECURRENT)


def test_right_padding_by_lengths(layer):
    x = tokens(4, 8)
    lengths = [8, 5, 1, 0]
    for b, n in enumerate(lengths):
        x[b, n:] = np.nan
    y = np.asarray(dense_lengths(layer, x, np.array(lengths, np.int32)))
    for b, n in enumerate(lengths):
        assert_zero(y[b, n:])
        if n:
            assert_close(y[b, :n], exact_layer(layer, x[b, :n])[0], RECURRENT)


def test_padding_by_mask(layer):
    x = tokens(5, 8)
    mask = np.zeros((5, 8), np.int32)
    for b, (start, end) in enumerate([(0, 8), (3, 8), (0, 5), (2, 6), (4, 4)]):
        mask[b, start:end] = 1
    x[mask == 0] = np.nan
    y = np.asarray(dense_mask(layer, x, mask))
    assert_zero(y[mask == 0])
    for b in range(4):
        assert_close(y[b][mask[b] == 1], exact_layer(layer, x[b][mask[b] == 1])[0], RECURRENT)
    # A hole is a token of zeros.
    mask[0, 3] = 0
    hole = x[0].copy()
    hole[3] = 0
    y = np.asarray(dense_mask(layer, x, mask))[0]
    assert_close(np.delete(y, 3, 0), np.delete(exact_layer(layer, hole)[0], 3, 0), RECURRENT)
    assert_zero(y[3])


def test_dtypes():
    x = tokens(2, 9)
    layer = make_layer(dtype=jnp.bfloat16)
    assert dense(layer, x).dtype == jnp.bfloat16
    assert layer.in_proj_qkv.kernel.dtype == jnp.float32
    cache = layer.init_cache(3)
    assert cache.conv_state.dtype == jnp.bfloat16
    assert cache.recurrent_state.dtype == jnp.float32
    low = make_layer(param_dtype=jnp.bfloat16)
    assert low.in_proj_qkv.kernel.dtype == low.conv_weight.dtype == low.norm_weight.dtype == jnp.bfloat16
    assert low.A_log.dtype == low.dt_bias.dtype == jnp.float32
    cache = low.init_cache(3, state_dtype=jnp.bfloat16, conv_dtype=jnp.float16)
    assert cache.conv_state.dtype == jnp.float16
    assert cache.recurrent_state.dtype == jnp.bfloat16
    # Promotion, as in nnx.Linear: float32 tokens through bfloat16 parameters.
    y = dense(low, x)
    assert y.dtype == jnp.float32
    assert_close(y[0], exact_layer(low, x[0])[0], 1e-5)


# With a cache


def test_ragged_mixture(layer):
    """Prompts, pieces of prompts, single tokens, an empty row and padding, against each request alone."""
    x = {request: tokens(20, seed=i) for i, request in enumerate("abc")}
    slots = {"a": 4, "b": 0, "c": 2}
    done = dict.fromkeys("abc", 0)
    cache = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), layer.init_cache(6))
    produced = {request: [] for request in "abc"}
    # Each call: (request, tokens) rows; None is a padding row of 2 tokens.
    calls = [
        [("a", 7), (None, 2), ("b", 1)],
        [("b", 9), ("c", 0), ("a", 1)],
        [("a", 1), ("b", 1), ("c", 8)],
        [("c", 12), (None, 2), ("a", 1)],
        [("a", 10), ("b", 9), (None, 1)],
    ]
    for rows in calls:
        pieces, idx, fresh = [], [], []
        for request, n in rows:
            if request is None:
                pieces.append(np.full((n, CONFIG.hidden_size), np.nan, np.float32))
                idx.append([-1, 6, 2**31 - 1][n])
            else:
                pieces.append(x[request][done[request] : done[request] + n])
                idx.append(slots[request])
            fresh.append(request is not None and done[request] > 0)
        offsets = np.cumsum([0] + [len(piece) for piece in pieces])
        batch = np.full((20, CONFIG.hidden_size), np.nan, np.float32)
        batch[: offsets[-1]] = np.concatenate(pieces)
        y, cache = ragged(layer, batch, cache, np.array(idx), offsets, np.array(fresh))
        assert_zero(y[offsets[-1] :], "outside every row")
        for (request, n), start in zip(rows, offsets, strict=False):
            if request is None:
                assert_zero(y[start : start + n], "padding row")
            else:
                produced[request].append(np.asarray(y[start : start + n]))
                done[request] += n
    assert done == {"a": 20, "b": 20, "c": 20}
    for request in "abc":
        out, state = exact_layer(layer, x[request])
        assert_close(np.concatenate(produced[request]), out, RECURRENT, request)
        assert_close(cache.recurrent_state[slots[request]], state, RECURRENT, request)
    untouched = np.array([1, 3, 5])
    assert np.isnan(cache.recurrent_state[untouched]).all()
    assert np.isnan(cache.conv_state[untouched]).all()


def test_nothing_to_do(layer):
    """No tokens, no rows: the cache keeps its bits."""
    cache = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), layer.init_cache(3))
    for x, slots, offsets in (
        (tokens(0), np.array([1, 2]), np.zeros(3, int)),
        (tokens(4), np.zeros(0, int), np.zeros(1, int)),
        (tokens(4), np.array([1, -1]), np.array([2, 2, 4])),
    ):
        y, new = layer(x, cache, slot_idx=slots, input_row_offsets=offsets)
        assert y.shape == x.shape
        assert_zero(y)
        for now, then in zip(jax.tree.leaves(new), jax.tree.leaves(cache), strict=True):
            assert_same_bits(now, then)
    assert layer(tokens(2, 0)).shape == (2, 0, CONFIG.hidden_size)
    assert layer(tokens(0, 3), lengths=np.zeros(0, int)).shape == (0, 3, CONFIG.hidden_size)
    assert layer(tokens(2, 0), attention_mask=np.ones((2, 0))).shape == (2, 0, CONFIG.hidden_size)


def test_one_compilation_for_all_batches(layer):
    cache = layer.init_cache(4)
    traces = 0

    @nnx.jit
    def step(layer, x, cache, slot_idx, offsets, fresh):
        nonlocal traces
        traces += 1
        return layer(x, cache, slot_idx=slot_idx, input_row_offsets=offsets, has_initial_state=fresh)

    for seed in range(5):
        rng = np.random.default_rng(seed)
        offsets = np.sort(rng.integers(0, 12, 4))
        _, cache = step(layer, tokens(11, seed=seed), cache, rng.permutation(4)[:3], offsets, rng.random(3) < 0.5)
    assert traces == 1


def pointers(cache):
    return [pool.unsafe_buffer_pointer() for pool in jax.tree.leaves(cache)]


def test_donated_cache_is_updated_in_place(layer):
    cache = layer.init_cache(500)
    before, pool_bytes = pointers(cache), sum(pool.nbytes for pool in jax.tree.leaves(cache))
    arguments = (layer, tokens(3), cache, np.array([7, 499, 0]), np.arange(4))
    memory = jax.jit(
        lambda state, x, cache, slots, offsets: nnx.merge(graph, state)(
            x, cache, slot_idx=slots, input_row_offsets=offsets
        ),
        donate_argnums=2,
    )
    graph, state = nnx.split(layer)
    analysis = memory.lower(state, *arguments[1:]).compile().memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes / 10
    for _ in range(3):
        _, cache = ragged(layer, tokens(3), cache, np.array([7, 499, 0]), np.arange(4))
    assert pointers(cache) == before


def test_held_cache(layer):
    x = tokens(4, 3)
    held = HeldCache(layer.init_cache(4))
    cache = layer.init_cache(4)
    before = pointers(held.read())

    @nnx.jit(donate_argnames="held")
    def decode(layer, x, held, slot_idx, offsets):
        return layer(x, held, slot_idx=slot_idx, input_row_offsets=offsets)

    slots, offsets = np.array([3, -1, 1]), np.arange(4)
    for step in range(4):
        y = decode(layer, x[step], held, slots, offsets)
        expected, cache = ragged(layer, x[step], cache, slots, offsets)
        assert_same_bits(y, expected)
    assert pointers(held.read()) == before
    assert_same_bits(held.recurrent_state[...], cache.recurrent_state)
    assert_same_bits(held.conv_state[...], cache.conv_state)
    # Cache variables, as nnx users filter them.
    _, caches, rest = nnx.split(held, nnx.Cache, ...)
    assert len(jax.tree.leaves(caches)) == 2
    assert not jax.tree.leaves(rest)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"slot_idx": None}, ValueError, r"slot_idx is None, must be given with a cache"),
        ({"input_row_offsets": None}, ValueError, r"input_row_offsets is None"),
        ({"lengths": np.array([2])}, ValueError, r"lengths is given, but is for calls without a cache"),
        ({"cache": None}, ValueError, r"slot_idx is given, but needs a cache"),
        ({"x": tokens(1, 3)}, ValueError, r"x has shape \(1, 3, 24\), must be \[total_seq_len, hidden_size\]"),
        ({"x": tokens(3)[:, :7]}, ValueError, r"x has shape \(3, 7\), .*hidden_size = 24"),
        ({"input_row_offsets": np.arange(3)}, ValueError, r"input_row_offsets has shape \(3,\)"),
        ({"slot_idx": np.array([0.0, 1, 2])}, TypeError, r"slot_idx has dtype float"),
        ({"has_initial_state": np.ones(3)}, TypeError, r"has_initial_state has dtype float"),
        ({"has_initial_state": np.ones(2, bool)}, ValueError, r"has_initial_state has shape \(2,\)"),
        (
            {"cache": GatedDeltaCache(np.zeros((4, 112, 2)), np.zeros((4, 6, 16, 8)))},
            ValueError,
            r"cache.conv_state has shape \(4, 112, 2\)",
        ),
        (
            {"cache": GatedDeltaCache(np.zeros((4, 112, 3)), np.zeros((4, 6, 8, 16)))},
            ValueError,
            r"cache.recurrent_state has shape \(4, 6, 8, 16\)",
        ),
    ],
)
def test_errors_with_a_cache(layer, change, error, message):
    arguments = {
        "x": tokens(3),
        "cache": layer.init_cache(4),
        "slot_idx": np.arange(3),
        "input_row_offsets": np.arange(4),
    } | change
    with pytest.raises(error, match=message):
        layer(arguments.pop("x"), arguments.pop("cache"), **arguments)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (tokens(3), {}, r"x has shape \(3, 24\), must be \[batch_size, seq_len, hidden_size\]"),
        (tokens(2, 3), {"lengths": np.arange(3)}, r"lengths has shape \(3,\)"),
        (tokens(2, 3), {"attention_mask": np.ones((3, 3))}, r"attention_mask has shape \(3, 3\)"),
        (tokens(2, 3), {"lengths": np.arange(2), "attention_mask": np.ones((2, 3))}, r"must be one of them"),
    ],
)
def test_errors_without_a_cache(layer, x, options, message):
    with pytest.raises(ValueError, match=message):
        layer(x, **options)


def test_layer_slots():
    slots = np.array([0, 2, 3, 2**31 - 1, 2**32 - 1], np.uint32)
    np.testing.assert_array_equal(layer_slots(slots, 1, 2, 6), [1, 5, -1, -1, -1])
    with pytest.raises(ValueError, match=r"rows is 7, must be a multiple of num_layers = 2"):
        layer_slots(slots, 1, 2, 7)


# Weights


@pytest.mark.parametrize("layout", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("prefix", ["", "model.layers.3.linear_attn"])
def test_weights_round_trip(layer, layout, prefix):
    weights = layer.to_hf(layout=layout, prefix=prefix)
    assert len(weights) == {"qwen3_5": 9, "qwen3_next": 7}[layout]
    assert all(name.startswith(prefix) for name in weights)
    other = make_layer(seed=5)
    other.load_hf(weights)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(layer)), jax.tree.leaves(nnx.state(other)), strict=True):
        assert_same_bits(theirs, ours)


def test_weights_from_safetensors_and_jax(layer, tmp_path):
    prefix = "model.layers.1.linear_attn."
    whole = layer.to_hf(prefix=prefix) | make_layer(seed=9).to_hf(prefix="model.layers.2.linear_attn")
    safetensors.numpy.save_file(whole, tmp_path / "model.safetensors")
    expected = layer.to_hf()
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="np") as file:
        for source in (file, safetensors.numpy.load_file(tmp_path / "model.safetensors")):
            other = make_layer(seed=5)
            other.load_hf(source, prefix=prefix)
            for name, weight in other.to_hf().items():
                assert_same_bits(weight, expected[name], name)
    low = make_layer(param_dtype=jnp.bfloat16)
    low.load_hf(jax.tree.map(jnp.asarray, expected))
    assert low.out_proj.kernel.dtype == jnp.bfloat16
    assert_same_bits(low.to_hf()["out_proj.weight"], np.asarray(expected["out_proj.weight"], jnp.bfloat16))
    assert_same_bits(low.to_hf()["A_log"], expected["A_log"])


def test_weights_into_an_abstract_layer(layer):
    abstract = nnx.eval_shape(lambda: GatedDeltaNet(CONFIG, rngs=nnx.Rngs(0), algorithm="recurrent"))
    abstract.load_hf(layer.to_hf())
    x = tokens(1, 5)
    assert_same_bits(dense(abstract, x), dense(layer, x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("in_proj_a.weight"), r"lacks in_proj_a.weight of the qwen3_5 layout"),
        (lambda w: w.pop("A_log"), r"lacks A_log"),
        (lambda w: w.update({"conv1d.bias": np.zeros(3)}), r"has conv1d.bias, which no qwen3_5"),
        (lambda w: w.update({"in_proj_ba.weight": np.zeros(3)}), r"lacks in_proj_qkvz.weight of the qwen3_next layout"),
        (
            lambda w: w.update({"conv1d.weight": np.zeros((112, 4))}),
            r"conv1d.weight has shape \(112, 4\), must be \(112, 1, 4\)",
        ),
        (
            lambda w: w.update({"x.A_log": w["A_log"]}),
            r"holds 2 Gated DeltaNet layers: give prefix, one of '', 'x.'",
        ),
    ],
)
def test_weight_errors(layer, change, message):
    weights = layer.to_hf()
    change(weights)
    other = make_layer(seed=5)
    before = other.to_hf()
    with pytest.raises(ValueError, match=message):
        other.load_hf(weights)
    for name, weight in other.to_hf().items():
        assert_same_bits(weight, before[name], name)


def test_weight_errors_with_a_prefix(layer):
    weights = layer.to_hf(prefix="a.b")
    with pytest.raises(ValueError, match=r"lacks c.in_proj_qkv.weight, c.in_proj_z.weight"):
        layer.load_hf(weights, prefix="c")
    with pytest.raises(ValueError, match=r"has mlp.weight beside the layer at 'a.b.'"):
        layer.load_hf(weights | {"mlp.weight": np.zeros(3)})
    with pytest.raises(ValueError, match=r"layout is 'qwen4', must be one of"):
        layer.to_hf(layout="qwen4")


# Transformations of nnx


def test_split_and_merge(layer):
    graph, state = nnx.split(layer)
    x = tokens(1, 5)
    assert_same_bits(dense(nnx.merge(graph, state), x), dense(layer, x))
    assert all(
        isinstance(leaf, nnx.Param) for leaf in jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Param))
    )


def stacked_layers(count):
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def make(rngs):
        return GatedDeltaNet(CONFIG, rngs=rngs, algorithm="recurrent")

    return make(nnx.Rngs(1))


def test_scan_over_layers():
    layers = stacked_layers(3)
    x = tokens(5)
    slots, offsets = np.array([1, -1, 0]), np.array([0, 2, 4, 5])

    @nnx.jit(donate_argnames="cache")
    def forward(layers, x, cache):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def block(carry, layer, i):
            x, cache = carry
            rows = layer_slots(slots, i, 3, cache.recurrent_state.shape[0])
            y, cache = layer(x, cache, slot_idx=rows, input_row_offsets=offsets)
            return x + y, cache

        return block((x, cache), layers, jnp.arange(3))

    graph, state = nnx.split(layers)
    first = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
    cache = first.init_cache(3 * 2)
    before = pointers(cache)
    y, cache = forward(layers, x, cache)
    assert pointers(cache) == before

    expected = x
    for i in range(3):
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        out, alone = ragged(layer, expected, layer.init_cache(2), slots, offsets)
        expected = expected + out
        assert_close(cache.recurrent_state[i::3], alone.recurrent_state, RECURRENT)
        assert_close(cache.conv_state[i::3], alone.conv_state, RECURRENT)
    assert_close(y, expected, RECURRENT)


def test_remat_and_gradients():
    layer = make_layer()
    x, mask = tokens(2, 7), np.arange(7) < np.array([[7], [4]])
    x[~mask] = np.nan

    def loss(layer, x):
        return jnp.sum(layer(x, attention_mask=mask) ** 2)

    def remat_loss(layer, x):
        return jnp.sum(nnx.remat(lambda layer, x: layer(x, attention_mask=mask))(layer, x) ** 2)

    gradients = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, x)
    again = nnx.jit(nnx.grad(remat_loss, argnums=(0, 1)))(layer, x)
    for leaf, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(again), strict=True):
        assert_close(other, leaf, 1e-5)
        assert np.isfinite(leaf).all()
        assert np.linalg.norm(leaf) > 0
    assert_zero(np.asarray(gradients[1])[~mask])

    # Against a finite difference along a random direction of each parameter, in float64 outside the layer.
    weights = layer.to_hf()
    names = dict(zip(weights, hf_gradients(layer, gradients[0]), strict=True))
    for i, (name, weight) in enumerate(weights.items()):
        direction = np.random.default_rng(i).normal(size=weight.shape)
        direction *= 1e-4 / np.linalg.norm(direction)
        ends = []
        for sign in (1, -1):
            moved = make_layer()
            ends.append(exact_loss(moved, weights | {name: weight + sign * direction}, x, mask))
        slope = (ends[0] - ends[1]) / 2
        assert abs(np.sum(names[name] * direction) - slope) <= 2e-3 * abs(slope) + 1e-9, name


def hf_gradients(layer, gradients):
    """The gradients in the order and layout of `to_hf`."""
    graph, _ = nnx.split(layer)
    return nnx.merge(graph, gradients).to_hf().values()


def exact_loss(layer, weights, x, mask):
    """The loss at weights that need not be float32 numbers."""
    layer.to_hf = lambda: weights
    return sum(np.sum(exact_layer(layer, row[m])[0] ** 2) for row, m in zip(x, mask, strict=True))


def test_orbax_round_trip(layer, tmp_path):
    _, state = nnx.split(layer)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        graph, abstract = nnx.split(nnx.eval_shape(lambda: make_layer(algorithm="recurrent")))
        restored = checkpointer.restore(tmp_path / "layer", nnx.to_pure_dict(abstract))
    nnx.replace_by_pure_dict(abstract, restored)
    x = tokens(1, 5)
    assert_same_bits(dense(nnx.merge(graph, abstract), x), dense(layer, x))


# Sharding by heads


def mesh_of(size, kind):
    return jax.make_mesh((size,), (HEAD_AXIS,), axis_types=(kind,), devices=jax.devices()[:size])


def test_sharding_metadata(layer):
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    to_heads = {"kernel": PartitionSpec(None, HEAD_AXIS)}
    assert specs == {
        "in_proj_qkv": to_heads,
        "in_proj_z": to_heads,
        "in_proj_b": to_heads,
        "in_proj_a": to_heads,
        "out_proj": {"kernel": PartitionSpec(HEAD_AXIS, None)},
        "conv_weight": PartitionSpec(HEAD_AXIS, None),
        "A_log": PartitionSpec(HEAD_AXIS),
        "dt_bias": PartitionSpec(HEAD_AXIS),
        "norm_weight": PartitionSpec(),
    }


def test_created_under_a_mesh_with_rules():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        unsharded = GatedDeltaNet(CONFIG, rngs=nnx.Rngs(0))
        with nnx.logical_axis_rules([(HEAD_AXIS, "model")]):
            layer = GatedDeltaNet(CONFIG, rngs=nnx.Rngs(0))
    assert layer.in_proj_qkv.kernel.sharding.spec == PartitionSpec(None, "model")
    assert unsharded.in_proj_qkv.kernel.sharding.is_fully_replicated


@pytest.mark.parametrize("head_shards", [1, 2])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(layer, kind, head_shards):
    mesh = mesh_of(2, kind)
    x = tokens(5)
    slots, offsets = np.array([1, -1, 0]), np.array([0, 2, 4, 5])
    with jax.set_mesh(mesh):
        sharded = GatedDeltaNet(CONFIG, rngs=nnx.Rngs(3), head_shards=head_shards, algorithm="recurrent")
        assert sharded.in_proj_qkv.kernel.sharding.spec == PartitionSpec(None, HEAD_AXIS)
        sharded.load_hf(layer.to_hf())
        assert sharded.in_proj_qkv.kernel.sharding.spec == PartitionSpec(None, HEAD_AXIS)
        cache = sharded.init_cache(3)
        if kind == AxisType.Auto:
            cache = jax.device_put(cache, NamedSharding(mesh, PartitionSpec(None, HEAD_AXIS)))
        if kind == AxisType.Explicit and head_shards == 2:
            # Each device works on its own heads; what they exchange is the sum at the end.
            program = ragged.lower(sharded, x, cache, slots, offsets).compile().as_text() or ""
            assert program.count("all-reduce(") == 1
            assert not any(f"{name}(" in program for name in ("all-gather", "all-to-all", "collective-permute"))
        y, new = ragged(sharded, x, cache, slots, offsets)
        assert new.recurrent_state.sharding.spec[1] == HEAD_AXIS
        batch = dense_lengths(sharded, tokens(2, 5), np.array([5, 3], np.int32))
    expected, expected_cache = ragged(layer, x, layer.init_cache(3), slots, offsets)
    assert_close(y, expected, RECURRENT)
    assert_close(new.recurrent_state, expected_cache.recurrent_state, RECURRENT)
    assert_close(batch, dense_lengths(layer, tokens(2, 5), np.array([5, 3], np.int32)), RECURRENT)
    for name, weight in sharded.to_hf().items():
        assert_same_bits(weight, layer.to_hf()[name], name)


def test_head_shards_that_fit_no_mesh():
    config = dataclasses.replace(CONFIG, num_key_heads=4, num_value_heads=8)
    with jax.set_mesh(mesh_of(4, AxisType.Explicit)):
        layer = GatedDeltaNet(config, rngs=nnx.Rngs(0), head_shards=2)
        with pytest.raises(ValueError, match=r"head_shards is 2, must be 1 or 4, the size of the mesh axis"):
            layer(tokens(1, 3))


def test_head_shards_off_a_mesh(layer):
    other = GatedDeltaNet(CONFIG, rngs=nnx.Rngs(3), head_shards=2, algorithm="recurrent")
    other.load_hf(layer.to_hf())
    x = tokens(1, 5)
    assert_close(dense(other, x), dense(layer, x), RECURRENT)
    with pytest.raises(ValueError, match=r"head_shards is 3, must divide num_key_heads = 2"):
        GatedDeltaNet(CONFIG, rngs=nnx.Rngs(0), head_shards=3)
