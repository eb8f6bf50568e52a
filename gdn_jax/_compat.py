"""What differs between the supported versions of JAX, and the names that are only needed because of it."""

import importlib.util
import inspect

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
    return jax.devices(platform)[0].device_kind if has_local_device(platform) else None


def has_local_device(platform: str) -> bool:
    """Whether this process sees a device of the platform."""
    try:
        return bool(jax.devices(platform))
    except RuntimeError:  # no such backend here
        return False


def triton_call(kernel, operands, pools, out_types, *, grid, num_warps, num_stages, **constants):
    """Calls a `triton.jit` kernel through jax-triton: `(outputs, pools)`, the pools updated in place.

    The kernel's parameters are the operands (arrays and ints), the pools, the outputs, and for each pool one more that
    it must not use: jax-triton before 0.4 hands a kernel the pools once more, as the outputs that they also are there;
    from 0.4 on it takes them as Refs, and this is None. Products are never contracted into sums.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    options = {"kernel": kernel, "grid": grid, "num_warps": num_warps, "num_stages": num_stages, **constants}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        refs = [jax.new_ref(pool) for pool in pools]
        given = len(operands) + len(pools) + len(out_types)
        options |= dict.fromkeys(kernel.arg_names[given : given + len(pools)])
        outs = jax_triton.triton_call(
            *operands,
            *refs,
            out_type=tuple(out_types),
            backend_options={"enable_fp_fusion": False, "ptx_version": _ptx_version()},
            **options,
        )
        return list(outs), [jax.freeze(ref) for ref in refs]
    first = len(operands) - sum(isinstance(x, int) for x in operands)
    results = jax_triton.triton_call(
        *operands,
        *pools,
        out_shape=(*out_types, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)),
        input_output_aliases={first + i: len(out_types) + i for i in range(len(pools))},
        enable_fp_fusion=False,
        **options,
    )
    return list(results[: len(out_types)]), list(results[len(out_types) :])


def _ptx_version() -> int:
    """What XLA's assembler reads; left alone, Triton writes for its own, which may be newer."""
    return 90 if importlib.util.find_spec("jax_cuda13_plugin") else 87
