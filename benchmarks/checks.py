"""A result against the NumPy float64 oracle of the tests, on a sample that costs less than a second or two.

Rows, heads and value columns are independent of one another, so the oracle runs on some rows, and for long rows on some
columns of some heads. A library hands over its results as two functions, so that only the sample leaves the device.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from benchmarks.cases import Case, Inputs
from tests import oracle

SAMPLED_ROWS = 8
LONG_ROW = 8  # tokens from which on only columns are sampled, but of a verify, whose records belong to whole heads
SAMPLED_COLUMNS = 32
SAMPLED_CHANNELS = 64


@dataclasses.dataclass
class Error:
    """Relative error `norm(x - reference) / norm(reference)`, collected over parts."""

    distance: float = 0.0
    norm: float = 0.0

    def add(self, value, reference) -> None:
        value, reference = oracle.exact(value), np.asarray(reference)
        assert value.shape == reference.shape, (value.shape, reference.shape)
        self.distance += float(np.sum((value - reference) ** 2))
        self.norm += float(np.sum(reference**2))

    @property
    def relative(self) -> float:
        return float(np.sqrt(self.distance / self.norm)) if self.norm else float(np.sqrt(self.distance))


@dataclasses.dataclass(frozen=True)
class Results:
    """What a library computed.

    Attributes:
        tokens: `(token slice, channel slice) -> [tokens, channels]`: outputs, of several layers one below the other.
        state: `row of the pool -> its new contents`.
        ring_row: `row of the ring -> its new contents`, of a verify.
    """

    tokens: Callable
    state: Callable
    ring_row: Callable | None = None


def spread(count: int, total: int) -> list[int]:
    """At most `count` of `range(total)`, evenly spread, the first and the last among them."""
    return sorted({int(i) for i in np.linspace(0, total - 1, min(count, total))})


def assert_written(out: np.ndarray, groups: int) -> None:
    """Every output is finite, and no token has a head (`groups` a token) that is all zeros."""
    size = out.dtype.itemsize
    exponent, magnitude = {2: (0x7F80, 0x7FFF), 4: (0x7F800000, 0x7FFFFFFF)}[size]
    bits = np.ascontiguousarray(out).view(f"u{size}") & magnitude
    assert not (bits >= exponent).any(), "an output is not finite"
    assert bits.reshape(len(out), groups, -1).any(axis=-1).all(), "an output was not written"


def sampled(case: Case, inputs: Inputs, results: Results) -> Callable[[], tuple[float, float]]:
    """Fetches the sample. The function that is returned runs the oracle and gives the errors of `(outputs, states)`."""
    if case.operation == "state_fold":
        return _fold(case, inputs, results)
    if case.operation == "conv1d":
        return _conv1d(case, inputs, results)
    if case.operation == "recurrence" and max(case.lengths) >= LONG_ROW:
        return _columns(case, inputs, results)
    return _rows(case, inputs, results)


def _rows(case: Case, inputs: Inputs, results: Results):
    everything = slice(None)
    layers = inputs.slot_idx[None] if inputs.row_ids is None else inputs.row_ids
    # Rows of every layer: of several, they lie less than a layer apart.
    sample = spread(max(SAMPLED_ROWS, 2 * len(layers)), layers.size)
    parts = []
    for layer, b in (divmod(i, case.batch_size) for i in sample):
        tokens = slice(int(inputs.offsets[b]), int(inputs.offsets[b + 1]))
        below = layer * case.num_tokens
        out = results.tokens(slice(below + tokens.start, below + tokens.stop), everything)
        slot = int(layers[layer, b])
        ring = results.ring_row(int(inputs.ring_row_ids[b])) if results.ring_row else None
        parts.append((tokens, slot, out, results.state(slot), ring))

    def errors():
        outputs, states = Error(), Error()
        for tokens, slot, out, state, ring in parts:
            rows = inputs.tokens[tokens], inputs.decay[tokens], inputs.beta[tokens]
            pool_before, offsets = inputs.pool[slot][None], [0, tokens.stop - tokens.start]
            if ring is None:
                reference, pool = oracle.recurrence(*rows, pool_before, [0], offsets)
            else:
                ring_before = np.full((1, *ring.shape), np.nan)
                reference, new_ring, pool = oracle.verify_ring(*rows, pool_before, ring_before, [0], [0], offsets)
                states.add(ring, new_ring[0])
            outputs.add(out, reference)
            states.add(state, pool[0])
        return outputs.relative, states.relative

    return errors


def _columns(case: Case, inputs: Inputs, results: Results):
    heads = case.heads
    kd, vd = heads.key_head_dim, heads.value_head_dim
    width = min(SAMPLED_COLUMNS, vd)
    rows = spread(2, case.batch_size)
    # Two samples: the first columns of the first value head, and the last columns of the last one.
    parts = []
    for b, head, column in ((rows[0], 0, 0), (rows[-1], heads.num_value_heads - 1, vd - width)):
        tokens, slot = slice(int(inputs.offsets[b]), int(inputs.offsets[b + 1])), int(inputs.slot_idx[b])
        out = results.tokens(tokens, slice(head * vd + column, head * vd + column + width))
        columns = slice(column, column + width)
        parts.append((tokens, slot, head, columns, out, results.state(slot)[head][:, columns]))

    def errors():
        outputs, states = Error(), Error()
        for tokens, slot, head, columns, out, state in parts:
            key_head = head // heads.group_size
            key_dim = heads.num_key_heads * kd
            first_value = 2 * key_dim + head * vd + columns.start
            fused = np.concatenate(
                [
                    inputs.tokens[tokens, key_head * kd : (key_head + 1) * kd],
                    inputs.tokens[tokens, key_dim + key_head * kd : key_dim + (key_head + 1) * kd],
                    inputs.tokens[tokens, first_value : first_value + width],
                ],
                axis=1,
            )
            decay, beta = (x[tokens, head : head + 1] for x in (inputs.decay, inputs.beta))
            pool = inputs.pool[slot, head][:, columns][None, None]
            reference, new = oracle.recurrence(fused, decay, beta, pool, [0], [0, len(fused)])
            outputs.add(out, reference)
            states.add(state, new[0, 0])
        return outputs.relative, states.relative

    return errors


def _fold(case: Case, inputs: Inputs, results: Results):
    sample = [divmod(i, case.batch_size) for i in spread(4, case.num_layers * case.batch_size)]
    parts = [(layer, b, results.state(int(inputs.row_ids[layer, b]))) for layer, b in sample]

    def errors():
        states = Error()
        for layer, b, state in parts:
            pool = inputs.pool[inputs.row_ids[layer, b]][None]
            ring = inputs.ring[inputs.ring_row_ids[layer, b]][None]
            states.add(state, oracle.state_fold(pool, ring, [[0]], [[0]], inputs.num_accepted[b : b + 1])[0])
        return 0.0, states.relative

    return errors


def _conv1d(case: Case, inputs: Inputs, results: Results):
    channels = np.array(spread(SAMPLED_CHANNELS, case.heads.conv_dim))
    parts = []
    for b in spread(SAMPLED_ROWS, case.batch_size):
        tokens, slot = slice(int(inputs.offsets[b]), int(inputs.offsets[b + 1])), int(inputs.slot_idx[b])
        parts.append((tokens, slot, results.tokens(tokens, slice(None))[:, channels], results.state(slot)[channels]))

    def errors():
        outputs, states = Error(), Error()
        for tokens, slot, out, state in parts:
            x, window = inputs.tokens[tokens][:, channels], inputs.pool[slot][channels][None]
            weight = inputs.weight[channels]
            reference, new = oracle.conv1d(x, weight, window, [0], [0, len(x)], activation="silu")
            outputs.add(out, reference)
            states.add(state, new[0])
        return outputs.relative, states.relative

    return errors
