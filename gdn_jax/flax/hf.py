"""Hugging Face weights of a Gated DeltaNet layer, in and out.

transformers stores each projection as `[out, in]`, in one of two layouts:

- Qwen3.5: `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`, each head-major, as this package has them.
- Qwen3-Next: `in_proj_qkvz` and `in_proj_ba`, interleaved per key head: for every key head its query
  channels, its key channels, the values of its group, the gates z of its group; and b, then a.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax.flax.config import GatedDeltaNetConfig

if TYPE_CHECKING:
    from gdn_jax.flax.layer import GatedDeltaNet

Layout = Literal["qwen3_5", "qwen3_next"]

# Weights with a row for every channel of the fused [Q | K | V] rows.
_FUSED = ("in_proj_qkv.weight", "conv1d.weight")


def expected_shapes(config: GatedDeltaNetConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that transformers has for this layer."""
    c = config
    projections = {
        "qwen3_5": {
            "in_proj_qkv.weight": c.conv_dim,
            "in_proj_z.weight": c.value_dim,
            "in_proj_b.weight": c.num_value_heads,
            "in_proj_a.weight": c.num_value_heads,
        },
        "qwen3_next": {
            "in_proj_qkvz.weight": c.conv_dim + c.value_dim,
            "in_proj_ba.weight": 2 * c.num_value_heads,
        },
    }
    if layout not in projections:
        raise ValueError(f"layout is {layout!r}, must be one of {tuple(projections)}")
    return {name: (out, c.hidden_size) for name, out in projections[layout].items()} | {
        "conv1d.weight": (c.conv_dim, 1, c.conv_kernel_size),
        "A_log": (c.num_value_heads,),
        "dt_bias": (c.num_value_heads,),
        "norm.weight": (c.value_head_dim,),
        "out_proj.weight": (c.hidden_size, c.value_dim),
    }


def load_hf(layer: "GatedDeltaNet", state_dict: Mapping[str, Any], *, prefix: str | None = None) -> None:
    """See `GatedDeltaNet.load_hf`."""
    names = list(state_dict.keys())
    if prefix is None:
        prefix = _only_prefix(names)
    elif prefix and not prefix.endswith("."):
        prefix += "."
    found = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    layout: Layout = "qwen3_next" if found & {"in_proj_qkvz.weight", "in_proj_ba.weight"} else "qwen3_5"
    shapes = expected_shapes(layer.config, layout)
    if missing := [name for name in shapes if name not in found]:
        raise ValueError(f"state_dict lacks {_listed(missing, prefix)} of the {layout} layout")
    if extra := sorted(found - set(shapes)):
        raise ValueError(f"state_dict has {_listed(extra, prefix)}, which no {layout} Gated DeltaNet layer has")
    # An open safetensors file is not a mapping: it reads one tensor at a time, by this method.
    read = getattr(state_dict, "get_tensor", None) or state_dict.__getitem__
    weights = {name: np.asarray(read(prefix + name)) for name in shapes}
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"{prefix}{name} has shape {weights[name].shape}, must be {shape}")

    if layout == "qwen3_next":
        weights |= _split_per_key_head(layer.config, weights)
    for name, parameter in _parameters(layer).items():
        weight = weights[name]
        if name in _FUSED:
            weight = weight[layer.channel_order]
        if name == "conv1d.weight":
            weight = weight[:, 0]
        elif weight.ndim == 2:
            weight = weight.T
        value = parameter.get_value()
        # A cast on the host, so that a float32 copy of a large weight never reaches the device.
        weight = weight.astype(value.dtype)
        sharding = getattr(value, "sharding", None)
        parameter.set_value(jnp.asarray(weight) if sharding is None else jax.device_put(weight, sharding))


def to_hf(layer: "GatedDeltaNet", *, layout: Layout = "qwen3_5", prefix: str = "") -> dict[str, np.ndarray]:
    """See `GatedDeltaNet.to_hf`."""
    shapes = expected_shapes(layer.config, layout)
    weights = {}
    for name, parameter in _parameters(layer).items():
        weight = np.asarray(parameter.get_value())
        if name == "conv1d.weight":
            weight = weight[:, None]
        elif weight.ndim == 2:
            weight = weight.T
        if name in _FUSED:
            weight = weight[np.argsort(layer.channel_order)]
        weights[name] = weight
    if layout == "qwen3_next":
        weights |= _join_per_key_head(layer.config, weights)
    if prefix and not prefix.endswith("."):
        prefix += "."
    return {prefix + name: np.ascontiguousarray(weights[name]) for name in shapes}


def _parameters(layer: "GatedDeltaNet") -> dict[str, nnx.Param]:
    """The layer's parameters by their Qwen3.5 names."""
    return {
        "in_proj_qkv.weight": layer.in_proj_qkv.kernel,
        "in_proj_z.weight": layer.in_proj_z.kernel,
        "in_proj_b.weight": layer.in_proj_b.kernel,
        "in_proj_a.weight": layer.in_proj_a.kernel,
        "conv1d.weight": layer.conv_weight,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "norm.weight": layer.norm_weight,
        "out_proj.weight": layer.out_proj.kernel,
    }


def _only_prefix(names: list[str]) -> str:
    """What stands before the names of a state dict that holds one layer."""
    prefixes = [name.removesuffix("A_log") for name in names if f".{name}".endswith(".A_log")]
    if not prefixes:
        raise ValueError("state_dict lacks A_log: it holds no Gated DeltaNet layer")
    if len(prefixes) > 1:
        raise ValueError(
            f"state_dict holds {len(prefixes)} Gated DeltaNet layers: give prefix, one of "
            f"{_listed([repr(p) for p in prefixes], '')}"
        )
    (prefix,) = prefixes
    if strangers := [name for name in names if not name.startswith(prefix)]:
        raise ValueError(
            f"state_dict has {_listed(strangers, '')} beside the layer at {prefix!r}: "
            f"give prefix={prefix!r} to load that layer out of a larger model"
        )
    return prefix


def _listed(names: list[str], prefix: str) -> str:
    shown = ", ".join(prefix + name for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _split_per_key_head(config: GatedDeltaNetConfig, weights) -> dict[str, np.ndarray]:
    nk, group = config.num_key_heads, config.num_value_heads // config.num_key_heads
    kd, values = config.key_head_dim, group * config.value_head_dim

    def split(weight, sizes):
        per_head = weight.reshape(nk, sum(sizes), -1)
        parts = np.split(per_head, np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(-1, weight.shape[1]) for part in parts]

    q, k, v, z = split(weights["in_proj_qkvz.weight"], (kd, kd, values, values))
    b, a = split(weights["in_proj_ba.weight"], (group, group))
    return {
        "in_proj_qkv.weight": np.concatenate([q, k, v]),
        "in_proj_z.weight": z,
        "in_proj_b.weight": b,
        "in_proj_a.weight": a,
    }


def _join_per_key_head(config: GatedDeltaNetConfig, weights) -> dict[str, np.ndarray]:
    def join(parts):
        return np.concatenate(
            [part.reshape(config.num_key_heads, -1, config.hidden_size) for part in parts], axis=1
        ).reshape(-1, config.hidden_size)

    q, k, v = np.split(weights["in_proj_qkv.weight"], [config.key_dim, 2 * config.key_dim])
    return {
        "in_proj_qkvz.weight": join([q, k, v, weights["in_proj_z.weight"]]),
        "in_proj_ba.weight": join([weights["in_proj_b.weight"], weights["in_proj_a.weight"]]),
    }
