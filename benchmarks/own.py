"""The process that measures this package: `python -m benchmarks` starts it."""

import argparse
import dataclasses
import importlib.metadata
import platform
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import gdn_jax
from benchmarks import cases, checks, timing
from benchmarks.cases import Case, Inputs
from benchmarks.records import emit

IMPL = "gdn_jax"
# XLA moves and computes far more than the floors count.
XLA_OVER_FLOOR = 30.0


@dataclasses.dataclass(frozen=True)
class Call:
    """A case as a function of JAX arrays: `step(args, state) -> (state, out)`."""

    step: object
    args: tuple
    state: tuple


def make_call(case: Case, inputs: Inputs, as_shapes: bool = False) -> Call:
    def arrays(*values):
        if as_shapes:
            return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values)
        return tuple(jnp.asarray(x) for x in values)

    named = {"implementation": case.implementation}
    if case.operation == "conv1d":

        def step(args, state):
            tokens, weight, slot_idx, offsets = args
            out, pool = gdn_jax.gated_delta_conv1d_fwd(
                tokens, weight, state[0], slot_idx, offsets, activation="silu", **named
            )
            return (pool,), out

        args = arrays(inputs.tokens, inputs.weight, inputs.slot_idx, inputs.offsets)
        return Call(step, args, arrays(inputs.pool))
    if case.operation == "state_fold":

        def step(args, state):
            return (gdn_jax.gated_delta_state_fold(state[0], *args, **named),), ()

        args = arrays(inputs.ring, inputs.row_ids, inputs.ring_row_ids, inputs.num_accepted)
        return Call(step, args, arrays(inputs.pool))
    if case.operation == "verify_ring":

        def step(args, state):
            tokens, decay, beta, slot_idx, ring_slot_idx, offsets = args
            out, ring, pool = gdn_jax.gated_delta_recurrence_verify_ring(
                tokens, decay, beta, *state, slot_idx, ring_slot_idx, offsets, **named
            )
            return (pool, ring), out

        tokens = inputs.tokens, inputs.decay, inputs.beta
        args = arrays(*tokens, inputs.slot_idx, inputs.ring_row_ids, inputs.offsets)
        return Call(step, args, arrays(inputs.pool, inputs.ring))

    def step(args, state):
        tokens, decay, beta, slot_idx, offsets = args
        out, pool = gdn_jax.gated_delta_recurrence_fwd(
            tokens, decay, beta, state[0], slot_idx, offsets, algorithm=case.algorithm, **named
        )
        return (pool,), out

    args = arrays(inputs.tokens, inputs.decay, inputs.beta, inputs.slot_idx, inputs.offsets)
    return Call(step, args, arrays(inputs.pool))


def plan_of(case: Case, floor_us: float, implementation: str | None) -> timing.Plan:
    """Loop lengths from what a case is expected to take. Programs of several kernels are large: few copies of them."""
    light = case.is_main and case.algorithm == "recurrent"
    return timing.plan_for(floor_us * (XLA_OVER_FLOOR if implementation == "xla" else 1.5), 32 if light else 4)


def served_by(program) -> str:
    """Which implementation a compiled program calls."""
    text = program.as_text()
    return next((name for name in ("mosaic_gpu", "triton") if name in text), "xla")


@jax.jit
def _sound(out, num_heads):
    """Whether everything is finite, and whether no head of a token was left at zero."""
    heads = out.astype(jnp.float32).reshape(out.shape[0], num_heads.shape[0], -1)
    return jnp.isfinite(heads).all(), (jnp.abs(heads).max(-1) > 0).all()


def poison(shape, dtype) -> None:
    """Leaves NaN in memory that the next outputs of this shape are likely to get."""
    jax.block_until_ready(jnp.full(shape, jnp.nan, dtype)).delete()


