"""Wrong arguments: raised before anything runs, naming the argument, what it is and what it must be."""

# Arguments are NumPy arrays as often as JAX arrays, and come unpacked from tuples.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from tests import shapes
from tests.harness import assert_same_bits

HEADS = shapes.Heads(2, 4, 16, 8)
NUM_TOKENS, BATCH, MAX_SLOTS = 6, 3, 5
RING_ROWS, RING_LEN, LAYERS = 4, 3, 2
NV, KD, VD = HEADS.num_value_heads, HEADS.key_head_dim, HEADS.value_head_dim

TOKEN_ARGUMENTS = {
    "qkv_conv_output": np.ones((NUM_TOKENS, HEADS.conv_dim), np.float32),
    "decay_per_token": np.ones((NUM_TOKENS, NV), np.float32),
    "beta_per_token": np.ones((NUM_TOKENS, NV), np.float32),
    "recurrent_state": np.ones(HEADS.state_shape(MAX_SLOTS), np.float32),
    "slot_idx": np.arange(BATCH, dtype=np.int32),
    "input_row_offsets": np.array([0, 1, 4, 6], np.int32),
    "has_initial_state": np.ones(BATCH, bool),
}
RING = {"ring": np.zeros(HEADS.ring_shape(RING_ROWS, RING_LEN), np.float32)}
ARGUMENTS = {
    "gated_delta_conv1d_fwd": {
        "qkv_input_ragged": np.ones((NUM_TOKENS, HEADS.conv_dim), np.float32),
        "conv_weight": np.ones((HEADS.conv_dim, 4), np.float32),
        "conv_state": np.ones(HEADS.conv_state_shape(MAX_SLOTS), np.float32),
        "slot_idx": TOKEN_ARGUMENTS["slot_idx"],
        "input_row_offsets": TOKEN_ARGUMENTS["input_row_offsets"],
        "bias": np.ones(HEADS.conv_dim, np.float32),
        "has_initial_state": TOKEN_ARGUMENTS["has_initial_state"],
    },
    "gated_delta_gates": {
        "a": np.ones((2, NUM_TOKENS, NV), np.float32),
        "b": np.ones((2, NUM_TOKENS, NV), np.float32),
        "A_log": np.ones(NV, np.float32),
        "dt_bias": np.ones(NV, np.float32),
    },
    "gated_delta_recurrence_fwd": TOKEN_ARGUMENTS,
    "gated_delta_recurrence_verify_ring": {
        **TOKEN_ARGUMENTS,
        **RING,
        "ring_slot_idx": np.arange(BATCH, dtype=np.int32),
    },
    "gated_delta_state_fold": {
        "recurrent_state": TOKEN_ARGUMENTS["recurrent_state"],
        **RING,
        "row_ids": np.zeros((LAYERS, BATCH), np.int32),
        "ring_row_ids": np.zeros((LAYERS, BATCH), np.int32),
        "num_accepted": np.ones(BATCH, np.int32),
        "has_initial_state": TOKEN_ARGUMENTS["has_initial_state"],
    },
    "gated_delta_rule": {
        "q": np.ones((1, NUM_TOKENS, HEADS.num_key_heads, KD), np.float32),
        "k": np.ones((1, NUM_TOKENS, HEADS.num_key_heads, KD), np.float32),
        "v": np.ones((1, NUM_TOKENS, NV, VD), np.float32),
        "g": np.zeros((1, NUM_TOKENS, NV), np.float32),
        "beta": np.ones((1, NUM_TOKENS, NV), np.float32),
        "initial_state": np.ones(HEADS.state_shape(BATCH), np.float32),
        "cu_seqlens": np.array([0, 1, 4, 6], np.int32),
    },
}
OPERATIONS = tuple(ARGUMENTS)
EVERY_ARGUMENT = [(operation, name) for operation in OPERATIONS for name in ARGUMENTS[operation]]


def call(operation, changes, **options):
    arguments = {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in (ARGUMENTS[operation] | changes).items()
    }
    return getattr(gdn_jax, operation)(**arguments, **options)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_arguments_of_these_tests_are_right(operation):
    jax.block_until_ready(call(operation, {}))


