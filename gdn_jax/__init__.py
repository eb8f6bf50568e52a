"""Gated DeltaNet for serving in JAX: ragged batches, a pool of states updated in place, speculative verification."""

from gdn_jax.conv1d import gated_delta_conv1d_fwd
from gdn_jax.gates import gated_delta_gates
from gdn_jax.recurrence import gated_delta_recurrence_fwd
from gdn_jax.rule import gated_delta_rule
from gdn_jax.state_fold import gated_delta_state_fold
from gdn_jax.verify_ring import gated_delta_recurrence_verify_ring, gated_delta_ring_record_elements

__version__ = "0.1.0"

__all__ = [
    "gated_delta_conv1d_fwd",
    "gated_delta_gates",
    "gated_delta_recurrence_fwd",
    "gated_delta_recurrence_verify_ring",
    "gated_delta_ring_record_elements",
    "gated_delta_rule",
    "gated_delta_state_fold",
]
