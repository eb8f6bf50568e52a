"""How the token by token kernels cut a call into programs, and what they know of it before it runs."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn_jax._mosaic import KEY_ROWS, L2_BYTES, value_tile

_TILE_ELEMENTS = 64 * 128
"""State elements that one program holds in registers, 64 a thread."""
_PROGRAMS = 128
"""Tiles are halved until there are this many: about one for each multiprocessor of a Hopper GPU (132)."""
_MULTIPROCESSORS = 132
_SHARED_BYTES = 227 * 1024
"""Shared memory that one thread block can have."""
_SHARED_UNIT = 1024
"""What Mosaic aligns every buffer in shared memory to."""
_SHARED_RESERVED = 4096
"""Enough for what Mosaic adds to the buffers: 2048 bytes for reductions, and barriers."""
SHORT_WINDOW, _LONG_WINDOW = 4, 16
"""Tokens of a row that are handled together where rows are short on average, and where they are not."""
_SHORT_WARPGROUPS, _WIDE_WARPGROUPS = 4, 2
"""Warpgroups of a thread block with short windows: they get 128 registers a thread, of which a tile takes 64, or
255 for a tile of twice the width."""
_RUN_HEADS = 4
"""Key heads at most whose tiles a program takes one after the other, with what they need ready for all at once."""
_ROWS_PROGRAMS = 256
"""Programs from which on states are read in whole rows."""
_ROWS_BYTES = 32 * 1024
"""Size of such a tile, in registers or in shared memory: four fit on a multiprocessor."""
_ROWS_AT_ONCE = 4 * _MULTIPROCESSORS
"""Tiles of 16 bits that are on the device together. Of more, a program takes two in turn if the states may still be in
the cache; where they come from memory, that costs 2 to 4 percent."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is cut into programs; follows from shapes alone.

    Attributes:
        tile: value columns of a program's tile.
        window: tokens that come to shared memory together; 0 if rows go token by token.
        rows: with `window` 0, whether a tile is read in whole rows.
        warpgroups: with a window, warpgroups of a thread block, each a program of its own; together they may use all
            registers of a multiprocessor, so their number bounds what the compiler gives to one.
        run: tiles that a program takes one after the other: with whole rows of one key head, with the short window of
            one key head, or all of several.
    """

    tile: int
    window: int = 0
    rows: bool = False
    warpgroups: int = 3
    run: int = 1


def plan_rows(num_tokens, batch, num_key_heads, num_value_heads, key_dim, value_dim, dtypes, records) -> Plan:
    """`dtypes` are those of tokens and pool; `records` says whether rows write records, as in a verify."""

    def programs(tile):
        return batch * num_value_heads * (value_dim // tile)

    group = num_value_heads // num_key_heads
    tile = value_tile(value_dim, _TILE_ELEMENTS // key_dim)
    while tile > 16 and programs(tile) < _PROGRAMS:
        tile //= 2
    if num_tokens <= batch or num_tokens < 4:
        if records or programs(tile) < _ROWS_PROGRAMS:
            return Plan(tile)
        wide = value_tile(value_dim, _ROWS_BYTES // (key_dim * dtypes[1].itemsize))
        tile = wide if programs(wide) >= _ROWS_PROGRAMS else tile
        states_bytes = programs(tile) * tile * key_dim * dtypes[1].itemsize
        in_turn = dtypes[1] != jnp.float32 and programs(tile) > _ROWS_AT_ONCE and states_bytes <= L2_BYTES
        return Plan(tile, rows=True, run=math.gcd(group * (value_dim // tile), 2) if in_turn else 1)
    # A row of several short windows loads keys and gates once a tile, which costs less if its state is not written.
    if num_tokens <= 16 * batch if records else num_tokens < max(16, 8 * batch):
        most = _SHORT_WARPGROUPS
        wide = value_tile(value_dim, 2 * _TILE_ELEMENTS // key_dim)
        if wide > tile and programs(wide) >= 2 * _PROGRAMS:
            tile, most = wide, _WIDE_WARPGROUPS
        of_key_head = group * (value_dim // tile)
        runs = [n for n in range(of_key_head, 0, -1) if of_key_head % n == 0]
        # With 128 registers a thread there would be none for what several key heads take.
        if num_tokens <= SHORT_WINDOW * batch and most == _WIDE_WARPGROUPS:
            runs = [of_key_head * n for n in range(_RUN_HEADS, 1, -1) if num_key_heads % n == 0] + runs

        def short(warpgroups):
            workers = warpgroups * _MULTIPROCESSORS
            # The longest runs that leave the busiest worker with no more tiles than runs of one would come first.
            ordered = sorted(runs, key=lambda n: -(-programs(tile) // (n * workers)) * n)
            return [Plan(tile, window=SHORT_WINDOW, warpgroups=warpgroups, run=run) for run in ordered]

        most = min(most, -(-programs(tile) // _MULTIPROCESSORS))
        plans = [plan for n in range(most, 0, -1) for plan in short(n)]
    else:
        most = 1 if programs(tile) <= _MULTIPROCESSORS else 3
        plans = [Plan(tile, window=_LONG_WINDOW, warpgroups=n) for n in range(most, 0, -1)]
    return next(
        plan for plan in plans if shared_bytes(plan, key_dim, value_dim, group, dtypes, records) <= _SHARED_BYTES
    )


def run_heads(plan, group, value_dim) -> int:
    """Key heads of a run."""
    return max(plan.run * plan.tile // (group * value_dim), 1)


def window_buffers(plan, key_dim, value_dim, group, dtypes, records) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    """Shapes and dtypes of what a program with a window keeps in shared memory."""
    token, pool, f32 = *dtypes, jnp.dtype(jnp.float32)
    window, tile = plan.window, plan.tile
    state, values = ((key_dim, tile), pool), ((2, window, tile), token)
    keys, factors = ((window, key_dim), f32), ((window, tile), f32)
    if window == SHORT_WINDOW:
        heads = run_heads(plan, group, value_dim)
        buffers = [
            state,
            ((heads, window, 2 * key_dim), f32),
            ((heads, 3, window), f32),
            ((2, heads, window, key_dim), token),
            values,
            factors,
            ((2, window, heads * group), f32),
            ((2, 5 if records else 4), jnp.dtype(jnp.int32)),
        ]
        return [*buffers, ((heads, window, key_dim), f32)] if records else buffers
    buffers = [state, keys, keys, ((5, window), f32), *[((2, window, key_dim), token)] * 2, values]
    return [*buffers, factors] if records else buffers


def shared_bytes(plan, key_dim, value_dim, group, dtypes, records) -> int:
    """Bytes of shared memory of a thread block with a window."""
    sizes = [
        plan.warpgroups * math.prod(shape) * dtype.itemsize
        for shape, dtype in window_buffers(plan, key_dim, value_dim, group, dtypes, records)
    ]
    return sum(-(-size // _SHARED_UNIT) * _SHARED_UNIT for size in sizes) + _SHARED_RESERVED


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of a call before it runs: its shapes, dtypes and plan.

    Attributes:
        records: whether there is a ring for the records of rows.
        interpret: as `pallas.kernel` takes it.
    """

    num_tokens: int
    batch: int
    max_slots: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    token_dtype: jnp.dtype
    pool_dtype: jnp.dtype
    plan: Plan
    records: bool
    interpret: Any

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def run_heads(self) -> int:
        """Key heads of a run of tiles with the short window."""
        return run_heads(self.plan, self.group, self.value_dim)

    @property
    def swizzled(self) -> bool:
        """Whether tiles with the short window are swizzled in shared memory: if they are as wide as they can be."""
        return self.plan.window == SHORT_WINDOW and self.plan.tile == 128 and self.interpret is None

    @property
    def num_tiles(self) -> int:
        """Tiles of a state."""
        return self.value_dim // self.plan.tile

    @property
    def num_programs(self) -> int:
        """Tiles of all states."""
        return self.batch * self.num_value_heads * self.num_tiles

    @property
    def num_blocks(self) -> int:
        """Thread blocks with windows, whose warpgroups take one tile after the other."""
        warpgroups = self.plan.warpgroups
        return min(_MULTIPROCESSORS * max(3 // warpgroups, 1), -(-self.num_programs // warpgroups))

    @property
    def num_workers(self) -> int:
        return self.num_blocks * self.plan.warpgroups

    @property
    def chunks(self) -> list:
        """Slices of the key dimension."""
        return [pl.ds(c, KEY_ROWS) for c in range(0, self.key_dim, KEY_ROWS)]

    def where(self, i):
        """Row, value head and first value column of tile i."""
        v0 = lax.rem(i, self.num_tiles) * self.plan.tile
        i = lax.div(i, self.num_tiles)
        return lax.div(i, self.num_value_heads), lax.rem(i, self.num_value_heads), v0

    def token_columns(self, h):
        """Where the fused rows hold the head's key, query and value."""
        hk = lax.div(h, self.group)
        return (
            pl.ds((self.num_key_heads + hk) * self.key_dim, self.key_dim),
            pl.ds(hk * self.key_dim, self.key_dim),
            2 * self.num_key_heads * self.key_dim + h * self.value_dim,
        )


def window_scratch(call: Call) -> list:
    """What the warpgroups of a thread block keep in shared memory, and where the copies of states arrive."""
    dtypes = call.token_dtype, call.pool_dtype
    buffers = window_buffers(call.plan, call.key_dim, call.value_dim, call.group, dtypes, call.records)
    warpgroups = call.plan.warpgroups
    (shape, dtype), *others = buffers
    transforms = ()
    if call.swizzled:
        tiling = plgpu.TilingTransform((KEY_ROWS, 128 // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
        transforms = tiling, plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return [
        plgpu.SMEM((warpgroups, *shape), dtype, transforms=transforms),
        *(plgpu.SMEM((warpgroups, *shape), dtype) for shape, dtype in others),
        plgpu.Barrier(num_barriers=warpgroups),
    ]