@pytest.mark.parametrize(("operation", "name"), EVERY_ARGUMENT)
@pytest.mark.parametrize("extra", [-1, 1])
def test_wrong_rank(operation, name, extra):
    right = ARGUMENTS[operation][name]
    wrong = right[None] if extra == 1 else right[0]
    blamed = "(a|b)" if (operation, name) == ("gated_delta_gates", "a") else name
    with pytest.raises(ValueError, match=rf"{operation}: {blamed} has shape .* must be ") as error:
        call(operation, {name: wrong})
    if blamed == name:
        assert str(wrong.shape) in str(error.value)


# Dimensions that no other argument shares: how many slots, ring rows and positions, the padding of a
# record, and how many tokens are convolved.
FREE = {
    ("recurrent_state", 0),
    ("conv_state", 0),
    ("ring", 0),
    ("ring", 2),
    ("ring", 3),
    ("qkv_input_ragged", 0),
}


@pytest.mark.parametrize(("operation", "name"), EVERY_ARGUMENT)
def test_wrong_size_of_every_dimension(operation, name):
    right = ARGUMENTS[operation][name]
    for axis in range(right.ndim):
        wrong = np.concatenate([right, np.take(right, [0], axis)], axis)
        changes = {name: wrong}
        if (name, axis) in FREE:
            call(operation, changes)
            continue
        with pytest.raises(ValueError, match=r"has shape .* must be ") as error:
            call(operation, changes)
        # Two arguments disagree. The message blames one of them, with its shape, and says why.
        message = str(error.value)
        blamed = re.search(rf"{operation}: (\w+) has shape (\(.*?\))", message)
        assert blamed is not None, message
        assert blamed[2] == str((ARGUMENTS[operation] | changes)[blamed[1]].shape), message
        if (operation, name) != ("gated_delta_state_fold", "recurrent_state"):
            assert re.search(rf"\b{name}\b", message), f"axis {axis}: {message}"


@pytest.mark.parametrize(("operation", "name"), EVERY_ARGUMENT)
def test_wrong_dtype(operation, name):
    right = ARGUMENTS[operation][name]
    wrong_dtypes = [np.complex64, np.int8]
    if right.dtype == np.float32:
        wrong_dtypes += [np.int32, bool]
        if name == "ring":
            wrong_dtypes += [np.float16]
    elif right.dtype == np.int32:
        wrong_dtypes += [np.float32, bool, np.uint16]
    else:
        wrong_dtypes += [np.float32, np.int32]
    for dtype in wrong_dtypes:
        wrong = right.astype(dtype)
        expected = rf"{operation}: {name} has dtype {np.dtype(dtype).name}, must be \w+"
        if (operation, name) == ("gated_delta_rule", "q"):
            expected = rf"{operation}: \w+ has dtype .*, must be \w+"
        with pytest.raises(TypeError, match=expected):
            call(operation, {name: wrong})


@pytest.mark.parametrize("name", ["k", "v"])
def test_the_rule_takes_one_dtype(name):
    wrong = ARGUMENTS["gated_delta_rule"][name].astype(np.float16)
    with pytest.raises(TypeError, match=f"{name} has dtype float16, must be float32"):
        call("gated_delta_rule", {name: wrong})


OPTIONAL = {"bias", "has_initial_state", "initial_state", "cu_seqlens"}


@pytest.mark.parametrize(("operation", "name"), EVERY_ARGUMENT)
@pytest.mark.parametrize("wrong", [None, "text", object()], ids=["None", "text", "object"])
def test_not_an_array(operation, name, wrong):
    if wrong is None and name in OPTIONAL:
        changes = {name: None}
        if name == "cu_seqlens":  # Without it the one row is one sequence, with one state.
            changes["initial_state"] = np.ones(HEADS.state_shape(1), np.float32)
        if name == "initial_state":
            changes["initial_state"] = None
        call(operation, changes)
        return
    with pytest.raises(TypeError, match=rf"{operation}: {name} is .*, must be an array"):
        call(operation, {name: wrong})


