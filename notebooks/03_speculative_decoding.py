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
# # Speculative decoding: records in a ring, and a fold
#
# To check several draft tokens at once is easy for attention: keys and values of rejected tokens are overwritten. A
# recurrent state has no such history. One way out is to keep a copy of the state after every draft token, and to go
# back to the right one. Here the state is left alone instead: the verify computes the outputs and writes down, per
# token and head, what the token *would* do to the state. Such a record is a key, a vector and a decay. Once the
# accepted counts are known, the fold applies that many records. The result equals, bit for bit, what decoding the
# accepted tokens one by one gives.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import gdn_jax
from gdn_jax.flax import GatedDeltaNet, GatedDeltaNetConfig, layer_slots
from gdn_jax.serving import Window, commit, init_pools, verify

# %% [markdown]
# ## Verify
#
# Four requests, five tokens each: the one that is certain and four drafts. `verify_ring` takes what the forward takes,
# and a ring with a row for each request.

# %%
num_key_heads, num_value_heads, head_dim, window, batch, max_slots = 4, 8, 64, 5, 4, 16
group_size = num_value_heads // num_key_heads
conv_dim = (2 * num_key_heads + num_value_heads) * head_dim

keys = jax.random.split(jax.random.key(0), 4)
pool = 0.1 * jax.random.normal(keys[0], (max_slots, num_value_heads, head_dim, head_dim))
qkv = jax.random.normal(keys[1], (batch * window, conv_dim))
decay = 1.0 - 0.1 * jax.random.uniform(keys[2], (batch * window, num_value_heads))
beta = jax.random.uniform(keys[3], (batch * window, num_value_heads))
slot_idx = jnp.array([3, 12, 7, 0], jnp.int32)
ring_slot_idx = jnp.arange(batch, dtype=jnp.int32)
input_row_offsets = jnp.arange(batch + 1, dtype=jnp.int32) * window

record_elements = gdn_jax.gated_delta_ring_record_elements(head_dim, head_dim, group_size)
ring = jnp.full((batch, num_key_heads, window, record_elements), jnp.nan)
print("a record:", record_elements, "numbers =", f"{head_dim} (key) + {group_size} x ({head_dim} + 1)")

verify_op = jax.jit(gdn_jax.gated_delta_recurrence_verify_ring, donate_argnames=("recurrent_state", "ring"))
forward = jax.jit(gdn_jax.gated_delta_recurrence_fwd, static_argnames="algorithm")


def same_bits(x, y):
    return np.asarray(x).tobytes() == np.asarray(y).tobytes()


def copy_of(x):
    return np.asarray(jnp.copy(x))


expected, _ = forward(qkv, decay, beta, pool, slot_idx, input_row_offsets, algorithm="recurrent")
before, pointers = copy_of(pool), [x.unsafe_buffer_pointer() for x in (pool, ring)]
out, ring, pool = verify_op(qkv, decay, beta, pool, ring, slot_idx, ring_slot_idx, input_row_offsets)
print("outputs have the bits of the forward:", same_bits(out, expected))
print("the pool kept its bits:", same_bits(copy_of(pool), before))
print("pool and ring at their old addresses:", [x.unsafe_buffer_pointer() for x in (pool, ring)] == pointers)

# %% [markdown]
# ## Fold
#
# Any accepted counts, from 0 to the window, take the same compiled fold. Each time the result is compared with the
# forward over the accepted tokens alone, in pools of float32 and of bfloat16. (In a bfloat16 pool a state is rounded
# once, after the last accepted token. That, too, is the same.) Rows alternate between the accepted tokens of a request
# and its rejected ones, which go to no slot.


# %%
def accepted_only(accepted):
    """Slots and offsets of a batch in which only the accepted tokens belong to a request."""
    starts = input_row_offsets[:-1]
    slots = jnp.stack([slot_idx, jnp.full_like(slot_idx, -1)], axis=1).reshape(-1)
    offsets = jnp.append(jnp.stack([starts, starts + accepted], axis=1).reshape(-1), batch * window)
    return slots, offsets


traces = 0


@jax.jit
def fold(pool, ring, num_accepted):
    global traces
    traces += 1
    return gdn_jax.gated_delta_state_fold(pool, ring, slot_idx[None], ring_slot_idx[None], num_accepted)


