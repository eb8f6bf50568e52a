"""The process that measures this package: `python -m benchmarks` starts it."""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

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
COPY_EVERY_S = 2.0


@dataclasses.dataclass(frozen=True)
class Call:
    """A case as a function of JAX arrays: `step(args, state) -> (state, out)`."""

    step: Callable
    args: tuple
    state: tuple


def make_call(case: Case, inputs: Inputs, as_shapes: bool = False) -> Call:
    """The call on the device; with `as_shapes`, for programs that are compiled before their inputs are there."""

    def arrays(*values):
        if as_shapes:
            return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values)
        return tuple(jnp.asarray(x) for x in values)

    x = inputs
    if case.operation == "conv1d":
        args = arrays(x.tokens, x.weight, x.slot_idx, x.offsets)
        return Call(functools.partial(_conv1d, case), args, arrays(x.pool))
    if case.operation == "state_fold":
        args = arrays(x.ring, x.row_ids, x.ring_row_ids, x.num_accepted)
        return Call(functools.partial(_fold, case), args, arrays(x.pool))
    if case.operation == "verify_ring":
        args = arrays(x.tokens, x.decay, x.beta, x.slot_idx, x.ring_row_ids, x.offsets)
        return Call(functools.partial(_verify, case), args, arrays(x.pool, x.ring))
    layers = [x.slot_idx] if x.row_ids is None else x.row_ids
    args = *arrays(x.tokens, x.decay, x.beta, x.offsets), arrays(*layers)
    return Call(functools.partial(_recurrence, case), args, arrays(x.pool))


def _conv1d(case: Case, args, state):
    tokens, weight, slot_idx, offsets = args
    (pool,) = state
    out, pool = gdn_jax.gated_delta_conv1d_fwd(
        tokens, weight, pool, slot_idx, offsets, activation="silu", implementation=case.implementation
    )
    return (pool,), out


def _fold(case: Case, args, state):
    ring, row_ids, ring_row_ids, num_accepted = args
    (pool,) = state
    pool = gdn_jax.gated_delta_state_fold(
        pool, ring, row_ids, ring_row_ids, num_accepted, implementation=case.implementation
    )
    return (pool,), ()


def _verify(case: Case, args, state):
    tokens, decay, beta, slot_idx, ring_slot_idx, offsets = args
    pool, ring = state
    out, ring, pool = gdn_jax.gated_delta_recurrence_verify_ring(
        tokens, decay, beta, pool, ring, slot_idx, ring_slot_idx, offsets, implementation=case.implementation
    )
    return (pool, ring), out


def _recurrence(case: Case, args, state):
    tokens, decay, beta, offsets, layers = args
    (pool,) = state
    outs = []
    for slot_idx in layers:
        out, pool = gdn_jax.gated_delta_recurrence_fwd(
            tokens,
            decay,
            beta,
            pool,
            slot_idx,
            offsets,
            algorithm=case.algorithm,
            implementation=case.implementation,
        )
        outs.append(out)
    return (pool,), tuple(outs) if len(outs) > 1 else outs[0]


def first_call_s(case: Case) -> float:
    """Seconds to trace, lower and compile one call."""
    call = make_call(case, shapes_of(case), as_shapes=True)
    start = time.perf_counter()
    jax.jit(call.step, donate_argnums=1).lower(call.args, call.state).compile()
    return time.perf_counter() - start


def plan_of(case: Case, floor_us: float, implementation: str | None) -> timing.Plan:
    """Loop lengths from what a case is expected to take.

    Programs of several kernels are large, and so are the outputs of long rows, of which each copy has its own: few of
    them.
    """
    if implementation == "xla":
        return timing.plan_for(floor_us * XLA_OVER_FLOOR, max_unroll=1)
    light = case.is_main and case.algorithm == "recurrent" and case.num_tokens < 8192
    return timing.plan_for(floor_us * 1.5, max_unroll=32 if light else 4)


def served_by(program) -> str:
    """Which implementation a compiled program calls."""
    text = program.as_text()
    targets = {"mosaic_gpu": "mosaic_gpu", "triton_kernel_call": "triton"}
    return next((name for target, name in targets.items() if target in text), "xla")


