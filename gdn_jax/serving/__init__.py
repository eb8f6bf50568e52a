"""Serving with Gated DeltaNet layers: slots of requests, checkpoints of slots, speculative steps."""

from gdn_jax.serving.checkpoints import fork_slots, restore_slots, save_slots
from gdn_jax.serving.slots import PADDING_SLOT, SlotPool, grow_cache
from gdn_jax.serving.speculation import (
    SpeculativePools,
    Window,
    accepted_lengths,
    accepted_row_plan,
    commit,
    init_pools,
    verify,
)

__all__ = [
    "PADDING_SLOT",
    "SlotPool",
    "SpeculativePools",
    "Window",
    "accepted_lengths",
    "accepted_row_plan",
    "commit",
    "fork_slots",
    "grow_cache",
    "init_pools",
    "restore_slots",
    "save_slots",
    "verify",
]
