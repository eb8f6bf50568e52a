"""The layer against transformers: expected values come from transformers itself.

`tests/hf/make_fixtures.py` made the committed files. Where torch and transformers are installed (the `hf` extra), or
`GDN_JAX_HF_PYTHON` names an interpreter that has them, the same tests also run on files that the script makes on the
spot, with other weights.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gdn_jax.flax import GatedDeltaNet, GatedDeltaNetConfig, layer_slots
from gdn_jax.serving import Window, commit, init_pools, verify
from tests.harness import relative_error

HERE = pathlib.Path(__file__).parent / "hf"
FLOAT32_BOUND = 1e-5
BFLOAT16_BOUND = 1e-2
PIECES = (41, 29)


def hf_python() -> str | None:
    """An interpreter with torch and transformers."""
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        return sys.executable
    return os.environ.get("GDN_JAX_HF_PYTHON")


@pytest.fixture(scope="session", params=["committed", "live"] if hf_python() else ["committed"])
def fixture_dir(request, tmp_path_factory) -> pathlib.Path:
    if request.param == "committed":
        return HERE
    made = tmp_path_factory.mktemp("hf")
    command = [hf_python(), str(HERE / "make_fixtures.py"), "--out", str(made), "--seed", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return made


def load(path: pathlib.Path):
    """Arrays, configuration, and the state dict."""
    with np.load(path) as file:
        arrays = dict(file)
    config = json.loads(str(arrays.pop("meta")))["config"]
    weights = {name.removeprefix("weights/"): a for name, a in arrays.items() if name.startswith("weights/")}
    return arrays, config, weights


@pytest.fixture(scope="session", params=["qwen3_next", "qwen3_5"])
def layer_file(request, fixture_dir):
    return load(fixture_dir / f"{request.param}_layer.npz")


# One compilation serves every file: the layers have one and the same graph definition.
call = nnx.jit(lambda layer, x: layer(x))
masked_call = nnx.jit(lambda layer, x, mask: layer(x, attention_mask=mask))


@nnx.jit
def ragged_call(layer, x, cache, slot_idx, offsets, has_initial_state):
    return layer(
        x,
        cache,
        slot_idx=slot_idx,
        input_row_offsets=offsets,
        has_initial_state=jnp.full(slot_idx.shape, has_initial_state),
    )


def built(config, weights, dtype):
    layer = GatedDeltaNet(GatedDeltaNetConfig.from_hf(config), rngs=nnx.Rngs(0), dtype=dtype, param_dtype=dtype)
    layer.load_hf(weights)
    return layer


def served(layer, x, x_decode):
    """Outputs of x in two cached pieces, of x_decode token by token, and the last state."""
    batch_size, hidden = x.shape[0], x.shape[-1]
    slots = np.array([3, 1])
    cache = layer.init_cache(5)
    outputs = []
    pieces = np.split(x, np.cumsum(PIECES)[:-1], axis=1) + [x_decode[:, t : t + 1] for t in range(x_decode.shape[1])]
    for i, piece in enumerate(pieces):
        offsets = np.arange(batch_size + 1) * piece.shape[1]
        y, cache = ragged_call(layer, piece.reshape(-1, hidden), cache, slots, offsets, i > 0)
        outputs.append(np.asarray(y, np.float32).reshape(piece.shape))
    outputs = np.concatenate(outputs, axis=1)
    return outputs[:, : x.shape[1]], outputs[:, x.shape[1] :], np.asarray(cache.recurrent_state)[slots]


def test_float32_layer(layer_file):
    arrays, config, weights = layer_file
    assert config["linear_num_value_heads"] != config["linear_num_key_heads"]
    assert config["linear_value_head_dim"] != config["linear_key_head_dim"]
    layer = built(config, weights, jnp.float32)
    assert relative_error(call(layer, arrays["x"]), arrays["y"]) <= FLOAT32_BOUND
    pieces, decode, state = served(layer, arrays["x"], arrays["x_decode"])
    assert relative_error(pieces, arrays["y_pieces"]) <= FLOAT32_BOUND
    assert arrays["x_decode"].shape[1] == 32
    assert relative_error(decode, arrays["y_decode"]) <= FLOAT32_BOUND
    assert relative_error(state, arrays["state"]) <= FLOAT32_BOUND


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(layer_file, side):
    arrays, config, weights = layer_file
    layer = built(config, weights, jnp.float32)
    mask = arrays[f"{side}_mask"]
    y = np.asarray(masked_call(layer, arrays["x_padded"], mask))
    assert relative_error(y[mask], arrays[f"y_{side}"][mask]) <= FLOAT32_BOUND


def test_bfloat16_layer(layer_file):
    arrays, config, weights = layer_file
    layer = built(config, weights, jnp.bfloat16)
    x, x_decode = (np.asarray(arrays[name], jnp.bfloat16) for name in ("x", "x_decode"))
    y = call(layer, x)
    assert y.dtype == jnp.bfloat16
    assert relative_error(y, arrays["y_bfloat16"]) <= BFLOAT16_BOUND
    _, decode, state = served(layer, x, x_decode)
    assert relative_error(decode, arrays["y_decode_bfloat16"]) <= BFLOAT16_BOUND
    assert relative_error(state, arrays["state_bfloat16"]) <= BFLOAT16_BOUND


# A whole Qwen3.5 text model around the layer: everything else is plain JAX.


class RMSNorm(nnx.Module):
    """The zero-centred norm of Qwen3.5's residual stream."""

    def __init__(self, weights, name, eps):
        self.weight = nnx.Param(jnp.asarray(weights[name]))
        self.eps = eps

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * (1 + self.weight[...])


