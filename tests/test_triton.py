"""The Triton kernels without a GPU: run on NumPy by Triton's interpreter, and compiled for GPUs that are not there."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from gdn_jax._primitive import triton_kernel
from tests import oracle, shapes
from tests.harness import assert_close, assert_same_bits, assert_zero

pytest.importorskip("triton", reason="triton has wheels for Linux on x86_64 only, and is not here")

interpreter = import_module("triton.runtime.interpreter")
FORWARD, CHUNKED, VERIFY, FOLD, CONV = MODULES = [
    import_module(f"gdn_jax.{name}")
    for name in (
        "recurrence.triton",
        "recurrence.triton_chunked",
        "verify_ring.triton",
        "state_fold.triton",
        "conv1d.triton",
    )
]
BUDGET = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 5e-4}


class Tensor:
    """What the interpreter wants of an array: an address, a dtype, and a place on the host."""

    def __init__(self, array: np.ndarray | None, dtype: str):
        self.array, self.dtype = array, dtype

    def data_ptr(self):
        assert self.array is not None
        return self.array.ctypes.data

    def cpu(self):
        return self

    def copy_(self, other):
        assert self.data_ptr() == other.data_ptr()

    def untyped_storage(self):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return () if self.array is None else self.array.shape

    stride = size

    def new_empty(self, *_, **__):
        return Tensor(None, self.dtype)

    def set_(self, storage, *_):
        self.array = storage.array


def interpreted(kernel, operands, pools, out_types, *, grid, num_warps, num_stages, **constants):
    """`gdn_jax._compat.triton_call` on NumPy; what a kernel does not write stays a sentinel."""
    del num_warps, num_stages
    pools = [np.array(pool) for pool in pools]
    outs = [np.full(out.shape, 777, out.dtype) for out in out_types]
    arrays = [x if isinstance(x, int) else np.array(x) for x in operands]
    args = [x if isinstance(x, int) else Tensor(x, str(x.dtype)) for x in (*arrays, *pools, *outs)]
    constants |= dict.fromkeys(kernel.arg_names[len(args) : len(args) + len(pools)])
    with np.errstate(all="ignore"):  # rounding to what a dtype cannot hold is no error on a GPU either
        kernel[grid](*args, **constants)
    return outs, pools


@pytest.fixture(autouse=True)
def _interpret(monkeypatch):
    for module in MODULES:
        monkeypatch.setattr(module, "triton_call", interpreted)
    builder = type(interpreter.interpreter_builder)
    splat = builder.create_splat

    def splat_flags(self, shape, scalar):
        """Flags stay flags: the interpreter gives them the dtype of what was compared, which its loads then refuse."""
        full = splat(self, shape, scalar)
        if scalar.data.dtype == bool:
            full.data = full.data.astype(bool)
        return full

    monkeypatch.setattr(builder, "create_splat", splat_flags)
    product = builder.create_dot

    def bfloat16_product(self, a, b, *rest):
        """As it is, but for bfloat16: the interpreter keeps it as its bits, and would multiply those as integers."""

        def exact(x):
            if x.data.dtype != np.uint16:
                return x
            return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

        return product(self, exact(a), exact(b), *rest)

    monkeypatch.setattr(builder, "create_dot", bfloat16_product)
    cast = builder.cast_impl

    def rounding_cast(self, src, to):
        """As it is, but to bfloat16: the interpreter cuts off what a GPU rounds."""
        if src.dtype.scalar != interpreter.tl.float32 or to.scalar != interpreter.tl.bfloat16:
            return cast(self, src, to)
        return interpreter.TensorHandle(src.data.astype(jnp.bfloat16).view(np.uint16), to.scalar)

    monkeypatch.setattr(builder, "cast_impl", rounding_cast)


def make(lengths, heads, slots, *, tokens="float32", pool="float32", first=0, extra=0, fresh=(), seed=0):
    """Random operands of the recurrence; tokens before and after the rows, and those of padding rows, hold NaN."""
    rng = np.random.default_rng(seed)
    nk, nv, key_dim, value_dim = heads
    offsets = first + np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = offsets[-1] + extra
    qkv = rng.standard_normal((num_tokens, 2 * nk * key_dim + nv * value_dim))
    max_slots = max(slots) + 2
    qkv[oracle.owners(np.array(slots), offsets, max_slots, num_tokens) == 0] = np.nan
    state = 0.3 * rng.standard_normal((max_slots, nv, key_dim, value_dim))
    for b in fresh:
        state[slots[b]] = np.nan
    return (
        jnp.asarray(qkv, tokens),
        jnp.asarray(1 - 0.2 * rng.random((num_tokens, nv)), jnp.float32),
        jnp.asarray(rng.random((num_tokens, nv)), jnp.float32),
        jnp.asarray(state, pool),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(offsets, jnp.int32),
        jnp.asarray([b not in fresh for b in range(len(lengths))]),
    )


def check_recurrence(args, out, pool, budget, state_budget):
    expected, expected_pool = oracle.recurrence(*args)
    live = oracle.owners(args[4], args[5], args[3].shape[0], args[0].shape[0]) > 0
    assert_zero(out[~live])
    assert_close(out[live], expected[live], budget)
    bounds = oracle.row_bounds(args[5], args[0].shape[0])
    slots = zip(np.asarray(args[4]), bounds, strict=True)
    written = [int(s) for s, (lo, hi) in slots if lo < hi and 0 <= s < args[3].shape[0]]
    assert_close(pool[written], expected_pool[written], state_budget)
    rest = np.setdiff1d(np.arange(pool.shape[0]), written)
    assert_same_bits(pool[rest], np.asarray(args[3])[rest])


CASES = {
    "decode": {"lengths": [1, 1, 1], "heads": (1, 2, 16, 32), "slots": [2, -1, 0], "fresh": (2,), "tokens": "bfloat16"},
    "ragged": {"lengths": [1, 0, 5, 3], "heads": (2, 2, 12, 20), "slots": [1, 0, 3, 2], "pool": "bfloat16"},
    "tiles": {"lengths": [2, 3], "heads": (1, 1, 8, 40), "slots": [1, 0], "tokens": "float16", "pool": "float16"},
    "padding": {"lengths": [3, 2, 1], "heads": (1, 3, 8, 8), "slots": [1, 2**30, 0], "extra": 18, "first": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    case = CASES[name]
    if case["slots"][1] == 2**30:
        args = list(make(**{**case, "slots": [1, -1, 0]}))
        args[4] = jnp.asarray(case["slots"], jnp.int32)
    else:
        args = make(**case)
    out, pool = FORWARD.recurrence(*args, algorithm="recurrent", precision=None)
    check_recurrence(args, out, pool, BUDGET[args[0].dtype.name], BUDGET[pool.dtype.name])


CHUNKED_CASES = {
    "blocks": {"lengths": [70, 1, 59, 9], "heads": (1, 2, 16, 16), "slots": [2, 0, -1, 1], "fresh": (3,)},
    "padding": {"lengths": [30, 50], "heads": (1, 1, 24, 20), "slots": [1, 0], "extra": 70, "first": 3},
    "bfloat16": {"lengths": [90, 40], "heads": (1, 1, 32, 16), "slots": [1, 0], "tokens": "bfloat16"},
    "float16": {"lengths": [66], "heads": (1, 1, 16, 16), "slots": [0], "tokens": "float16", "pool": "bfloat16"},
}


@pytest.mark.parametrize("name", CHUNKED_CASES)
def test_chunked(name):
    args = make(**CHUNKED_CASES[name])
    out, pool = FORWARD.recurrence(*args, algorithm="chunked", precision="highest")
    budget = {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}[args[0].dtype.name]
    check_recurrence(args, out, pool, budget, budget + BUDGET[pool.dtype.name])


@pytest.mark.parametrize(("tokens", "budget"), [("float32", 1e-5), ("bfloat16", 4e-3)])
def test_chunked_resets_and_repeated_keys(tokens, budget):
    """Decays of 0 and of what products underflow on; one key for all tokens with beta 1."""
    args = list(make([100, 28], (1, 1, 16, 16), [0, 1], tokens=tokens))
    rng = np.random.default_rng(3)
    values = np.array([0, 1e-45, 1e-38, 1e-12, 1], np.float32)
    args[1] = jnp.asarray(rng.choice(values, args[1].shape, p=[0.05, 0.05, 0.05, 0.05, 0.8]))
    args[2] = jnp.ones_like(args[2])
    args[0] = args[0].at[:, 16:32].set(args[0][0, 16:32])
    out, pool = FORWARD.recurrence(*args, algorithm="chunked", precision="highest")
    check_recurrence(args, out, pool, budget, budget)


@pytest.mark.parametrize("alternate", [False, True])
def test_chunked_repeated_keys_in_bfloat16(alternate):
    """Roundings of what cancels in the sum over a chunk must not add up there."""
    heads = shapes.HEADS["small_64"]
    tokens = shapes.repeated_keys(heads, 256, "bfloat16", seed=3, alternate=alternate)
    pool = jnp.asarray(shapes.state_pool(heads, 2))
    rows = jnp.asarray([1], jnp.int32), jnp.asarray([0, 256], jnp.int32), jnp.ones(1, bool)
    args = *(jnp.asarray(x) for x in tokens), pool, *rows
    out, new_pool = FORWARD.recurrence(*args, algorithm="chunked", precision=None)
    check_recurrence(args, out, new_pool, 4e-3, 1.5e-3)


def test_chunked_rows_keep_to_themselves():
    """A row of NaN and a row with a beta out of all bounds share blocks with others, which do not notice."""
    args = list(make([20, 30, 10, 20], (1, 1, 16, 16), [0, 1, 2, 3]))
    clean = FORWARD.recurrence(*args, algorithm="chunked", precision="highest")
    args[0] = args[0].at[20:50].set(jnp.nan)
    args[2] = args[2].at[50:60].set(1e30)
    out, pool = FORWARD.recurrence(*args, algorithm="chunked", precision="highest")
    assert np.isnan(out[20:50]).all()
    assert not np.isfinite(pool[2]).any()
    assert_same_bits(out[[*range(20), *range(60, 80)]], clean[0][[*range(20), *range(60, 80)]])
    assert_same_bits(pool[[0, 3]], clean[1][[0, 3]])


def test_chunked_rows_that_overlap():
    """Decreasing offsets make rows share tokens; each state is its row's own, also where the other is padding."""
    args = list(make([40, 30, 30], (1, 1, 16, 16), [0, -1, 1]))
    args[0] = jnp.asarray(np.nan_to_num(np.asarray(args[0])))
    args[5] = jnp.asarray([5, 90, 20, 70], jnp.int32)
    args[4] = jnp.asarray([0, 2, 1], jnp.int32)
    expected = oracle.recurrence(*args)[1]
    for slots in ([0, 2, 1], [0, 2, -1]):
        args[4] = jnp.asarray(slots, jnp.int32)
        _, pool = FORWARD.recurrence(*args, algorithm="chunked", precision="highest")
        live = [s for s in slots if s in (0, 1)]
        assert_close(pool[live], expected[live], 1e-5)


