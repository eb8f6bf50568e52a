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
# # Quickstart: the operations and the pool
#
# A Gated DeltaNet layer keeps, per request and value head, one matrix `S` of `key_head_dim x value_head_dim` numbers.
# gdn_jax stores the matrices of all requests in one array, the *pool*, whose first axis is the *slot*. A call takes a
# ragged batch: tokens of several requests laid end to end, with offsets that say where each row begins and a slot for
# each row. It returns outputs and the pool with the named slots advanced.
#
# This notebook runs the two passes of a layer on such a batch, looks at what the pool then holds, and shows that a
# donated pool is updated in its own memory.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import gdn_jax

print("gdn_jax", gdn_jax.__version__, "| jax", jax.__version__, "|", jax.devices()[0].platform)

# %% [markdown]
# ## A ragged batch
#
# Three requests and one row of padding: 12 prompt tokens, 1 decode token, 6 prompt tokens, 3 tokens of padding. A slot
# outside the pool marks a row as padding. `has_initial_state` is False for requests that start here, so whatever their
# slots hold has no influence.

# %%
num_key_heads, num_value_heads, head_dim, kernel_size = 4, 8, 64, 4
conv_dim = (2 * num_key_heads + num_value_heads) * head_dim
max_slots = 32

lengths = [12, 1, 6, 3]
input_row_offsets = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
slot_idx = jnp.array([5, 17, 9, -1], jnp.int32)
has_initial_state = jnp.array([False, True, False, False])
total_seq_len = sum(lengths)

rng = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)


tokens = normal(total_seq_len, conv_dim)  # rows [Q | K | V], as the in-projection gives them
a, b = normal(total_seq_len, num_value_heads), normal(total_seq_len, num_value_heads)
A_log, dt_bias = normal(num_value_heads, scale=0.5), normal(num_value_heads) - 3.0
conv_weight = normal(conv_dim, kernel_size, scale=0.5)

keys = jax.random.split(jax.random.key(0))
conv_state = jax.random.normal(keys[0], (max_slots, conv_dim, kernel_size - 1))
recurrent_state = 0.1 * jax.random.normal(keys[1], (max_slots, num_value_heads, head_dim, head_dim))
print("recurrent pool:", recurrent_state.shape, f"{recurrent_state.nbytes / 2**20:.0f} MiB")
print("conv pool:     ", conv_state.shape, f"{conv_state.nbytes / 2**20:.1f} MiB")

# %% [markdown]
# ## Two passes
#
# Pass 1 is a causal depthwise convolution. Its history, the last `kernel_size - 1` inputs of each request, lives in a
# pool of its own. Pass 2 is the gated delta rule; L2 norms of queries and keys and the query scale are part of it.


# %%
def layer(conv_state, recurrent_state, tokens, a, b, slot_idx, input_row_offsets, has_initial_state):
    decay, beta = gdn_jax.gated_delta_gates(a, b, A_log, dt_bias)
    qkv, conv_state = gdn_jax.gated_delta_conv1d_fwd(
        tokens,
        conv_weight,
        conv_state,
        slot_idx,
        input_row_offsets,
        activation="silu",
        has_initial_state=has_initial_state,
    )
    out, recurrent_state = gdn_jax.gated_delta_recurrence_fwd(
        qkv, decay, beta, recurrent_state, slot_idx, input_row_offsets, has_initial_state=has_initial_state
    )
    return out, conv_state, recurrent_state


step = jax.jit(layer, donate_argnames=("conv_state", "recurrent_state"))
before = np.asarray(jnp.copy(recurrent_state))  # on a CPU, a NumPy view of the pool itself would keep its buffer
pointers = [pool.unsafe_buffer_pointer() for pool in (conv_state, recurrent_state)]

out, conv_state, recurrent_state = step(
    conv_state, recurrent_state, tokens, a, b, slot_idx, input_row_offsets, has_initial_state
)
print("outputs:", out.shape, out.dtype)
print("outputs of the padding row are zero:", not out[input_row_offsets[3] :].any())

# %% [markdown]
# Only the slots that the batch names have changed, and the others kept their bits. Bit for bit is what the check below
# asks for; the plot shows how far each slot's state moved.

# %%
after = np.asarray(recurrent_state)
changed = [slot for slot in range(max_slots) if after[slot].tobytes() != before[slot].tobytes()]
print("slots that changed:", changed)
assert changed == sorted(int(slot) for slot in slot_idx if slot >= 0)

distance = np.linalg.norm((after - before).reshape(max_slots, -1), axis=1)
figure, axes = plt.subplots(figsize=(7, 2.2))
axes.bar(range(max_slots), distance)
axes.set(xlabel="slot", ylabel="|S after - S before|", title="One call over slots 5, 17, 9 and a row of padding")
plt.show()

