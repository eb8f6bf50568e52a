"""Modular MAX (`max.nn.state_space`): the same operations, on the slot pool in place.

Raw queries and keys, ragged rows, ring records padded as its own cache pads them. MAX takes tokens in float32 and gives
float32 back, whatever the case's dtype: they are converted outside the timed call, as its model has them in float32 by
then. The SiLU of a convolution is an operation of its own there, and is timed with it. Rows are walked token by token,
also those of the prefill cases: its chunked form needs a Blackwell GPU.

A graph makes one call, for the check, or a chain of them, for the time, which is that of replays as a CUDA graph. Sizes
that differ between cases are symbolic, so an operation on a pool of one dtype needs two graphs for all its cases, and
those of a run are compiled together.
"""

import functools
import importlib.metadata
import statistics
import subprocess
import time
from collections.abc import Callable

import numpy as np

from benchmarks.cases import Case, Inputs
from benchmarks.checks import Results
from benchmarks.peers import common
from benchmarks.records import emit
from tests.shapes import FLOAT_DTYPES, HEADS

IMPL = "max"
NAMES = (
    *(f"decode/{dtype}/B{batch}" for dtype in ("f32", "bf16") for batch in (1, 8, 32, 128, 256)),
    *(f"verify4/{dtype}/B64" for dtype in ("f32", "bf16")),
    *("conv/B128", "conv/T8192"),
    *(f"fold4/{dtype}/L8/B64" for dtype in ("f32", "bf16")),
    *(f"prefill/bf16/nv32/{rows}" for rows in ("1x512", "1x2048", "8x1024", "1x8192", "64x128")),
    *(f"recurrent/{rows}" for rows in ("f32/8x1024", "f32/1x8192", "bf16/1x8192")),
    "prefill/f32/nv32/1x8192",
)
LAYER = HEADS["qwen3.5"]  # of all these cases
WINDOW = 4  # tokens of a verify, and records of a ring row
RECORD_STRIDE = -(-LAYER.record_elements // 32) * 32  # whole lines of 128 bytes
CALLS = 32  # of a chain
LONG_S = 2e-3  # a call that takes longer is not chained

FUNCTIONS = {
    "recurrence": "gated_delta_recurrence_fwd",
    "verify_ring": "gated_delta_recurrence_verify_ring_fwd",
    "state_fold": "gated_delta_state_fold",
    "conv1d": "gated_delta_conv1d_fwd",
}
# What each operation takes, by the names of `Inputs`.
OPERANDS = {
    "recurrence": ("tokens", "decay", "beta", "pool", "slot_idx", "offsets"),
    "verify_ring": ("tokens", "decay", "beta", "pool", "ring", "slot_idx", "ring_row_ids", "offsets"),
    "state_fold": ("pool", "ring", "row_ids", "ring_row_ids", "num_accepted"),
    "conv1d": ("tokens", "weight", "pool", "slot_idx", "offsets"),
}


def main() -> None:
    options = common.arguments()
    try:
        from max import driver, engine  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        emit("skipped", impl=IMPL, reason=f"not installed: {error}")
        return
    if options.tiny or driver.accelerator_count() == 0:
        emit("skipped", impl=IMPL, reason="its kernels need a GPU and heads of 128 x 128")
        return
    selected = common.select(options.prefixes, NAMES)
    device, name = driver.Accelerator(), device_name()
    copy_rate = make_copy_rate(device)
    versions = {"max": importlib.metadata.version("max")}
    emit("environment", device=name, versions=versions, copy_gbps=round(copy_rate(), 1))
    start = time.perf_counter()
    models = engine.InferenceSession(devices=[device]).load_all(build(selected))
    print(f"{len(models)} graphs compiled in {time.perf_counter() - start:.1f} s", flush=True)

    def measure(case: Case, inputs: Inputs):
        operands = {name: to_device(x, device) for name, x in arrays(case, inputs).items()}
        graphs = {calls: models[graph_name(case.operation, case.pool_dtype, calls)] for calls in (1, CALLS)}
        held = {"out": graphs[1].execute(*operands.values())[0], **operands}
        host = functools.cache(lambda name: to_host(held[name]))
        yield Results(
            tokens=lambda t, c: host("out")[t, c],
            state=lambda slot: host("pool")[slot],
            ring_row=(lambda row: host("ring")[row, ..., : LAYER.record_elements]) if "ring" in held else None,
        )
        median_us, spread_us = time_us(device, graphs, [*operands.values()])
        yield {
            "median_us": round(median_us, 3),
            "spread_us": round(spread_us, 3),
            "implementation": FUNCTIONS[case.operation] + (", float32 tokens" if "tokens" in operands else ""),
        }

    common.run(IMPL, selected, measure, options.deadline, copy_rate, name)


def arrays(case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """The operands of the case's graphs, in their order."""
    found = {name: getattr(inputs, name) for name in OPERANDS[case.operation]}
    for name, x in found.items():
        if x.dtype == np.int32:
            found[name] = x.astype(np.uint32)
        elif name == "ring":
            found[name] = np.pad(x, [(0, 0)] * 3 + [(0, RECORD_STRIDE - x.shape[-1])])
        elif name != "pool":
            found[name] = x.astype(np.float32)
    return found


def build(selected: list[Case]):
    """A module of the graphs that the cases need."""
    from max.graph import Graph, Module  # pyright: ignore[reportMissingImports]

    module = Module()
    for operation, pool_dtype in dict.fromkeys((case.operation, case.pool_dtype) for case in selected):
        types = operand_types(operation, pool_dtype)
        for calls in (1, CALLS):
            with Graph(graph_name(operation, pool_dtype, calls), input_types=types, module=module) as graph:
                graph.output(*make_calls(operation, graph.inputs, calls))
    return module


def graph_name(operation: str, pool_dtype: str, calls: int) -> str:
    return f"{operation}_{pool_dtype}_{calls}"


def operand_types(operation: str, pool_dtype: str) -> list:
    """The types of `arrays`. Sizes that differ between cases have names."""
    from max.dtype import DType  # pyright: ignore[reportMissingImports]
    from max.graph import BufferType, DeviceRef, TensorType  # pyright: ignore[reportMissingImports]

    state_shape = LAYER.conv_state_shape(1) if operation == "conv1d" else LAYER.state_shape(1)
    rows = ("layers", "batch") if operation == "state_fold" else ("batch",)
    shapes = {
        "tokens": ("tokens", LAYER.conv_dim),
        "decay": ("tokens", LAYER.num_value_heads),
        "beta": ("tokens", LAYER.num_value_heads),
        "weight": (LAYER.conv_dim, LAYER.kernel_size),
        "pool": ("slots", *state_shape[1:]),
        "ring": ("ring_rows", LAYER.num_key_heads, WINDOW, RECORD_STRIDE),
        "slot_idx": ("batch",),
        "offsets": ("ends",),
        "row_ids": rows,
        "ring_row_ids": rows,
        "num_accepted": ("batch",),
    }
    indices = ("slot_idx", "offsets", "row_ids", "ring_row_ids", "num_accepted")
    types = []
    for name in OPERANDS[operation]:
        dtype = DType.uint32 if name in indices else getattr(DType, pool_dtype) if name == "pool" else DType.float32
        kind = BufferType if name in ("pool", "ring") else TensorType
        types.append(kind(dtype, shapes[name], device=DeviceRef.GPU()))
    return types


def make_calls(operation: str, values, calls: int) -> list:
    """Calls one after the other, each on the pool as the one before left it; what the graph gives back."""
    from max.dtype import DType  # pyright: ignore[reportMissingImports]
    from max.graph import BufferType, ops  # pyright: ignore[reportMissingImports]
    from max.nn import state_space  # pyright: ignore[reportMissingImports]

    function = getattr(state_space, FUNCTIONS[operation])
    operands = [x.buffer if isinstance(x.type, BufferType) else x.tensor for x in values]
    if operation in ("verify_ring", "state_fold"):
        operands.append(state_space.verify_width_operand(WINDOW - 1))
    outs = [function(*operands) for _ in range(calls)]
    if operation == "conv1d":
        return [ops.silu(out) for out in outs]  # all of them: one that nobody wants is not computed
    if operation == "state_fold":
        return [operands[-2].cast(DType.int32)]  # a graph gives back something
    return outs[-1:]


def to_device(x: np.ndarray, device):
    from max.driver import Buffer  # pyright: ignore[reportMissingImports]
    from max.dtype import DType  # pyright: ignore[reportMissingImports]

    if x.dtype == FLOAT_DTYPES["bfloat16"]:  # NumPy has no interchange for it
        return Buffer.from_numpy(x.view(np.uint16)).to(device).view(DType.bfloat16, x.shape)
    return Buffer.from_numpy(x).to(device)


def to_host(x) -> np.ndarray:
    from max.dtype import DType  # pyright: ignore[reportMissingImports]

    if x.dtype == DType.bfloat16:
        return x.view(DType.uint16, x.shape).to_numpy().view(FLOAT_DTYPES["bfloat16"])
    return x.to_numpy()


def time_us(device, models: dict, operands, target_s: float = 0.03, pairs: int = 9) -> tuple[float, float]:
    """Time of one call, from pairs of runs that replay a CUDA graph once and more often: the median, and the spread."""
    calls = CALLS if seconds(device, lambda: models[1].execute(*operands)) < LONG_S else 1
    model = models[calls]
    model.execute(*operands)  # loads what is loaded at first use
    outputs = model.capture(0, *operands)  # where replays write: to be kept until the last of them

    def run(times: int) -> float:
        return seconds(device, lambda: model.replay(0, *operands), times)

    run(2)
    extra = int(min(max(target_s / run(1), 2), 200))
    slopes = [(run(1 + extra) - run(1)) / (extra * calls) * 1e6 for _ in range(pairs)]
    del outputs
    model.release_captured_graph(0)
    low, median, high = statistics.quantiles(slopes, n=4)
    return median, high - low


def seconds(device, call, times: int = 1) -> float:
    device.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    device.synchronize()
    return time.perf_counter() - start


def make_copy_rate(device) -> Callable[[], float]:
    """What measures the device's copy bandwidth in GB/s, bytes read and written."""
    x = to_device(np.tile(np.random.default_rng(0).random(1 << 24, np.float32), 16), device)
    y = x.copy()

    def run(times: int) -> float:
        return seconds(device, lambda: y.inplace_copy_from(x), times)

    def copy_rate() -> float:
        run(2)
        slope = statistics.median(run(12) - run(2) for _ in range(5)) / 10
        return 2 * 4 * x.num_elements / slope * 1e-9

    return copy_rate


def device_name() -> str:
    """As the driver has it: MAX knows the architecture alone."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0].strip()


if __name__ == "__main__":
    main()
