"""What is measured: case names, shapes, the inputs of a case, the work it must do and the error it may have.

The shapes are those of `tests/shapes.py`. A name says which operation, which dtype (of the pool for the operations on
states, of the tokens for whole rows) and which batch. Nothing here imports JAX, so that every peer can use it.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from tests.shapes import FLOAT_DTYPES, HEADS, ROWS, Heads, conv_inputs, row_offsets, spread_slots, state_pool
from tests.shapes import trained_tokens as tokens_like_a_trained_model

OperationName = Literal["recurrence", "verify_ring", "state_fold", "conv1d"]
SHORT = {"f32": "float32", "bf16": "bfloat16"}
CHUNK = 64  # tokens; what the work of the chunked form is counted with
# Slots that no row names. They hold NaN, and must hold it afterwards.
SPARE_SLOTS = 2

CROSSOVER_LENGTHS = (16, 32, 64, 128)
CROSSOVER_LENGTHS_XLA = (64,)

# Cases whose first call is timed: tracing, lowering and compiling, with nothing else running.
FIRST_CALLS = (
    *(f"decode/{short}/B{batch}" for short in SHORT for batch in (1, 128)),
    *(f"verify4/{short}/B64" for short in SHORT),
    *(f"fold4/{short}/L8/B64" for short in SHORT),
    "conv/T8192",
    "conv/B128",
    "recurrent/f32/1x8192",
    "prefill/bf16/nv32/1x8192",
)

# float32 products and sums a second outside the tensor cores, from the data sheets.
VECTOR_FLOPS = {"H200": 67e12, "H100": 67e12}


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the results.

    Attributes:
        name: what the results call it.
        operation: which of the package's operations.
        heads: geometry of the layer.
        lengths: tokens of each row; for a fold, accepted records of each request.
        token_dtype, pool_dtype: names as NumPy has them.
        algorithm: of the recurrence.
        num_layers: layers that one fold commits, or whose recurrences follow one another, each on states of its own.
        implementation: None for the package's own choice.
    """

    name: str
    operation: OperationName
    heads: Heads
    lengths: tuple[int, ...]
    token_dtype: str = "bfloat16"
    pool_dtype: str = "float32"
    algorithm: Literal["auto", "recurrent", "chunked"] = "recurrent"
    num_layers: int = 1
    implementation: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def max_slots(self) -> int:
        return self.num_layers * self.batch_size + SPARE_SLOTS

    @property
    def is_main(self) -> bool:
        """Whether the case stands for itself; the crossover cases are the points of two curves."""
        return not self.name.startswith("crossover/")

    @property
    def group(self) -> str:
        """Cases whose programs are compiled together."""
        return "main" if self.is_main else self.name[: self.name.index("/L")]

    def tiny(self) -> "Case":
        """The same call on a few short rows and small heads, for trying the harness itself."""
        lengths = tuple(min(length, 6) for length in self.lengths[:3])
        return dataclasses.replace(self, heads=HEADS["small"], lengths=lengths, num_layers=min(self.num_layers, 2))


def _all_cases() -> tuple[Case, ...]:
    whole = HEADS["qwen3.5"]
    cases = []
    for short, dtype in SHORT.items():
        cases += [
            Case(f"decode/{short}/B{batch}", "recurrence", whole, ROWS[f"decode_{batch}"], pool_dtype=dtype)
            for batch in (1, 8, 32, 128, 256)
        ]
        # What a model sees: nothing of a layer's states is left in the cache from the step before.
        rows = ROWS["decode_32"]
        cases.append(Case(f"decode/{short}/L8/B32", "recurrence", whole, rows, pool_dtype=dtype, num_layers=8))
    for short, dtype in SHORT.items():
        cases += [
            Case(f"verify4/{short}/B{batch}", "verify_ring", whole, ROWS[f"window4_{batch}"], pool_dtype=dtype)
            for batch in (8, 32, 64)
        ]
    for short, dtype in SHORT.items():
        name = f"fold4/{short}/L8/B64"
        cases.append(Case(name, "state_fold", whole, ROWS["window4_64"], pool_dtype=dtype, num_layers=8))
    cases.append(Case("conv/T8192", "conv1d", whole, ROWS["prefill_1x8192"], pool_dtype="bfloat16"))
    cases.append(Case("conv/B128", "conv1d", whole, ROWS["decode_128"], pool_dtype="bfloat16"))
    for heads, batch in (
        ("nv32", "1x512"),
        ("nv32", "1x2048"),
        ("nv32", "1x8192"),
        ("nv32", "1x32768"),
        ("nv32", "8x1024"),
        ("nv32", "4x8192"),
        ("nv32", "64x128"),
        ("nv48", "1x8192"),
        ("nv8", "1x32768"),
    ):
        geometry = HEADS[{"nv32": "qwen3.5", "nv48": "qwen3.5_large", "nv8": "qwen3.5_rank"}[heads]]
        rows = ROWS[f"prefill_{batch}"]
        cases.append(Case(f"prefill/bf16/{heads}/{batch}", "recurrence", geometry, rows, algorithm="chunked"))
    long_row, eight_rows = ROWS["prefill_1x8192"], ROWS["prefill_8x1024"]
    cases += [
        Case("prefill/f32/nv32/1x8192", "recurrence", whole, long_row, "float32", algorithm="chunked"),
        Case("recurrent/f32/1x8192", "recurrence", whole, long_row, "float32"),
        Case("recurrent/f32/8x1024", "recurrence", whole, eight_rows, "float32"),
        Case("recurrent/bf16/1x8192", "recurrence", whole, long_row),
    ]
    for batch in (1, 8, 64):
        for length in CROSSOVER_LENGTHS:
            name, rows = f"crossover/B{batch}/L{length}", (length,) * batch
            cases.append(Case(f"{name}/recurrent", "recurrence", whole, rows))
            cases.append(Case(f"{name}/chunked", "recurrence", whole, rows, algorithm="chunked"))
            if length in CROSSOVER_LENGTHS_XLA:
                cases.append(Case(f"{name}/xla", "recurrence", whole, rows, algorithm="auto", implementation="xla"))
    return tuple(cases)


