"""Conv1d and the state fold in Mosaic GPU: interpreted against the oracle (compiled, under `-m gpu`), and lowered."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import gdn_jax.conv1d.mosaic_gpu as conv
import gdn_jax.state_fold.mosaic_gpu as fold
from tests import oracle
from tests.harness import assert_close, assert_same_bits, assert_zero

BUDGET = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 5e-4}
COMPILED = pytest.param(None, marks=pytest.mark.gpu, id="compiled")
RUNS = [pytest.param(plgpu.InterpretGPUParams(), id="interpreted"), COMPILED]


def conv_operands(
    offsets,
    *,
    conv_dim=32,
    taps=4,
    num_tokens=None,
    tokens="float32",
    pool="float32",
    weights="float32",
    padding=(),
    fresh=(),
):
    """Random operands of the convolution. Tokens in no row, unnamed windows and fresh ones hold NaN."""
    rng = np.random.default_rng(conv_dim + taps + len(offsets))
    batch = len(offsets) - 1
    num_tokens = offsets[-1] if num_tokens is None else num_tokens
    slots = rng.permutation(batch + 2)[:batch].astype(np.int32)
    foreign = [-1, batch + 2, 2**31 - 1]
    slots[list(padding)] = [foreign[b % 3] for b in padding]
    x = np.full((num_tokens, conv_dim), np.nan)
    state = np.full((batch + 2, conv_dim, taps - 1), np.nan)
    for b, (start, end) in enumerate(oracle.row_bounds(offsets, num_tokens)):
        x[start:end] = rng.standard_normal((end - start, conv_dim))
        if b not in padding and b not in fresh:
            state[slots[b]] = rng.standard_normal((conv_dim, taps - 1))
    return (
        jnp.asarray(x, tokens),
        jnp.asarray(0.5 * rng.standard_normal((conv_dim, taps)), weights),
        jnp.asarray(0.1 * rng.standard_normal(conv_dim), weights),
        jnp.asarray(state, pool),
        jnp.asarray(slots),
        jnp.asarray(offsets, jnp.int32),
        jnp.asarray([b not in fresh for b in range(batch)]),
    )


CONV_CASES = {
    "rows of every length": {"offsets": [0, 1, 3, 3, 6, 10, 60]},
    "one row": {"offsets": [0, 70], "tokens": "bfloat16", "pool": "bfloat16", "weights": "bfloat16"},
    "decode": {"offsets": list(range(21)), "conv_dim": 16, "padding": (2, 5), "fresh": (7,), "pool": "float16"},
    "two taps": {"offsets": [0, 5, 6, 40], "taps": 2, "padding": (1,), "fresh": (0,), "pool": "bfloat16"},
    "three taps": {"offsets": [0, 1, 2, 50], "taps": 3, "conv_dim": 48, "tokens": "float16", "fresh": (1, 2)},
    "eight taps": {"offsets": [0, 0, 0, 1, 4, 40], "taps": 8, "conv_dim": 128, "fresh": (3,), "weights": "bfloat16"},
    "head and tail": {"offsets": [3, 5, 33, 36], "num_tokens": 50, "padding": (1,), "tokens": "bfloat16"},
    "many rows": {
        "offsets": [2, 2, *(4 * i for i in range(1, 34)), 180],
        "num_tokens": 190,
        "conv_dim": 16,
        "padding": (4, 20),
    },
    "decreasing": {"offsets": [0, 5, 3], "num_tokens": 20},
    "falling below the first": {"offsets": [5, 8, 0, 3], "num_tokens": 20},
    "past the end": {"offsets": [-2, 7, 2**30], "num_tokens": 24, "conv_dim": 320},
}


@pytest.mark.parametrize("interpret", RUNS)
@pytest.mark.parametrize("name", CONV_CASES)
def test_conv1d(name, interpret):
    args = conv_operands(**CONV_CASES[name])
    check_conv1d(args, interpret, activation="silu", write_state=True)


@pytest.mark.parametrize("interpret", RUNS)
@pytest.mark.parametrize("conv_dim", [16, 1024])
@pytest.mark.parametrize("write_state", [True, False])
def test_conv1d_two_rows_a_program(write_state, conv_dim, interpret, monkeypatch):
    """Two rows of one token; one of them empty, longer, fresh or padded; the last row alone."""
    monkeypatch.setattr(conv, "_MANY_ROW_PROGRAMS", 0)
    offsets = [0, 1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 17, 17, 18, 19, 20, 21, 22]
    args = conv_operands(offsets, num_tokens=23, conv_dim=conv_dim, padding=(2, 8, 9, 20), fresh=(3, 10, 11, 13))
    check_conv1d(args, interpret, activation="silu", write_state=write_state)


@pytest.mark.parametrize("interpret", RUNS)
def test_conv1d_without_activation_or_writing(interpret):
    args = conv_operands([0, 1, 2, 30], conv_dim=64)
    check_conv1d(args, interpret, activation=None, write_state=False)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", ["float32", "bfloat16", "float16"])
def test_conv1d_at_full_width(tokens, pool):
    """Long, short and single-token rows on the channels of a real layer, where every bulk copy is in use."""
    two_rows_a_program = [*range(110), 110, 110, *range(111, 131)]
    for offsets in ([0, 1, 3, 70, 71, 400], list(range(33)), list(range(0, 65, 4)), two_rows_a_program):
        args = conv_operands(offsets, conv_dim=8192, tokens=tokens, pool=pool, padding=(1,), fresh=(2,))
        check_conv1d(args, None, activation="silu", write_state=True)


def check_conv1d(args, interpret, **options):
    x, weight, bias, state, slots, offsets, has_state = args
    out, new = jax.jit(partial(conv.conv1d, interpret=interpret, **options))(*args)
    expected, expected_state = oracle.conv1d(
        np.nan_to_num(x), weight, state, slots, offsets, bias=bias, has_initial_state=has_state, **options
    )
    owners = oracle.owners(slots, offsets, state.shape[0], x.shape[0])
    assert_zero(np.asarray(out)[owners == 0])
    assert_close(np.asarray(out)[owners == 1], expected[owners == 1], BUDGET[x.dtype.name])
    # A window is a copy of inputs: exact up to the pool's own rounding.
    # Rounded by NumPy: a conversion on the device may give NaN another payload.
    assert_same_bits(new, np.asarray(expected_state, np.float32).astype(new.dtype))


def fold_operands(*, heads=(2, 6), dims=(32, 32), ring_len=4, pool="float32", ring="float32", padding=0):
    """Two layers of six requests: whole, none, too many and partly accepted, foreign rows, a fresh row.

    Whatever must have no influence holds NaN.
    """
    (nk, nv), (key_dim, value_dim) = heads, dims
    rng = np.random.default_rng(key_dim + value_dim + ring_len)
    layers, batch, group = 2, 6, nv // nk
    decays_at = key_dim + group * value_dim
    records = 0.1 * rng.standard_normal((layers * batch, nk, ring_len, decays_at + group + padding))
    records[..., decays_at:] = rng.uniform(0.8, 1, (*records.shape[:-1], group + padding))
    accepted = np.array([ring_len, 0, min(2, ring_len), ring_len + 1, 1, -3], np.int32)
    rows = rng.permutation(layers * batch + 2)[: layers * batch].reshape(layers, batch).astype(np.int32)
    ring_rows = rng.permutation(layers * batch).reshape(layers, batch).astype(np.int32)
    for (layer, b), ring_row in np.ndenumerate(ring_rows):
        del layer
        records[ring_row, :, max(accepted[b], 0) :] = np.nan
    state = 0.3 * rng.standard_normal((layers * batch + 2, nv, key_dim, value_dim))
    state[rows[:, 4]] = np.nan
    rows[0, 0], ring_rows[1, 2] = -1, 2**31 - 1
    return (
        jnp.asarray(state, pool),
        jnp.asarray(records, ring),
        jnp.asarray(rows),
        jnp.asarray(ring_rows),
        jnp.asarray(accepted),
        jnp.asarray(np.arange(batch) != 4),
    )


FOLD_CASES = {
    "small": {},
    "bfloat16": {"pool": "bfloat16", "dims": (16, 48), "heads": (1, 2), "ring_len": 5, "padding": 3},
    "float16": {"pool": "float16", "ring": "bfloat16", "dims": (48, 16), "heads": (2, 2), "ring_len": 3},
    "one record": {"dims": (16, 80), "heads": (1, 1), "ring_len": 1, "padding": 1},
    "long ring": {"dims": (80, 16), "heads": (1, 3), "ring_len": 64},
    "whole heads": {"dims": (128, 128), "heads": (1, 1), "pool": "bfloat16"},
    "widest": {"dims": (256, 256), "heads": (1, 1), "ring_len": 2},
}


@pytest.mark.parametrize("interpret", RUNS)
@pytest.mark.parametrize("name", FOLD_CASES)
def test_state_fold(name, interpret):
    args = fold_operands(**FOLD_CASES[name])
    state, rows = args[0], np.asarray(args[2])
    new = np.asarray(jax.jit(partial(fold.state_fold, interpret=interpret))(*args))
    expected = oracle.state_fold(*args)
    folded = [int(rows[layer, b]) for layer, b in ((1, 0), (0, 2), (0, 4), (1, 4))]
    assert_close(new[folded], expected[folded], {**BUDGET, "float32": 1e-6}[state.dtype.name])
    rest = np.setdiff1d(np.arange(state.shape[0]), folded)
    assert_same_bits(new[rest], np.asarray(state)[rest])


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 96), (256, 16)])
def test_state_fold_rounds_twice_a_record(dims, pool):
    """Every bit: the decayed state is rounded, then the fused product and sum, and the result once to the pool."""
    args = fold_operands(dims=dims, pool=pool, ring_len=8)
    state, records, rows, ring_rows, accepted, has_state = (np.asarray(x) for x in args)
    new = np.asarray(jax.jit(fold.state_fold)(*args))
    key_dim, value_dim = dims
    group = state.shape[1] // records.shape[1]
    for layer, b in ((1, 0), (0, 2), (0, 4), (1, 4)):
        old = state[rows[layer, b]].astype(np.float32)
        now = old if has_state[b] else np.zeros_like(old)
        for p in range(accepted[b]):
            record = np.repeat(records[ring_rows[layer, b], :, p], group, axis=0)
            delta = records[ring_rows[layer, b], :, p, key_dim : key_dim + group * value_dim].reshape(-1, value_dim)
            decay = records[ring_rows[layer, b], :, p, key_dim + group * value_dim :].reshape(-1)
            decayed = (now * decay[:, None, None]).astype(np.float64)
            # The product of two float32 is exact in float64.
            product = record[:, :key_dim, None].astype(np.float64) * delta[:, None, :]
            now = (decayed + product).astype(np.float32)
        assert_same_bits(new[rows[layer, b]], now.astype(state.dtype))


def lowered(function, args, donated):
    traced = jax.jit(function, donate_argnums=donated).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def assert_one_call_in_place(text, pool):
    assert text.count("mosaic_gpu_v2") == text.count("griddepcontrol.wait") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 1
    # Besides the call, only reshapes of the pool may stand in the program.
    elements = str(np.prod(pool.shape))
    names = {line.split("=", 1)[1].split()[0] for line in text.splitlines() if "=" in line and elements in line}
    assert not names & {"stablehlo.copy", "stablehlo.transpose", "stablehlo.scatter", "stablehlo.add"}


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "size", [(8192, 1, 8192, 4), (128, 128, 8192, 4), (256, 64, 10240, 4), (100, 9, 320, 3), (1, 1, 16, 2)], ids=str
)
def test_conv1d_lowers_in_place(size, pool):
    num_tokens, batch, conv_dim, taps = size
    shape = jax.ShapeDtypeStruct
    args = (
        shape((num_tokens, conv_dim), jnp.bfloat16),
        shape((conv_dim, taps), jnp.bfloat16),
        shape((conv_dim,), jnp.bfloat16),
        shape((batch + 1, conv_dim, taps - 1), pool),
        shape((batch,), jnp.int32),
        shape((batch + 1,), jnp.int32),
        shape((batch,), jnp.bool_),
    )
    function = partial(conv.conv1d, activation="silu", write_state=True)
    assert_one_call_in_place(lowered(function, args, 3), args[3])


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "size", [(16, 32, 128, 128), (16, 48, 128, 128), (2, 6, 32, 32), (1, 2, 256, 48), (2, 2, 16, 256)], ids=str
)
def test_state_fold_lowers_in_place(size, pool):
    nk, nv, key_dim, value_dim = size
    shape = jax.ShapeDtypeStruct
    args = (
        shape((100, nv, key_dim, value_dim), pool),
        shape((90, nk, 8, key_dim + nv // nk * (value_dim + 1)), jnp.float32),
        shape((8, 9), jnp.int32),
        shape((8, 9), jnp.int32),
        shape((9,), jnp.int32),
        shape((9,), jnp.bool_),
    )
    assert_one_call_in_place(lowered(fold.state_fold, args, 0), args[0])


def test_what_is_refused():
    shape = jax.ShapeDtypeStruct
    rows = shape((1, 1), jnp.int32)
    accepted, has_state = shape((1,), jnp.int32), shape((1,), jnp.bool_)

    def fold_reason(dims, ring_len=4, pool="float32"):
        ring = shape((1, 1, ring_len, sum(dims) + 1), jnp.float32)
        return fold.unsupported(shape((1, 1, *dims), pool), ring, rows, rows, accepted, has_state)

    assert fold_reason((16, 256)) is None
    assert "value_head_dim is 24" in str(fold_reason((32, 24)))
    assert "key_head_dim is 272" in str(fold_reason((272, 32)))
    assert "RING_LEN" in str(fold_reason((32, 32), ring_len=65))

    def conv_reason(conv_dim, taps, activation="silu"):
        args = conv_operands([0, 1], conv_dim=conv_dim, taps=taps)
        return conv.unsupported(*args, activation=activation, write_state=True)

    assert conv_reason(48, 4) is None
    assert "conv_dim" in str(conv_reason(40, 4))
    assert "kernel_size" in str(conv_reason(32, 9))
    assert "gelu" in str(conv_reason(32, 4, "gelu"))
