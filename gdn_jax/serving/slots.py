"""Which request owns which row of the pools: bookkeeping on the host."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

PADDING_SLOT = -1
"""A slot outside every pool: its row reads nothing, writes nothing, and has zero outputs."""


class SlotPool:
    """Gives slots to requests and takes them back.

    A new request gets whatever an earlier one left in its slot, so it must start from zeros: `has_initial_state` is
    False for it until `mark_started`. Nothing on the device is cleared.

        pool = SlotPool(max_slots=64)
        pool.allocate("a")
        y, cache = layer(x, cache, slot_idx=pool.slot_idx(["a"], pad_to=8),
                         has_initial_state=pool.has_initial_state(["a"], pad_to=8), input_row_offsets=...)
        pool.mark_started(["a"])
        pool.free("a")

    Args:
        max_slots: rows of the pools (slots, where layers share the pools).

    Raises:
        ValueError: max_slots is not a positive integer.
    """

    def __init__(self, max_slots: int):
        self._check_size(max_slots, least=1)
        self.max_slots = max_slots
        # The lowest free slot is at the end.
        self._free = list(range(max_slots - 1, -1, -1))
        self._slots: dict[Hashable, int] = {}
        self._started: set[Hashable] = set()

    def __len__(self) -> int:
        """How many requests own a slot."""
        return len(self._slots)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._slots

    @property
    def num_free(self) -> int:
        """How many slots nobody owns."""
        return len(self._free)

    def allocate(self, request: Hashable) -> int:
        """Give the request a slot, fresh: its first call must start from zeros.

        Raises:
            ValueError: the request owns a slot already.
            RuntimeError: every slot is taken; free one, or grow.
        """
        if request in self._slots:
            raise ValueError(f"request {request!r} already owns slot {self._slots[request]}")
        if not self._free:
            raise RuntimeError(f"no slot is free for request {request!r}: all {self.max_slots} are taken")
        slot = self._free.pop()
        self._slots[request] = slot
        return slot

    def free(self, request: Hashable) -> int:
        """Take the request's slot back; the slot that it was.

        Raises:
            KeyError: the request owns no slot: it never did, or it was freed before.
        """
        slot = self.slot(request)
        del self._slots[request]
        self._started.discard(request)
        self._free.append(slot)
        return slot

    def slot(self, request: Hashable) -> int:
        """The request's slot.

        Raises:
            KeyError: the request owns no slot.
        """
        if request not in self._slots:
            raise KeyError(f"request {request!r} owns no slot: it was never allocated, or is freed already")
        return self._slots[request]

    def mark_started(self, requests: Sequence[Hashable]) -> None:
        """The slots of these requests hold their states from now on.

        Raises:
            KeyError: a request owns no slot; then none is marked.
        """
        requests = list(requests)
        for request in requests:
            self.slot(request)
        self._started.update(requests)

    def reset(self, request: Hashable) -> None:
        """Let the request start from zeros again, in the slot it has.

        Raises:
            KeyError: the request owns no slot.
        """
        self.slot(request)
        self._started.discard(request)

    def slot_idx(self, requests: Sequence[Hashable], *, pad_to: int | None = None) -> np.ndarray:
        """`[len(requests)]` int32: the slots of a batch, or `[pad_to]`, filled up with padding slots.

        Raises:
            KeyError: a request owns no slot.
            ValueError: a request is named twice, or there are more requests than pad_to.
        """
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests are {list(requests)!r}, must not name one request twice")
        slots = [self.slot(request) for request in requests]
        return np.array(slots + [PADDING_SLOT] * self._padding(requests, pad_to), np.int32)

    def has_initial_state(self, requests: Sequence[Hashable], *, pad_to: int | None = None) -> np.ndarray:
        """`[len(requests)]` bool, or `[pad_to]`: which requests of a batch have a state to continue from.

        Raises:
            KeyError: a request owns no slot.
            ValueError: there are more requests than pad_to.
        """
        for request in requests:
            self.slot(request)
        started = [request in self._started for request in requests]
        return np.array(started + [False] * self._padding(requests, pad_to), bool)

    def grow(self, max_slots: int) -> None:
        """Have more slots; requests keep theirs. `grow_cache` does the same to the pools.

        Raises:
            ValueError: max_slots is fewer than now.
        """
        self._check_size(max_slots, least=self.max_slots)
        self._free = list(range(max_slots - 1, self.max_slots - 1, -1)) + self._free
        self.max_slots = max_slots

    @staticmethod
    def _padding(requests, pad_to) -> int:
        if pad_to is None:
            return 0
        if pad_to < len(requests):
            raise ValueError(f"pad_to is {pad_to}, must be at least the number of requests, {len(requests)}")
        return pad_to - len(requests)

    @staticmethod
    def _check_size(max_slots, least) -> None:
        if not isinstance(max_slots, int) or isinstance(max_slots, bool) or max_slots < least:
            raise ValueError(f"max_slots is {max_slots!r}, must be an integer of at least {least}")


def grow_cache[Tree](cache: Tree, max_slots: int, *, num_layers: int = 1) -> Tree:
    """Pools with more rows: the old ones first, zeros after them.

    The pools are copied: for a moment both are in memory.

    Args:
        cache: a `GatedDeltaCache`, or any pytree of arrays `[slots * num_layers, ..]`.
        max_slots: slots afterwards.
        num_layers: how many layers share the pools.

    Raises:
        ValueError: a pool has more rows than that already.
    """
    rows = max_slots * num_layers

    def grow(pool: jax.Array) -> jax.Array:
        if pool.shape[0] > rows:
            raise ValueError(f"max_slots is {max_slots}, must be at least {pool.shape[0] // num_layers}, as now")
        return jnp.pad(pool, [(0, rows - pool.shape[0])] + [(0, 0)] * (pool.ndim - 1))

    return jax.tree.map(grow, cache)
