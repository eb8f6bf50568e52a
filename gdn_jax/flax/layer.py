"""The Gated DeltaNet layer as a Flax NNX module."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import spmd
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from gdn_jax import (
    gated_delta_conv1d_fwd,
    gated_delta_gates,
    gated_delta_recurrence_fwd,
    gated_delta_recurrence_verify_ring,
    gated_delta_ring_record_elements,
)
from gdn_jax._checks import Arguments
from gdn_jax.flax import hf
from gdn_jax.flax.cache import GatedDeltaCache, HeldCache
from gdn_jax.flax.config import GatedDeltaNetConfig
from gdn_jax.recurrence import Algorithm, Precision
from gdn_jax.sharding import fused_channel_order

HEAD_AXIS = "heads"
"""The axis in the parameters' sharding metadata; `nnx.logical_axis_rules` maps it to a mesh axis."""


class GatedDeltaNet(nnx.Module):
    """A Gated DeltaNet layer: projections, convolution, gated delta rule, gated norm, projection.

    The architecture is that of Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2
    with Delta Rule" (2024), in the form of Qwen3-Next and Qwen3.5, whose weights `load_hf` takes.

        layer = GatedDeltaNet(config, rngs=nnx.Rngs(0))
        y = layer(x)                                         # [B, T, hidden]
        cache = layer.init_cache(max_slots)
        y, cache = layer(x, cache, slot_idx=..., input_row_offsets=...)      # ragged [T, hidden]

    Parameters carry the axis name "heads" as sharding metadata wherever a dimension runs over heads
    or head-major channels. Created under a mesh that has the axis (or with `nnx.logical_axis_rules`
    that map it to one), they are sharded at once.

    Args:
        config: sizes of the layer.
        rngs: the stream `params` initialises the parameters. The gates start as in Mamba-2: decay
            rates `exp(A_log)` uniform over 1..16, step sizes `softplus(dt_bias)` log-uniform over
            0.001..0.1.
        dtype: dtype of the computation and of the output; None promotes input and parameters. The
            gates, the norm and the states while they are computed are float32 in any case.
        param_dtype: dtype of the parameters, except A_log and dt_bias: one number a head each, kept
            in float32 because the decay is an exponential of an exponential of them.
        head_shards: in how many shards of heads the fused channels of `in_proj_qkv` and `conv_weight` are ordered. 1
            is the order `[Q | K | V]`. On a mesh, choose the size of the axis that the heads are split over: each
            device then holds the `[Q | K | V]` of its own heads, and nothing but the sum of the output is communicated;
            with 1 the fused rows are gathered in every call. An axis that is not explicit is only known as long as its
            mesh is in force (`jax.set_mesh`). `load_hf` and `to_hf` reorder.
        algorithm, precision, implementation: passed to the operations, see
            `gated_delta_recurrence_fwd`.

    Raises:
        ValueError: head_shards does not divide num_key_heads, or the mesh axis that "heads" maps to has a size that
            does not.
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        head_shards: int = 1,
        algorithm: Algorithm = "auto",
        precision: Precision | None = None,
        implementation: str | None = None,
    ):
        c = config
        if head_shards < 1 or c.num_key_heads % head_shards:
            raise ValueError(f"head_shards is {head_shards}, must divide num_key_heads = {c.num_key_heads}")
        self.config = c
        self.head_axis = _head_axis()
        mesh = jax.sharding.get_abstract_mesh()
        if self.head_axis in mesh.axis_names and c.num_key_heads % mesh.shape[self.head_axis]:
            raise ValueError(
                f"num_key_heads is {c.num_key_heads}, must be a multiple of {mesh.shape[self.head_axis]}, the size of "
                f"the mesh axis {self.head_axis!r} over which the heads are split"
            )
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.head_shards = head_shards
        self.algorithm: Algorithm = algorithm
        self.precision: Precision | None = precision
        self.implementation = implementation

        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        to_heads = functools.partial(linear, c.hidden_size, kernel_metadata=_sharded(None, HEAD_AXIS))
        self.in_proj_qkv = to_heads(c.conv_dim)
        self.in_proj_z = to_heads(c.value_dim)
        self.in_proj_b = to_heads(c.num_value_heads)
        self.in_proj_a = to_heads(c.num_value_heads)
        self.out_proj = linear(c.value_dim, c.hidden_size, kernel_metadata=_sharded(HEAD_AXIS, None))
        bound = c.conv_kernel_size**-0.5
        self.conv_weight = nnx.Param(
            jax.random.uniform(rngs.params(), (c.conv_dim, c.conv_kernel_size), param_dtype, -bound, bound),
            **_sharded(HEAD_AXIS, None),
        )
        heads = (c.num_value_heads,)
        rate = jax.random.uniform(rngs.params(), heads, jnp.float32, 1.0, 16.0)
        self.A_log = nnx.Param(jnp.log(rate), **_sharded(HEAD_AXIS))
        step = jnp.exp(jax.random.uniform(rngs.params(), heads, jnp.float32, np.log(1e-3), np.log(1e-1)))
        # The inverse of softplus, in a form that keeps its accuracy for small steps.
        self.dt_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)), **_sharded(HEAD_AXIS))
        self.norm_weight = nnx.Param(jnp.ones((c.value_head_dim,), param_dtype))

    @property
    def channel_order(self) -> np.ndarray:
        """`[conv_dim]`: which channel of `[Q | K | V]` each stored channel is."""
        c = self.config
        geometry = (c.num_key_heads, c.num_value_heads, c.key_head_dim, c.value_head_dim)
        return fused_channel_order(*geometry, head_shards=self.head_shards)

    def init_cache(self, max_slots: int, *, state_dtype: Any = jnp.float32, conv_dtype: Any = None) -> GatedDeltaCache:
        """Pools of zeros for `max_slots` requests.

        Args:
            max_slots: rows of the pools. For layers that share them, slots times layers; see
                `layer_slots`.
            state_dtype: dtype of the recurrent states: float32, bfloat16 or float16.
            conv_dtype: dtype of the convolution windows; None is the dtype of the computation.
        """
        c = self.config
        axis = self._explicit_head_axis()
        if conv_dtype is None:
            conv_dtype = self.param_dtype if self.dtype is None else self.dtype

        def zeros(shape, dtype):
            spec = PartitionSpec(None, axis) if axis is not None else None
            return jnp.zeros((max_slots, *shape), dtype, out_sharding=spec)

        return GatedDeltaCache(
            conv_state=zeros((c.conv_dim, c.conv_kernel_size - 1), conv_dtype),
            recurrent_state=zeros((c.num_value_heads, c.key_head_dim, c.value_head_dim), state_dtype),
        )

    def init_ring(self, ring_rows: int, ring_len: int, *, dtype: Any = jnp.float32) -> jax.Array:
        """A ring of records for `verify`: `[ring_rows, num_key_heads, ring_len, record_stride]`.

        Args:
            ring_rows: how many requests one verify may hold, times layers where layers share the
                ring.
            ring_len: the longest window whose commit may be deferred.
            dtype: float32, or bfloat16, with which a fold is no longer exact to the bit.
        """
        c = self.config
        group = c.num_value_heads // c.num_key_heads
        stride = gated_delta_ring_record_elements(c.key_head_dim, c.value_head_dim, group)
        axis = self._explicit_head_axis()
        spec = PartitionSpec(None, axis) if axis is not None else None
        return jnp.zeros((ring_rows, c.num_key_heads, ring_len, stride), dtype, out_sharding=spec)

    def __call__(
        self,
        x: ArrayLike,
        cache: GatedDeltaCache | HeldCache | None = None,
        *,
        slot_idx: ArrayLike | None = None,
        input_row_offsets: ArrayLike | None = None,
        has_initial_state: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        attention_mask: ArrayLike | None = None,
    ):
        """Apply the layer.

        Without a cache, to a batch of sequences, each from its beginning: `x [B, T, hidden]` gives
        `y [B, T, hidden]`. `lengths [B]` says how many tokens of each row are real (padding on the
        right), or `attention_mask [B, T]` which ones are (true or nonzero; padding on either side).
        Each row is as if alone, outputs at padding are zero, and what stands there has no
        influence. A zero of the mask between real tokens counts as a token of zeros, as in
        transformers.

        With a cache, to a ragged batch: `x [T, hidden]` gives `(y [T, hidden], cache)`, or `y`
        alone with a `HeldCache`. Row b is tokens `[input_row_offsets[b], input_row_offsets[b+1])`
        of the request whose state is in row `slot_idx[b]` of the pools: a prompt, the next piece of
        one, or one token of a decode, in any mixture. `has_initial_state[b]` False starts row b
        from zeros, whatever its slot holds. A slot outside the pools marks a padding row; outputs
        of padding rows and of tokens in no row are zero.

        Args:
            x: `[B, T, hidden]`, or `[T, hidden]` with a cache.
            cache: pools from `init_cache`.
            slot_idx: `[B]` int32 or uint32, required with a cache.
            input_row_offsets: `[B + 1]` int32 or uint32, required with a cache.
            has_initial_state: `[B]` bool; None continues every row from its slot.
            lengths: `[B]` int32.
            attention_mask: `[B, T]` bool, integer or float.

        Raises:
            ValueError, TypeError: an argument is missing, out of place, or has a wrong shape or
                dtype; the message names it.
        """
        ragged = {
            "slot_idx": slot_idx,
            "input_row_offsets": input_row_offsets,
            "has_initial_state": has_initial_state,
        }
        padding = {"lengths": lengths, "attention_mask": attention_mask}
        x = jnp.asarray(x)
        if cache is None:
            _refuse(ragged, "needs a cache")
            return self._batch(x, lengths, attention_mask)
        _refuse(padding, "is for calls without a cache; with one, rows are given by input_row_offsets")
        pools = cache.read() if isinstance(cache, HeldCache) else cache
        args, rows = self._ragged_arguments(x, pools, slot_idx, input_row_offsets)
        fresh = args.flags("has_initial_state", has_initial_state, args.sizes["batch_size"])
        y, pools = self._rows(x, pools, *rows, fresh)
        if isinstance(cache, HeldCache):
            cache.write(pools)
            return y
        return y, pools

    def verify(
        self,
        x: ArrayLike,
        cache: GatedDeltaCache,
        ring: jax.Array,
        *,
        slot_idx: ArrayLike,
        ring_slot_idx: ArrayLike,
        input_row_offsets: ArrayLike,
        has_initial_state: ArrayLike | None = None,
    ) -> tuple[jax.Array, GatedDeltaCache, jax.Array, jax.Array]:
        """Apply the layer to windows of draft tokens, and record what a commit of any prefix needs.

        Outputs are those of the call with a cache. The states stay as they are, except that a row
        longer than the ring commits its recurrent state itself; the convolution windows always
        stay. Once the accepted counts are known, `gdn_jax.serving.commit` brings both up to date,
        or `gated_delta_state_fold` and a convolution over the accepted rows of `conv_input` do.

        Args:
            x: `[T, hidden]`, ragged.
            cache: pools from `init_cache`.
            ring: from `init_ring`.
            slot_idx: `[B]` int32 or uint32: rows of the pools.
            ring_slot_idx: `[B]` int32 or uint32: rows of the ring; a foreign one records nothing.
            input_row_offsets: `[B + 1]` int32 or uint32.
            has_initial_state: `[B]` bool; None continues every row from its slot.

        Returns:
            `(y [T, hidden], cache, ring, conv_input [T, conv_dim])`: `conv_input` is what the
            convolution was applied to.

        Raises:
            ValueError, TypeError: as the call.
        """
        x = jnp.asarray(x)
        args, rows = self._ragged_arguments(x, cache, slot_idx, input_row_offsets)
        fresh = args.flags("has_initial_state", has_initial_state, args.sizes["batch_size"])
        qkv, gates, z = self._project(x)

        def mix(qkv, decay, beta, weight, conv_state, recurrent_state, ring, slots, ring_slots, offsets, fresh):
            conv, conv_state = self._conv(qkv, weight, conv_state, slots, offsets, fresh, write_state=False)
            out, ring, recurrent_state = gated_delta_recurrence_verify_ring(
                self._fused_channels(conv),
                decay,
                beta,
                recurrent_state,
                ring,
                slots,
                ring_slots,
                offsets,
                has_initial_state=fresh,
                implementation=self.implementation,
            )
            return out, conv_state, recurrent_state, ring

        out, conv_state, recurrent_state, ring = self._on_own_heads(mix, num_pools=3)(
            qkv,
            *gates,
            self.conv_weight[...],
            cache.conv_state,
            cache.recurrent_state,
            ring,
            rows[0],
            args.indices("ring_slot_idx", ring_slot_idx, ("batch_size",)),
            rows[1],
            fresh,
        )
        return self._output(out, z), GatedDeltaCache(conv_state, recurrent_state), ring, qkv

    def load_hf(self, state_dict: Mapping[str, Any], *, prefix: str | None = None) -> None:
        """Take the weights of a Hugging Face layer.

        Args:
            state_dict: names to NumPy, JAX or safetensors arrays (a file opened with `safe_open`
                will do). Qwen3.5 (`in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`) and
                Qwen3-Next (`in_proj_qkvz`, `in_proj_ba`) are told apart by the names.
            prefix: what stands before the names, as in "model.layers.0.linear_attn"; names without
                it are left alone. None finds the prefix of a dict that holds this layer and nothing
                else.

        Raises:
            ValueError: a weight is missing, unknown or mis-shaped; the message names it. The layer
                is then unchanged.
        """
        hf.load_hf(self, state_dict, prefix=prefix)

    def to_hf(self, *, layout: hf.Layout = "qwen3_5", prefix: str = "") -> dict[str, np.ndarray]:
        """The weights under their Hugging Face names and in its layout, in the parameters' dtypes.

        Args:
            layout: "qwen3_5" or "qwen3_next".
            prefix: put before every name, as in "model.layers.0.linear_attn".
        """
        return hf.to_hf(self, layout=layout, prefix=prefix)

    def _batch(self, x, lengths, attention_mask):
        """The call without a cache: the batch laid end to end, with padding as foreign rows."""
        args = Arguments("GatedDeltaNet")
        args.derive("hidden_size", self.config.hidden_size, "config")
        args.shape("x", x.shape, ("batch_size", "seq_len", "hidden_size"))
        batch_size, seq_len, hidden_size = x.shape
        first = jnp.zeros((batch_size,), jnp.int32)
        last = jnp.full((batch_size,), seq_len, jnp.int32)
        real = None
        if lengths is not None and attention_mask is not None:
            raise ValueError("GatedDeltaNet: lengths and attention_mask are given, must be one of them")
        if lengths is not None:
            last = jnp.clip(args.indices("lengths", lengths, ("batch_size",)), 0, seq_len)
            real = jnp.arange(seq_len) < last[:, None]
        if attention_mask is not None:
            args.shape("attention_mask", jnp.shape(attention_mask), ("batch_size", "seq_len"))
            real = jnp.asarray(attention_mask) != 0
            last = jnp.max(jnp.where(real, jnp.arange(1, seq_len + 1), 0), axis=1, initial=0)
            first = jnp.minimum(jnp.argmax(real, axis=1).astype(jnp.int32), last) if seq_len else first
        start = jnp.arange(batch_size, dtype=jnp.int32) * seq_len
        slots = jnp.arange(batch_size, dtype=jnp.int32)
        end = jnp.full((1,), batch_size * seq_len, jnp.int32)
        if real is None:
            offsets = jnp.concatenate([start, end])
        else:
            x = jnp.where(real[..., None], x, 0)
            # Every row is followed by one in a foreign slot, up to where the next one begins.
            bounds = jnp.stack([start + first, start + last], axis=1).astype(jnp.int32)
            offsets = jnp.concatenate([bounds.reshape(-1), end])
            slots = jnp.stack([slots, jnp.full_like(slots, -1)], axis=1).reshape(-1)
        pools = self.init_cache(batch_size)
        fresh = jnp.zeros(slots.shape, bool)
        y, _ = self._rows(x.reshape(-1, hidden_size), pools, slots, offsets, fresh)
        y = y.reshape(x.shape)
        return y if real is None else jnp.where(real[..., None], y, 0)

    def _ragged_arguments(self, x, cache, slot_idx, input_row_offsets):
        args = Arguments("GatedDeltaNet")
        c = self.config
        args.derive("hidden_size", c.hidden_size, "config")
        args.derive("conv_dim", c.conv_dim, "config")
        args.derive("conv_kernel_size - 1", c.conv_kernel_size - 1, "config")
        for dim in ("num_value_heads", "key_head_dim", "value_head_dim"):
            args.derive(dim, getattr(c, dim), "config")
        args.shape("x", x.shape, ("total_seq_len", "hidden_size"))
        args.shape(
            "cache.conv_state",
            cache.conv_state.shape,
            ("max_slots", "conv_dim", "conv_kernel_size - 1"),
        )
        args.shape(
            "cache.recurrent_state",
            cache.recurrent_state.shape,
            ("max_slots", "num_value_heads", "key_head_dim", "value_head_dim"),
        )
        if slot_idx is None or input_row_offsets is None:
            name = "slot_idx" if slot_idx is None else "input_row_offsets"
            raise ValueError(f"GatedDeltaNet: {name} is None, must be given with a cache")
        slot_idx = args.indices("slot_idx", slot_idx, ("batch_size",))
        args.derive("batch_size + 1", args.sizes["batch_size"] + 1, "slot_idx")
        offsets = args.offsets("input_row_offsets", input_row_offsets, ("batch_size + 1",), x.shape[0])
        return args, (slot_idx, offsets)

    def _rows(self, x, cache, slot_idx, input_row_offsets, fresh):
        qkv, gates, z = self._project(x)

        def mix(qkv, decay, beta, weight, conv_state, recurrent_state, slots, offsets, fresh):
            conv, conv_state = self._conv(qkv, weight, conv_state, slots, offsets, fresh, write_state=True)
            out, recurrent_state = gated_delta_recurrence_fwd(
                self._fused_channels(conv),
                decay,
                beta,
                recurrent_state,
                slots,
                offsets,
                has_initial_state=fresh,
                algorithm=self.algorithm,
                precision=self.precision,
                implementation=self.implementation,
            )
            return out, conv_state, recurrent_state

        out, conv_state, recurrent_state = self._on_own_heads(mix, num_pools=2)(
            qkv,
            *gates,
            self.conv_weight[...],
            cache.conv_state,
            cache.recurrent_state,
            slot_idx,
            input_row_offsets,
            fresh,
        )
        return self._output(out, z), GatedDeltaCache(conv_state, recurrent_state)

    def _project(self, x):
        # XLA for GPUs merges products with one common operand, by concatenating their weights in every call. What
        # comes out of a barrier counts as another operand. Only the narrow pair a, b is worth merging.
        narrow, for_qkv, for_z = jax.lax.optimization_barrier((x, x, x))
        a, b = self.in_proj_a(narrow), self.in_proj_b(narrow)
        gates = gated_delta_gates(a, b, self.A_log[...], self.dt_bias[...])
        return self.in_proj_qkv(for_qkv), gates, self.in_proj_z(for_z)

    def _conv(self, qkv, weight, conv_state, slots, offsets, fresh, *, write_state):
        return gated_delta_conv1d_fwd(
            qkv,
            weight,
            conv_state,
            slots,
            offsets,
            activation="silu",
            has_initial_state=fresh,
            write_state=write_state,
            implementation=self.implementation,
        )

    def _output(self, out, z):
        """Gated norm per value head, and the projection back to the hidden size."""
        c = self.config
        out = out.reshape(-1, c.num_value_heads, c.value_head_dim).astype(jnp.float32)
        mean_square = jnp.mean(out * out, axis=-1, keepdims=True)
        normed = out * jax.lax.rsqrt(mean_square + c.rms_norm_eps) * self.norm_weight[...].astype(jnp.float32)
        # The recurrence gives zeros for padding, but z comes from x, which may hold NaN there.
        gate = z.reshape(out.shape).astype(jnp.float32)
        gate = jnp.where((mean_square == 0) & ~jnp.isfinite(gate), 0.0, gate)
        gate = {"silu": nnx.silu, "sigmoid": nnx.sigmoid}[c.output_gate](gate)
        gated = (normed * gate).reshape(z.shape).astype(z.dtype)
        replicated = PartitionSpec() if self._explicit_head_axis() is not None else None
        return self.out_proj(gated, out_sharding=replicated)

    def _on_own_heads(self, mix, num_pools):
        """`mix`, run on a mesh by every device on the heads that it holds.

        Its arguments are tokens, decay, beta, weight, the pools, then what has no heads; its results the output and
        the pools.
        """
        mesh, axis = self._mesh_of_heads()
        if mesh is None or self.head_shards == 1 < mesh.shape[axis]:
            return mix
        if self.head_shards != mesh.shape[axis]:
            raise ValueError(
                f"GatedDeltaNet: head_shards is {self.head_shards}, must be 1 or {mesh.shape[axis]}, the size of the "
                f"mesh axis {axis!r} over which the parameters are split"
            )
        by_head = PartitionSpec(None, axis)
        pools = (by_head,) * num_pools

        def split(*arguments):
            in_specs = (*(by_head,) * 3, PartitionSpec(axis), *pools)
            in_specs += (PartitionSpec(),) * (len(arguments) - len(in_specs))
            return jax.shard_map(mix, mesh=mesh, in_specs=in_specs, out_specs=(by_head, *pools), check_vma=False)(
                *arguments
            )

        return split

    def _fused_channels(self, conv):
        """Rows in the order `[Q | K | V]`, which those of one shard have already."""
        c = self.config
        if conv.shape[-1] < c.conv_dim or self.head_shards == 1:
            return conv
        by_shard = conv.reshape(-1, self.head_shards, c.conv_dim // self.head_shards)
        ends = np.cumsum([c.key_dim, c.key_dim]) // self.head_shards
        blocks = jnp.split(by_shard, ends, axis=-1)
        return jnp.concatenate([block.reshape(conv.shape[0], -1) for block in blocks], axis=-1)

    def _explicit_head_axis(self):
        """The explicit mesh axis that the heads are split over, or None."""
        spec = jax.typeof(self.A_log.get_value()).sharding.spec
        return spec[0] if len(spec) else None

    def _mesh_of_heads(self):
        """The mesh and its axis that the heads are split over, or `(None, None)`.

        Types say so for an explicit axis. Of an automatic one they say nothing, so the mesh in force must have it.
        """
        axis = self._explicit_head_axis()
        if axis is not None:
            return jax.typeof(self.A_log.get_value()).sharding.mesh, axis
        mesh = jax.sharding.get_abstract_mesh()
        return (mesh, self.head_axis) if self.head_axis in mesh.auto_axes else (None, None)


def _head_axis() -> Any:
    """What the logical axis rules in force call the mesh axis of the heads."""
    return dict(spmd.get_logical_axis_rules()).get(HEAD_AXIS, HEAD_AXIS)


def _sharded(*axes: str | None) -> dict[str, Any]:
    """Sharding metadata of a parameter.

    Flax shards an annotated parameter as it is created, and refuses to create one outside a mesh.
    This one is only annotated where no mesh has the axis.
    """
    has_axis = _head_axis() in jax.sharding.get_abstract_mesh().axis_names
    return {"out_sharding": axes, "eager_sharding": has_axis and nnx.using_eager_sharding()}


def _refuse(arguments: Mapping[str, Any], reason: str) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"GatedDeltaNet: {name} is given, but {reason}")
