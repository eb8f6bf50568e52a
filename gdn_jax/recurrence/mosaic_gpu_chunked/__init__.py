"""Chunked recurrence on Hopper tensor cores (Pallas Mosaic GPU), ragged, on the slot pool in place.

Rows are cut into chunks of 64 tokens. With S the state before the chunk, gamma_i the product of the decays of the chunk
up to token i, q (scaled) and k the normalised rows, and the gate-free inverse

    X  = (I + strict_lower(beta_i k_i.k_j))^-1

the token-by-token rule is, over a whole chunk (the WY form; Yang et al., "Gated Delta Networks", 2024),

    D  = V - gamma K S                                                      what the state does not know yet
    O  = gamma Q S + W D      W_ij = gamma_i/gamma_j beta_j (lower(Q K^T) X)_ij
    S <- gamma_end S + R^T D  R_j  = gamma_end/gamma_j beta_j (X^T K)_j

W and R do not depend on the state. Row R_j is what token j adds to the state at the end of the chunk, after the later
tokens have corrected it, and W_ij how token i reads it: both are bounded by 1 for any keys and gates, and rounding them
costs one rounding. (Rounding T D, with T the gated X, costs more: on repeated keys its rows are differences of
neighbouring values, whose errors add up in the state.) Ratios of gamma are exponentials of differences of cumulative
log decays, all of them at most 1.

Two kernels. `prepare.py` works on all chunks at once and writes W, R and three vectors a chunk and value head.
`carry.py` walks each (row, value head, columns) serially: warpgroups with 64 value columns each carry S^T as float32
accumulators, and one more streams the inputs. With two of the former, X is written in place of R, which takes more than
twice as many bytes, and one more warpgroup makes R of it. Where the serial pass leaves many multiprocessors idle,
`both.py` does the two side by side, and with few heads and long rows, rows are cut into segments first (`split.py`).
float32 tokens become float16 operands: normalised keys and queries (`normalise.py`), values in units of their columns
(`values.py`).
docs/kernels_chunked.md has the whole story.
"""

import jax
import jax.numpy as jnp

from gdn_jax._ragged import is_live, read_rows
from gdn_jax.recurrence.mosaic_gpu_chunked.both import run_both
from gdn_jax.recurrence.mosaic_gpu_chunked.carry import run_pass
from gdn_jax.recurrence.mosaic_gpu_chunked.prepare import heads_at_once, pad_gates, run_prepare
from gdn_jax.recurrence.mosaic_gpu_chunked.split import cut_rows, initial_states, map_tiles, segment_maps
from gdn_jax.recurrence.mosaic_gpu_chunked.tiles import SMS, C, f32, row_table


def _dims(qkv, recurrent_state):
    _, nv, key_dim, value_dim = recurrent_state.shape
    nk = (qkv.shape[1] - nv * value_dim) // (2 * key_dim)
    return nk, nv, key_dim, value_dim


def _is_short(total, batch, nv):
    """Whether rows of this average length are faster token by token: measured, from few rows and from many."""
    return total < batch * (16 if batch * nv > SMS else 64)


def unsupported(
    qkv,
    decay,
    beta,
    recurrent_state,
    slot_idx,
    input_row_offsets,
    has_initial_state,
    *,
    algorithm,
    precision,
):
    """Why this backend cannot serve the call, in one sentence; None when it can."""
    _, nv, key_dim, value_dim = _dims(qkv, recurrent_state)
    if algorithm == "recurrent":
        return "the chunked Mosaic GPU kernel serves algorithm='chunked' and 'auto' only"
    if algorithm == "auto" and _is_short(qkv.shape[0], slot_idx.shape[0], nv):
        return "rows this short on average are faster token by token"
    if precision == "highest":
        return "the chunked Mosaic GPU kernel has 16-bit products; precision='highest' needs the recurrent algorithm"
    for name, dim in (("key_head_dim", key_dim), ("value_head_dim", value_dim)):
        if dim not in (64, 128, 256):
            return f"the chunked Mosaic GPU kernel serves {name} 64, 128 and 256, not {dim}"
    return None