class Suite:
    """Cases in groups: every program of a group is compiled, on all cores, then one case after another is timed."""

    def __init__(
        self,
        copy_rate: Callable[[], float],
        copy_gbps: float,
        matmul_tflops: float | None,
        device: str,
        deadline: float,
        impl: str = IMPL,
    ):
        """`copy_gbps` is what `copy_rate` measured first: how long the loops are follows from it."""
        self.impl = impl
        self.copy_rate, self.copied = copy_rate, time.monotonic()
        self.copy_gbps, self.matmul_tflops, self.device = copy_gbps, matmul_tflops, device
        self.deadline = deadline
        self.threads = ThreadPoolExecutor(max(min(os.cpu_count() or 1, 16) - 2, 1))

    def run(self, selected: list[Case]) -> None:
        first_calls = {c.name: self.guarded(c, first_call_s) for c in selected if c.name in cases.FIRST_CALLS}
        for _, group in itertools.groupby(selected, key=lambda case: case.group):
            waiting = [(case, prepared) for case in group if (prepared := self.guarded(case, self.prepare))]
            concurrent.futures.wait([future for _, prepared in waiting for future in prepared])
            while waiting:  # nothing else runs while a case is timed
                case, prepared = waiting.pop(0)
                self.guarded(case, self.measure, *prepared, first_calls.get(case.name))
                if time.monotonic() - self.copied > COPY_EVERY_S:
                    self.measure_copy()
        self.measure_copy()

    def measure_copy(self) -> None:
        """Between the cases: what a process finds at one time may be some percent off what it finds at another."""
        emit("copy", copy_gbps=round(self.copy_rate(), 1))
        self.copied = time.monotonic()

    def guarded(self, case: Case, function: Callable, *args):
        """What the function returns; None where it fails or time is up, which does not cost the other cases theirs."""
        if time.monotonic() > self.deadline:
            emit("skipped", case=case.name, impl=self.impl, reason="time budget")
            return None
        try:
            return function(case, *args)
        except Exception as error:
            traceback.print_exc()
            emit("skipped", case=case.name, impl=self.impl, reason=f"{type(error).__name__}: {str(error)[:300]}")
            return None

    def plan(self, case: Case) -> timing.Plan:
        floor_us = cases.work(case).floor_us(self.copy_gbps, self.matmul_tflops, self.device)
        return plan_of(case, floor_us, "xla" if self.device == "cpu" else case.implementation)

    def prepare(self, case: Case) -> tuple[Future, Future]:
        """The program and the inputs."""
        call = make_call(case, shapes_of(case), as_shapes=True)
        inputs = self.threads.submit(cases.make_inputs, case)
        plan = self.plan(case)
        carry = timing.loop_carry(call.step, plan, call.args, call.state)
        which = jax.ShapeDtypeStruct((), jnp.int32)
        program = timing.loop_program(call.step, plan).lower(which, call.args, carry)
        return self.threads.submit(program.compile), inputs

    def measure(self, case: Case, compiling: Future, coming: Future, first_call_s: float | None) -> None:
        program, values = compiling.result(), coming.result()
        plan, call = self.plan(case), make_call(case, values)
        carry = timing.loop_carry(call.step, plan, call.args, call.state)
        buffers = [x.unsafe_buffer_pointer() for x in call.state]
        carry = jax.block_until_ready(program(jnp.int32(timing.ONCE), call.args, carry))
        in_place = buffers == [x.unsafe_buffer_pointer() for x in carry[0]]
        rel_err, state_rel_err = self.check(case, values, *carry)
        record = {
            "case": case.name,
            "impl": self.impl,
            "implementation": served_by(program),
            "median_us": None,
            **cases.work(case).facts(self.matmul_tflops, self.device),
            "rel_err": rel_err,
            "state_rel_err": state_rel_err,
            "in_place": in_place,
        }
        if first_call_s is not None:
            record["first_call_s"] = round(first_call_s, 2)
        budget = cases.budgets(case)
        # Written so that NaN fails.
        if not (rel_err <= budget[0] and state_rel_err <= budget[1]):
            emit("record", **record, failed=f"errors over the budgets {budget[0]:g} and {budget[1]:g}: not timed")
            return
        seconds = 0.4 if case.is_main else 0.15
        median_us, spread_us, _ = timing.time_program(program, call.args, carry, plan, seconds)
        emit("record", **{**record, "median_us": round(median_us, 3), "spread_us": round(spread_us, 3)})

    def check(self, case: Case, inputs: Inputs, state, outs) -> tuple[float, float]:
        """Errors of outputs and states on a sample; and that all outputs were written, and no slot of nobody."""
        pool = state[0]
        for slot in inputs.spare_slots:
            assert np.isnan(np.asarray(pool[slot]).astype(np.float32)).all(), "a slot that no row names was written"
        layers = [np.asarray(out) for out in jax.tree.leaves(outs[0])]
        out = np.concatenate(layers) if layers else np.empty((0, 0))
        if out.size:
            groups = 1 if case.operation == "conv1d" else case.heads.num_value_heads
            checks.assert_written(out, groups)
        results = checks.Results(
            tokens=lambda tokens, channels: out[tokens, channels],
            state=lambda slot: np.asarray(pool[slot]),
            ring_row=(lambda row: np.asarray(state[1][row])) if case.operation == "verify_ring" else None,
        )
        return checks.sampled(case, inputs, results)()


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-triton", "triton", "numpy")
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
        row_ids=like((layers, batch), np.int32) if fold or layers > 1 else None,
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
    parser.add_argument("--implementation", help="measure this row of the implementation table, as gdn_jax_NAME")
    options = parser.parse_args()
    selected, impl = cases.select(options.prefixes), IMPL
    if options.implementation is not None:
        impl = f"{IMPL}_{options.implementation}"
        main_cases = [case for case in selected if case.is_main]
        selected = [dataclasses.replace(case, implementation=options.implementation) for case in main_cases]
    if options.lower:
        lower_for_cuda(selected)
        return
    device = jax.devices()[0].device_kind
    if options.tiny:
        selected = [case.tiny() for case in selected]
        copy_rate, matmul = timing.CopyRate(1 << 16), timing.matmul_tflops(256)
    else:
        copy_rate, matmul = timing.CopyRate(), timing.matmul_tflops()
    copy = copy_rate()
    emit(
        "environment",
        device=device,
        versions=versions(),
        copy_gbps=round(copy, 1),
        matmul_tflops=round(matmul, 1),
        seconds_to_first_case=round(time.monotonic() - start, 1),
    )
    Suite(copy_rate, copy, matmul, device, start + options.budget_s, impl).run(selected)
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
