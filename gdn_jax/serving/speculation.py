"""The speculative step: verify draft tokens through all layers, then commit the accepted ones at once.

    pools = init_pools(layers[0], num_layers=len(layers), max_slots=64, max_batch_size=8, ring_len=8)

    window = Window(slot_idx, input_row_offsets, has_initial_state)
    for i, layer in enumerate(layers):                     # inside the model's forward
        y, pools, conv_input = verify(layer, x, pools, window, i)
        ...
    pools = commit(pools, window, conv_inputs, num_accepted)

A row is any number of tokens: one without drafts, one with drafts, a piece of a prompt. The verify leaves the states as
they are and records, in a ring, what each token would do to them; the commit applies the accepted prefix. A row longer
than the ring must be accepted whole, as a prompt is: it commits its recurrent state in the verify.

Everything is on the device, counts included: one program may hold verify, acceptance and commit. Inside `jax.jit`,
donate the pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from gdn_jax import gated_delta_conv1d_fwd, gated_delta_state_fold
from gdn_jax._checks import Arguments
from gdn_jax._ragged import fold_rows, is_live, row_bounds
from gdn_jax.flax import GatedDeltaCache, GatedDeltaNet, layer_slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeculativePools:
    """The pools that the Gated DeltaNet layers of a model share, and their ring. `init_pools` makes them.

    A step without drafts may use the same pools: call the layer with `pools.cache` and `layer_slots`.

    Attributes:
        cache: pools of `max_slots * num_layers` rows, laid out as `layer_slots` says.
        ring: `[max_batch_size * num_layers, num_key_heads, ring_len, record_stride]`, laid out the same way.
        num_layers: how many layers share them.
    """

    cache: GatedDeltaCache
    ring: Any
    num_layers: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """The ragged batch of one speculative step.

    Attributes:
        slot_idx: `[B]` int32 or uint32 slots; a foreign one is padding.
        input_row_offsets: `[B + 1]` int32 or uint32: row b is tokens `[offsets[b], offsets[b+1])`.
        has_initial_state: `[B]` bool: False for a row that starts from zeros; None: every row continues.
        ring_slot_idx: `[B]` int32 or uint32: where in the ring each row's records go; None is 0 to B - 1. A row with a
            foreign one cannot be committed unless it is longer than the ring.
    """

    slot_idx: Any
    input_row_offsets: Any
    has_initial_state: Any = None
    ring_slot_idx: Any = None

    def ring_slots(self, ring_rows: int) -> ArrayLike:
        """`ring_slot_idx`, or what stands for it where it is None, for a ring of so many rows a layer.

        Raises:
            ValueError: ring_slot_idx is None, and there are more rows than that.
        """
        if self.ring_slot_idx is not None:
            return self.ring_slot_idx
        batch_size = jnp.shape(self.slot_idx)[0]
        if batch_size > ring_rows:
            raise ValueError(
                f"Window: slot_idx has {batch_size} rows, must have at most max_batch_size = {ring_rows}, as the ring; "
                "give ring_slot_idx where not all of them need records"
            )
        return jnp.arange(batch_size, dtype=jnp.int32)


def init_pools(
    layer: GatedDeltaNet,
    *,
    num_layers: int,
    max_slots: int,
    max_batch_size: int,
    ring_len: int,
    state_dtype: Any = jnp.float32,
    conv_dtype: Any = None,
    ring_dtype: Any = jnp.float32,
) -> SpeculativePools:
    """Pools and ring of zeros.

    Args:
        layer: one of the layers; all must have its configuration and dtype.
        num_layers: how many layers share the pools.
        max_slots: how many requests the pools hold.
        max_batch_size: how many rows a step has at most.
        ring_len: the longest row whose commit waits for its accepted count; one more than the most drafts.
        state_dtype: dtype of the recurrent states: float32, bfloat16 or float16.
        conv_dtype: dtype of the convolution windows; None is the layer's dtype.
        ring_dtype: float32, or bfloat16, with which a commit no longer equals the plain step to the bit.
    """
    cache = layer.init_cache(max_slots * num_layers, state_dtype=state_dtype, conv_dtype=conv_dtype)
    ring = layer.init_ring(max_batch_size * num_layers, ring_len, dtype=ring_dtype)
    return SpeculativePools(cache=cache, ring=ring, num_layers=num_layers)


def verify(
    layer: GatedDeltaNet, x: ArrayLike, pools: SpeculativePools, window: Window, layer_idx: ArrayLike
) -> tuple[jax.Array, SpeculativePools, jax.Array]:
    """Apply one layer to the window; commits nothing but the recurrent states of rows longer than the ring.

    Args:
        layer: the layer.
        x: `[T, hidden]`, ragged.
        pools: from `init_pools`.
        window: the batch.
        layer_idx: which of the layers that share the pools, 0 to num_layers - 1; may be traced.

    Returns:
        `(y [T, hidden], pools, conv_input [T, conv_dim])`; `commit` wants the last of every layer.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it.
    """
    n = pools.num_layers
    y, cache, ring, conv_input = layer.verify(
        x,
        pools.cache,
        pools.ring,
        slot_idx=layer_slots(window.slot_idx, layer_idx, n, pools.cache.recurrent_state.shape[0]),
        ring_slot_idx=layer_slots(window.ring_slots(pools.ring.shape[0] // n), layer_idx, n, pools.ring.shape[0]),
        input_row_offsets=window.input_row_offsets,
        has_initial_state=window.has_initial_state,
    )
    return y, replace(pools, cache=cache, ring=ring), conv_input


def commit(
    pools: SpeculativePools,
    window: Window,
    conv_inputs: jax.Array | Sequence[jax.Array],
    num_accepted: ArrayLike,
) -> SpeculativePools:
    """Bring the states of all layers to the end of each row's accepted prefix.

    One `gated_delta_state_fold` folds every layer, and one pass of the convolution moves every layer's windows. With a
    float32 ring both are, bit for bit, what a call with `algorithm="recurrent"` leaves after the accepted tokens alone.

    Args:
        pools: as the verify of the last layer left them.
        window: the batch that was verified.
        conv_inputs: what `verify` returned for each layer in order, a sequence of `[T, conv_dim]` or one array
            `[num_layers, T, conv_dim]`.
        num_accepted: `[B]` int32 or uint32: how many tokens of each row stay, drafts or not, counted from its start;
            clamped to the row. 0 leaves the request as it was before the verify; if it was fresh, it is still fresh.
            A row longer than the ring stays whole, whatever its count.

    Raises:
        ValueError, TypeError: an argument is not as above; the message names it.
    """
    n, cache = pools.num_layers, pools.cache
    if len(conv_inputs) != n:
        raise ValueError(f"commit: conv_inputs has {len(conv_inputs)} layers, must have num_layers = {n}")
    total_seq_len = conv_inputs[0].shape[0]
    ring_rows, ring_len = pools.ring.shape[0] // n, pools.ring.shape[2]
    args = Arguments("commit")
    slot_idx = args.indices("slot_idx", window.slot_idx, ("batch_size",))
    ring_slots = args.indices("ring_slot_idx", window.ring_slots(ring_rows), ("batch_size",))
    args.derive("batch_size + 1", args.sizes["batch_size"] + 1, "slot_idx")
    offsets = args.offsets("input_row_offsets", window.input_row_offsets, ("batch_size + 1",), total_seq_len)
    fresh = args.flags("has_initial_state", window.has_initial_state, args.sizes["batch_size"])
    num_accepted = args.indices("num_accepted", num_accepted, ("batch_size",))
    # Where there are no records to fold, the window must not move either.
    num_accepted = jnp.where(is_live(ring_slots, ring_rows), num_accepted, 0)
    lengths = accepted_lengths(num_accepted, offsets, ring_len=ring_len, total_seq_len=total_seq_len)

    def rows(slots, pool):
        return jnp.stack([layer_slots(slots, i, n, pool.shape[0]) for i in range(n)])

    slots = rows(slot_idx, cache.recurrent_state)
    recurrent_state = gated_delta_state_fold(
        cache.recurrent_state, pools.ring, slots, rows(ring_slots, pools.ring), lengths, has_initial_state=fresh
    )

    # A convolution window depends on no weight and on no more than the last tokens that fill it.
    taps = cache.conv_state.shape[-1]
    token_idx, row_offsets = accepted_row_plan(lengths, offsets, last=taps, total_seq_len=total_seq_len)
    replayed = jnp.concatenate([layer[token_idx] for layer in conv_inputs])
    no_weight = jnp.pad(jnp.zeros_like(cache.conv_state[0]), ((0, 0), (0, 1)))
    offsets, slots, fresh = fold_rows(
        jnp.broadcast_to(row_offsets, (n, *row_offsets.shape)),
        token_idx.shape[0],
        (slots, -1),
        (jnp.broadcast_to(fresh, slots.shape), True),
    )
    _, conv_state = gated_delta_conv1d_fwd(
        replayed, no_weight, cache.conv_state, slots, offsets, has_initial_state=fresh, write_state=True
    )
    return replace(pools, cache=GatedDeltaCache(conv_state, recurrent_state))


def accepted_lengths(
    num_accepted: jax.Array, input_row_offsets: jax.Array, *, ring_len: int, total_seq_len: int
) -> jax.Array:
    """How many tokens of each row stay, `[B]` int32.

    That is `num_accepted`, held between 0 and the row's length; all tokens of a row longer than `ring_len`, whose
    recurrent state the verify has committed already.

    Args:
        num_accepted: `[B]` int32.
        input_row_offsets: `[B + 1]` int32.
        ring_len: records that a row of the ring holds.
        total_seq_len: T, the tokens of the batch.
    """
    _, length = row_bounds(input_row_offsets, total_seq_len)
    return jnp.where(length > ring_len, length, jnp.clip(num_accepted, 0, length))


def accepted_row_plan(
    lengths: jax.Array, input_row_offsets: jax.Array, *, last: int, total_seq_len: int
) -> tuple[jax.Array, jax.Array]:
    """Which tokens to replay: the last ones of each row's accepted prefix, packed into a ragged batch.

    Shapes depend on B and `last` alone, and the values stay on the device: a change of counts neither compiles anew nor
    waits for the host.

    Args:
        lengths: `[B]` int32, from `accepted_lengths`.
        input_row_offsets: `[B + 1]` int32: rows of the verified batch.
        last: at most how many tokens of each row to replay; a convolution window needs kernel_size - 1.
        total_seq_len: T, the tokens of the batch.

    Returns:
        `(token_idx [B * last], row_offsets [B + 1])`, int32: row b of the packed batch is the tokens
        `token_idx[row_offsets[b]:row_offsets[b+1]]` of the verified one. Entries past the last row are 0.
    """
    start, _ = row_bounds(input_row_offsets, total_seq_len)
    count = jnp.minimum(lengths, last)
    row_offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    place = jnp.arange(lengths.shape[0] * last, dtype=jnp.int32)
    # A binary search would be a chain of small kernels; B is small enough to compare with all rows in one.
    row = jnp.searchsorted(row_offsets[1:], place, side="right", method="compare_all")
    token = (start + lengths - count - row_offsets[:-1]).at[row].get(mode="clip") + place
    return jnp.where(place < row_offsets[-1], token, 0), row_offsets