CASES = _all_cases()


def select(prefixes) -> list[Case]:
    """The cases whose names begin with one of the prefixes, in their usual order; all of them if there is no prefix."""
    unknown = [p for p in prefixes if not any(case.name.startswith(p) for case in CASES)]
    if unknown:
        raise ValueError(f"no case begins with {', '.join(unknown)}")
    return [case for case in CASES if not prefixes or case.name.startswith(tuple(prefixes))]


# Inputs


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a case is called with, as NumPy arrays; an operation uses some of them.

    Each array is what the operation's documentation says; `tokens` is the fused rows of a recurrence or a convolution.
    """

    pool: np.ndarray
    slot_idx: np.ndarray
    offsets: np.ndarray
    tokens: Any = None
    decay: Any = None
    beta: Any = None
    weight: Any = None
    ring: Any = None
    row_ids: Any = None
    ring_row_ids: Any = None
    num_accepted: Any = None

    @property
    def spare_slots(self) -> np.ndarray:
        named = self.slot_idx if self.row_ids is None else self.row_ids
        return np.setdiff1d(np.arange(len(self.pool)), named)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    slot_idx = spread_slots(case.batch_size, case.max_slots, seed)
    offsets = row_offsets(case.lengths)
    if case.operation == "conv1d":
        arrays = conv_inputs(
            case.heads, case.num_tokens, case.max_slots, case.token_dtype, case.pool_dtype, case.token_dtype, seed
        )
        tokens, weight, _, pool = arrays
        inputs = Inputs(pool, slot_idx, offsets, tokens=tokens, weight=weight)
    elif case.operation == "state_fold":
        inputs = _fold_inputs(case, slot_idx, offsets, seed)
    else:
        pool = state_pool(case.heads, case.max_slots, case.pool_dtype, seed + 1)
        t = tokens_like_a_trained_model(case.heads, case.num_tokens, case.token_dtype, seed)
        row_ids = None
        if case.num_layers > 1:
            row_ids = spread_slots(case.num_layers * case.batch_size, case.max_slots, seed).reshape(case.num_layers, -1)
            slot_idx = row_ids[-1]
        inputs = Inputs(pool, slot_idx, offsets, tokens=t.qkv, decay=t.decay, beta=t.beta, row_ids=row_ids)
    if case.operation == "verify_ring":
        # NaN: what the verify must write and does not is found by the check.
        ring = np.full(case.heads.ring_shape(case.batch_size, max(case.lengths)), np.nan, np.float32)
        ring_rows = spread_slots(case.batch_size, case.batch_size, seed + 2)
        inputs = dataclasses.replace(inputs, ring=ring, ring_row_ids=ring_rows)
    inputs.pool[inputs.spare_slots] = np.nan
    return inputs


def _fold_inputs(case: Case, slot_idx, offsets, seed: int) -> Inputs:
    """Records like those of a verify over a trained model's tokens: raw keys, small factors, decays near 1."""
    heads, layers, batch = case.heads, case.num_layers, case.batch_size
    rng = np.random.default_rng(seed)
    ring = rng.standard_normal(heads.ring_shape(layers * batch, max(case.lengths)), np.float32)
    factors = heads.key_head_dim + heads.group_size * heads.value_head_dim
    ring[..., heads.key_head_dim : factors] *= heads.key_head_dim**-0.5
    decays = ring[..., factors:]
    decays[:] = 1.0 - 0.1 * rng.random(decays.shape, np.float32) ** 3
    return Inputs(
        state_pool(heads, case.max_slots, case.pool_dtype, seed + 1),
        slot_idx,
        offsets,
        ring=ring,
        row_ids=spread_slots(layers * batch, case.max_slots, seed + 3).reshape(layers, batch),
        ring_row_ids=spread_slots(layers * batch, layers * batch, seed + 4).reshape(layers, batch),
        num_accepted=np.asarray(case.lengths, np.int32),
    )