@pytest.mark.parametrize("conv_dim", [1, NV * VD, NV * VD + KD, HEADS.conv_dim - 1, NV * VD + 6 * KD])
@pytest.mark.parametrize("operation", ["gated_delta_recurrence_fwd", "gated_delta_recurrence_verify_ring"])
def test_fused_rows_that_do_not_work_out(operation, conv_dim):
    """No key head, half a key head, or 3 key heads for 4 value heads."""
    wrong = np.ones((NUM_TOKENS, conv_dim), np.float32)
    with pytest.raises(ValueError, match="qkv_conv_output has shape") as error:
        call(operation, {"qkv_conv_output": wrong})
    for needed in (str(wrong.shape), "num_value_heads", "key_head_dim", "value_head_dim"):
        assert needed in str(error.value)


@pytest.mark.parametrize("operation", ["gated_delta_recurrence_verify_ring", "gated_delta_state_fold"])
def test_a_record_that_does_not_fit(operation):
    shape = (RING_ROWS, HEADS.num_key_heads, RING_LEN, HEADS.record_elements - 1)
    with pytest.raises(ValueError, match="ring has shape") as error:
        call(operation, {"ring": np.ones(shape, np.float32)})
    assert str(shape) in str(error.value)
    assert str(HEADS.record_elements) in str(error.value)


@pytest.mark.parametrize("num_key_heads", [0, 3])
def test_ring_heads_that_do_not_divide(num_key_heads):
    shape = (RING_ROWS, num_key_heads, RING_LEN, HEADS.record_elements)
    with pytest.raises(ValueError, match="ring has shape") as error:
        call("gated_delta_state_fold", {"ring": np.ones(shape, np.float32)})
    assert "num_value_heads" in str(error.value)


@pytest.mark.parametrize("kernel_size", [0, 1])
def test_a_convolution_of_fewer_than_two_taps(kernel_size):
    weight = np.ones((HEADS.conv_dim, kernel_size), np.float32)
    state = np.ones((MAX_SLOTS, HEADS.conv_dim, max(kernel_size - 1, 0)), np.float32)
    with pytest.raises(ValueError, match=r"conv_weight has shape .* at least 2"):
        call("gated_delta_conv1d_fwd", {"conv_weight": weight, "conv_state": state})


def test_value_heads_that_are_no_multiple_of_the_key_heads():
    changes = {name: np.ones((1, NUM_TOKENS, 3, KD), np.float32) for name in ("q", "k")}
    with pytest.raises(ValueError, match=r"v has shape .* multiple of q's 3"):
        call("gated_delta_rule", changes)


def test_packed_sequences_in_a_batch_of_two():
    changes = {name: np.repeat(ARGUMENTS["gated_delta_rule"][name], 2, 0) for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match=r"q has shape \(2, .* when cu_seqlens is given"):
        call("gated_delta_rule", changes)


@pytest.mark.parametrize(
    ("operation", "option", "wrong"),
    [
        ("gated_delta_conv1d_fwd", "activation", "relu"),
        ("gated_delta_conv1d_fwd", "activation", True),
        ("gated_delta_conv1d_fwd", "write_state", "no"),
        ("gated_delta_conv1d_fwd", "write_state", None),
        ("gated_delta_recurrence_fwd", "algorithm", "parallel"),
        ("gated_delta_recurrence_fwd", "algorithm", None),
        ("gated_delta_recurrence_fwd", "precision", "high"),
        ("gated_delta_recurrence_fwd", "precision", True),
        ("gated_delta_rule", "algorithm", "parallel"),
        *((operation, "implementation", "cudnn") for operation in OPERATIONS),
        *((operation, "implementation", "auto") for operation in OPERATIONS),
    ],
)
def test_unknown_options(operation, option, wrong):
    with pytest.raises(ValueError, match=f"{option} is {wrong!r}, must be one of ") as error:
        call(operation, {}, **{option: wrong})
    for known in {"implementation": ("mosaic_gpu", "triton", "xla", "scan")}.get(option, ()):
        assert known in str(error.value)


@pytest.mark.parametrize(
    ("sizes", "error", "name"),
    [
        ((0, 16, 1), ValueError, "key_head_dim"),
        ((16, -1, 1), ValueError, "value_head_dim"),
        ((16, 16, 0), ValueError, "group_size"),
        ((16.0, 16, 1), TypeError, "key_head_dim"),
        ((16, "16", 1), TypeError, "value_head_dim"),
        ((16, 16, True), TypeError, "group_size"),
    ],
)
def test_ring_record_elements_of_no_shape(sizes, error, name):
    with pytest.raises(error, match=rf"{name} is .*, must be "):
        gdn_jax.gated_delta_ring_record_elements(*sizes)


