"""The layer on all devices of this host against one of them: time, speed-up, and what the sum at its end takes.

    python -m benchmarks.many_devices            # writes benchmarks/results/<gpu>x<devices>.json
    python -m benchmarks.many_devices --tiny     # small shapes on any devices; writes --output or nothing

The heads of one Qwen3.5 layer are split over the devices. Each time is the slope between two lengths of a loop inside
one program, as in `benchmarks/timing.py`. What the reduction takes is the difference between that program with and
without it. Results are compared before anything is timed: with float64 on the first tokens, and with one device on all.
"""

import argparse
import datetime
import functools
import json
import pathlib
import shlex
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import timing
from benchmarks.__main__ import without_output
from benchmarks.own import served_by, versions
from benchmarks.records import RESULTS, result_name
from gdn_jax.flax import HEAD_AXIS, GatedDeltaCache, GatedDeltaNet, GatedDeltaNetConfig
from tests import oracle
from tests.harness import relative_error
from tests.shapes import row_offsets

WHOLE = GatedDeltaNetConfig(
    hidden_size=4096, num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128
)
TINY = GatedDeltaNetConfig(hidden_size=32, num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16)
# Name, tokens of each row, what a call is expected to take on one GPU in microseconds.
CASES = (("decode/B128", (1,) * 128, 250.0), ("prefill/1x8192", (8192,), 5000.0))
TINY_CASES = (("decode/B128", (1,) * 3, 5000.0), ("prefill/1x8192", (6,), 5000.0))
EXACT_TOKENS = 128
# Of bfloat16 weights, and of every array between the operations rounded to bfloat16.
BUDGET = 2e-2


