# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The Flax layer: weights, padding, prefill and decode
#
# `gdn_jax.flax.GatedDeltaNet` is the whole layer as an `nnx.Module`: in-projections, convolution, gates, gated delta
# rule, gated norm, out-projection. This notebook loads weights in the Hugging Face layout into one, calls it on a
# padded batch, and then serves two requests from a cache: prefill in pieces, decode, and both in one call.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from gdn_jax.flax import GatedDeltaNet, GatedDeltaNetConfig, HeldCache
from gdn_jax.serving import SlotPool

# %% [markdown]
# ## Configuration and weights
#
# `from_hf` takes a configuration object of transformers, or a dict with its `linear_*` fields. The one here is small.

# %%
hf_config = {
    "hidden_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
config = GatedDeltaNetConfig.from_hf(hf_config)
layer = GatedDeltaNet(config, rngs=nnx.Rngs(0))
print(config)

# %% [markdown]
# A checkpoint of Qwen3-Next stores two fused projections, interleaved per key head; one of Qwen3.5 stores four. The
# names tell which it is. The weights below are made up, with the names and shapes of one Qwen3-Next layer inside a
# larger state dict.

# %%
rng = np.random.default_rng(0)
prefix = "model.layers.0.linear_attn."
conv_dim, value_dim, num_value_heads = config.conv_dim, config.value_dim, config.num_value_heads
shapes = {
    "in_proj_qkvz.weight": (conv_dim + value_dim, config.hidden_size),
    "in_proj_ba.weight": (2 * num_value_heads, config.hidden_size),
    "conv1d.weight": (conv_dim, 1, config.conv_kernel_size),
    "A_log": (num_value_heads,),
    "dt_bias": (num_value_heads,),
    "norm.weight": (config.value_head_dim,),
    "out_proj.weight": (config.hidden_size, value_dim),
}
state_dict = {
    prefix + name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    for name, shape in shapes.items()
}
state_dict["model.layers.0.mlp.gate.weight"] = np.zeros((8, config.hidden_size), np.float32)

layer.load_hf(state_dict, prefix=prefix)

# %% [markdown]
# `to_hf` is the way back, in either layout. A weight that is missing, unknown or of a wrong shape is an error that
# names it, and leaves the layer as it was.

# %%
back = layer.to_hf(layout="qwen3_next", prefix=prefix)
print("the way back gives the same weights:", all((state_dict[name] == weight).all() for name, weight in back.items()))
print("in the layout of Qwen3.5:", ", ".join(layer.to_hf(layout="qwen3_5")))

lacking = {name: weight for name, weight in state_dict.items() if not name.endswith("A_log")}
try:
    layer.load_hf(lacking, prefix=prefix)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ## A padded batch
#
# Without a cache, `x` is `[B, T, hidden]`. `lengths` describes padding on the right, `attention_mask` on either side.
# Each row is as if it were alone.

# %%
x = jnp.asarray(rng.standard_normal((3, 20, config.hidden_size)), jnp.float32)
apply = nnx.jit(lambda layer, x, **padding: layer(x, **padding))

lengths = jnp.array([20, 7, 13])
right = apply(layer, x, lengths=lengths)
mask = jnp.arange(20) >= 20 - lengths[:, None]
shifted = jnp.stack([jnp.roll(row, 20 - int(length), axis=0) for row, length in zip(x, lengths, strict=True)])
left = apply(layer, shifted, attention_mask=mask)


def relative_error(y, reference):
    return float(np.linalg.norm(np.asarray(y) - np.asarray(reference)) / np.linalg.norm(reference))


for row, length in enumerate(lengths.tolist()):
    alone = apply(layer, x[row : row + 1, :length])[0]
    print(
        f"row of {length:2} tokens against the row alone:",
        f"padded on the right {relative_error(right[row, :length], alone):.1e},",
        f"on the left {relative_error(left[row, 20 - length :], alone):.1e}",
    )

# %% [markdown]
# ## Serving from a cache
#
# `init_cache` makes the two pools of a layer as one pytree. With a cache, `x` is ragged, `[T, hidden]`, and one
# compiled function serves prompts, pieces of prompts, decode and any mixture of them. `SlotPool` keeps the books on the
# host: which request owns which slot, and whether the slot holds its state yet.

# %%
cache = layer.init_cache(max_slots=16)
pool = SlotPool(max_slots=16)
traces = 0


@nnx.jit(donate_argnames="cache")
def step(layer, x, cache, slot_idx, input_row_offsets, has_initial_state):
    global traces
    traces += 1
    return layer(
        x,
        cache,
        slot_idx=slot_idx,
        input_row_offsets=input_row_offsets,
        has_initial_state=has_initial_state,
    )


def call(cache, rows, pad_tokens, pad_rows=4):
    """One step over `{request: tokens [n, hidden]}`, padded to fixed shapes; outputs by request."""
    requests = list(rows)
    offsets = np.cumsum([0, *(len(row) for row in rows.values())])
    flat = np.zeros((pad_tokens, config.hidden_size), np.float32)
    flat[: offsets[-1]] = np.concatenate([np.asarray(row) for row in rows.values()])
    padded = np.append(offsets, [offsets[-1]] * (pad_rows - len(requests))).astype(np.int32)
    y, cache = step(
        layer,
        flat,
        cache,
        pool.slot_idx(requests, pad_to=pad_rows),
        padded,
        pool.has_initial_state(requests, pad_to=pad_rows),
    )
    pool.mark_started(requests)
    return {r: y[offsets[i] : offsets[i + 1]] for i, r in enumerate(requests)}, cache


pointers = [p.unsafe_buffer_pointer() for p in jax.tree.leaves(cache)]
prompt_a, prompt_b = x[0], x[2, :13]

# %% [markdown]
# Request `a` brings a prompt of 14 tokens and request `b` the first 8 of its own. Then `a` decodes token by token while
# `b` still receives the rest of its prompt, and for one step both decode. What the steps give is compared with one call
# over the whole sequence.

# %%
outputs = {"a": [], "b": []}


def take(cache, rows, pad_tokens):
    y, cache = call(cache, rows, pad_tokens)
    for request, out in y.items():
        outputs[request].append(np.asarray(out))
    return cache


pool.allocate("a")
pool.allocate("b")
cache = take(cache, {"a": prompt_a[:14], "b": prompt_b[:8]}, pad_tokens=24)  # both prompts begin
cache = take(cache, {"b": prompt_b[8:12], "a": prompt_a[14:15]}, pad_tokens=8)  # a piece of a prompt, and a decode
cache = take(cache, {"b": prompt_b[12:13], "a": prompt_a[15:16]}, pad_tokens=8)  # both decode
pool.free("b")  # its slot may go to another request now
for t in range(16, 20):
    cache = take(cache, {"a": prompt_a[t : t + 1]}, pad_tokens=8)

whole = {"a": apply(layer, prompt_a[None])[0], "b": apply(layer, prompt_b[None])[0]}
for request in outputs:
    print(
        f"request {request}: {len(outputs[request])} calls,",
        f"error against one call {relative_error(np.concatenate(outputs[request]), whole[request]):.1e}",
    )
print("compilations, for the two sizes of batch:", traces)
print("pools at their old addresses:", [p.unsafe_buffer_pointer() for p in jax.tree.leaves(cache)] == pointers)

# %%
figure, axes = plt.subplots(figsize=(7, 2.8))
for request in outputs:
    y, reference = np.concatenate(outputs[request]), np.asarray(whole[request])
    error = np.linalg.norm(y - reference, axis=1) / np.linalg.norm(reference, axis=1)
    axes.semilogy(error, ".-", label=f"request {request}")
for cut in (8, 12, 14):
    axes.axvline(cut - 0.5, color="0.8", zorder=0)
axes.set(xlabel="token", ylabel="relative error", ylim=(1e-8, 1e-5))
axes.set(title="Prefill in pieces and decode, against one call (float32)")
axes.legend()
plt.show()

# %% [markdown]
# ## A cache that a module holds
#
# For decode loops written with mutable modules, `HeldCache` keeps the pools as `nnx.Cache` variables. A call then
# returns the output alone and leaves the new state in the module.

# %%
held = HeldCache(layer.init_cache(max_slots=4))


@nnx.jit(donate_argnames="held")
def decode(layer, x, held, slot_idx, offsets):
    return layer(x, held, slot_idx=slot_idx, input_row_offsets=offsets)


before = [p.unsafe_buffer_pointer() for p in jax.tree.leaves(held.read())]
y = [decode(layer, prompt_a[t : t + 1], held, jnp.array([2]), jnp.array([0, 1])) for t in range(6)]
print("error of 6 decode steps against one call:", f"{relative_error(np.concatenate(y), whole['a'][:6]):.1e}")
print("in place:", [p.unsafe_buffer_pointer() for p in jax.tree.leaves(held.read())] == before)

# %% [markdown]
# ## What a request costs in memory
#
# A state has one size, however long the request is. For comparison: the keys and values that an attention layer keeps,
# here one with 2 key-value heads of 256 elements in bfloat16. The Gated DeltaNet layer is one of 16 key heads, 32 value
# heads, 128 x 128, with float32 states.

# %%
full = GatedDeltaNetConfig(hidden_size=2048, num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128)
cache_shapes = jax.eval_shape(
    lambda: GatedDeltaNet(full, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16).init_cache(1)
)
state_bytes = sum(int(np.prod(p.shape)) * p.dtype.itemsize for p in jax.tree.leaves(cache_shapes))
sequence = 2 ** np.arange(7, 18)
attention_bytes = sequence * 2 * 2 * 256 * 2

figure, axes = plt.subplots(figsize=(7, 3))
axes.loglog(sequence, np.full(sequence.shape, state_bytes / 2**20), label="Gated DeltaNet layer")
axes.loglog(sequence, attention_bytes / 2**20, label="attention layer")
axes.set(xlabel="tokens of the request", ylabel="MiB per request and layer", title="State and key-value cache")
axes.legend()
plt.show()
print(f"{state_bytes / 2**20:.2f} MiB; as much as the keys and values of {state_bytes // (2 * 2 * 256 * 2)} tokens")
