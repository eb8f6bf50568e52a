"""The recurrent Mosaic GPU kernels without a GPU: interpreted against the oracle, and lowered for CUDA."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import gdn_jax.recurrence.mosaic_gpu as forward
import gdn_jax.recurrence.mosaic_gpu.plan as plans
import gdn_jax.verify_ring.mosaic_gpu as verify
from tests import oracle
from tests.harness import assert_close, assert_same_bits, assert_zero

INTERPRET = plgpu.InterpretGPUParams()
RUNS = [pytest.param(INTERPRET, id="interpreted"), pytest.param(None, marks=pytest.mark.gpu, id="compiled")]
recurrence = partial(forward.recurrence, algorithm="recurrent", precision=None)


def make(lengths, heads, slots, *, tokens="bfloat16", pool="float32", extra=0, first=0, fresh=()):
    """Random operands of the recurrence; `extra` tokens after and `first` before the rows hold NaN."""
    rng = np.random.default_rng(sum(lengths) + heads[2])
    nk, nv, key_dim, value_dim = heads
    offsets = first + np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = offsets[-1] + extra
    qkv = rng.standard_normal((num_tokens, 2 * nk * key_dim + nv * value_dim))
    qkv[:first] = qkv[offsets[-1] :] = np.nan
    max_slots = max(slots) + 2
    state = 0.3 * rng.standard_normal((max_slots, nv, key_dim, value_dim))
    has = np.array([b not in fresh for b in range(len(lengths))])
    for b in fresh:
        state[slots[b]] = np.nan
    return (
        jnp.asarray(qkv, tokens),
        jnp.asarray(rng.uniform(0.8, 1, (num_tokens, nv)), jnp.float32),
        jnp.asarray(rng.uniform(0, 1, (num_tokens, nv)), jnp.float32),
        jnp.asarray(state, pool),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(offsets, jnp.int32),
        jnp.asarray(has),
    )


CASES = {
    "decode": {"lengths": [1, 1, 1, 1], "heads": (1, 2, 32, 32), "slots": [2, -1, 0, 3], "fresh": (2,)},
    "ragged": {"lengths": [1, 0, 6, 17], "heads": (2, 2, 16, 48), "slots": [1, 0, 3, 2], "tokens": "float32"},
    "wide": {"lengths": [2, 5], "heads": (1, 1, 48, 16), "slots": [1, 0], "pool": "bfloat16", "tokens": "float16"},
    "padding": {
        "lengths": [3, 2, 1],
        "heads": (1, 3, 32, 16),
        "slots": [1, 6, 0],
        "extra": 18,
        "first": 1,
        "tokens": "float32",
        "pool": "float16",
    },
    "one token": {"lengths": [1], "heads": (1, 1, 128, 128), "slots": [1]},
}


def run(args, plan=None, interpret=INTERPRET):
    pool = jax.new_ref(args[3])
    out = forward.run_rows(args[:3], args[4:], pool, plan=plan, interpret=interpret)
    return out, jax.freeze(pool)


@pytest.mark.parametrize("name", CASES)
def test_forward(name):
    args = make(**CASES[name])
    check_forward(args, *recurrence(*args, interpret=INTERPRET))


PLANS = {
    "token by token": plans.Plan(16),
    "whole rows of 32": plans.Plan(32, rows=True),
    "whole rows of 128": plans.Plan(128, rows=True),
    "whole rows of both heads of a key head": plans.Plan(64, rows=True, run=2),
    "windows of 4": plans.Plan(16, window=4, warpgroups=2),
    "windows of 4, all tiles of a key head": plans.Plan(16, window=4, warpgroups=2, run=4),
    "windows of 4, all tiles of two key heads": plans.Plan(16, window=4, warpgroups=2, run=8),
    "windows of 4, wide tiles": plans.Plan(128, window=4, warpgroups=2, run=2),
    "windows of 16": plans.Plan(32, window=16, warpgroups=1),
}


@pytest.mark.parametrize("interpret", RUNS)
@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_takes_every_row(name, pool, interpret):
    plan = PLANS[name]
    nk = 2 if plan.run > 4 else 1
    heads = (1, plan.run, 64, max(plan.tile, 64)) if plan.rows else (nk, 2 * nk, 16, max(plan.tile, 32))
    args = make([1, 18, 0, 1, 2, 1], heads, [2, 0, 1, -1, 3, 4], fresh=(4, 5), pool=pool)
    function = partial(run, plan=plan, interpret=interpret)
    check_forward(args, *(function if interpret else jax.jit(function))(args))


@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_short_windows_of_few_programs(size, warpgroups, monkeypatch):
    """With several runs for each, in which the later programs of a block begin late, by idle rows, or by long ones."""
    monkeypatch.setattr(plans, "_MULTIPROCESSORS", 1)
    plan = plans.Plan(16, window=4, warpgroups=warpgroups, run=size)
    lengths, slots = [0, 0, 4, 4, 0, 6, 1], [5, 0, 4, -1, 1, 2, 3]
    args = make(lengths, (1, 3, 16, 16), slots, pool="bfloat16", fresh=(2,), first=1, extra=2)
    check_forward(args, *run(args, plan, interpret=INTERPRET))


def check_forward(args, out, pool):
    reference = oracle.recurrence(*args)
    budget = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 5e-4}
    live = oracle.owners(args[4], args[5], args[3].shape[0], args[0].shape[0]) > 0
    assert_zero(np.asarray(out)[~live])
    assert_close(np.asarray(out)[live], reference[0][live], budget[args[0].dtype.name])
    written = written_slots(args)
    assert_close(np.asarray(pool)[written], reference[1][written], budget[pool.dtype.name])
    rest = np.setdiff1d(np.arange(pool.shape[0]), written)
    assert_same_bits(np.asarray(pool)[rest], np.asarray(args[3])[rest])


def written_slots(args):
    bounds = oracle.row_bounds(args[5], args[0].shape[0])
    slots = zip(np.asarray(args[4]), bounds, strict=True)
    return [int(s) for s, (lo, hi) in slots if lo < hi and 0 <= s < args[3].shape[0]]


@pytest.mark.parametrize(
    ("ring_dtype", "window", "padding", "num_key_heads"),
    [("float32", 4, 0, 1), ("float32", 4, 1, 2), ("bfloat16", 16, 3, 1), ("float32", 0, 1, 1)],
)
def test_verify(ring_dtype, window, padding, num_key_heads):
    """Windows of 1, 2, RING_LEN and RING_LEN + 1 tokens, a padding row, a padding ring slot."""
    ring_len = 9
    lengths, slots = [1, 2, ring_len, ring_len + 1, 2], [4, 2, 0, 1, -1]
    args = make(lengths, (num_key_heads, 2 * num_key_heads, 16, 16), slots, tokens="float32", fresh=(1,))
    ring = jnp.full((4, num_key_heads, ring_len, 16 + 2 * 17 + padding), jnp.nan, ring_dtype)
    ring_slots = jnp.asarray([2, 3, 9, 0, 1], jnp.int32)
    pool, records = jax.new_ref(args[3]), jax.new_ref(ring)
    plan = plans.Plan(16, window=window, warpgroups=1, run=2 * num_key_heads if window == 4 else 1)
    out = forward.run_rows(args[:3], args[4:], pool, records, ring_slots, plan=plan, interpret=INTERPRET)
    pool, records = jax.freeze(pool), jax.freeze(records)
    expected_out, expected_pool = run(args, plan)
    # XLA on a CPU fuses the two programs differently; on a GPU they agree bit for bit.
    assert_close(out, expected_out, 1e-6)
    assert_close(pool[1], expected_pool[1], 1e-6)
    others = np.array([0, 2, 3, 4, 5])
    assert_same_bits(np.asarray(pool)[others], np.asarray(args[3])[others])
    _, reference, _ = oracle.verify_ring(*args[:4], ring, args[4], ring_slots, *args[5:])
    records = np.asarray(records).astype(np.float64)
    assert (np.isnan(records) == np.isnan(reference)).all()
    budget = 2e-6 if ring_dtype == "float32" else 4e-3
    assert_close(np.nan_to_num(records), np.nan_to_num(reference), budget)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
def test_verify_of_many_rows(pool):
    """So many that the second program of a block begins late."""
    batch = 1100
    args = make([4] * batch, (1, 2, 64, 64), list(range(batch)), pool=pool, fresh=(1, 700))
    ring = jnp.zeros((batch, 1, 4, 64 + 2 * 65), jnp.float32)

    def verified(args, ring):
        state, records = jax.new_ref(args[3]), jax.new_ref(ring)
        return forward.run_rows(args[:3], args[4:], state, records, args[4])

    def by_token(args):
        return forward.run_rows(args[:3], args[4:], jax.new_ref(args[3]), plan=plans.Plan(64))

    assert_same_bits(jax.jit(verified)(args, ring), jax.jit(by_token)(args))


def test_verify_is_served_as_the_forward_is():
    args = make([1, 2], (1, 1, 16, 16), [1, 0])
    ring = jnp.zeros((2, 1, 2, 33), jnp.float32)
    out, records, pool = verify.verify_ring(*args[:4], ring, args[4], args[4], *args[5:], interpret=INTERPRET)
    assert_close(out, run(args)[0], 3e-3)
    assert_same_bits(pool, args[3])
    assert_same_bits(np.asarray(records)[:, 0, 0, :16], np.asarray(args[0][[1, 0], 16:32]).astype(np.float32))


@pytest.mark.parametrize("last", [-(2**31), 2**31 - 1])
def test_offsets_whose_distance_overflows(last):
    """Tokens in no row are zeroed, however far away the offsets are."""
    args = list(make([3, 2, 4, 15], (1, 1, 16, 16), [1, 0, 2, 3], tokens="float32"))
    args[5] = jnp.asarray([0, 0, 3, 9, last], jnp.int32)
    args[0] = args[0].at[9:].set(jnp.nan) if last < 0 else args[0]
    out, pool = recurrence(*args, interpret=INTERPRET)
    check_forward(tuple(args), out, pool)


def shapes(num_tokens, batch, heads, *, tokens="bfloat16", pool="float32"):
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


def test_verify_of_single_tokens_lowers():
    """Many rows of one token: what takes the forward through shared memory must not take the verify there."""
    args = shapes(128, 128, (16, 32, 128, 128))
    ring = jax.ShapeDtypeStruct((129, 16, 8, 386), jnp.float32)
    lowered(verify.verify_ring, (*args[:4], ring, args[4], args[4], *args[5:]))


def lowered(function, args):
    donated = [n for n, a in enumerate(args) if len(a.shape) == 4]
    traced = jax.jit(function, donate_argnums=donated).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "size",
    [
        (1, 1, (16, 32, 128, 128)),
        (128, 128, (16, 32, 128, 128)),
        (2048, 2048, (48, 48, 16, 16)),
        (8192, 1, (16, 32, 128, 128)),
        (64, 4, (2, 6, 240, 48)),
        (64, 64, (2, 6, 80, 256)),
    ],
    ids=str,
)
def test_forward_lowers_in_place(size, pool):
    text = lowered(recurrence, shapes(*size, pool=pool))
    assert text.count("mosaic_gpu_v2") == text.count("griddepcontrol.wait") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 1


@pytest.mark.parametrize(
    ("batch", "pool", "stays"),
    [
        (8, "float32", None),
        (32, "float32", "0.5000"),
        (64, "float32", None),
        (32, "bfloat16", None),
        (64, "bfloat16", "0.5000"),
    ],
)
def test_states_keep_their_lines_until_they_are_overwritten(batch, pool, stays):
    """Of states that are somewhat more than the cache holds, a share stays for the next call."""
    text = lowered(recurrence, shapes(batch, batch, (16, 32, 128, 128), pool=pool))
    if pool == "float32":
        assert "createpolicy.fractional.L2::evict_last.b64 $0, 1.0000" in text
    else:
        assert ("prefetch.global.L2::evict_last" in text) == (stays is not None)
    stores = f"L2::evict_normal.L2::evict_first.b64 $0, {stays}" if stays else "L2::evict_normal.b64 $0, 1.0000"
    assert set(re.findall(r"L2::evict_normal[^;]*", text)) == {stores}


@pytest.mark.parametrize(
    ("batch", "value_heads", "pool", "run"),
    [
        (8, 32, "bfloat16", 1),
        (32, 32, "bfloat16", 2),
        (48, 32, "float16", 2),
        (48, 16, "float16", 1),
        (64, 32, "bfloat16", 1),
        (32, 32, "float32", 1),
    ],
)
def test_two_tiles_in_turn_if_they_are_in_the_cache(batch, value_heads, pool, run):
    """More tiles than fit at once, no more than the cache holds, and a second one of the key head."""
    dtypes = jnp.dtype("bfloat16"), jnp.dtype(pool)
    plan = plans.plan_rows(batch, batch, 16, value_heads, 128, 128, dtypes, False)
    assert plan.rows
    assert plan.run == run


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("pool", DTYPES)
@pytest.mark.parametrize("tokens", DTYPES)
@pytest.mark.parametrize("group", [2, 1024])
def test_shared_memory_suffices(group, tokens, pool, records):
    """Every served head dim gets a plan that fits into a thread block's shared memory, whatever the batch."""
    num_key_heads = 16 if group == 2 else 1
    for key_dim in range(16, 257, 16):
        for value_dim in (16, 48, 64, 128, 240, 256):
            for num_tokens, batch in ((1, 1), (16, 16), (8, 1), (64, 16), (8192, 1), (8192, 8), (262144, 64)):
                dtypes = jnp.dtype(tokens), jnp.dtype(pool)
                plan = plans.plan_rows(
                    num_tokens, batch, num_key_heads, num_key_heads * group, key_dim, value_dim, dtypes, records
                )
                if plan.window:
                    assert plans.shared_bytes(plan, key_dim, value_dim, group, dtypes, records) <= 232448
                elif plan.rows:
                    assert not records
                    # Its sums take 8 rows of float32, each for the keys and for the queries.
                    assert key_dim * plan.tile * dtypes[1].itemsize + (3 * key_dim + 16 * plan.tile) * 4 < 55_000


