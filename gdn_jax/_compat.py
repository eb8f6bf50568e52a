"""What differs between the supported versions of JAX, and the names that are only needed because of it."""

import jax
from jax.sharding import ManualAxisType


def varying_axes(x) -> frozenset:
    """The manual mesh axes over which an array or tracer varies inside `jax.shard_map`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def strip_varying_axes(ctx):
    """A lowering context whose operand and result types no longer say over which mesh axes they vary."""

    def strip(avals):
        return [a.update(manual_axis_type=ManualAxisType()) for a in avals]

    return ctx.replace(avals_in=strip(ctx.avals_in), avals_out=strip(ctx.avals_out))


def automatic_devices(ctx) -> int:
    """Over how many devices XLA splits the program that is lowered; 1 inside `jax.shard_map`, which has done it."""
    return getattr(ctx.module_context.axis_context, "num_devices", 1)


def device_kind(platform: str) -> str | None:
    """What kind of device a program for `platform` will run on, as far as can be known while it is lowered.

    An abstract device on the mesh in force says so for a program that is compiled elsewhere; otherwise the first local
    device of the platform, if there is one.
    """
    abstract_device = jax.sharding.get_abstract_mesh().abstract_device
    if abstract_device is not None:
        return abstract_device.device_kind
    try:
        return jax.devices(platform)[0].device_kind
    except RuntimeError:  # no such backend here
        return None