# Work


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call must do at the least: bytes through device memory, and operations by unit."""

    bytes: int
    state_bytes: int
    tensor_flops: float = 0.0
    vector_flops: float = 0.0

    def operations_us(self, matmul_tflops: float | None, device: str) -> float:
        """The time for the operations; those whose rate is not known take none."""
        tensor = self.tensor_flops / matmul_tflops * 1e-6 if matmul_tflops else 0.0
        vector = next((rate for kind, rate in VECTOR_FLOPS.items() if kind in device), None)
        return max(tensor, self.vector_flops / vector * 1e6 if vector else 0.0)

    def floor_us(self, copy_gbps: float, matmul_tflops: float | None, device: str) -> float:
        """The larger of the times for the bytes and for the operations."""
        return max(self.bytes / copy_gbps * 1e-3, self.operations_us(matmul_tflops, device))

    def facts(self, matmul_tflops: float | None, device: str) -> dict[str, float]:
        """What a record says of it: floor and shares follow, once the copy bandwidth of the run is known."""
        return {
            "bytes": self.bytes,
            "state_bytes": self.state_bytes,
            "operations_us": round(self.operations_us(matmul_tflops, device), 3),
        }


def work(case: Case) -> Work:
    """Every input read once, every output written once; states read and written once, whatever the row's length."""
    heads, tokens = case.heads, case.num_tokens
    size, pool_size = FLOAT_DTYPES[case.token_dtype].itemsize, FLOAT_DTYPES[case.pool_dtype].itemsize
    nk, nv, kd, vd = heads.num_key_heads, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim
    if case.operation == "conv1d":
        windows = 2 * case.batch_size * heads.conv_dim * (heads.kernel_size - 1) * pool_size
        weight = heads.conv_dim * heads.kernel_size * size
        moved = 2 * tokens * heads.conv_dim * size + windows + weight
        return Work(moved, windows, vector_flops=2 * heads.kernel_size * tokens * heads.conv_dim)
    states = case.num_layers * case.batch_size * nv * kd * vd * pool_size
    records = case.num_layers * tokens * nk * heads.record_elements * 4
    if case.operation == "state_fold":
        flops = 3.0 * case.num_layers * tokens * nv * kd * vd
        return Work(2 * states + records, 2 * states, vector_flops=flops)
    rows = case.num_layers * tokens * ((heads.conv_dim + heads.value_dim) * size + 2 * nv * 4)
    # Per token and value head: decay, S^T k, the rank-one update, S^T q.
    vector_flops = 7.0 * case.num_layers * tokens * nv * kd * vd
    if case.operation == "verify_ring":
        return Work(states + rows + records, states, vector_flops=vector_flops)
    if case.algorithm != "chunked":
        return Work(2 * states + rows, 2 * states, vector_flops=vector_flops)
    # Per value head: K S, Q S and K^T V' with the state, the inverse and the scores times the values.
    # Per key head: K K^T, Q K^T and the triangular inverse.
    per_value_head = 3 * 2 * kd * vd + 2 * 2 * CHUNK * vd
    per_key_head = 2 * 2 * CHUNK * kd + 2 * CHUNK * CHUNK / 3
    return Work(2 * states + rows, 2 * states, tensor_flops=tokens * (nv * per_value_head + nk * per_key_head))


# Errors

_OUTPUTS = {
    ("recurrent", "float32"): 2e-6,
    ("recurrent", "bfloat16"): 3e-3,
    ("chunked", "float32"): 1e-3,
    ("chunked", "bfloat16"): 6e-3,
}
_POOL_ROUNDING = {"float32": 0.0, "bfloat16": 3e-3}


def budgets(case: Case) -> tuple[float, float]:
    """Largest relative errors of the contract: `(outputs, states)`."""
    if case.operation == "conv1d":
        # Windows are moved, not computed.
        return 3e-3, 0.0
    algorithm = "recurrent" if case.algorithm == "recurrent" else "chunked"
    outputs = _OUTPUTS[algorithm, case.token_dtype]
    states = _OUTPUTS[algorithm, "float32" if algorithm == "recurrent" else case.token_dtype]
    return outputs, states + _POOL_ROUNDING[case.pool_dtype]