@pytest.mark.parametrize(
    ("size", "pool"),
    [
        ((8192, 8, (16, 32, 128, 128)), "float32"),
        ((8192, 1, (16, 32, 128, 128)), "float32"),
        ((256, 64, (16, 32, 256, 256)), "float32"),
        ((8192, 64, (16, 32, 256, 256)), "float32"),
        ((8192, 64, (2, 2, 16, 256)), "bfloat16"),
    ],
    ids=str,
)
def test_float32_tokens_lower(size, pool):
    args = shapes(*size, tokens="float32", pool=pool)
    lowered(recurrence, args)
    batch, (nk, nv, key_dim, value_dim) = size[1:]
    ring = jax.ShapeDtypeStruct((batch, nk, 8, key_dim + nv // nk * (value_dim + 1)), jnp.float32)
    lowered(verify.verify_ring, (*args[:4], ring, args[4], args[4], *args[5:]))


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3, 5, 8])
def test_verify_lowers_with_any_number_of_value_heads(group, pool):
    for batch in (2, 64):
        args = shapes(4 * batch, batch, (2, 2 * group, 64, 32), pool=pool)
        ring = jax.ShapeDtypeStruct((batch, 2, 8, 64 + group * 33), jnp.float32)
        lowered(verify.verify_ring, (*args[:4], ring, args[4], args[4], *args[5:]))


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
def test_verify_lowers_in_place(pool):
    args = shapes(256, 64, (16, 32, 128, 128), pool=pool)
    ring = jax.ShapeDtypeStruct((65, 16, 8, 386), jnp.float32)
    text = lowered(verify.verify_ring, (*args[:4], ring, args[4], args[4], *args[5:]))
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2


@pytest.mark.parametrize(
    ("tokens", "batch", "records", "pool", "kilobytes"),
    [
        (1, 1, False, "float32", 90),
        (128, 128, False, "float32", 150),
        (128, 128, False, "bfloat16", 240),
        (32, 32, False, "bfloat16", 270),
        (8192, 1, False, "float32", 480),
        (256, 64, True, "float32", 270),
        (256, 64, True, "bfloat16", 290),
    ],
)
def test_programs_stay_short(tokens, batch, records, pool, kilobytes):
    """The time of a first call follows the operations that a kernel is written with: a third more would show."""
    args = shapes(tokens, batch, (16, 32, 128, 128), pool=pool)
    if records:
        ring = jax.ShapeDtypeStruct((65, 16, 8, 386), jnp.float32)
        text = lowered(verify.verify_ring, (*args[:4], ring, args[4], args[4], *args[5:]))
    else:
        text = lowered(recurrence, args)
    assert len(text) < 1000 * kilobytes
