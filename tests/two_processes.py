"""One of two processes that run an engine's steps on one mesh: `python -m tests.two_processes ADDRESS PROCESS`.

Each process has two devices. Requests are split over one axis of the mesh and heads over the other, which joins the
processes: the sum that ends the layer goes from one to the other. `tests/test_many_devices.py` starts both.
"""

# Arguments come unpacked from tuples.
# pyright: reportCallIssue=false

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gdn_jax
from gdn_jax.sharding import fused_channel_order, over_devices
from tests import oracle, shapes
from tests.harness import assert_close

HEADS = shapes.Heads(2, 4, 16, 16)
GROUPS, SLOTS, BATCH, RING_LEN = 2, 3, 2, 4
POOLS = P("data", "model")


def place(mesh, array, *axes):
    """A global array of which every process makes its own parts."""
    return jax.make_array_from_callback(np.shape(array), NamedSharding(mesh, P(*axes)), np.asarray(array).__getitem__)


def check(value, reference, what, budget=2e-6):
    """Every part of a global array that is here, against that part of the reference."""
    for shard in value.addressable_shards:
        assert_close(shard.data, reference[shard.index], budget, f"{what} of {shard.device}")


class Batch:
    """One ragged batch for each group of devices along `data`, and the same tokens in the order of head shards."""

    def __init__(self, lengths, seed):
        self.offsets = np.stack([shapes.row_offsets(rows) for rows in lengths])
        self.num_tokens = int(self.offsets[0, -1])
        self.slots = np.array([[2, 0], [1, 2]], np.int32)
        self.tokens = shapes.trained_tokens(HEADS, GROUPS * self.num_tokens, seed=seed)

    def on(self, mesh):
        geometry = (HEADS.num_key_heads, HEADS.num_value_heads, HEADS.key_head_dim, HEADS.value_head_dim)
        order = fused_channel_order(*geometry, head_shards=mesh.shape["model"])
        qkv, decay, beta = self.tokens
        tokens = [place(mesh, x, "data", "model") for x in (qkv[:, order], decay, beta)]
        return tokens, place(mesh, self.slots.reshape(-1), "data"), place(mesh, self.offsets.reshape(-1), "data")

    def groups(self):
        """`(tokens, slots, offsets)` of each group."""
        size = self.num_tokens
        return [(self.tokens[g * size : (g + 1) * size], self.slots[g], self.offsets[g]) for g in range(GROUPS)]


def forward(mesh, pool, expected, batch, what):
    tokens, slots, offsets = batch.on(mesh)
    step = over_devices(gdn_jax.gated_delta_recurrence_fwd, heads="model", data="data")
    out, pool = jax.jit(step, donate_argnames="recurrent_state", static_argnames="algorithm")(
        *tokens, recurrent_state=pool, slot_idx=slots, input_row_offsets=offsets, algorithm="recurrent"
    )
    results = [oracle.recurrence(*t, expected[g], s, o) for g, (t, s, o) in enumerate(batch.groups())]
    check(out, np.concatenate([result[0] for result in results]), f"outputs of the {what}")
    expected = np.stack([result[1] for result in results])
    check(pool, np.concatenate(expected), f"states after the {what}")
    return pool, expected


def speculate(mesh, pool, expected, batch):
    tokens, slots, offsets = batch.on(mesh)
    ring = np.zeros(HEADS.ring_shape(GROUPS * BATCH, RING_LEN), np.float32)
    ring_slots = np.arange(BATCH, dtype=np.int32)
    accepted = np.array([[2, 0], [1, 4]], np.int32)
    verify = over_devices(gdn_jax.gated_delta_recurrence_verify_ring, heads="model", data="data")
    fold = over_devices(gdn_jax.gated_delta_state_fold, heads="model", data="data")

    def call(tokens, pool, ring, slots, ring_slots, offsets, accepted):
        out, ring, pool = verify(*tokens, pool, ring, slots, ring_slots, offsets)
        return out, ring, fold(pool, ring, slots[None], ring_slots[None], accepted)

    placed = [place(mesh, np.tile(ring_slots, GROUPS), "data"), offsets, place(mesh, accepted.reshape(-1), "data")]
    out, ring_out, pool = jax.jit(call, donate_argnums=(1, 2))(
        tokens, pool, place(mesh, ring, "data", "model"), slots, *placed
    )
    outs, rings, pools = [], [], []
    for g, (t, s, o) in enumerate(batch.groups()):
        results = oracle.verify_ring(*t, expected[g], ring[:BATCH], s, ring_slots, o)
        outs.append(results[0])
        rings.append(results[1])
        pools.append(oracle.state_fold(results[2], results[1], s[None], ring_slots[None], accepted[g]))
    check(out, np.concatenate(outs), "outputs of the verify")
    check(ring_out, np.concatenate(rings), "records")
    check(pool, np.concatenate(pools), "states after the fold")


def layer_step(mesh):
    """The layer, its heads on both processes, against the same layer on one device."""
    from flax import nnx

    from gdn_jax.flax import HEAD_AXIS, GatedDeltaNet, GatedDeltaNetConfig

    config = GatedDeltaNetConfig(hidden_size=24, num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16)
    alone = GatedDeltaNet(config, rngs=nnx.Rngs(0), algorithm="recurrent")
    weights = alone.to_hf()
    x = np.random.default_rng(9).normal(size=(5, config.hidden_size)).astype(np.float32)
    slots, offsets = np.array([1, 0], np.int32), np.array([0, 3, 5], np.int32)
    expected, expected_cache = alone(x, alone.init_cache(2), slot_idx=slots, input_row_offsets=offsets)
    expected, expected_cache = jax.tree.map(np.asarray, (expected, expected_cache))
    with jax.set_mesh(mesh), nnx.logical_axis_rules([(HEAD_AXIS, "model")]):
        layer = GatedDeltaNet(config, rngs=nnx.Rngs(1), head_shards=mesh.shape["model"], algorithm="recurrent")
        layer.load_hf(weights)
        step = nnx.jit(lambda layer, x, cache: layer(x, cache, slot_idx=slots, input_row_offsets=offsets))
        y, cache = step(layer, place(mesh, x), layer.init_cache(2))
    check(y, expected, "outputs of the layer", 4e-6)
    check(cache.recurrent_state, expected_cache.recurrent_state, "states of the layer", 4e-6)


def main():
    address, process = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=process, initialization_timeout=60)
    assert jax.process_count() == 2
    assert len(jax.local_devices()) == 2
    devices = np.array(jax.devices()).reshape(2, 2).T  # heads across the processes
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    expected = shapes.state_pool(HEADS, GROUPS * SLOTS).reshape(GROUPS, *HEADS.state_shape(SLOTS))
    with jax.set_mesh(mesh):
        pool = place(mesh, np.concatenate(expected), *POOLS)
        pool, expected = forward(mesh, pool, expected, Batch([(5, 2), (1, 6)], seed=1), "prefill")
        pool, expected = forward(mesh, pool, expected, Batch([(1, 1), (1, 1)], seed=2), "decode")
        speculate(mesh, pool, expected, Batch([(4, 2), (2, 4)], seed=3))
    layer_step(Mesh(devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2))
    jax.distributed.shutdown()
    print("ok")


if __name__ == "__main__":
    main()