rng = np.random.default_rng(0)
counts = [[0] * batch, [window] * batch, *rng.integers(0, window + 1, (10, batch)).tolist()]
for dtype in (jnp.float32, jnp.bfloat16):
    states = pool.astype(dtype)
    _, records, _ = gdn_jax.gated_delta_recurrence_verify_ring(
        qkv, decay, beta, states, jnp.zeros_like(ring), slot_idx, ring_slot_idx, input_row_offsets
    )
    equal = 0
    for accepted in counts:
        accepted = jnp.asarray(accepted, jnp.int32)
        folded = fold(states, records, accepted)
        _, expected = forward(qkv, decay, beta, states, *accepted_only(accepted), algorithm="recurrent")
        equal += same_bits(folded, expected)
    print(f"{dtype.__name__} pool: {equal} of {len(counts)} folds have the bits of the forward")
    assert equal == len(counts)
print("compilations, one for each dtype:", traces)

# %% [markdown]
# ## A model that speculates
#
# `gdn_jax.serving` has the same for whole models. Layers share their pools; `verify` runs one layer over the window,
# and `commit` brings all layers to the accepted prefix: one fold for the states, one convolution for the windows. The
# model below has three layers and random weights. Verify, acceptance and commit are one program; the counts do not
# visit the host before the commit.

