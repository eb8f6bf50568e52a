"""Device time of a call, from JAX programs that make many of them.

A program of `loop_program` makes one call, or runs a loop of one of two lengths, each call on the pool that the call
before it returned. The difference between two runs of it, one of each length, is the time of the calls alone: what it
takes to launch the program, and to enter and leave its loop, cancels. Nothing in the loop can be removed, merged or
moved out of it: the operands of each call pass an optimisation barrier together with the pool, and every output is a
result of the program.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Plan:
    """Lengths of the two loops, in iterations of `unroll` calls.

    Several calls an iteration let XLA replay them as one CUDA graph, as a decode step of many layers would, and spread
    the microseconds that the loop counter takes over them.
    """

    unroll: int
    short: int
    long: int

    @property
    def extra_calls(self) -> int:
        return self.unroll * (self.long - self.short)


def plan_for(expected_us: float, max_unroll: int = 32, target_us: float = 20000.0) -> Plan:
    """A plan whose two lengths differ by about `target_us`, for calls that take about `expected_us`.

    A run's time wavers by 0.2 to 0.3 ms on a busy host, which is to be little beside that. Both are loops: XLA makes
    none of a single iteration.
    """
    expected_us = max(expected_us, 2.0)
    unroll = max(round(2000 / expected_us), 4 if expected_us < 500 else 1)
    unroll = min(unroll, max_unroll)
    extra = max(round(target_us / (expected_us * unroll)), 2)
    short = max(extra // 8, 2)
    return Plan(unroll, short, short + extra)


def slope_us(short_s: Sequence[float], long_s: Sequence[float], extra_calls: int) -> tuple[float, float]:
    """Time of one call in microseconds from pairs of runs: the median, and the spread of its middle half.

    Args:
        short_s, long_s: seconds of the shorter and the longer run of each pair.
        extra_calls: calls that the longer one makes more.
    """
    slopes = [(b - a) / extra_calls * 1e6 for a, b in zip(short_s, long_s, strict=True)]
    middle = statistics.quantiles(slopes, n=4) if len(slopes) > 1 else slopes * 3
    return statistics.median(slopes), middle[2] - middle[0]


ONCE, SHORT, LONG = range(3)


def loop_program(step: Callable, plan: Plan) -> Callable:
    """A jitted `(ONCE | SHORT | LONG, args, carry) -> carry`, with the carry donated; `carry` comes from `loop_carry`.

    Args:
        step: `(args, state) -> (state, out)`, the state with the structure and types it came with.
    """
    call = jax.jit(step)  # lowered once for all its uses

    def once(args, carry):
        state, out = call(args, carry[0])
        return state, (out,) * plan.unroll

    def loop(iterations: int, args, carry):
        def body(_, carry):
            state, outs = carry[0], []
            for _ in range(plan.unroll):
                held, state = lax.optimization_barrier((args, state))
                state, out = call(held, state)
                outs.append(out)
            return state, tuple(outs)

        return lax.fori_loop(0, iterations, body, carry)

    def program(which, args, carry):
        branches = once, functools.partial(loop, plan.short), functools.partial(loop, plan.long)
        return lax.switch(which, branches, args, carry)

    return jax.jit(program, donate_argnums=2)


def loop_carry(step: Callable, plan: Plan, args, state):
    """The state, and room for the outputs of one iteration, holding NaN; or their shapes, if `state` is shapes."""
    out = jax.eval_shape(step, args, state)[1]
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        return state, (out,) * plan.unroll
    return state, tuple(jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), out) for _ in range(plan.unroll))


def time_program(program: Callable, args, carry, plan: Plan, budget_s: float = 0.8, max_pairs: int = 25):
    """`(median_us, spread_us, carry)` of one call inside a compiled loop program."""

    def run(which, carry):
        start = time.perf_counter()
        carry = jax.block_until_ready(program(jnp.int32(which), args, carry))
        return time.perf_counter() - start, carry

    for which in (SHORT, LONG):  # the first run of either also builds its CUDA graphs
        _, carry = run(which, carry)
    short, long, start = [], [], time.perf_counter()
    while len(short) < 5 or (len(short) < max_pairs and time.perf_counter() - start < budget_s):
        seconds, carry = run(SHORT, carry)
        short.append(seconds)
        seconds, carry = run(LONG, carry)
        long.append(seconds)
    median, spread = slope_us(short, long, plan.extra_calls)
    return median, spread, carry


COPY_PLAN, COPY_PAIRS = Plan(1, 4, 40), 5


def _scale(factor, state):
    return state * factor, ()


class CopyRate:
    """Device copy bandwidth in GB/s, bytes read and written, measured anew by every call.

    It is the better of a copy and of a scaling in place, on an array of its own: what a process finds differs by a few
    percent from one measurement to the next.
    """

    def __init__(self, elements: int = 1 << 28):
        self._elements = elements
        self._factor = jnp.float32(1.0000001)
        self._program = loop_program(_scale, COPY_PLAN)
        self._copy = jax.jit(jnp.copy)

    def __call__(self) -> float:
        x = jnp.linspace(1.0, 2.0, self._elements, dtype=jnp.float32)
        moved = 2 * x.nbytes
        carry = loop_carry(_scale, COPY_PLAN, self._factor, x)
        scaling, _, (x, _) = time_program(self._program, self._factor, carry, COPY_PLAN, max_pairs=COPY_PAIRS)
        self._copies(x, COPY_PLAN.short)
        pairs = [[self._copies(x, n) for n in (COPY_PLAN.short, COPY_PLAN.long)] for _ in range(COPY_PAIRS)]
        short, long = zip(*pairs, strict=True)
        copying, _ = slope_us(short, long, COPY_PLAN.extra_calls)
        return moved / min(scaling, copying) * 1e-3

    def _copies(self, x, times: int) -> float:
        """Seconds. A copy is a program of its own; they queue up, so the host does not count."""
        start = time.perf_counter()
        for _ in range(times):
            y = self._copy(x)
        jax.block_until_ready(y)
        return time.perf_counter() - start


def matmul_tflops(size: int = 8192) -> float:
    """Rate of a bfloat16 matrix product of random operands, TFLOP/s."""
    plan = Plan(1, 2, 12)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))

    def product(b, state):
        a = state
        # Scaled, so that a chain of products neither grows nor vanishes.
        return (a @ b) * jnp.bfloat16(size**-0.5), ()

    program = loop_program(product, plan)
    median, _, _ = time_program(program, b, loop_carry(product, plan, b, a), plan)
    return 2.0 * size**3 / median * 1e-6
