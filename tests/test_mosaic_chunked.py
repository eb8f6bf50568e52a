"""The chunked Mosaic GPU kernels without a GPU: interpreted against the oracle, and lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import gdn_jax.recurrence.mosaic_gpu_chunked as chunked
from gdn_jax.recurrence.mosaic_gpu_chunked import carry, prepare, tiles
from tests import oracle, shapes
from tests.harness import (
    OUTPUT_BUDGET,
    assert_close,
    assert_other_rows_kept,
    assert_same_bits,
    assert_zero,
    state_budget,
)

RACES = plgpu.InterpretGPUParams(detect_races=True)
recurrence = partial(chunked.recurrence, algorithm="chunked", precision=None)


def interpreted(*args, interpret):
    """Every access of an interpreted kernel calls Python: optimised code would only take longer to compile."""
    run = jax.jit(partial(recurrence, interpret=interpret), compiler_options={"xla_backend_optimization_level": 0})
    return run(*args)


def make(lengths, heads, slots, *, tokens="bfloat16", pool="float32", extra=0, first=0, fresh=(), inputs="trained"):
    """Operands of the recurrence; `extra` tokens after and `first` before the rows hold NaN, and foreign rows do."""
    heads = shapes.Heads(*heads)
    offsets = shapes.row_offsets(lengths, first)
    num_tokens = int(offsets[-1]) + extra
    source = {
        "trained": shapes.trained_tokens,
        "resetting": shapes.resetting_tokens,
        "repeated": shapes.repeated_keys,
        "alternating": partial(shapes.repeated_keys, alternate=True),
        "zero": shapes.zero_rows,
    }[inputs]
    qkv, decay, beta = source(heads, num_tokens, tokens, seed=sum(lengths))
    state = shapes.state_pool(heads, max(slots) + 2, pool)
    for x in (qkv, decay, beta):
        x[oracle.owners(slots, offsets, state.shape[0], num_tokens) == 0] = np.nan
    live = [s for s in slots if 0 <= s < state.shape[0]]
    state[np.setdiff1d(np.arange(state.shape[0]), live)] = np.nan
    state[[slots[b] for b in fresh]] = np.nan
    has = np.array([b not in fresh for b in range(len(lengths))])
    return [jnp.asarray(x) for x in (qkv, decay, beta, state, np.int32(slots), offsets, has)]


def check(args, out, pool):
    qkv, _, _, state, slots, offsets, _ = args
    reference = oracle.recurrence(*args)
    dtype = qkv.dtype.name
    owners = oracle.owners(slots, offsets, state.shape[0], qkv.shape[0])
    assert_zero(np.asarray(out)[owners == 0])
    assert_close(np.asarray(out)[owners == 1], reference[0][owners == 1], OUTPUT_BUDGET["chunked", dtype], "outputs")
    bounds = oracle.row_bounds(offsets, qkv.shape[0])
    rows = zip(np.asarray(slots), bounds, strict=True)
    written = [int(s) for s, (lo, hi) in rows if lo < hi and 0 <= s < state.shape[0]]
    budget = state_budget("chunked", dtype, pool.dtype.name)
    assert_close(np.asarray(pool)[written], reference[1][written], budget, "states")
    assert_other_rows_kept(pool, np.asarray(state), written)


CASES = {
    # every pipeline stage used twice, and a tail
    "long": {"lengths": [7 * 64 + 9], "heads": (1, 1, 64, 64), "slots": [1], "extra": 3},
    "ragged": {
        "lengths": [3, 0, 70, 64, 1],
        "heads": (1, 2, 64, 64),
        "slots": [1, 0, 7, 3, 5],
        "extra": 70,
        "first": 2,
        "fresh": (3,),
        "tokens": "float16",
        "pool": "bfloat16",
    },
    "short": {"lengths": [5, 8], "heads": (1, 1, 64, 64), "slots": [1, -1], "tokens": "float16", "pool": "float16"},
    "full head": {"lengths": [130], "heads": (1, 1, 128, 128), "slots": [0]},
    "wide key": {"lengths": [70], "heads": (1, 1, 256, 64), "slots": [0]},
    "wide value": {"lengths": [70], "heads": (1, 1, 64, 256), "slots": [0]},
    "float32": {
        "lengths": [70, 5],
        "heads": (1, 2, 64, 64),
        "slots": [0, 2],
        "tokens": "float32",
        "extra": 2,
        "first": 3,
        "fresh": (1,),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    args = make(**CASES[name])
    check(args, *interpreted(*args, interpret=RACES))


@pytest.mark.parametrize(
    ("key_dim", "options"),
    [
        (64, {}),
        (128, {"tokens": "float16"}),
        (128, {"tokens": "float32", "pool": "bfloat16"}),
        (256, {"tokens": "float32"}),
    ],
)
def test_full_chip(monkeypatch, key_dim, options):
    """What many rows run: the second kernel has two value tiles, makes R and carries one state after the other.

    With 256 keys it has one tile and makes no R, and with float32 tokens one stage of values.
    """
    for module in (chunked, carry, prepare):
        monkeypatch.setattr(module, "SMS", 1)
    args = make([70, 0, 200, 5, 64], (1, 2, key_dim, 128), [1, 3, 0, 9, 2], extra=3, first=2, fresh=(2,), **options)
    check(args, *interpreted(*args, interpret=RACES))


@pytest.mark.parametrize("tokens", ["bfloat16", "float32"])
def test_split_rows(monkeypatch, tokens):
    """What few heads and a long row run: rows cut into segments, some shorter than others, some empty."""
    monkeypatch.setattr(chunked, "_num_segments", lambda *_: 3)
    args = make([300, 0, 70, 3, 128], (1, 1, 64, 64), [1, 2, 9, 3, 0], tokens=tokens, extra=5, first=2, fresh=(0,))
    check(args, *interpreted(*args, interpret=RACES))


@pytest.mark.parametrize("tokens", ["bfloat16", "float32"])
@pytest.mark.parametrize("inputs", ["resetting", "repeated", "alternating", "zero"])
def test_hard_inputs(inputs, tokens):
    args = make([256], (1, 1, 64, 64), [0], tokens=tokens, inputs=inputs)
    check(args, *interpreted(*args, interpret=plgpu.InterpretGPUParams()))


# First column, token and elements; keys begin at column 64.
OVERFLOWS = {
    "two keys": [(64, 40, 1e20), (64, 45, 1e20)],
    "two keys, both signs": [(64, 40, np.resize([1e20, -1e20], 64)), (64, 45, 1e20)],
    "a query": [(0, 40, 1e25)],
    "a query after a key": [(0, 45, 1e25), (64, 40, 1e15)],
    "a query after a longer key": [(64, 40, 1e25), (0, 45, 1e15)],
}


@pytest.mark.parametrize("run", [pytest.param("interpreted"), pytest.param("compiled", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", ["bfloat16", "float32"])
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_squares_that_overflow(overflow, tokens, run):
    """A key or query whose sum of squares is no float32 number counts as zero, and leaves other tokens alone."""
    args = make([66], (1, 1, 64, 64), [0], tokens=tokens)
    zeroed = list(args)
    for column, token, size in OVERFLOWS[overflow]:
        columns = slice(column, column + 64)
        args[0] = args[0].at[token, columns].set(jnp.asarray(size, args[0].dtype))
        zeroed[0] = zeroed[0].at[token, columns].set(0.0 if np.max(np.abs(size)) > 1e18 else size)
    out, pool = interpreted(*args, interpret=plgpu.InterpretGPUParams()) if run == "interpreted" else compiled(*args)
    check(zeroed, out, pool)


@pytest.mark.parametrize("batch", [1, 2, 8, 9, 64, 65, 513])
def test_finds_rows(batch):
    firsts = np.sort(np.random.default_rng(batch).integers(0, 60, batch))
    wanted = np.arange(-1, 61)
    rows = jax.vmap(lambda at: tiles.find_row(jnp.asarray(firsts), at, batch))(jnp.asarray(wanted))
    np.testing.assert_array_equal(rows, np.maximum(np.searchsorted(firsts, wanted, side="right") - 1, 0))


@pytest.mark.parametrize(("size", "grow"), [(1e36, 1.0), (1e-30, 1.0), (1e-30, 1e60)])
def test_any_size_of_values(size, grow):
    """float32 values far outside the range of float16, each row at its own scale, which may grow."""
    args = make([66, 5], (1, 1, 64, 64), [0, 1], tokens="float32")
    sizes = np.repeat([size, size * grow, 1e-30], [50, 16, 5])[:, None]
    args[0] = args[0].at[:, 128:].multiply(sizes)
    args[3] = args[3].at[:2].multiply(jnp.asarray([size, 1e-30])[:, None, None, None])
    out, pool = interpreted(*args, interpret=plgpu.InterpretGPUParams())
    expected, states = oracle.recurrence(*args)
    for row, tokens in enumerate((slice(66), slice(66, None))):
        assert_close(np.asarray(out)[tokens], expected[tokens], 1e-3, "outputs")
        assert_close(np.asarray(pool)[row], states[row], 1e-3, "states")


LARGE, SETTLED = 1e7, 192  # tokens until what is large has decayed


def large_at_first(what, **options):
    """float32 tokens of rows whose state, or first values, are large and then decay: below 1e-18 of them is left."""
    args = make(**options, tokens="float32")
    heads = shapes.Heads(*options["heads"])
    keys = 2 * heads.num_key_heads * heads.key_head_dim
    for start, end in oracle.row_bounds(args[5], args[0].shape[0]):
        at = slice(start, min(start + SETTLED, end))
        args[1] = args[1].at[at].multiply(0.8)
        if what == "values":
            args[0] = args[0].at[start : min(start + 40, end), keys:].multiply(LARGE)
    if what == "state":
        args[3] = args[3] * LARGE
    return args


def check_settled(args, out, pool):
    """Errors are relative to what is small by then."""
    expected, states = oracle.recurrence(*args)
    for b, (start, end) in enumerate(oracle.row_bounds(args[5], args[0].shape[0])):
        if end - start > SETTLED + 64:
            late = slice(start + SETTLED, end)
            assert_close(
                np.asarray(out)[late], expected[late], OUTPUT_BUDGET["chunked", "float32"], f"outputs of row {b}"
            )
            slot = int(args[4][b])
            assert_close(np.asarray(pool)[slot], states[slot], 1e-3, f"state of row {b}")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("what", ["state", "values"])
def test_small_after_large(monkeypatch, what, split):
    if split:
        monkeypatch.setattr(chunked, "_num_segments", lambda *_: 3)
    args = large_at_first(what, lengths=[300, 70], heads=(1, 1, 64, 64), slots=[0, 1])
    check_settled(args, *interpreted(*args, interpret=plgpu.InterpretGPUParams()))


def reset_after_large(what, at, **options):
    """float32 tokens of rows that are reset at a token, after a state, or values, ten thousand times as large."""
    args = make(**options, tokens="float32")
    heads = shapes.Heads(*options["heads"])
    keys = 2 * heads.num_key_heads * heads.key_head_dim
    for start, end in oracle.row_bounds(args[5], args[0].shape[0]):
        if what == "values":
            args[0] = args[0].at[start : min(start + at, end), keys:].multiply(1e4)
        if start + at < end:
            args[1] = args[1].at[start + at].set(0.0)
    if what == "state":
        size = jnp.std(args[0][jnp.isfinite(args[0][:, -1]), keys:]) / jnp.nanstd(args[3])
        args[3] = args[3] * (1e4 * size)
    return args


def check_reset(args, at, out, pool):
    """Errors are relative to what there is after the reset, and in the chunk of the reset.

    A single output may be as small as a key and a query happen to be orthogonal.
    """
    expected, states = oracle.recurrence(*args)
    for b, (start, end) in enumerate(oracle.row_bounds(args[5], args[0].shape[0])):
        slot = int(args[4][b])
        if start + at + 16 <= end and 0 <= slot < args[3].shape[0]:
            budget = OUTPUT_BUDGET["chunked", "float32"]
            for chunk in (slice(start + at, min(start + 64, end)), slice(start + at, end)):
                assert_close(np.asarray(out)[chunk], expected[chunk], budget, f"outputs of row {b}")
            assert_close(np.asarray(pool)[slot], states[slot], budget, f"state of row {b}")


@pytest.mark.parametrize("key_dim", [64, 128, 256])
@pytest.mark.parametrize(("what", "at"), [("state", 0), ("state", 23), ("values", 23)])
def test_reset_within_a_chunk(what, at, key_dim):
    args = reset_after_large(what, at, lengths=[64, 70], heads=(1, 1, key_dim, 64), slots=[0, 1])
    check_reset(args, at, *interpreted(*args, interpret=plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("run", [pytest.param("interpreted"), pytest.param("compiled", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_value_that_is_not_finite(value, run):
    """With float32 tokens, the chunks before it and other columns of values are as they were."""
    args = make([100, 30], (1, 1, 64, 64), [0, 1], tokens="float32")
    run = compiled if run == "compiled" else partial(interpreted, interpret=plgpu.InterpretGPUParams())
    wanted, _ = run(*args)
    args[0] = args[0].at[70, 130].set(value)
    out, _ = run(*args)
    kept = np.ones(out.shape, bool)
    kept[64:100, 2] = False
    assert_same_bits(np.where(kept, out, 0.0), np.where(kept, wanted, 0.0))
    assert not np.isfinite(out[70:100, 2]).any()


def decreasing(offsets, tokens):
    args = make([300], (1, 1, 64, 64), [0, 1, 2, 3], tokens=tokens)
    args[3] = args[3].at[3].multiply(100.0)  # rows of different sizes
    args[5] = jnp.asarray(offsets, jnp.int32)
    args[6] = jnp.ones(4, bool)
    return args


@pytest.mark.parametrize(
    ("offsets", "tokens"),
    [
        pytest.param([250, 20, 10, 120, 90], "float32", id="mixed"),
        pytest.param([0, 130, 0, 0, 0], "bfloat16", id="padded with zeros"),
        pytest.param([200, 300, 0, 100, 100], "bfloat16", id="a row before an earlier one"),
    ],
)
def test_offsets_that_decrease(offsets, tokens):
    args = decreasing(offsets, tokens)
    check(args, *interpreted(*args, interpret=RACES))


def test_tokens_of_two_rows():
    """Each row's state is its own. The outputs of the tokens may be either row's: a race, so no detector here."""
    args = decreasing([0, 20, 10, 10, 40], "float32")
    check(args, *interpreted(*args, interpret=plgpu.InterpretGPUParams()))


def test_rows_that_overlap():
    """Malformed: the results of such rows are unspecified, but nothing hangs and no other row is touched."""
    args = make([200], (1, 1, 64, 64), [0, 1, 2])
    args[5] = jnp.asarray([0, 2**31 - 1, 0, 200], jnp.int32)
    args[6] = jnp.ones(3, bool)
    _, pool = interpreted(*args, interpret=plgpu.InterpretGPUParams())
    assert_other_rows_kept(pool, np.asarray(args[3]), [0, 2])


def test_a_row_does_not_depend_on_the_batch():
    args = make([70, 64, 9], (1, 1, 64, 64), [2, 0, 1])
    out, pool = interpreted(*args, interpret=plgpu.InterpretGPUParams())
    alone = [*args[:4], args[4][1:2], args[5][1:3], args[6][1:2]]
    out_alone, pool_alone = interpreted(*alone, interpret=plgpu.InterpretGPUParams())
    assert_same_bits(out[70:134], out_alone[70:134])
    assert_same_bits(pool[0], pool_alone[0])


compiled = jax.jit(recurrence)
FULL = (16, 32, 128, 128)
SIZES = {
    # Members of a union of shared memory are separate buffers when interpreted, and the two kernels never run side by
    # side there: only a GPU shows whether warpgroups keep apart and wait for each other.
    "ragged": {"lengths": [256, 100, 300, 77], "heads": (32, 64, 128, 128), "slots": [2, 0, 3, 1]},
    "side by side": {"lengths": [2049], "heads": FULL, "slots": [1]},
    "side by side, rows": {
        "lengths": [3000, 1, 3400],
        "heads": (2, 8, 128, 128),
        "slots": [1, 9, 0],
        "extra": 3,
        "first": 5,
        "fresh": (2,),
        "tokens": "float16",
    },
    "side by side, float32": {"lengths": [2300], "heads": (4, 8, 64, 128), "slots": [0], "tokens": "float32"},
    "one value head a key head": {"lengths": [300, 65], "heads": (8, 8, 128, 128), "slots": [1, 0]},
    "three": {"lengths": [1100], "heads": (16, 48, 128, 128), "slots": [0]},
    "five": {"lengths": [300, 65], "heads": (2, 10, 64, 128), "slots": [1, 0], "tokens": "float16"},
    "split": {"lengths": [6205], "heads": (2, 8, 128, 128), "slots": [0]},
    "many rows": {"lengths": [65] * 40, "heads": (2, 8, 128, 128), "slots": [*range(40)]},
    "many rows, 16-bit states": {
        "lengths": [65, 200] * 20,
        "heads": (2, 8, 128, 128),
        "slots": [*range(40)],
        "pool": "bfloat16",
        "fresh": (1, 5),
    },
    "three, rows": {"lengths": [300, 129, 64], "heads": (16, 48, 128, 128), "slots": [1, 0, 7], "extra": 3, "first": 5},
    "five, rows": {
        "lengths": [65, 3] * 10,
        "heads": (2, 10, 64, 128),
        "slots": [*range(20)],
        "tokens": "float16",
        "fresh": (1,),
    },
    "eight, rows": {"lengths": [65, 130] * 5, "heads": (1, 8, 128, 256), "slots": [*range(10)]},
    "float32": {"lengths": [900, 200], "heads": FULL, "slots": [1, 0], "tokens": "float32"},
    "wide": {"lengths": [300, 1, 64], "heads": (4, 8, 256, 256), "slots": [1, 7, 0], "tokens": "float16"},
    "wide, float32": {"lengths": [300, 1, 64], "heads": (4, 8, 256, 128), "slots": [1, 7, 0], "tokens": "float32"},
    "wide, many rows, float32": {
        "lengths": [65, 200, 1, 0] * 10,
        "heads": (4, 8, 256, 128),
        "slots": [*range(37), -1, 38, 39],
        "tokens": "float32",
        "fresh": (1, 5),
    },
    "split, float32": {"lengths": [6205], "heads": (2, 8, 128, 128), "slots": [0], "tokens": "float32"},
    "many rows, float32": {
        "lengths": [65, 200, 1, 0] * 10,
        "heads": (2, 8, 128, 128),
        "slots": [*range(40)],
        "tokens": "float32",
        "fresh": (1, 5),
        "extra": 5,
        "first": 2,
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_sizes_on_a_gpu(name):
    args = make(**SIZES[name])
    check(args, *compiled(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["ragged", "side by side", "split"])
def test_slow_decays(size):
    """The final state depends on every chunk of the row: what is wrong in any of them shows in it."""
    args = make(**SIZES[size])
    decay = np.random.default_rng(1).uniform(0.999, 1.0, args[1].shape)
    args[1] = jnp.asarray(decay, jnp.float32)
    check(args, *compiled(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["state", "values"])
@pytest.mark.parametrize("size", [name for name in SIZES if SIZES[name].get("tokens") == "float32"])
def test_small_after_large_on_a_gpu(size, what):
    args = large_at_first(what, **{k: v for k, v in SIZES[size].items() if k != "tokens"})
    check_settled(args, *compiled(*args))


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "at"), [("state", 0), ("state", 23), ("values", 23)])
@pytest.mark.parametrize("size", [name for name in SIZES if SIZES[name].get("tokens") == "float32"])
def test_reset_within_a_chunk_on_a_gpu(size, what, at):
    args = reset_after_large(what, at, **{k: v for k, v in SIZES[size].items() if k != "tokens"})
    check_reset(args, at, *compiled(*args))


@pytest.mark.gpu
def test_chunk_boundaries():
    for length in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257):
        args = make([length, 70], (2, 4, 128, 128), [1, 0], extra=3, first=5)
        check(args, *compiled(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", ["bfloat16", "float32"])
def test_a_row_alone_and_in_a_batch(tokens):
    """Alone, R comes from the first kernel, and the row has one value tile a CTA."""
    args = make([512] * 8, FULL, [3, 1, 0, 2, 7, 6, 5, 4], tokens=tokens)
    out, pool = compiled(*args)
    for b in range(8):
        tokens = slice(512 * b, 512 * (b + 1))
        alone = [*[x[tokens] for x in args[:3]], args[3], args[4][b : b + 1], jnp.asarray([0, 512]), args[6][:1]]
        out_alone, pool_alone = compiled(*alone)
        assert_same_bits(out[tokens], out_alone, f"row {b}")
        slot = int(args[4][b])
        assert_same_bits(pool[slot], pool_alone[slot], f"row {b}")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size",
    [
        "ragged",
        "side by side",
        "side by side, rows",
        "side by side, float32",
        "split",
        "many rows",
        "many rows, float32",
    ],
)
def test_same_bits_when_repeated(size):
    args = make(**SIZES[size])
    first = compiled(*args)
    for _ in range(200):
        again = compiled(*args)
        assert bool(jnp.array_equal(first[0], again[0]))
        assert bool(jnp.array_equal(first[1], again[1], equal_nan=True))


def operands(num_tokens, batch, heads, tokens="bfloat16", pool="float32"):
    nk, nv, key_dim, value_dim = heads
    shape = jax.ShapeDtypeStruct
    return (
        shape((num_tokens, 2 * nk * key_dim + nv * value_dim), tokens),
        shape((num_tokens, nv), jnp.float32),
        shape((num_tokens, nv), jnp.float32),
        shape((batch + 1, nv, key_dim, value_dim), pool),
        shape((batch,), jnp.int32),
        shape((batch + 1,), jnp.int32),
        shape((batch,), jnp.bool_),
    )


@pytest.mark.parametrize(
    "size",
    [
        (8192, 1, (16, 32, 128, 128)),
        (8192, 64, (16, 32, 128, 128)),
        (8192, 1, (16, 32, 128, 128), "float32"),
        (8192, 64, (16, 32, 128, 128), "float32"),
        (32768, 1, (2, 8, 128, 128)),
        (4096, 2, (16, 48, 128, 128), "float16", "bfloat16"),
        (30, 2, (2, 8, 64, 128), "bfloat16", "float16"),
        (300, 3, (2, 4, 128, 256), "float32"),
        (300, 3, (1, 7, 256, 64)),
    ],
    ids=str,
)
def test_lowers_in_place(size):
    kernels = {(8192, 1): 1, (32768, 1): 4}.get(size[:2], 2)
    args = operands(*size)
    assert chunked.unsupported(*args, algorithm="chunked", precision=None) is None
    traced = jax.jit(recurrence, donate_argnums=3).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == text.count("griddepcontrol.wait") == kernels
    # The pool's, and in a kernel whose CTAs wait for each other the one of its semaphores.
    assert text.count("#stablehlo.output_operand_alias<") == (2 if size[:2] == (8192, 1) else 1)


@pytest.mark.parametrize(
    ("heads", "options", "reason"),
    [
        ((1, 1, 128, 128), {"algorithm": "recurrent", "precision": None}, "algorithm"),
        ((1, 1, 128, 128), {"algorithm": "chunked", "precision": "highest"}, "precision"),
        ((1, 1, 48, 128), {"algorithm": "chunked", "precision": None}, "key_head_dim"),
        ((1, 1, 128, 96), {"algorithm": "chunked", "precision": None}, "value_head_dim"),
    ],
)
def test_refuses(heads, options, reason):
    assert reason in chunked.unsupported(*operands(64, 1, heads), **options)
