"""Run by CI against the installed wheel, away from the source tree: one decode step on a donated pool."""

import pathlib

import jax
import jax.numpy as jnp

import gdn_jax

source = pathlib.Path(gdn_jax.__file__)
assert "site-packages" in source.parts, source
assert (source.parent / "py.typed").exists()

nk, nv, kd, vd = 2, 4, 16, 16
key = jax.random.key(0)
qkv = jax.random.normal(key, (3, 2 * nk * kd + nv * vd))
gates = jax.random.uniform(key, (3, nv))
pool = jnp.zeros((5, nv, kd, vd))
step = jax.jit(gdn_jax.gated_delta_recurrence_fwd, donate_argnames="recurrent_state")
out, state = step(qkv, gates, gates, recurrent_state=pool, slot_idx=jnp.arange(3), input_row_offsets=jnp.arange(4))
assert out.shape == (3, nv * vd)
assert bool(jnp.isfinite(out).all())
assert bool((state[3:] == 0).all())
assert float(jnp.abs(state[:3]).max()) > 0
print(f"gdn-jax {gdn_jax.__version__} on jax {jax.__version__}: the installed wheel runs")
