"""How an operation becomes a JAX primitive.

An `Operation` owns one `jax.extend.core.Primitive` and derives all of its rules from four facts about the operation:
its output types, its table of implementations, how the lanes of a `vmap` fold into more requests, and a
differentiable form in ordinary JAX operations.

The table is consulted when the program is lowered, once for each platform, so one traced program exports to several
platforms and takes the best implementation on each. A new backend is one more row.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec

from gdn_jax._compat import automatic_devices, device_kind, has_local_device, strip_varying_axes, varying_axes

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla", "scan")
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Implementation:
    """One row of an operation's table.

    Attributes:
        name: what a caller passes as `implementation=`.
        module: imported when the row is first consulted. It defines the operation's function, and `unsupported`, which
            takes the same arguments (abstract values will do) and returns why it cannot serve them, or None.
        platforms: where it runs; None means everywhere.
        device_kinds: what the name of the device must contain one of; None means any. A program that is lowered where
            no such device is in sight, and that names none, is taken to be for a fitting one.
        in_place: whether it updates its large arguments through aliases, which XLA must not fuse slices into, and
            which it cannot split over devices: it would gather the pools.
        package: what must be installed for its module to be imported, as it is named when imported and by pip.
        compiles_for_local_device: whether it can be lowered only where a device of the platform is in sight.
    """

    name: str
    module: str
    platforms: tuple[str, ...] | None = None
    device_kinds: tuple[str, ...] | None = None
    in_place: bool = False
    package: tuple[str, str] | None = None
    compiles_for_local_device: bool = False

    def unsupported(self, platform: str | None, avals, params) -> str | None:
        """Why this row cannot serve a call, or None. `platform` None asks about the call alone."""
        if platform is not None and self.platforms is not None and platform not in self.platforms:
            return f"runs on {' and '.join(self.platforms)}, and this program is for {platform}"
        if platform is not None and self.device_kinds is not None:
            kind = device_kind(platform)
            if kind is not None and not any(name in kind for name in self.device_kinds):
                return f"is built for {', '.join(self.device_kinds)}, and this program is for an {kind}"
        if platform is not None and self.compiles_for_local_device and not has_local_device(platform):
            return f"is compiled for the GPU that is in sight, and there is none for {platform}"
        if self.package is not None:
            name, distribution = self.package
            if importlib.util.find_spec(name) is None:
                return f"needs {distribution}, which is not installed: pip install {distribution}"
            if platform is not None:
                try:
                    importlib.import_module(name)
                except (ImportError, AttributeError) as error:  # it and what it builds on do not fit together
                    return f"needs a {distribution} that works, and it does not: {error}"
        return importlib.import_module(self.module).unsupported(*avals, **params)


def hopper_kernel(module: str) -> Implementation:
    """The row of a kernel in Pallas Mosaic GPU, which is compiled and tested for Hopper."""
    return Implementation("mosaic_gpu", module, ("cuda",), ("H100", "H200", "H800", "H20", "GH200"), in_place=True)


def triton_kernel(module: str) -> Implementation:
    """The row of a kernel in Triton, called through jax-triton."""
    return Implementation(
        "triton",
        module,
        ("cuda", "rocm"),
        in_place=True,
        package=("jax_triton", "jax-triton"),
        compiles_for_local_device=True,
    )


class Operation:
    """An operation of the package, callable on validated JAX arrays.

    Args:
        name: the primitive's name, and the name of the function in each implementation's module.
        public_name: the function that users call, for messages.
        out_avals: `(*avals, **params) -> [aval]`, made by `update` on operand avals so that sharding and varying axes
            carry through.
        implementations: the table, best first.
        batch: `(bind, lanes, args, is_batched) -> outputs`: `vmap` over `lanes` lanes, batched arguments and
            all outputs with the lane axis in front.
        differentiable: the operation in ordinary JAX operations with static loop bounds; tangents come from it.
        head_axes: for each argument by name, then for each output, the axis that runs over heads (or head-major
            channels), or None. On an explicit mesh the operation is split along these axes.
        own_heads: `(args, shard, shards) -> args`: cuts what no axis of an argument splits by heads down to one shard.
    """

    def __init__(
        self,
        name: str,
        *,
        public_name: str,
        out_avals: Callable,
        implementations: Sequence[Implementation],
        batch: Callable,
        differentiable: Callable,
        head_axes: tuple[Mapping[str, int | None], tuple[int | None, ...]],
        own_heads: Callable | None = None,
    ):
        self.name = name
        self.public_name = public_name
        self.implementations = tuple(implementations)
        self._out_avals = out_avals
        self._batch = batch
        self._differentiable = differentiable
        self._head_axes = head_axes
        self._own_heads = own_heads
        self.primitive = Primitive(f"gdn_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_impl(functools.partial(xla.apply_primitive, self.primitive))
        self.primitive.def_abstract_eval(self._abstract_eval)
        for platform in (None, *_PLATFORMS):
            mlir.register_lowering(self.primitive, functools.partial(self._lower, platform or "cpu"), platform=platform)
        batching.primitive_batchers[self.primitive] = self._batching_rule
        ad.primitive_jvps[self.primitive] = self._jvp_rule

    def __call__(self, *args: jax.Array, implementation: str | None, **params: Any) -> list[jax.Array]:
        _refuse_half_manual(self.public_name)
        varying = _vary_alike(args)
        call = functools.partial(self.primitive.bind, implementation=implementation, **params)
        mesh = next((m for x in args if (m := jax.typeof(x).sharding.mesh).explicit_axes), None)
        return call(*varying) if mesh is None else self._split_by_heads(call, varying, mesh)

    def check_implementation(self, *args, implementation: str | None, **params: Any) -> None:
        """A `NotImplementedError` with the reason if a named implementation cannot serve the call on any platform."""
        if implementation is not None:
            self._choose(None, args, implementation, params)

    def _choose(self, platform: str | None, avals, implementation: str | None, params, devices=1) -> Implementation:
        """The first row of the table that serves the call; a `NotImplementedError` with the reasons if none does.

        `devices` is over how many of them XLA is to split the call by itself.
        """
        reasons = []
        for row in self.implementations:
            if implementation in (None, row.name):
                reason = row.unsupported(platform, avals, params)
                if row.in_place and devices > 1:
                    reason = (
                        f"is not split over {devices} devices by XLA; call it inside jax.shard_map "
                        "(gdn_jax.sharding.over_devices), or on a mesh with explicit axes"
                    )
                if reason is None:
                    return row
                reasons.append(f"{row.name}: {reason}")
        if not reasons:
            raise NotImplementedError(
                f"{self.public_name} has no implementation={implementation!r}; it has "
                f"{sorted({row.name for row in self.implementations})}"
            )
        raise NotImplementedError(f"{self.public_name} cannot serve this call. " + "; ".join(reasons))

    def _abstract_eval(self, *avals, implementation, **params):
        del implementation
        return self._out_avals(*avals, **params)

    def _lower(self, platform, ctx, *operands, implementation, **params):
        row = self._choose(platform, ctx.avals_in, implementation, params, automatic_devices(ctx))
        function = getattr(importlib.import_module(row.module), self.name)

        def outputs(*args):
            out = function(*(map(_apart, args) if row.in_place else args), **params)
            out = out if isinstance(out, tuple) else (out,)
            return list(map(_apart, out) if row.in_place else out)

        # Varying axes are settled by abstract evaluation. They have no trace in the lowered types, and Pallas refuses
        # Refs that carry them.
        return mlir.lower_fun(outputs, multiple_results=True)(strip_varying_axes(ctx), *operands)

    def _batching_rule(self, args, dims, **params):
        lanes = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        is_batched = [d is not None for d in dims]
        args = [jax.numpy.moveaxis(x, d, 0) if m else x for x, d, m in zip(args, dims, is_batched, strict=True)]
        bind = functools.partial(self.primitive.bind, **params)
        outs = self._batch(bind, lanes, args, is_batched)
        return outs, [0] * len(outs)

    def _jvp_rule(self, primals, tangents, *, implementation, **params):
        out = self.primitive.bind(*primals, implementation=implementation, **params)
        active = [i for i, x in enumerate(primals) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]

        def function(*floats):
            args = list(primals)
            for i, x in zip(active, floats, strict=True):
                args[i] = x
            return self._differentiable(*args, **params)

        _, out_tangents = jax.jvp(
            function,
            [primals[i] for i in active],
            [ad.instantiate_zeros(tangents[i]) for i in active],
        )
        return out, list(out_tangents)

    def _split_by_heads(self, call, args, mesh):
        """The call on a mesh with explicit axes: every device runs the heads that its part of the pool has."""
        in_axes, out_axes = self._head_axes
        got = [(*jax.typeof(x).sharding.spec, *[None] * x.ndim)[: x.ndim] for x in args]
        names = {spec[axis] for spec, axis in zip(got, in_axes.values(), strict=True) if axis is not None} - {None}
        name = names.pop() if len(names) == 1 else None
        in_specs = [_spec_at(axis, name) for axis in in_axes.values()]
        for i, (argument, spec, want) in enumerate(zip(in_axes, got, in_specs, strict=True)):
            if i == 0 and self._own_heads is not None:
                continue  # any sharding will do: it is gathered, and every device takes its own heads from it
            # What comes whole is cut without communication; what is split otherwise would have to be gathered first.
            if names or spec not in ((None,) * args[i].ndim, (*want, *[None] * args[i].ndim)[: args[i].ndim]):
                raise ValueError(
                    f"{self.public_name}: {argument} of shape {args[i].shape} is sharded as {PartitionSpec(*spec)}, "
                    f"must be {want}: on an explicit mesh every argument with heads is split along its head axis, all "
                    "over one mesh axis, and nothing else is split"
                )
        args = [
            jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, want))
            for x, want in zip(args, in_specs, strict=True)
        ]

        def shard(*args):
            if self._own_heads is not None and name is not None:
                args = self._own_heads(args, jax.lax.axis_index(name), mesh.shape[name])
            return tuple(call(*args))

        out_specs = tuple(_spec_at(axis, name) for axis in out_axes)
        return list(
            jax.shard_map(shard, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)(*args)
        )


def _refuse_half_manual(public_name: str) -> None:
    """An error for a call inside a `jax.shard_map` that leaves other axes of its mesh to XLA.

    The devices along a manual axis have rows of their own and leave the loops over tokens at different times. A
    collective that XLA puts into such a loop then waits for devices that never come.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]
    if mesh.manual_axes and automatic:
        raise ValueError(
            f"{public_name}: mesh axis {automatic[0]!r} is automatic inside a jax.shard_map over {mesh.manual_axes}, "
            "must be manual, too, or explicit"
        )


def _apart(x):
    """A pool or a ring (what has more than two axes) behind a barrier; anything else as it is.

    A kernel updates them in place. On GPUs, XLA as of jax 0.11.2 and 0.12.0 fuses a custom call with a slice that it
    takes (one layer of stacked pools) and with the update that its result goes to, and then loses that result and
    operand share a buffer: the kernel would write into the slice's source, and the result would stay unwritten.
    """
    return jax.lax.optimization_barrier(x) if x.ndim > 2 else x


def _spec_at(axis: int | None, name) -> PartitionSpec:
    return PartitionSpec() if axis is None or name is None else PartitionSpec(*[None] * axis, name)


def _vary_alike(args):
    """All arguments varying over the union of their manual mesh axes, as elementwise JAX operations make them."""
    axes = frozenset().union(*(varying_axes(x) for x in args))
    return [
        jax.lax.pcast(x, tuple(sorted(axes - varying_axes(x))), to="varying") if axes - varying_axes(x) else x
        for x in args
    ]