# %%
vocabulary, num_layers, num_drafts = 64, 3, window - 1
config = GatedDeltaNetConfig(hidden_size=64, num_key_heads=2, num_value_heads=4, key_head_dim=32, value_head_dim=32)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(vocabulary, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([GatedDeltaNet(config, rngs=rngs, algorithm="recurrent") for _ in range(num_layers)])
        self.norms = nnx.List([nnx.RMSNorm(config.hidden_size, rngs=rngs) for _ in range(num_layers + 1)])
        self.head = nnx.Linear(config.hidden_size, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens, mix):
        """Greedy next tokens; `mix(i, layer, x)` applies layer i."""
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = x + mix(i, layer, self.norms[i](x))
        return jnp.argmax(self.head(self.norms[-1](x)), axis=-1)


@nnx.jit(donate_argnames="pools")
def plain_step(model, tokens, pools, rows):
    """Prefill or decode: every token stays."""
    cache = pools.cache

    def mix(i, layer, x):
        nonlocal cache
        slots = layer_slots(rows.slot_idx, i, num_layers, cache.recurrent_state.shape[0])
        y, cache = layer(
            x,
            cache,
            slot_idx=slots,
            input_row_offsets=rows.input_row_offsets,
            has_initial_state=rows.has_initial_state,
        )
        return y

    predicted = model(tokens, mix)
    return predicted, dataclasses.replace(pools, cache=cache)


@nnx.jit(donate_argnames="pools")
def speculative_step(model, tokens, pools, rows):
    """Verify windows of drafts, accept those that the model itself would have chosen, commit."""
    conv_inputs = []

    def mix(i, layer, x):
        nonlocal pools
        y, pools, conv_input = verify(layer, x, pools, rows, i)
        conv_inputs.append(conv_input)
        return y

    predicted = model(tokens, mix).reshape(-1, window)
    matches = predicted[:, :-1] == tokens.reshape(-1, window)[:, 1:]
    num_accepted = 1 + jnp.cumprod(matches, axis=1).sum(axis=1)  # the first token is no draft
    return predicted, num_accepted, commit(pools, rows, conv_inputs, num_accepted)


model = Model(nnx.Rngs(0))
prompts = rng.integers(0, vocabulary, (batch, 24))
new_tokens = 48


def fresh_pools():
    return init_pools(
        model.layers[0], num_layers=num_layers, max_slots=max_slots, max_batch_size=batch, ring_len=window
    )


def prefill():
    offsets = jnp.arange(batch + 1, dtype=jnp.int32) * prompts.shape[1]
    rows = Window(slot_idx, offsets, has_initial_state=jnp.zeros(batch, bool))
    predicted, pools = plain_step(model, jnp.asarray(prompts.reshape(-1)), fresh_pools(), rows)
    first = np.asarray(predicted).reshape(batch, -1)[:, -1]
    return [[*prompt.tolist(), int(token)] for prompt, token in zip(prompts, first, strict=True)], pools


# %% [markdown]
# First the texts without speculation, one token a step. Then with it: instead of a draft model there are drafts that
# continue the text as the model will, except that each token is replaced by a random one with probability 0.25. A draft
# counts as long as all before it were right.

# %%
texts, pools = prefill()
one_each = Window(slot_idx, jnp.arange(batch + 1, dtype=jnp.int32))
for _ in range(new_tokens - 1 + window):
    predicted, pools = plain_step(model, jnp.array([text[-1] for text in texts]), pools, one_each)
    for text, token in zip(texts, predicted.tolist(), strict=True):
        text.append(token)
plain_texts = texts

texts, pools = prefill()
windows, accepted_counts = Window(slot_idx, input_row_offsets), []
length = prompts.shape[1] + new_tokens
while min(len(text) for text in texts) < length:
    tokens = np.zeros((batch, window), np.int32)
    for row, text, future in zip(tokens, texts, plain_texts, strict=True):
        known = future[len(text) - 1 : len(text) - 1 + window]
        row[: len(known)] = known
    wrong = rng.random((batch, num_drafts)) < 0.25
    tokens[:, 1:] = np.where(wrong, rng.integers(0, vocabulary, wrong.shape), tokens[:, 1:])
    predicted, num_accepted, pools = speculative_step(model, jnp.asarray(tokens.reshape(-1)), pools, windows)
    for text, choices, count in zip(texts, predicted.tolist(), num_accepted.tolist(), strict=True):
        text.extend(choices[:count])
    accepted_counts.append(num_accepted.tolist())

same = all(t[:length] == p[:length] for t, p in zip(texts, plain_texts, strict=True))
print("same tokens as without speculation:", same)
print(f"{len(accepted_counts)} steps instead of {new_tokens - 1} after the prompts")
print(f"tokens kept per step and request: {np.mean(accepted_counts):.2f}")
assert same

# %%
figure, axes = plt.subplots(figsize=(7, 2.2))
image = axes.imshow(np.transpose(accepted_counts), aspect="auto", vmin=0, vmax=window, interpolation="nearest")
axes.set(xlabel="step", ylabel="request", yticks=range(batch), title="Tokens kept, of a window of 5")
figure.colorbar(image)
plt.show()

# %% [markdown]
# ## Records against snapshots
#
# For the layer shape of Qwen3.5 (16 key heads, 32 value heads, 128 x 128, float32): what must be kept per request and
# layer until the accepted count of a window is known. A snapshot is a whole state after each token. A record is a key
# per key head, and a vector and a decay per value head. What the ring has in memory is what the verify writes and the
# fold reads, so the ratio is one of traffic as well.

# %%
layer_shape = GatedDeltaNetConfig(
    hidden_size=2048, num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128
)
lengths = np.arange(1, 17)


def kept_bytes(length):
    """Of records and of snapshots, from the shapes of the arrays that would hold them."""
    layer = GatedDeltaNet(layer_shape, rngs=nnx.Rngs(0))
    return layer.init_ring(1, length), layer.init_cache(length).recurrent_state


sizes = [[x.size * x.dtype.itemsize for x in jax.eval_shape(lambda n=int(n): kept_bytes(n))] for n in lengths]
records, snapshots = np.transpose(sizes)

figure, axes = plt.subplots(figsize=(7, 3))
axes.semilogy(lengths, snapshots / 2**20, ".-", label="snapshots: a state per token")
axes.semilogy(lengths, records / 2**20, ".-", label="records in the ring")
axes.axhline(snapshots[0] / 2**20, color="0.7", linestyle="--", label="the state itself")
axes.set(xlabel="tokens of the window", ylabel="MiB per request and layer", title="Kept until the count is known")
axes.set_ylim(1e-3, 1e2)
axes.legend(loc="lower right")
plt.show()
print(f"a record takes {records[0] / 1024:.1f} KiB, a snapshot {snapshots[0] / 1024:.0f} KiB")
print(f"ratio: {snapshots[0] / records[0]:.0f}")