class Batch:
    """What every program of a case is called with, in NumPy."""

    def __init__(self, config: GatedDeltaNetConfig, lengths: tuple[int, ...]):
        c, rng = config, np.random.default_rng(0)
        max_slots, self.num_tokens = len(lengths) + 2, sum(lengths)
        self.x = rng.standard_normal((self.num_tokens, c.hidden_size), np.float32).astype(jnp.bfloat16)
        self.slots = rng.permutation(max_slots)[: len(lengths)].astype(np.int32)
        self.offsets = row_offsets(lengths)
        states = (max_slots, c.num_value_heads, c.key_head_dim, c.value_head_dim)
        self.states = 0.3 * rng.standard_normal(states, np.float32)
        windows = (max_slots, c.conv_dim, c.conv_kernel_size - 1)
        self.windows = rng.standard_normal(windows, np.float32).astype(jnp.bfloat16)

    def exact(self, layer: GatedDeltaNet) -> np.ndarray:
        """The layer in float64, of the first tokens alone."""
        c, count = layer.config, min(self.num_tokens, EXACT_TOKENS)
        w = {name: oracle.exact(array) for name, array in layer.to_hf().items()}
        x, rows = oracle.exact(self.x[:count]), (self.slots, self.offsets)
        qkv, z, b, a = (x @ w[f"in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
        conv, _ = oracle.conv1d(qkv, w["conv1d.weight"][:, 0], self.windows, *rows, activation="silu")
        out, _ = oracle.recurrence(conv, *oracle.gates(a, b, w["A_log"], w["dt_bias"]), self.states, *rows)
        out = out.reshape(count, c.num_value_heads, c.value_head_dim)
        out = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + c.rms_norm_eps) * w["norm.weight"]
        return (out.reshape(z.shape) * z * oracle.sigmoid(z)) @ w["out_proj.weight"].T


class Setup:
    """One layer on a mesh of so many devices, and the forms of a step that are timed."""

    def __init__(self, config: GatedDeltaNetConfig, devices, weights=None):
        self.mesh = Mesh(np.array(devices), (HEAD_AXIS,), axis_types=(AxisType.Auto,))
        dtypes: dict[str, Any] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        with jax.set_mesh(self.mesh):
            self.layer = GatedDeltaNet(config, rngs=nnx.Rngs(0), head_shards=len(devices), **dtypes)
            if weights is not None:
                self.layer.load_hf(weights)
            self.graph, self.weights = nnx.split(self.layer)
        heads = {name: getattr(config, name) // len(devices) for name in ("num_key_heads", "num_value_heads")}
        own = GatedDeltaNetConfig(
            hidden_size=config.hidden_size,
            key_head_dim=config.key_head_dim,
            value_head_dim=config.value_head_dim,
            **heads,
        )
        self.own_graph = nnx.split(nnx.eval_shape(lambda: GatedDeltaNet(own, rngs=nnx.Rngs(0), **dtypes)))[0]

    def place(self, batch: Batch):
        """`(args, cache)` of a step on the mesh."""
        by_head = NamedSharding(self.mesh, P(None, HEAD_AXIS))
        cache = GatedDeltaCache(batch.windows[:, self.layer.channel_order], batch.states)
        tokens = jax.device_put((batch.x, batch.slots, batch.offsets), NamedSharding(self.mesh, P()))
        return (self.weights, *tokens), jax.device_put(cache, by_head)

    def step(self, args, cache):
        """The layer as users call it."""
        weights, x, slots, offsets = args
        y, cache = nnx.merge(self.graph, weights)(x, cache, slot_idx=slots, input_row_offsets=offsets)
        return cache, y

    def own_step(self, args, cache, *, reduce: bool):
        """Each device's part of the layer, inside one `jax.shard_map`, with the sum over devices or without it."""

        def part(args, cache):
            weights, x, slots, offsets = args
            layer = nnx.merge(self.own_graph, weights)
            y, cache = layer(x, cache, slot_idx=slots, input_row_offsets=offsets)
            return cache, jax.lax.psum(y, HEAD_AXIS) if reduce else y

        by_head = P(None, HEAD_AXIS)
        in_specs = (nnx.get_partition_spec(self.weights), P(), P(), P()), by_head
        split = jax.shard_map(part, mesh=self.mesh, in_specs=in_specs, out_specs=(by_head, P()), check_vma=False)
        return split(args, cache)

    def measure(self, step, batch: Batch, expected_us: float, check=None) -> dict:
        """Compiles the loops over a step, hands the first output to `check`, and times them."""
        with jax.set_mesh(self.mesh):
            args, cache = self.place(batch)
            plan = timing.plan_for(expected_us, max_unroll=1)
            carry = timing.loop_carry(step, plan, args, cache)
            compiled = timing.loop_program(step, plan).lower(jnp.int32(timing.ONCE), args, carry).compile()
            carry = jax.device_put(carry, compiled.input_shardings[0][2])
            carry = compiled(jnp.int32(timing.ONCE), args, carry)
            if check is not None:
                check(np.asarray(carry[1][0]))
            median, spread, _ = timing.time_program(compiled, args, carry, plan)
        return {"median_us": round(median, 2), "spread_us": round(spread, 2), "implementation": served_by(compiled)}


def measure_case(name: str, lengths, expected_us: float, one: Setup, many: Setup) -> dict:
    """The record of a case."""
    batch, outputs, errors = Batch(one.layer.config, lengths), [], []
    exact = batch.exact(one.layer)

    def check(y):
        outputs.append(y)
        errors.append(relative_error(y[: len(exact)], exact))
        difference = relative_error(y, outputs[0])
        # Written so that NaN fails.
        if not (errors[-1] <= BUDGET and difference <= BUDGET):
            raise ValueError(f"{name}: errors {errors[-1]:.1e} and {difference:.1e} are over {BUDGET:g}: not timed")

    alone = one.measure(one.step, batch, expected_us, check)
    split = many.measure(many.step, batch, expected_us, check)
    whole = many.measure(functools.partial(many.own_step, reduce=True), batch, expected_us, check)
    parts = many.measure(functools.partial(many.own_step, reduce=False), batch, expected_us)
    return {
        "case": f"tp{many.mesh.size}/{name}",
        "impl": "gdn_jax",
        **split,
        "one_device_us": alone["median_us"],
        "speed_up": round(alone["median_us"] / split["median_us"], 3),
        "with_reduction_us": whole["median_us"],
        "without_reduction_us": parts["median_us"],
        "reduction_share": round(1 - parts["median_us"] / whole["median_us"], 3),
        "rel_err": max(errors),
    }


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_devices", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--devices", type=int, help="how many; default: all")
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/<gpu>x<devices>.json")
    parser.add_argument("--tiny", action="store_true", help="small shapes; writes --output or nothing")
    options = parser.parse_args(argv)
    devices = jax.devices()[: options.devices]
    if len(devices) < 2:
        parser.error(f"needs two devices, this machine has {len(jax.devices())}")
    config, cases = (TINY, TINY_CASES) if options.tiny else (WHOLE, CASES)
    one = Setup(config, devices[:1])
    many = Setup(config, devices, one.layer.to_hf())
    content = {
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(
            ["python", "-m", "benchmarks.many_devices", *without_output(sys.argv[1:] if argv is None else argv)]
        ),
        "records": [],
    }
    path = options.output
    if path is None and not options.tiny:
        path = RESULTS / f"{result_name(content['device'])}x{len(devices)}.json"
    for case in cases:
        record = measure_case(*case, one, many)
        content["records"].append(record)
        print(json.dumps(record), flush=True)
        if path is not None:  # anew after each case: a run that is cut short leaves what it measured
            path.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