@pytest.mark.parametrize(("ring_dtype", "padding", "in_turn"), [("float32", 0, 2), ("bfloat16", 3, 1)])
@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
def test_verify_and_fold(ring_dtype, padding, in_turn, pool, monkeypatch):
    """Windows of 1, 2, RING_LEN and RING_LEN + 1 tokens, a padding row, a padding ring slot; heads in turn."""
    ring_len = 4
    lengths, slots = [1, 2, ring_len, ring_len + 1, 2], [4, 2, 0, 1, -1]
    args = make(lengths, (1, 2, 12, 20), slots, fresh=(1,), pool=pool)
    monkeypatch.setattr(VERIFY, "heads_in_turn", lambda *_: in_turn)
    ring = jnp.full((4, 1, ring_len, 12 + 2 * 21 + padding), jnp.nan, ring_dtype)
    ring_slots = jnp.asarray([2, 3, 9, 0, 1], jnp.int32)
    out, records, new = VERIFY.verify_ring(*args[:4], ring, args[4], ring_slots, *args[5:])
    forward_out, forward_pool = FORWARD.recurrence(*args, algorithm="recurrent", precision=None)
    assert_same_bits(out, forward_out)
    assert_same_bits(new[1], forward_pool[1])
    others = [0, 2, 3, 4, 5]
    assert_same_bits(new[others], np.asarray(args[3])[others])
    _, reference, _ = oracle.verify_ring(*args[:4], ring, args[4], ring_slots, *args[5:])
    assert (np.isnan(records.astype(float)) == np.isnan(reference)).all()
    budget = 2e-6 if ring_dtype == "float32" else 4e-3
    assert_close(np.nan_to_num(records.astype(float)), np.nan_to_num(reference), budget)

    rows = jnp.asarray([[4, 2, 0, -1]], jnp.int32)
    ring_rows = jnp.asarray([[2, 3, 7, 0]], jnp.int32)
    has_state = jnp.asarray([True, False, True, True])
    folded = FOLD.state_fold(new, records, rows, ring_rows, jnp.asarray([1, 2, 4, 1], jnp.int32), has_state)
    assert_same_bits(folded[[0, 1, 3, 5]], new[[0, 1, 3, 5]])
    if ring_dtype == "float32":
        assert_same_bits(folded[[4, 2]], forward_pool[[4, 2]])
    else:
        assert_close(folded[[4, 2]], forward_pool[[4, 2]], 1e-2)