class Suite:
    def __init__(self, copy_gbps: float, matmul_tflops: float | None, device: str, deadline: float):
        self.copy_gbps, self.matmul_tflops, self.device = copy_gbps, matmul_tflops, device
        self.deadline = deadline
        self.aside = ThreadPoolExecutor(2)

    def run(self, selected: list[Case]) -> None:
        """Each case in turn; the inputs of the next one and the oracle are computed while a program compiles."""
        coming = self.aside.submit(cases.make_inputs, selected[0]) if selected else None
        slowest, out_of_time = 0.0, False
        for case, following in zip(selected, [*selected[1:], None], strict=True):
            start = time.monotonic()
            if out_of_time or start + slowest > self.deadline:
                out_of_time = True
                emit("skipped", case=case.name, impl=IMPL, reason="time budget")
                continue
            assert coming is not None
            inputs = coming.result()

            def prepare(following=following):
                return self.aside.submit(cases.make_inputs, following) if following else None

            try:
                coming = self.one(case, inputs, prepare)
            except Exception as error:  # the other cases are still worth their time
                traceback.print_exc()
                emit("skipped", case=case.name, impl=IMPL, reason=f"{type(error).__name__}: {str(error)[:300]}")
                coming = prepare()
            slowest = max(0.7 * slowest, time.monotonic() - start)

    def one(self, case: Case, inputs: Inputs, prepare_next):
        work = cases.work(case)
        floor_us = work.floor_us(self.copy_gbps, self.matmul_tflops, self.device)
        call = make_call(case, inputs)
        record = {"case": case.name, "impl": IMPL, "median_us": None, "floor_us": round(floor_us, 3)}
        plan = plan_of(case, floor_us, "xla" if self.device == "cpu" else case.implementation)
        if case.is_main:
            start = time.perf_counter()
            single = jax.jit(call.step, donate_argnums=1).lower(call.args, call.state).compile()
            record["first_call_s"] = round(time.perf_counter() - start, 2)
            record["implementation"] = served_by(single)
            for aval in jax.tree.leaves(jax.eval_shape(call.step, call.args, call.state)[1]):
                poison(aval.shape, aval.dtype)
            buffers = [x.unsafe_buffer_pointer() for x in call.state]
            state, out = jax.block_until_ready(single(call.args, call.state))
            record["in_place"] = buffers == [x.unsafe_buffer_pointer() for x in state]
            errors = self.aside.submit(self.sample(case, inputs, state, out))
            coming = prepare_next()
            carry = timing.loop_carry(call.step, plan, call.args, state)
            program = timing.loop_program(call.step, plan).lower(jnp.int32(0), call.args, carry).compile()
        else:
            # One program compiled instead of two; the calls of the check are its own.
            coming = prepare_next()
            carry = timing.loop_carry(call.step, plan, call.args, call.state)
            program = timing.loop_program(call.step, plan).lower(jnp.int32(0), call.args, carry).compile()
            record["implementation"] = served_by(program)
            carry = jax.block_until_ready(program(jnp.int32(timing.ONCE), call.args, carry))
            state, outs = carry
            errors = self.aside.submit(self.sample(case, inputs, state, outs[0]))
        record["rel_err"], record["state_rel_err"] = errors.result()
        if coming:
            coming.result()  # nothing else runs while a case is timed
        budget = cases.budgets(case)
        # Written so that NaN fails.
        if not (record["rel_err"] <= budget[0] and record["state_rel_err"] <= budget[1]):
            emit("record", **record, failed=f"errors over the budgets {budget[0]:g} and {budget[1]:g}: not timed")
            return coming
        median_us, spread_us, _ = timing.time_program(program, call.args, carry, plan)
        record |= {
            "median_us": round(median_us, 3),
            "spread_us": round(spread_us, 3),
            "bytes": work.bytes,
            "state_bytes": work.state_bytes,
            "share_of_copy": round(work.bytes / median_us * 1e-3 / self.copy_gbps, 4),
            "state_share_of_copy": round(work.state_bytes / median_us * 1e-3 / self.copy_gbps, 4),
        }
        emit("record", **record)
        return coming

    def sample(self, case: Case, inputs: Inputs, state, out):
        """Checks what needs no oracle, and fetches what the oracle is compared with."""
        pool = state[0]
        for slot in inputs.spare_slots:
            assert np.isnan(np.asarray(pool[slot]).astype(np.float32)).all(), "a slot that no row names was written"
        if case.operation != "state_fold":
            groups = 1 if case.operation == "conv1d" else case.heads.num_value_heads
            finite, written = _sound(out, jnp.zeros(groups))
            assert finite, "an output is not finite"
            assert written, "an output was not written"
        results = checks.Results(
            tokens=lambda tokens, channels: np.asarray(out[tokens, channels]),
            state=lambda slot: np.asarray(pool[slot]),
            ring_row=(lambda row: np.asarray(state[1][row])) if case.operation == "verify_ring" else None,
        )
        return checks.sampled(case, inputs, results)


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy")
    found = {"gdn_jax": gdn_jax.__version__, "python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def lower_for_cuda(selected: list[Case]) -> None:
    """Lowers both programs of every case for a GPU, on any machine and without running anything."""
    for case in selected:
        start = time.perf_counter()
        try:
            call = make_call(case, shapes_of(case), as_shapes=True)
            plan = plan_of(case, cases.work(case).floor_us(4000.0, 700.0, "H200"), case.implementation)
            single = jax.jit(call.step, donate_argnums=1).trace(call.args, call.state)
            text = single.lower(lowering_platforms=("cuda",)).as_text()
            carry = timing.loop_carry(call.step, plan, call.args, call.state)
            which = jax.ShapeDtypeStruct((), jnp.int32)
            timing.loop_program(call.step, plan).trace(which, call.args, carry).lower(lowering_platforms=("cuda",))
            verdict = "mosaic_gpu" if "mosaic_gpu" in text else "xla"
        except Exception as error:
            verdict = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
        print(f"{case.name:32s} {verdict}  {time.perf_counter() - start:.1f} s", flush=True)


def shapes_of(case: Case) -> Inputs:
    """Inputs of the case's shapes and dtypes that take no memory to speak of."""

    def like(shape, dtype):
        return np.broadcast_to(np.zeros((), dtype), shape)

    heads, tokens, batch = case.heads, case.num_tokens, case.batch_size
    token, pool = cases.FLOAT_DTYPES[case.token_dtype], cases.FLOAT_DTYPES[case.pool_dtype]
    layers = case.num_layers
    fold = case.operation == "state_fold"
    state_shape = heads.conv_state_shape if case.operation == "conv1d" else heads.state_shape
    return Inputs(
        pool=like(state_shape(case.max_slots), pool),
        slot_idx=like((batch,), np.int32),
        offsets=like((batch + 1,), np.int32),
        tokens=like((tokens, heads.conv_dim), token),
        decay=like((tokens, heads.num_value_heads), np.float32),
        beta=like((tokens, heads.num_value_heads), np.float32),
        weight=like((heads.conv_dim, heads.kernel_size), token),
        ring=like(heads.ring_shape(layers * batch, max(case.lengths)), np.float32),
        row_ids=like((layers, batch), np.int32),
        ring_row_ids=like((layers, batch) if fold else (batch,), np.int32),
        num_accepted=like((batch,), np.int32),
    )


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("prefixes", nargs="*")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--lower", action="store_true")
    options = parser.parse_args()
    selected = cases.select(options.prefixes)
    if options.lower:
        lower_for_cuda(selected)
        return
    device = jax.devices()[0].device_kind
    if options.tiny:
        selected = [case.tiny() for case in selected]
        copy, matmul = timing.copy_gbps(1 << 16), timing.matmul_tflops(256)
    else:
        copy, matmul = timing.copy_gbps(), timing.matmul_tflops()
    emit(
        "environment",
        device=device,
        versions=versions(),
        copy_gbps=round(copy, 1),
        matmul_tflops=round(matmul, 1),
        seconds_to_first_case=round(time.monotonic() - start, 1),
    )
    Suite(copy, matmul, device, start + options.budget_s).run(selected)
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