# %% [markdown]
# ## Donation, in place
#
# The pools came back in the buffers they went in with, although every array of a JAX program is a new value:

# %%
in_place = [pool.unsafe_buffer_pointer() for pool in (conv_state, recurrent_state)] == pointers
print("conv pool and recurrent pool at their old addresses:", in_place)
assert in_place

# %% [markdown]
# The compiled program says the same. `alias_size_in_bytes` is how much of its output lives in donated inputs, and
# `temp_size_in_bytes` what it allocates beside inputs and outputs. With a pool that is 16 times larger, the first grows
# with the pool and the second does not: nothing pool-sized is copied. Without donation the program must allocate its
# outputs, a second pool among them.


# %%
def memory(max_slots, donate):
    shapes = [
        jax.ShapeDtypeStruct((max_slots, *x.shape[1:]) if i < 2 else x.shape, x.dtype)
        for i, x in enumerate(
            (conv_state, recurrent_state, tokens, a, b, slot_idx, input_row_offsets, has_initial_state)
        )
    ]
    compiled = jax.jit(layer, donate_argnums=(0, 1) if donate else ()).lower(*shapes).compile()
    analysis = compiled.memory_analysis()
    pools = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in shapes[:2])
    return pools, analysis.alias_size_in_bytes, analysis.temp_size_in_bytes, analysis.output_size_in_bytes


print(f"{'slots':>6} {'donated':>8} {'pools':>12} {'aliased':>12} {'temporary':>12} {'outputs':>12}   (bytes)")
for slots in (max_slots, 16 * max_slots):
    for donate in (True, False):
        pools, aliased, temporary, outputs = memory(slots, donate)
        print(f"{slots:6} {'yes' if donate else 'no':>8} {pools:12,} {aliased:12,} {temporary:12,} {outputs:12,}")
        if donate:
            assert aliased == pools
            assert temporary < 2**24

# %% [markdown]
# ## However it is cut
#
# A prompt may arrive in pieces. The recurrent form computes the same bits whether the 12 tokens of the first request
# come in one call, in pieces of 5 and 7, or one by one; the rest of the batch makes no difference either.

# %%
decay, beta = gdn_jax.gated_delta_gates(a, b, A_log, dt_bias)
recurrence = jax.jit(gdn_jax.gated_delta_recurrence_fwd, static_argnames="algorithm")


def run_in_pieces(pieces):
    state, outputs, start = jnp.zeros((1, *recurrent_state.shape[1:])), [], 0
    for length in pieces:
        rows = slice(start, start + length)
        out, state = recurrence(
            tokens[rows],
            decay[rows],
            beta[rows],
            state,
            jnp.array([0], jnp.int32),
            jnp.array([0, length], jnp.int32),
            algorithm="recurrent",
        )
        outputs.append(out)
        start += length
    return np.concatenate(outputs), np.asarray(state)


whole = run_in_pieces([12])
for pieces in ([5, 7], [1] * 12):
    same = all(x.tobytes() == y.tobytes() for x, y in zip(run_in_pieces(pieces), whole, strict=True))
    print(f"{len(pieces):2} calls: same bits as one call: {same}")
    assert same

# %% [markdown]
# ## What a state remembers
#
# The delta rule writes a value under a key and first takes away what stood there, so a state is an associative memory.
# Below, 64 random keys of 64 elements are written with `beta = 1`, and then each is asked for: the output of a query
# equal to a key, times `sqrt(key_head_dim)`, is what the state holds under it. The decay forgets old writes; without
# it, later writes disturb earlier ones as far as their keys overlap. `gated_delta_rule` is the call without a pool; its
# 16 heads are 16 trials of which the plot shows the mean.

# %%
num_pairs, num_trials = 64, 16
keys, values = normal(1, num_pairs, num_trials, head_dim), normal(1, num_pairs, num_trials, head_dim)
ones, zeros = jnp.ones((1, num_pairs, num_trials)), jnp.zeros((1, num_pairs, num_trials))
rule = jax.jit(gdn_jax.gated_delta_rule, static_argnames="output_final_state")

figure, axes = plt.subplots(figsize=(7, 3))
for rate in (1.0, 0.98, 0.9):
    log_decay = jnp.full(ones.shape, np.log(rate))
    _, state = rule(keys, keys, values, log_decay, ones, output_final_state=True)
    # beta = 0 writes nothing and a decay of 1 forgets nothing: this call only reads.
    read, _ = rule(keys, keys, values, zeros, zeros, initial_state=state)
    error = np.linalg.norm(read * head_dim**0.5 - values, axis=-1) / np.linalg.norm(values, axis=-1)
    axes.plot(np.arange(num_pairs)[::-1], error[0].mean(axis=1), ".-", label=f"decay {rate}")
axes.set(xlabel="writes since", ylabel="relative error of the value", title="Reading back what was written")
axes.legend()
plt.show()
