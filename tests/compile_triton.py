"""Compiles every Triton kernel for GPUs that are not there: `python -m tests.compile_triton`. Prints what they need."""

from __future__ import annotations

import re
from importlib import import_module

import jax
import jax.numpy as jnp

TARGETS = {"cuda": ((80, 32), (90, 32)), "hip": (("gfx942", 64),)}
# Shared memory of a thread block, bytes.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, "gfx942": 64 * 1024}
MODULES = ("recurrence.triton", "recurrence.triton_chunked", "verify_ring.triton", "state_fold.triton", "conv1d.triton")
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int32": "i32", "bool": "i1"}


def compiled_for(backend: str, arch, warp_size: int, found: list):
    """In place of `gdn_jax._compat.triton_call`: compiles, puts that into `found`, and returns shapes."""
    triton = import_module("triton")
    target = import_module("triton.backends.compiler").GPUTarget(backend, arch, warp_size)
    source = import_module("triton.compiler").ASTSource

    def call(kernel, operands, pools, out_types, *, grid, num_warps, num_stages, **constants):
        del grid
        args = [*operands, *pools, *out_types]
        names = [parameter.name for parameter in kernel.params]
        signature, aligned = {}, {}
        for i, (name, x) in enumerate(zip(names, args, strict=False)):
            if isinstance(x, int):
                signature[name] = "i32"
            else:
                signature[name] = f"*{NAMES[x.dtype.name]}"
                aligned[(i,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(names[len(args) :], "constexpr")
        constants = dict.fromkeys(names[len(args) :]) | constants
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
        kernel_source = source(kernel, signature=signature, constexprs=constants, attrs=aligned)
        found.append((kernel.__name__, triton.compile(kernel_source, target=target, options=options)))
        return list(out_types), list(pools)

    return call


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def rows(num_tokens, batch, heads, tokens="bfloat16", pool="float32"):
    nk, nv, key_dim, value_dim = heads
    return (
        shape(num_tokens, 2 * nk * key_dim + nv * value_dim, dtype=tokens),
        shape(num_tokens, nv),
        shape(num_tokens, nv),
        shape(batch + 1, nv, key_dim, value_dim, dtype=pool),
        shape(batch, dtype="int32"),
        shape(batch + 1, dtype="int32"),
        shape(batch, dtype="bool"),
    )


def compile_all(call, platform: str):
    forward, chunked, verify, fold, conv = modules = [import_module(f"gdn_jax.{name}") for name in MODULES]
    setattr(chunked, "has_local_device", lambda name: name == platform)  # noqa: B010
    for module in modules:
        setattr(module, "triton_call", call)  # noqa: B010
    for pool in ("float32", "bfloat16"):
        # The states of 8 rows fit into the cache.
        for batch in (8, 64):
            args = rows(batch, batch, (16, 32, 128, 128), pool=pool)
            forward.recurrence(*args, algorithm="recurrent", precision=None)
            args = rows(4 * batch, batch, (16, 32, 128, 128), pool=pool)
            ring = shape(batch, 16, 8, 386)
            verify.verify_ring(*args[:4], ring, args[4], args[4], *args[5:])
        forward.recurrence(*args, algorithm="recurrent", precision=None)
        layers = shape(8, 64, dtype="int32")
        fold.state_fold(args[3], ring, layers, layers, args[4], args[6])
    odd = rows(256, 64, (2, 6, 40, 24), tokens="float16", pool="float16")
    forward.recurrence(*odd, algorithm="recurrent", precision=None)
    for num_rows in (1, 8):
        forward.recurrence(*rows(8192, num_rows, (16, 32, 128, 128)), algorithm="chunked", precision=None)
    conv.conv1d(
        shape(8192, 8192, dtype="bfloat16"),
        shape(8192, 4, dtype="bfloat16"),
        shape(8192, dtype="bfloat16"),
        shape(4, 8192, 3, dtype="bfloat16"),
        shape(4, dtype="int32"),
        shape(5, dtype="int32"),
        shape(4, dtype="bool"),
        activation="silu",
        write_state=True,
    )


def summed_elements(text: str) -> set[int]:
    """How many elements a kernel in Triton's GPU dialect adds up at once; of more than two, layouts have the order."""
    sums = re.findall(r'"tt\.reduce".*?axis = (\d+) : i32.*?\}\) : \(tensor<([\dx]+)x[a-z]', text, re.S)
    return {int(shape.split("x")[int(axis)]) for axis, shape in sums}


def moved_tiles(text: str) -> list[str]:
    """Matrices that change threads in a kernel in Triton's GPU dialect: of a state, that would be all its registers."""
    return re.findall(r"convert_layout .*? : tensor<\d+x\d+x[a-z]\w+", text)


def main():
    for backend, targets in TARGETS.items():
        for arch, warp_size in targets:
            found: list = []
            compile_all(compiled_for(backend, arch, warp_size, found), {"cuda": "cuda", "hip": "rocm"}[backend])
            for name, kernel in found:
                print(arch, name, "shared memory", kernel.metadata.shared, flush=True)
                assert kernel.metadata.shared <= SHARED_BYTES[arch], (arch, name)
                if backend == "cuda":
                    # A product without a rounding mode is one that the assembler may contract.
                    assert "mul.f32" not in kernel.asm["ptx"], name
                if name in ("forward_kernel", "verify_kernel"):
                    assert max(summed_elements(kernel.asm["ttgir"])) == 2, (arch, name)
                    assert not moved_tiles(kernel.asm["ttgir"]), (arch, name)


if __name__ == "__main__":
    main()