@pytest.mark.parametrize(("rows", "heads"), [(0, 1), (1, 1), (8, 1), (16, 2), (32, 4), (64, 8), (96, 4), (256, 32)])
def test_heads_in_turn(rows, heads):
    """Of 32 heads of four tiles: as many as fill rounds of programs."""
    assert VERIFY.heads_in_turn(rows * 32 * 4, 32) == heads


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
def test_one_token_a_row_sums_as_several_do(pool, cached, monkeypatch):
    """Rows of one token have tiles of their own, wider if the cache has no room; a first token is the same in all."""
    if not cached:
        monkeypatch.setattr(import_module("gdn_jax._triton"), "_CACHE_BYTES", 0)
    several = make([2, 2], (1, 1, 128, 128), [1, 0], pool=pool)
    qkv, decay, beta = (x[::2] for x in several[:3])
    one = qkv, decay, beta, *several[3:5], jnp.asarray([0, 1, 2], jnp.int32), several[6]
    out, _ = FORWARD.recurrence(*one, algorithm="recurrent", precision=None)
    expected, _ = FORWARD.recurrence(*several, algorithm="recurrent", precision=None)
    assert_same_bits(out, expected[::2])


def test_fold_of_layers():
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((7, 2, 20, 12)).astype(np.float32)
    ring = rng.standard_normal((6, 1, 3, 20 + 2 * 13)).astype(np.float32)
    ring[:, :, 2] = np.nan
    row_ids = np.array([[0, 1, 2], [3, 4, 9]], np.int32)
    ring_row_ids = np.array([[5, 4, 3], [2, 1, 0]], np.int32)
    accepted = np.array([2, 0, 1], np.int32)
    has_state = np.array([True, True, False])
    new = FOLD.state_fold(pool, ring, row_ids, ring_row_ids, accepted, has_state)
    expected = oracle.state_fold(pool, ring, row_ids, ring_row_ids, accepted, has_state)
    assert_close(new, expected, 1e-6)
    assert_same_bits(new[[1, 4, 5, 6]], pool[[1, 4, 5, 6]])