def recurrence(
    qkv,
    decay,
    beta,
    recurrent_state,
    slot_idx,
    input_row_offsets,
    has_initial_state,
    *,
    algorithm,
    precision,
    interpret=None,
):
    """`gated_delta_recurrence_fwd` for algorithm "chunked": (out [T, nv*VD], recurrent_state)."""
    del algorithm, precision
    nk, nv, key_dim, value_dim = _dims(qkv, recurrent_state)
    total = qkv.shape[0]
    short = max(C - total, 0)
    # Copies and loads take whole chunks of the token arrays, so there must be one. Clamping offsets to the
    # true T first keeps the tokens added here out of every row.
    offsets = jnp.minimum(input_row_offsets, total) if short else input_row_offsets
    qkv, decay, beta = [jnp.pad(x, ((0, short), (0, 0))) if short else x for x in (qkv, decay, beta)]
    decay, beta = pad_gates(decay, nk), pad_gates(beta, nk)
    table = row_table(offsets, has_initial_state, total + short)
    count = _num_segments(total, slot_idx.shape[0], nv, key_dim, value_dim)
    wide = qkv.dtype == f32
    workers = 0
    if count == 1 and interpret is None:
        workers = _num_workers(total, slot_idx.shape[0], nk, nv, key_dim, value_dim, wide)
    if workers:
        pool = jax.new_ref(recurrent_state)
        out = run_both(
            qkv, decay, beta, slot_idx, offsets, table, pool,
            nk=nk, workers=workers,
        )[:total]  # fmt: skip
    else:
        tiles = _tiles(slot_idx.shape[0] * count, nv, key_dim, value_dim, wide)
        # `segment_maps` needs R, too, and float32 values leave no room for what makes it.
        late_r = tiles == 2 and count == 1 and not wide
        w, r, vec, *kq = run_prepare(
            qkv, decay, beta, slot_idx, offsets, table,
            nk=nk, nv=nv, key_dim=key_dim, max_slots=recurrent_state.shape[0], late_r=late_r, interpret=interpret,
        )  # fmt: skip
        kq = kq[0] if kq else None
        split = None
        if count > 1:
            segments = cut_rows(offsets, table, total, count)
            local, steps = segment_maps(
                qkv, kq, r, vec, slot_idx, segments,
                count=count, dims=(nk, nv, key_dim, value_dim), max_slots=recurrent_state.shape[0], interpret=interpret,
            )  # fmt: skip
            live = is_live(slot_idx, recurrent_state.shape[0])
            states = read_rows(recurrent_state, slot_idx, live & has_initial_state)
            split = segments, initial_states(local, steps, states, count, wide, interpret)
        pool = jax.new_ref(recurrent_state)
        out = run_pass(
            qkv, kq, w, r, vec, slot_idx, offsets, table, pool,
            nk=nk, tiles=tiles, late_r=late_r, interpret=interpret, split=split,
        )[:total]  # fmt: skip
    return out, jax.freeze(pool)


def _tiles(batch, nv, key_dim, value_dim, wide):
    """Value tiles of a CTA: two share keys, queries, W and R, one leaves more CTAs for an idle chip.

    With float32 tokens two leave no room for a third stage, and are faster only where all states run at once.
    """
    fits = value_dim % (2 * C) == 0 and key_dim <= 128
    return 2 if fits and batch * nv > SMS // 2 and not (wide and batch * nv > SMS) else 1


def _num_segments(total, batch, nv, key_dim, value_dim):
    """In how many segments to cut every row: 1, or as many as leave no multiprocessor idle while their maps are made.

    The maps cost as many columns again as the states, so two segments would gain nothing. Under 32 chunks of the batch
    for each, the steps between the kernels cost more than is saved. Where fewer than five fit, `run_both` has taken
    over. With 256 keys the maps of a step are too large for `initial_states`.
    """
    ctas = batch * nv * (value_dim + key_dim) // (C * map_tiles(key_dim, value_dim))
    count = min(SMS // ctas + 1, total // (32 * C))
    return count if count >= 3 and SMS // ctas >= 4 and key_dim <= 128 else 1


def _num_workers(total, batch, nk, nv, key_dim, value_dim, wide):
    """CTAs that prepare chunks beside those that carry states, in one kernel; 0 for one kernel after the other.

    Measured: worth it from 32 chunks a row on, where the states leave half of the multiprocessors idle. With 1.5 CTAs a
    value head chunks are prepared as fast as they are needed; more were slower, probably because W and R then have
    left the L2 cache when they are read. A head that shares no place with another takes longer, and so do `wide` tokens
    (float32).
    """
    carrying = batch * nv * value_dim // C
    if carrying > SMS // 2 or total < 32 * C * batch or key_dim > 128:
        return 0
    idle = SMS - carrying
    return idle if wide or heads_at_once(nv // nk) == 1 else min(idle, 3 * batch * nv // 2)
