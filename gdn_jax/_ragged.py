"""Rows, slots and padding: the one place that decides what a valid row is.

Row `b` of a ragged batch spans tokens `[input_row_offsets[b], input_row_offsets[b+1])`, both clamped to `[0, T]`; where
the offsets decrease the row is empty. It owns pool row `slot_idx[b]`; a slot outside the pool is foreign, and its row
is padding.
"""

import jax
import jax.numpy as jnp


def row_bounds(input_row_offsets: jax.Array, total_seq_len: int) -> tuple[jax.Array, jax.Array]:
    """First token and length of every row: two int32 arrays `[batch_size]`."""
    offsets = jnp.clip(input_row_offsets, 0, total_seq_len)
    return offsets[:-1], jnp.maximum(offsets[1:] - offsets[:-1], 0)


def is_live(slot_idx: jax.Array, max_slots: int) -> jax.Array:
    """Whether each slot names a row of the pool; the others are foreign."""
    return (slot_idx >= 0) & (slot_idx < max_slots)


def read_rows(pool: jax.Array, slot_idx: jax.Array, read: jax.Array) -> jax.Array:
    """The named pool rows as float32 (one, or a batch of them); zeros, by selection, where `read` is false.

    `read` must be false for a foreign slot.
    """
    rows = pool.at[jnp.where(read, slot_idx, 0)].get(mode="clip").astype(jnp.float32)
    return jnp.where(read.reshape(*read.shape, *[1] * (pool.ndim - 1)), rows, 0.0)


def write_rows(pool: jax.Array, slot_idx: jax.Array, rows: jax.Array, write: jax.Array) -> jax.Array:
    """The pool with `rows` stored at the named slots where `write` is true; every other row keeps its bits."""
    # max_slots is out of bounds, so mode="drop" leaves those rows out of the scatter.
    target = jnp.where(write, slot_idx, pool.shape[0])
    return pool.at[target].set(rows.astype(pool.dtype), mode="drop")


def fold_rows(input_row_offsets: jax.Array, total_seq_len: int, *per_row: tuple[jax.Array, object]) -> list[jax.Array]:
    """Offsets `[lanes, B+1]` of separate batches of T tokens as those of one batch of `lanes * T` tokens.

    With them come the `(values [lanes, B], padding)` of their rows. Between two lanes stands one more row, of padding,
    for the tokens of neither: the flat batch has `lanes * (B+1) - 1` rows. It must hold no token of a lane's row. Where
    offsets do not begin with their least or end with their greatest, it would: the lanes then stand in reverse order,
    so that the rows between them are empty, and the tokens of no row lie outside all rows.
    """
    lanes = input_row_offsets.shape[0]
    lane = jnp.arange(lanes, dtype=jnp.int32)
    offsets = jnp.clip(input_row_offsets, 0, total_seq_len)
    in_order = jnp.all((offsets[:, :1] <= offsets) & (offsets <= offsets[:, -1:]))
    order = jnp.where(in_order, lane, lane[::-1])
    offsets += lane[:, None] * total_seq_len
    padded = [jnp.pad(values, ((0, 0), (0, 1)), constant_values=padding) for values, padding in per_row]
    return [offsets[order].reshape(-1), *(values[order].reshape(-1)[:-1] for values in padded)]


def fold_slots(slot_idx: jax.Array, max_slots: int) -> jax.Array:
    """Slots `[lanes, ..]` of separate pools as slots of the pools laid end to end; foreign ones become -1."""
    lanes = slot_idx.shape[0]
    first = jnp.arange(lanes, dtype=jnp.int32).reshape(-1, *[1] * (slot_idx.ndim - 1)) * max_slots
    return jnp.where(is_live(slot_idx, max_slots), slot_idx + first, -1)


def token_rows(starts: jax.Array, lengths: jax.Array, total_seq_len: int) -> jax.Array:
    """The row `[T]` of each token: the last one that holds it, -1 if none does."""
    token = jnp.arange(total_seq_len)[:, None]
    inside = (token >= starts[None]) & (token < (starts + lengths)[None])
    return jnp.max(jnp.where(inside, jnp.arange(starts.shape[0])[None], -1), axis=1)
