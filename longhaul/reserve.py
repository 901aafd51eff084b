"""What the learner trains on while the link is down: transitions that have crossed and whose rows it still holds.

As a replay of its own it would be a poor one: nobody adds to it, and what the site's replay has drawn often is in it
once. So it is a reserve: drawn from only while nothing comes from the site, by the priorities that training has given
last, and only so often. What is learned goes to the site's actors as soon as they can be reached; the priorities that
change here stay here, since the site does not say under which keys it holds what it sends.
"""

import numpy as np

from longhaul.train_step import SCALARS

_NEVER = -1
_STREAM = 2  # of random numbers: apart from those of actors and of seeded draws
_PROBABILITY = SCALARS.index("probabilities") - len(SCALARS)  # its column, from the end


class Reserve:
    """The newest transition that was seen to begin in each row of the cache. Not thread-safe.

    Args:
      cache_rows: slots of the device cache.
      stack: rows per observation.
      exponent: of the priorities: draws are in proportion to priority^exponent.
      draws_each: transitions drawn from here per transition that has come over the link, at most; saved up, but never
        to more than so many for each transition that is held. 0: nothing is ever drawn, or kept.
      seed: of the draws.
    """

    def __init__(self, cache_rows: int, stack: int, exponent: float, draws_each: float, seed: int):
        self._stack = stack
        self._exponent = exponent
        self._draws_each = draws_each
        self._rng = np.random.default_rng([seed % 2**64, _STREAM])
        kept = cache_rows if draws_each > 0 else 0
        # By the slot of the newest row of its first observation: one stream's rows each begin one transition.
        self._transitions = np.zeros((kept, 2 * stack + len(SCALARS)), np.int32)  # as train_step.pack_batch has them
        self._masses = np.zeros(kept, np.float32)  # priority^exponent
        self._stamps = np.full(kept, _NEVER, np.int64)  # of the batch that it came with
        self._written = np.zeros(kept, np.int64)  # the stamp at which each slot got its row
        self._stamp = 0
        self._allowance = 0.0
        self._held: np.ndarray | None = None  # places that may be drawn; None: not known since rows or transitions came

    def rows_written(self, slots: np.ndarray) -> int:
        """Notes that the cache's slots (int32 [M]) hold other rows from now on; returns the stamp of their batch."""
        self._stamp += 1
        if self._draws_each > 0:
            self._written[slots] = self._stamp
            self._held = None
        return self._stamp

    def add(self, packed: np.ndarray, priorities: np.ndarray, stamp: int) -> None:
        """Takes a batch that has been trained on. What other rows than its own have overwritten since is never drawn.

        Args:
          packed: int32 [K, B, 2*stack + 4], of `train_step.pack_batch`; not kept.
          priorities: float32 [K, B]; where one is not finite, the transition is not taken.
          stamp: of its rows.
        """
        if self._draws_each <= 0:
            return
        transitions = packed.reshape(-1, packed.shape[-1])
        places = transitions[:, self._stack - 1]
        self._transitions[places] = transitions
        self._stamps[places] = stamp
        self._set(places, priorities)
        self._held = None
        self._allowance += self._draws_each * len(places)

    def _set(self, places: np.ndarray, priorities: np.ndarray) -> None:
        masses = np.power(np.maximum(priorities.reshape(-1), 0.0), self._exponent, dtype=np.float32)
        self._masses[places] = np.where(np.isfinite(masses), masses, 0.0)

    def draw(self, minibatches: int, batch_size: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Draws a batch by priority, with replacement, as the site's replay does.

        Returns:
          The packed batch int32 [K, B, 2*stack + 4], its probabilities those of this draw, and places int64 [K*B] for
          `update`; None if there is nothing, or enough has been drawn.
        """
        count = minibatches * batch_size
        held = self._find_held()
        self._allowance = min(self._allowance, self._draws_each * len(held))
        if self._allowance < count:
            return None
        sums = np.cumsum(self._masses[held], dtype=np.float64)
        if not sums[-1] > 0:
            return None
        # A sum's rounding must not lead past the end, nor to a transition of no mass there.
        last = np.searchsorted(sums, sums[-1])
        chosen = np.minimum(np.searchsorted(sums, self._rng.random(count) * sums[-1], side="right"), last)
        places = held[chosen]
        packed = self._transitions[places]
        packed[:, _PROBABILITY] = (self._masses[places] / sums[-1]).astype(np.float32).view(np.int32)
        self._allowance -= count
        return packed.reshape(minibatches, batch_size, -1), places

    def update(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities (float32 [K, B]) of what was drawn from `places`."""
        self._set(places, priorities)

    def forget(self) -> None:
        """Empties it, since the cache does not hold what it should; what is still to be added for older rows, too."""
        self.rows_written(np.arange(len(self._written)))

    def _find_held(self) -> np.ndarray:
        if self._held is None:
            places = np.flatnonzero(self._stamps > _NEVER)
            slots = self._transitions[places, : 2 * self._stack]
            self._held = places[(self._written[slots] <= self._stamps[places, None]).all(axis=1)]
        return self._held

    def __len__(self) -> int:
        """Transitions that may be drawn."""
        return len(self._find_held())
