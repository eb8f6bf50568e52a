"""jax-linear-attention (`jla`, Pallas Mosaic GPU).

Dense batches of equal rows, raw queries and keys, the first states in and the last ones out. Timed as this package is:
calls in a loop inside one program, each on the states of the call before.
"""

import importlib.metadata
import time

import numpy as np

from benchmarks.cases import Case, Inputs
from benchmarks.checks import Results
from benchmarks.peers import common
from benchmarks.records import emit

IMPL = "jla"
NAMES = (
    *(f"prefill/bf16/nv32/{rows}" for rows in ("1x512", "1x2048", "1x8192", "1x32768", "8x1024", "4x8192", "64x128")),
    "prefill/bf16/nv48/1x8192",
    "prefill/bf16/nv8/1x32768",
)


def main() -> None:
    options = common.arguments()
    try:
        import jax
        import jax.numpy as jnp
        from jla import ops  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        emit("skipped", impl=IMPL, reason=f"not installed: {error}")
        return
    from benchmarks import timing

    device = jax.devices()[0].device_kind
    kernels = "chunked" if jax.default_backend() == "cpu" else "mosaic_gpu"
    copy_rate = timing.CopyRate(1 << 16 if options.tiny else 1 << 28)
    emit(
        "environment",
        device=device,
        versions={"jax": jax.__version__, "jax-linear-attention": importlib.metadata.version("jax-linear-attention")},
        copy_gbps=round(copy_rate(), 1),
    )

    def step(args, state):
        q, k, v, g, beta = args
        out, state = ops.linear_attention(
            "gated_deltanet",
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm=True,
            impl=kernels,
        )
        return state, out

    def measure(case: Case, inputs: Inputs):
        heads, rows = case.heads, (case.batch_size, case.lengths[0])
        key_dim = heads.num_key_heads * heads.key_head_dim
        q, k, v = np.split(inputs.tokens, (key_dim, 2 * key_dim), axis=1)
        q, k = (x.reshape(*rows, heads.num_key_heads, heads.key_head_dim) for x in (q, k))
        v = v.reshape(*rows, heads.num_value_heads, heads.value_head_dim)
        gates = (x.reshape(*rows, heads.num_value_heads) for x in (np.log(inputs.decay), inputs.beta))
        args = tuple(jnp.asarray(x) for x in (q, k, v, *gates))
        state = jnp.asarray(inputs.pool[inputs.slot_idx])

        start = time.perf_counter()
        single = jax.jit(step).lower(args, state).compile()
        first_call_s = time.perf_counter() - start
        new, out = jax.block_until_ready(single(args, state))
        out = out.reshape(case.num_tokens, heads.value_dim)
        row_of = {int(slot): b for b, slot in enumerate(inputs.slot_idx)}
        yield Results(
            tokens=lambda t, c: np.asarray(out[t, c]),
            state=lambda slot: np.asarray(new[row_of[slot]]),
        )
        expected = 4000.0 * case.num_tokens * heads.num_value_heads / (32 * 32768)
        plan = timing.plan_for(max(expected, 60.0), 4)
        carry = timing.loop_carry(step, plan, args, state)
        program = timing.loop_program(step, plan).lower(jnp.int32(0), args, carry).compile()
        median_us, spread_us, _ = timing.time_program(program, args, carry, plan)
        yield {
            "median_us": round(median_us, 3),
            "spread_us": round(spread_us, 3),
            "first_call_s": round(first_call_s, 2),
            "implementation": kernels,
        }

    selected = common.select(options.prefixes, NAMES)
    if options.tiny:
        selected = [case.tiny() for case in selected]
    common.run(IMPL, selected, measure, options.deadline, copy_rate, device)


if __name__ == "__main__":
    main()