CONV_CASES = {
    "mixed": {"lengths": [1, 0, 2, 40, 3], "slots": [3, 1, 4, 0, -1], "taps": 4, "fresh": (2,)},
    "outside": {"lengths": [5, 1], "slots": [1, 0], "taps": 2, "first": 3, "extra": 40, "silu": True},
    "long taps": {"lengths": [3, 9], "slots": [1, 0], "taps": 8, "tokens": "bfloat16", "pool": "float16"},
}


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("name", CONV_CASES)
def test_conv1d(name, write):
    case = {"first": 0, "extra": 0, "fresh": (), "tokens": "float32", "pool": "float32", "silu": False}
    case |= CONV_CASES[name]
    rng = np.random.default_rng(1)
    channels, lengths, slots = 20, case["lengths"], np.array(case["slots"])
    offsets = case["first"] + np.concatenate([[0], np.cumsum(lengths)])
    x = rng.standard_normal((offsets[-1] + case["extra"], channels))
    x[oracle.owners(slots, offsets, 6, x.shape[0]) == 0] = np.nan
    state = rng.standard_normal((6, channels, case["taps"] - 1))
    for b in case["fresh"]:
        state[slots[b]] = np.nan
    has_state = jnp.asarray([b not in case["fresh"] for b in range(len(lengths))])
    x, state = jnp.asarray(x, case["tokens"]), jnp.asarray(state, case["pool"])
    weight, bias = (
        jnp.asarray(rng.standard_normal((channels, case["taps"]))),
        jnp.asarray(rng.standard_normal(channels)),
    )
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    activation = "silu" if case["silu"] else None
    indices = jnp.asarray(slots, jnp.int32), jnp.asarray(offsets, jnp.int32)
    out, pool = CONV.conv1d(x, weight, bias, state, *indices, has_state, activation=activation, write_state=write)
    expected, expected_pool = oracle.conv1d(
        x, weight, state, *indices, bias=bias, activation=activation, has_initial_state=has_state, write_state=write
    )
    assert_close(out, expected, BUDGET[case["tokens"]])
    written = [s for s, n in zip(slots, lengths, strict=True) if n and s >= 0 and write]
    assert_same_bits(pool[written], expected_pool[written].astype(pool.dtype))
    rest = np.setdiff1d(np.arange(6), written)
    assert_same_bits(pool[rest], np.asarray(state)[rest])


