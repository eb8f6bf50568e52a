"""flash-linear-attention (`fla-core`, PyTorch and Triton).

Raw queries and keys, their norm inside the call; the first states come in and the last ones go out, in new arrays.
Calls are captured in CUDA graphs, so that what Python and the launches cost is not counted.
"""

import importlib.metadata
import statistics
import time

import numpy as np

from benchmarks.cases import Case, Inputs
from benchmarks.checks import Results
from benchmarks.peers import common
from benchmarks.records import emit

IMPL = "fla"
# Its kernels tune themselves anew for each number of heads: those come last.
NAMES = (
    *(f"decode/f32/B{batch}" for batch in (1, 8, 32, 128, 256)),
    "verify4/f32/B64",
    *(f"prefill/bf16/nv32/{rows}" for rows in ("1x8192", "1x512", "1x2048", "1x32768", "8x1024", "4x8192", "64x128")),
    "prefill/bf16/nv48/1x8192",
    "prefill/bf16/nv8/1x32768",
)


def main() -> None:
    options = common.arguments()
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from fla.ops import gated_delta_rule as rules  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        emit("skipped", impl=IMPL, reason=f"not installed: {error}")
        return
    if not torch.cuda.is_available():
        emit("skipped", impl=IMPL, reason="torch finds no GPU")
        return
    torch.set_grad_enabled(False)
    device = torch.cuda.get_device_name()
    emit(
        "environment",
        device=device,
        versions={name: importlib.metadata.version(name) for name in ("fla-core", "torch", "triton")},
        copy_gbps=round(copy_gbps(torch), 1),
    )

    def on_gpu(x):
        return torch.from_numpy(x).cuda()

    def measure(case: Case, inputs: Inputs):
        heads, batch, length = case.heads, case.batch_size, case.lengths[0]
        key_dim = heads.num_key_heads * heads.key_head_dim
        short = case.algorithm != "chunked"
        # Rows of one length are a dense batch to the recurrent kernel; the chunked one takes them ragged.
        rows = (batch, length) if short else (1, batch * length)
        tokens = on_gpu(inputs.tokens.view(np.int16)).view(torch.bfloat16)
        q, k, v = (x.contiguous() for x in tokens.split([key_dim, key_dim, heads.value_dim], dim=1))
        q, k = (x.view(*rows, heads.num_key_heads, heads.key_head_dim) for x in (q, k))
        v = v.view(*rows, heads.num_value_heads, heads.value_head_dim)
        decay, beta = (on_gpu(x).view(*rows, heads.num_value_heads) for x in (inputs.decay, inputs.beta))
        options = {"g": decay.log(), "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        options["initial_state"] = on_gpu(inputs.pool[inputs.slot_idx])
        if not short and batch > 1:
            options["cu_seqlens"] = on_gpu(inputs.offsets.astype(np.int64))
        function = rules.fused_recurrent_gated_delta_rule if short else rules.chunk_gated_delta_rule

        start = time.perf_counter()
        out, state = function(q, k, v, **options)
        torch.cuda.synchronize()
        first_call_s = time.perf_counter() - start
        out = out.view(case.num_tokens, heads.value_dim)
        row_of = {int(slot): b for b, slot in enumerate(inputs.slot_idx)}
        # A verify leaves the states as they were; this library has no records to compare.
        yield Results(
            tokens=lambda t, c: out[t, c].float().cpu().numpy(),
            state=lambda slot: state[row_of[slot]].float().cpu().numpy(),
        )
        median_us, how = time_us(torch, lambda: function(q, k, v, **options))
        yield {
            "median_us": round(median_us, 3),
            "first_call_s": round(first_call_s, 2),
            "implementation": f"{function.__name__}, {how}",
        }

    common.run(
        IMPL, common.select(options.prefixes, NAMES), measure, options.deadline, lambda: copy_gbps(torch), device
    )


def time_us(torch, call, target_us: float = 20000.0, repeats: int = 7) -> tuple[float, str]:
    """Time of one call from replays of a CUDA graph of several, median of `repeats`, and how it was taken.

    A call that cannot be captured is timed as it stands.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    once = event_time_us(torch, call, 2)
    calls = int(min(max(1000.0 // once, 2), 20))
    replays = int(max(target_us / (once * calls), 2))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        times = [event_time_us(torch, call, calls * replays) for _ in range(repeats)]
        return statistics.median(times), "launched one by one"
    graph.replay()
    times = [event_time_us(torch, graph.replay, replays) / calls for _ in range(repeats)]
    return statistics.median(times), "CUDA graph"


def event_time_us(torch, call, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / times


def copy_gbps(torch) -> float:
    x = torch.rand(1 << 28, device="cuda")
    y = torch.empty_like(x)
    event_time_us(torch, lambda: y.copy_(x), 3)
    median = statistics.median(event_time_us(torch, lambda: y.copy_(x), 8) for _ in range(5))
    return 2 * x.numel() * 4 / median * 1e-3


if __name__ == "__main__":
    main()
