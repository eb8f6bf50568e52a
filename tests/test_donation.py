"""A donated pool is updated in its own buffer: read off the compiled program, and off the buffer's address."""

# Arguments are NumPy arrays as often as JAX arrays, and come unpacked from tuples.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from tests import shapes
from tests.conftest import IMPLEMENTATIONS
from tests.harness import assert_same_bits, devices, memory_of

HEADS = shapes.HEADS["small"]
LENGTHS = (3, 0, 1, 2)
NUM_TOKENS, BATCH, RING_LEN = sum(LENGTHS), len(LENGTHS), 4
OFFSETS = jnp.asarray(shapes.row_offsets(LENGTHS))
STEPS = 3
# Two sizes of pool, so far apart that anything of the pool's size stands out from everything else.
FEW_SLOTS, MANY_SLOTS = 64, 1024


def slots(max_slots):
    """The last slot, the first one, a foreign one, and one between."""
    return jnp.array([max_slots - 1, 0, -1, max_slots // 2], jnp.int32)


def problem(operation, implementation, max_slots, algorithm="recurrent"):
    """``(function of the pools, the pools)``; the function returns the new pools in their order."""
    tokens = [jnp.asarray(array) for array in shapes.trained_tokens(HEADS, NUM_TOKENS, seed=70)]
    x, weight, bias, windows = map(jnp.asarray, shapes.conv_inputs(HEADS, NUM_TOKENS, max_slots))
    rows = slots(max_slots)

    def pool():
        return jnp.zeros(HEADS.state_shape(max_slots)).at[rows[:2]].set(0.5)

    def ring():
        return jnp.full(HEADS.ring_shape(max_slots, RING_LEN), 0.25)

    named = {"implementation": implementation}

    def recurrence(pool):
        return gdn_jax.gated_delta_recurrence_fwd(*tokens, pool, rows, OFFSETS, algorithm=algorithm, **named)[1:]

    def verify_ring(pool, ring):
        _, ring, pool = gdn_jax.gated_delta_recurrence_verify_ring(*tokens, pool, ring, rows, rows, OFFSETS, **named)
        return pool, ring

    accepted = jnp.array([3, 1, 2, 9], jnp.int32)
    # The program holds this ring as a constant: as many rows whatever the pool has.
    full_ring, ring_rows = jnp.full(HEADS.ring_shape(BATCH, RING_LEN), 0.25), jnp.array([[3, 0, -1, 2]], jnp.int32)

    def state_fold(pool):
        return (gdn_jax.gated_delta_state_fold(pool, full_ring, rows[None], ring_rows, accepted, **named),)

    def conv1d(windows):
        return gdn_jax.gated_delta_conv1d_fwd(x, weight, windows, rows, OFFSETS, bias=bias, activation="silu", **named)[
            1:
        ]

    return {
        "recurrence": lambda: (recurrence, (pool(),)),
        "verify_ring": lambda: (verify_ring, (pool(), ring())),
        "state_fold": lambda: (state_fold, (pool(),)),
        "conv1d": lambda: (conv1d, (windows,)),
    }[operation]()


def loops(run):
    """The same update once, and several times inside the loops of JAX."""

    def scan(*pools):
        return jax.lax.scan(lambda carry, _: (tuple(run(*carry)), None), pools, length=STEPS)[0]

    def fori_loop(*pools):
        return jax.lax.fori_loop(0, STEPS, lambda _, carry: tuple(run(*carry)), pools)

    return {"jit": run, "scan": scan, "fori_loop": fori_loop}


CASES = [
    *(
        pytest.param((operation, *entry.values, "recurrent"), marks=entry.marks, id=f"{operation}-{entry.id}")
        for operation in ("recurrence", "verify_ring", "state_fold", "conv1d")
        for entry in IMPLEMENTATIONS
    ),
    pytest.param(("recurrence", "xla", "chunked"), id="recurrence-xla-chunked"),
]


@pytest.fixture(params=CASES)
def case(request):
    operation, name, algorithm = request.param
    return lambda max_slots: problem(operation, name, max_slots, algorithm)


@pytest.mark.parametrize("loop", ["jit", "scan", "fori_loop"])
def test_donated_pools_are_updated_in_place(case, loop):
    temporaries = {}
    for max_slots in (FEW_SLOTS, MANY_SLOTS):
        run, pools = case(max_slots)
        program = loops(run)[loop]
        expected = pools
        for _ in range(1 if loop == "jit" else STEPS):
            expected = tuple(run(*expected))
        compiled = jax.jit(program, donate_argnums=tuple(range(len(pools)))).lower(*pools).compile()
        text, memory = compiled.as_text(), memory_of(compiled)

        # Every pool is an input that shares its buffer with the output of the same position.
        aliases = re.search(r"input_output_alias=\{(.*?) \}", text)
        assert aliases is not None, "the program aliases nothing"
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)", aliases[0])
        assert {(int(out or 0), int(argument)) for out, argument in pairs} == {(i, i) for i in range(len(pools))}
        pool_bytes = sum(pool.nbytes for pool in pools)
        assert memory.alias_size_in_bytes == pool_bytes
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 64

        # No copy of a pool anywhere, and nothing of its size among the temporaries.
        for pool in pools:
            shape = f"{pool.shape}".strip("()").replace(" ", "")
            copies = re.findall(rf"f32\[{shape}\]\S* copy(?:-start)?\(", text)
            assert not copies, f"{len(copies)} copies of the pool [{shape}]"
        temporaries[max_slots] = memory.temp_size_in_bytes
        if max_slots == MANY_SLOTS:
            assert memory.temp_size_in_bytes < min(pool.nbytes for pool in pools) // 4

        pointers = [pool.unsafe_buffer_pointer() for pool in pools]
        results = compiled(*pools)
        assert [result.unsafe_buffer_pointer() for result in results] == pointers
        assert all(pool.is_deleted() for pool in pools)
        for result, reference in zip(results, expected, strict=True):
            assert_same_bits(result, reference)
    assert temporaries[MANY_SLOTS] == temporaries[FEW_SLOTS]


def test_time_does_not_grow_with_the_pool(case):
    """A pass over the large pool takes tens of milliseconds, a step that touches the named slots a fraction of one."""
    seconds = {}
    for max_slots in (FEW_SLOTS, 4 * MANY_SLOTS):
        run, pools = case(max_slots)
        step = jax.jit(run, donate_argnums=tuple(range(len(pools))))
        pools = jax.block_until_ready(step(*pools))
        seconds[max_slots] = np.inf
        for _ in range(20):
            start = time.perf_counter()
            pools = jax.block_until_ready(step(*pools))
            seconds[max_slots] = min(seconds[max_slots], time.perf_counter() - start)
    # The best of twenty is hundredths of a millisecond; what grew with the pool would be 64 times as much.
    assert seconds[4 * MANY_SLOTS] < 3 * seconds[FEW_SLOTS] + 1e-3, seconds


@pytest.mark.parametrize("check_vma", [True, False])
def test_donated_pools_inside_shard_map(implementation, check_vma):
    """Each device updates its part of the pool in its own buffer."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices(2))
    spec = jax.sharding.PartitionSpec(None, "heads")
    whole = jax.sharding.PartitionSpec()
    qkv, decay, beta = map(jnp.asarray, shapes.trained_tokens(HEADS, NUM_TOKENS, seed=71))
    rows = slots(MANY_SLOTS)

    def call(qkv, decay, beta, pool, rows, offsets):
        return gdn_jax.gated_delta_recurrence_fwd(
            qkv, decay, beta, pool, rows, offsets, algorithm="recurrent", implementation=implementation.name
        )

    split = jax.shard_map(
        call, mesh=mesh, in_specs=(spec,) * 4 + (whole,) * 2, out_specs=(spec, spec), check_vma=check_vma
    )
    pool = jax.device_put(jnp.zeros(HEADS.state_shape(MANY_SLOTS)), jax.NamedSharding(mesh, spec))
    arrays = (qkv, decay, beta, pool, rows, OFFSETS)
    compiled = jax.jit(split, donate_argnums=3).lower(*arrays).compile()
    memory = memory_of(compiled)
    assert memory.alias_size_in_bytes == pool.nbytes // 2
    assert memory.temp_size_in_bytes < pool.nbytes // 8
    pointers = [shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards]
    placed = [jax.device_put(x, s) for x, s in zip(arrays, compiled.input_shardings[0], strict=True)]
    placed[3] = pool
    _, new_pool = compiled(*placed)
    assert [shard.data.unsafe_buffer_pointer() for shard in new_pool.addressable_shards] == pointers


def test_without_donation_the_pool_is_left_alone(implementation):
    """The functions are pure: what was passed keeps its values."""
    pool = jnp.asarray(shapes.state_pool(HEADS, 8))
    before = np.array(pool)
    tokens = map(jnp.asarray, shapes.trained_tokens(HEADS, NUM_TOKENS, seed=72))
    rows = jnp.array([7, 0, -1, 4], jnp.int32)
    _, new_pool = gdn_jax.gated_delta_recurrence_fwd(*tokens, pool, rows, OFFSETS, implementation=implementation.name)
    assert_same_bits(pool, before)
    assert not np.array_equal(new_pool[7], before[7])


def test_a_speculative_round_in_one_program(implementation):
    """Verify and fold in one program, pool and ring donated: two buffers in, the same two out."""
    name = implementation.name
    tokens = [jnp.asarray(array) for array in shapes.trained_tokens(HEADS, NUM_TOKENS, seed=73)]
    rows = slots(MANY_SLOTS)

    def round_(pool, ring, accepted):
        out, ring, pool = gdn_jax.gated_delta_recurrence_verify_ring(
            *tokens, pool, ring, rows, rows, OFFSETS, implementation=name
        )
        pool = gdn_jax.gated_delta_state_fold(pool, ring, rows[None], rows[None], accepted, implementation=name)
        return pool, ring, out

    pool = jnp.zeros(HEADS.state_shape(MANY_SLOTS))
    ring = jnp.zeros(HEADS.ring_shape(MANY_SLOTS, RING_LEN))
    accepted = jnp.array([2, 1, 1, 2], jnp.int32)
    compiled = jax.jit(round_, donate_argnums=(0, 1)).lower(pool, ring, accepted).compile()
    memory = memory_of(compiled)
    assert memory.alias_size_in_bytes == pool.nbytes + ring.nbytes
    assert memory.temp_size_in_bytes < ring.nbytes // 2
    pointers = pool.unsafe_buffer_pointer(), ring.unsafe_buffer_pointer()
    new_pool, new_ring, _ = compiled(pool, ring, accepted)
    assert (new_pool.unsafe_buffer_pointer(), new_ring.unsafe_buffer_pointer()) == pointers