def call(**options):
    args = make([2, 1], (1, 1, 16, 16), [0, 1])
    return gdn_jax.gated_delta_recurrence_fwd(*args[:6], has_initial_state=args[6], **options)


def test_by_name_without_jax_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotImplementedError, match="pip install jax-triton"):
        call(implementation="triton")


def test_by_name_without_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(NotImplementedError, match="triton: runs on cuda and rocm, and this program is for cpu"):
        call(implementation="triton")
    row = triton_kernel("gdn_jax.recurrence.triton")
    assert "none for rocm" in str(row.unsupported("rocm", (), {}))


def test_a_jax_triton_that_does_not_fit_is_passed_over(monkeypatch):
    monkeypatch.setattr("gdn_jax._primitive.has_local_device", lambda _: True)
    row = dataclasses.replace(triton_kernel("gdn_jax.recurrence.triton"), package=("tests.misfit", "misfit"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert "needs a misfit that works" in str(row.unsupported("cuda", (), {}))


@pytest.mark.parametrize(
    ("sizes", "dtype", "algorithm", "reason"),
    [
        ((2, 1, 257, 16), "bfloat16", "recurrent", "key_head_dim is 257"),
        ((2, 1, 16, 300), "bfloat16", "auto", "value_head_dim is 300"),
        ((2, 1, 192, 16), "float32", "chunked", "key_head_dim up to 128"),
        ((2, 1, 192, 16), "float32", "auto", None),
        ((2, 1, 129, 16), "bfloat16", "chunked", "key_head_dim up to 128"),
        ((2, 1, 128, 16), "bfloat16", "chunked", None),
    ],
)
def test_refusals(sizes, dtype, algorithm, reason):
    state = jnp.zeros(sizes)
    qkv = jnp.zeros((200, 2 * sizes[2] + sizes[3]), dtype)
    said = FORWARD.unsupported(qkv, None, None, state, None, None, None, algorithm=algorithm, precision=None)
    assert said is None if reason is None else reason in said


def test_compiles_for_gpus_that_are_not_there():
    """For Ampere, Hopper and CDNA3, within their shared memory; no sum's order is left to a layout."""
    environment = dict(os.environ, TRITON_INTERPRET="0", JAX_PLATFORMS="cpu")
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "tests.compile_triton"]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("forward_kernel") == 21