# --- implementations that cannot serve


def test_scan_has_no_chunked_form():
    for operation in ("gated_delta_recurrence_fwd", "gated_delta_rule"):
        with pytest.raises(NotImplementedError, match=r"scan: .*chunked"):
            call(operation, {}, implementation="scan", algorithm="chunked")


KERNELS = [
    "gated_delta_conv1d_fwd",
    "gated_delta_recurrence_fwd",
    "gated_delta_recurrence_verify_ring",
    "gated_delta_state_fold",
]


@pytest.mark.parametrize("operation", KERNELS)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_gpu_kernel_on_a_cpu(operation, jitted):
    """Refused with the reason, also when the refusal waits for the platform to be known."""
    heads = shapes.Heads(2, 4, 64, 64)
    arguments = {
        name: np.zeros(shape, value.dtype)
        for name, value in ARGUMENTS[operation].items()
        for shape in [
            {
                "qkv_conv_output": (NUM_TOKENS, heads.conv_dim),
                "recurrent_state": heads.state_shape(MAX_SLOTS),
                "ring": heads.ring_shape(RING_ROWS, RING_LEN),
            }.get(name, value.shape)
        ]
    }
    function = getattr(gdn_jax, operation)
    on_cpu = {name: jax.device_put(value, jax.devices("cpu")[0]) for name, value in arguments.items()}

    def run(arguments):
        return function(**arguments, implementation="mosaic_gpu")

    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: .*cpu"):
        (jax.jit(run) if jitted else run)(on_cpu)


def test_gates_have_no_kernel():
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        call("gated_delta_gates", {}, implementation="mosaic_gpu")


@pytest.mark.parametrize("dim", [8, 24, 272])
def test_head_dims_that_the_gpu_kernels_refuse(dim):
    """Before anything runs, on any platform: the reason is in the shapes."""
    for heads in (shapes.Heads(1, 2, dim, 64), shapes.Heads(1, 2, 64, dim)):
        tokens = shapes.trained_tokens(heads, NUM_TOKENS)
        pool = shapes.state_pool(heads, MAX_SLOTS)
        rows, offsets = np.arange(BATCH, dtype=np.int32), TOKEN_ARGUMENTS["input_row_offsets"]
        with pytest.raises(NotImplementedError, match=rf"mosaic_gpu: .*{dim}"):
            gdn_jax.gated_delta_recurrence_fwd(*tokens, pool, rows, offsets, implementation="mosaic_gpu")
        ring = np.zeros(heads.ring_shape(RING_ROWS, RING_LEN), np.float32)
        with pytest.raises(NotImplementedError, match=rf"mosaic_gpu: .*{dim}"):
            gdn_jax.gated_delta_recurrence_verify_ring(
                *tokens, pool, ring, rows, rows, offsets, implementation="mosaic_gpu"
            )
        with pytest.raises(NotImplementedError, match=rf"mosaic_gpu: .*{dim}"):
            gdn_jax.gated_delta_state_fold(pool, ring, rows[None], rows[None], rows, implementation="mosaic_gpu")


# --- what is taken although it is no JAX array


def test_numpy_and_lists_are_arrays_too():
    """NumPy's default integers must not be cut down to int32 by wrapping."""
    tokens = {name: TOKEN_ARGUMENTS[name] for name in list(TOKEN_ARGUMENTS)[:4]}
    expected = gdn_jax.gated_delta_recurrence_fwd(
        **tokens, slot_idx=np.array([3, -1, 0], np.int32), input_row_offsets=np.array([0, 1, 4, 6], np.int32)
    )
    for slots, offsets in (
        ([3, -1, 0], [0, 1, 4, 6]),
        (np.array([3, 2**32 + 1, 0]), np.array([-(2**40), 1, 4, 2**40])),
    ):
        values = gdn_jax.gated_delta_recurrence_fwd(**tokens, slot_idx=slots, input_row_offsets=offsets)
        for value, reference in zip(values, expected, strict=True):
            assert_same_bits(value, reference)