class Linear(nnx.Module):
    def __init__(self, weights, name):
        self.weight = nnx.Param(jnp.asarray(weights[name + ".weight"]))

    def __call__(self, x):
        return x @ self.weight[...].T


class Attention(nnx.Module):
    """Gated attention over a cache of keys and values `[2, max_slots, max_len, num_kv_heads, head_dim]`."""

    def __init__(self, config, weights, prefix):
        self.head_dim = config["head_dim"]
        self.rope = config["rope_parameters"]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            Linear(weights, f"{prefix}.{name}_proj") for name in "qkvo"
        )
        self.q_norm, self.k_norm = (
            RMSNorm(weights, f"{prefix}.{name}_norm.weight", config["rms_norm_eps"]) for name in "qk"
        )

    def rotate(self, x, positions):
        dim = int(self.head_dim * self.rope["partial_rotary_factor"])
        frequencies = self.rope["rope_theta"] ** (-jnp.arange(0, dim, 2) / dim)
        angles = (positions[:, None] * frequencies)[:, None]
        x1, x2, rest = jnp.split(x, [dim // 2, dim], axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)

    def __call__(self, x, kv, slots, positions):
        q, gate = jnp.split(self.q_proj(x).reshape(x.shape[0], -1, 2 * self.head_dim), 2, axis=-1)
        k, v = (proj(x).reshape(x.shape[0], -1, self.head_dim) for proj in (self.k_proj, self.v_proj))
        q, k = self.rotate(self.q_norm(q), positions), self.rotate(self.k_norm(k), positions)
        kv = kv.at[:, slots, positions].set(jnp.stack([k, v]), mode="drop")
        keys, values = kv.at[:, slots].get(mode="clip")
        seen = jnp.arange(keys.shape[1]) <= positions[:, None]
        out = jax.nn.dot_product_attention(q[:, None], keys, values, mask=seen[:, None, None])
        return self.o_proj((out[:, 0] * nnx.sigmoid(gate)).reshape(x.shape[0], -1)), kv


class TextModel(nnx.Module):
    def __init__(self, config, weights):
        eps = config["rms_norm_eps"]
        self.embed = nnx.Param(jnp.asarray(weights["model.embed_tokens.weight"]))
        self.head = Linear(weights, "lm_head")
        self.norm = RMSNorm(weights, "model.norm.weight", eps)
        gdn_config = GatedDeltaNetConfig.from_hf(config)
        self.blocks = nnx.List([])
        for i, kind in enumerate(config["layer_types"]):
            prefix = f"model.layers.{i}"
            if kind == "linear_attention":
                # Token by token in every call, so that a commit can equal a plain step to the bit.
                mixer = GatedDeltaNet(gdn_config, rngs=nnx.Rngs(0), algorithm="recurrent")
                mixer.load_hf(weights, prefix=f"{prefix}.linear_attn")
            else:
                mixer = Attention(config, weights, f"{prefix}.self_attn")
            norms = [RMSNorm(weights, f"{prefix}.{n}_layernorm.weight", eps) for n in ("input", "post_attention")]
            mlp = [Linear(weights, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up", "down")]
            self.blocks.append(nnx.List([mixer, nnx.List(norms), nnx.List(mlp)]))

    def gdn_layers(self):
        return [block[0] for block in self.blocks if isinstance(block[0], GatedDeltaNet)]

    def __call__(self, tokens, kv, window, starts, mix):
        """Logits `[T, vocab]` and kv. `mix(layer, x)` applies the Gated DeltaNet layers in order.

        `starts [B]` is how many tokens each request has behind it.
        """
        place = jnp.arange(tokens.shape[0])
        row = jnp.searchsorted(window.input_row_offsets[1:], place, side="right")
        inside = row < window.slot_idx.shape[0]
        slots = jnp.where(inside, window.slot_idx.at[row].get(mode="clip"), kv.shape[1])
        positions = (starts - window.input_row_offsets[:-1]).at[row].get(mode="clip") + place
        x = self.embed[...][tokens]
        for mixer, (input_norm, post_norm), (gate, up, down) in self.blocks:
            h = input_norm(x)
            if isinstance(mixer, GatedDeltaNet):
                h = mix(mixer, h)
            else:
                h, kv = mixer(h, kv, slots, positions)
            x = x + h
            h = post_norm(x)
            x = x + down(nnx.silu(gate(h)) * up(h))
        return self.head(self.norm(x)), kv


@nnx.jit(donate_argnames=("pools", "kv"))
def plain_step(model, tokens, pools, kv, window, starts):
    """Logits of a ragged batch; states advance over all of it."""
    cache, layers = pools.cache, iter(range(pools.num_layers))

    def mix(layer, x):
        nonlocal cache
        slots = layer_slots(window.slot_idx, next(layers), pools.num_layers, cache.conv_state.shape[0])
        y, cache = layer(
            x,
            cache,
            slot_idx=slots,
            input_row_offsets=window.input_row_offsets,
            has_initial_state=window.has_initial_state,
        )
        return y

    logits, kv = model(tokens, kv, window, starts, mix)
    return logits, dataclasses.replace(pools, cache=cache), kv


@nnx.jit(donate_argnames=("pools", "kv"))
def speculative_step(model, tokens, pools, kv, window, starts, is_prompt):
    """Verify, accept greedily, commit: one program.

    A row is the last known token and drafts after it, or (`is_prompt`) a prompt, which stays whole. Returns how many
    tokens of each row stay, and the model's choice after each token.
    """
    layers, conv_inputs = iter(range(pools.num_layers)), []

    def mix(layer, x):
        nonlocal pools
        y, pools, conv_input = verify(layer, x, pools, window, next(layers))
        conv_inputs.append(conv_input)
        return y

    logits, kv = model(tokens, kv, window, starts, mix)
    choice = jnp.argmax(logits, axis=-1)
    right = jnp.append(tokens[1:] == choice[:-1], False)
    start, end = window.input_row_offsets[:-1], window.input_row_offsets[1:]
    # The first wrong draft ends a row: the count up to it is one for the known token plus the drafts before it.
    place = jnp.arange(tokens.shape[0])
    wrong = ~right & (place >= start[:, None]) & (place < end[:, None] - 1)
    accepted = jnp.min(jnp.where(wrong, place, end[:, None] - 1), axis=1) + 1 - start
    accepted = jnp.where(is_prompt, end - start, accepted)
    return accepted, choice, commit(pools, window, conv_inputs, accepted), kv


MAX_LEN = 160
SLOTS = np.array([2, 0, 3], np.int32)


@pytest.fixture(scope="module")
def text_model(fixture_dir):
    arrays, config, weights = load(fixture_dir / "qwen3_5_text.npz")
    model = TextModel(config, weights)
    kinds = config["layer_types"]
    assert kinds.count("linear_attention") == 3
    assert kinds.count("full_attention") == 1
    prompts = [arrays[f"prompt_{i}"] for i in range(len(SLOTS))]
    greedy = [arrays[f"greedy_{i}"] for i in range(len(SLOTS))]
    assert all(len(g) == 64 for g in greedy)
    kv_shape = (2, 4, MAX_LEN, config["num_key_value_heads"], config["head_dim"])

    def fresh_state():
        # Everything that must not matter is NaN: states of earlier requests, and records never written.
        pools = init_pools(model.gdn_layers()[0], num_layers=3, max_slots=4, max_batch_size=3, ring_len=8)
        return jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pools), jnp.zeros(kv_shape)

    return model, prompts, greedy, arrays["logits_0"], fresh_state


def batch(rows, num_tokens, **window):
    """A ragged batch of token rows, in a buffer of num_tokens."""
    tokens = np.zeros(num_tokens, np.int32)
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)
    tokens[: offsets[-1]] = np.concatenate(rows)
    return tokens, Window(SLOTS, offsets, **window), offsets


def test_text_model_logits(text_model):
    model, prompts, greedy, logits, fresh_state = text_model
    pools, kv = fresh_state()
    sequence = np.concatenate([prompts[0], greedy[0]])
    tokens, window, offsets = batch([sequence, [], []], 72, has_initial_state=np.zeros(3, bool))
    got, _, _ = plain_step(model, tokens, pools, kv, window, np.zeros(3, np.int32))
    assert relative_error(got[: offsets[1]], logits) <= FLOAT32_BOUND


def test_text_model_greedy(text_model):
    model, prompts, greedy, _, fresh_state = text_model
    pools, kv = fresh_state()
    starts = np.zeros(3, np.int32)
    rows, made = prompts, []
    for step in range(64):
        tokens, window, offsets = batch(rows, 88 if step == 0 else 3, has_initial_state=np.full(3, step > 0))
        logits, pools, kv = plain_step(model, tokens, pools, kv, window, starts)
        made.append(np.asarray(jnp.argmax(logits, axis=-1))[offsets[1:] - 1])
        starts = starts + np.diff(offsets)
        rows = made[-1][:, None]
    np.testing.assert_array_equal(np.stack(made, axis=1), np.stack(greedy))


def drafts(rng, made, truth, most):
    """Draft tokens for the next window: right up to a random place, so that any count gets accepted."""
    proposed = truth[len(made) : len(made) + most].copy()
    if rng.random() < 0.7 and len(proposed):
        proposed[rng.integers(len(proposed)) :] += 1
    return proposed % 97


def test_text_model_greedy_with_speculation(text_model):
    model, prompts, greedy, _, fresh_state = text_model
    rng = np.random.default_rng(0)
    pools, kv = fresh_state()
    starts = np.zeros(3, np.int32)
    made = [[], [], []]
    counts = set()
    first_step = [0, 3, 1]  # Prompts arrive while other requests decode.
    step = 0
    while min(map(len, made)) < 64:
        rows, is_prompt = [], []
        for i in range(3):
            is_prompt.append(step == first_step[i])
            if step < first_step[i] or len(made[i]) >= 64:
                rows.append([])
            elif is_prompt[i]:
                rows.append(prompts[i])
            else:
                most = min(4, 63 - len(made[i])) * (step % 3 > 0)  # Every third step goes without drafts.
                rows.append(np.append(made[i][-1], drafts(rng, made[i], greedy[i], most)))
        window = {"has_initial_state": starts > 0, "ring_slot_idx": np.array([1, 2, 0])}
        tokens, window, offsets = batch(rows, 88 if any(is_prompt) else 15, **window)
        accepted, choice, pools, kv = speculative_step(model, tokens, pools, kv, window, starts, np.array(is_prompt))
        accepted, choice = np.asarray(accepted), np.asarray(choice)
        for i in range(3):
            if len(rows[i]):
                new = choice[offsets[i] : offsets[i] + accepted[i]]
                made[i].extend(new[-1:] if is_prompt[i] else new)
                starts[i] += accepted[i]
                if not is_prompt[i] and len(rows[i]) == 5:
                    counts.add(int(accepted[i]))
        step += 1
    np.testing.assert_array_equal(np.stack([m[:64] for m in made]), np.stack(greedy))
    # Windows of one known token and four drafts were accepted to every length.
    assert counts == {1, 2, 3, 4, 5}
