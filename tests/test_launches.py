"""Calls one after the other: a kernel is launched while the one before it still ends, and must wait for it."""

import jax
import jax.numpy as jnp
import pytest

import gdn_jax
from tests.harness import assert_same_bits
from tests.shapes import HEADS, conv_inputs, row_offsets, spread_slots, state_pool, trained_tokens

heads = HEADS["qwen3.5"]
CALLS = 200


def mixed(tokens, out):
    """Tokens that depend on the outputs of the call before: a kernel of XLA's between two of this package's."""
    return tokens + jnp.pad(0.125 * jnp.tanh(out), ((0, 0), (0, tokens.shape[1] - out.shape[1])))


def forward(lengths, algorithm):
    offsets, slots = row_offsets(lengths), spread_slots(len(lengths), len(lengths) + 1)
    qkv, decay, beta = trained_tokens(heads, sum(lengths), "bfloat16")

    def step(out, pool):
        return gdn_jax.gated_delta_recurrence_fwd(
            mixed(qkv, out), decay, beta, pool, slots, offsets, algorithm=algorithm, implementation="mosaic_gpu"
        )

    return step, (jnp.zeros((sum(lengths), heads.value_dim), jnp.bfloat16), state_pool(heads, len(lengths) + 1))


def conv1d(lengths):
    offsets, slots = row_offsets(lengths), spread_slots(len(lengths), len(lengths) + 1)
    x, weight, _, pool = conv_inputs(heads, sum(lengths), len(lengths) + 1, "bfloat16", "bfloat16", "bfloat16")

    def step(out, pool):
        return gdn_jax.gated_delta_conv1d_fwd(
            mixed(x, out), weight, pool, slots, offsets, activation="silu", implementation="mosaic_gpu"
        )

    return step, (jnp.zeros_like(x), pool)


def speculation(lengths):
    batch = len(lengths)
    offsets, slots, ring_rows = row_offsets(lengths), spread_slots(batch, batch + 1), spread_slots(batch, batch, 1)
    qkv, decay, beta = trained_tokens(heads, sum(lengths), "bfloat16")

    def step(out, pool, ring):
        out, ring, pool = gdn_jax.gated_delta_recurrence_verify_ring(
            mixed(qkv, out), decay, beta, pool, ring, slots, ring_rows, offsets, implementation="mosaic_gpu"
        )
        accepted = jnp.asarray(lengths, jnp.int32)
        pool = gdn_jax.gated_delta_state_fold(
            pool, ring, slots[None], ring_rows[None], accepted, implementation="mosaic_gpu"
        )
        return out, pool, ring

    out = jnp.zeros((sum(lengths), heads.value_dim), jnp.bfloat16)
    return step, (out, state_pool(heads, batch + 1), jnp.zeros(heads.ring_shape(batch, max(lengths))))


CHAINS = {
    "decode of 8": lambda: forward((1,) * 8, "recurrent"),
    "decode of 32": lambda: forward((1,) * 32, "recurrent"),
    "chunks, two kernels": lambda: forward((512,), "chunked"),
    "chunks, one kernel": lambda: forward((2048,), "chunked"),
    "conv1d": lambda: conv1d((1,) * 64),
    "verify and fold": lambda: speculation((4,) * 8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHAINS)
def test_back_to_back(name):
    """The bits of calls that follow each other closely are those of calls each of which starts on an idle device."""
    step, first = CHAINS[name]()
    # Programs this small are launched kernel by kernel, not as a CUDA graph.
    step = jax.jit(step, donate_argnums=range(len(first)))
    ends = []
    for idle in (False, True):
        state = jax.tree.map(jnp.array, first)
        for _ in range(CALLS):
            state = step(*state)
            if idle:
                jax.block_until_ready(state)
        ends.append(state)
    for close, apart in zip(*ends, strict=True):
        assert_same_bits(close, apart, name)
