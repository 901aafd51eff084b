"""What the learner trains on besides what has just crossed: transitions that crossed before, whose rows it still holds.

As a replay of its own it would be a poor one: nobody adds to it, and what the site's replay has drawn often is in it
once. So it is drawn from while nothing comes from the site, so often (`Allowance`), and otherwise only as often as
config.learner.reuse says. Draws go by the priorities that training has given last; those that change here stay here,
since the site does not say under which keys it holds what it sends.
"""

import numpy as np

from longhaul.train_step import SCALARS

_NEVER = -1
_STREAM = 2  # of random numbers: apart from those of actors and of seeded draws
_PROBABILITY = SCALARS.index("probabilities") - len(SCALARS)  # its column, from the end


class Allowance:
    """How often what has crossed may be drawn again.

    Args:
      each: draws per transition that has come over the link, at most; saved up, but never to more than so many for each
        transition that is held.
    """

    def __init__(self, each: float):
        self._each = each
        self._left = 0.0

    def earn(self, count: int) -> None:
        """Notes that so many transitions have come over the link."""
        self._left += self._each * count

    def take(self, count: int, held: int) -> bool:
        """Takes leave for so many draws of `held` transitions; False if there is not so much left."""
        self._left = min(self._left, self._each * held)
        if self._left < count:
            return False
        self._left -= count
        return True


class Reserve:
    """The newest transition that was seen to begin in each row of the cache. Not thread-safe.

    Args:
      cache_rows: slots of the device cache; 0: nothing is ever kept.
      stack: rows per observation.
      exponent: of the priorities: draws are in proportion to priority^exponent.
      seed: of the draws.
    """

    def __init__(self, cache_rows: int, stack: int, exponent: float, seed: int):
        self._stack = stack
        self._exponent = exponent
        self._rng = np.random.default_rng([seed % 2**64, _STREAM])
        # By the slot of the newest row of its first observation: one stream's rows each begin one transition.
        self._transitions = np.zeros((cache_rows, 2 * stack + len(SCALARS)), np.int32)  # as train_step.pack_batch
        # priority^exponent. What has lost a row keeps its own until it is drawn and passed over: looking for all of
        # them after each batch would take longer than training on it.
        self._masses = np.zeros(cache_rows, np.float32)
        self._stamps = np.full(cache_rows, _NEVER, np.int64)  # of the batch that it came with
        self._written = np.zeros(cache_rows, np.int64)  # the stamp at which each slot got its row
        self._stamp = 0
        self._whole: int | None = None  # how many are; None: not known since rows or transitions came

    def rows_written(self, slots: np.ndarray) -> int:
        """Notes that the cache's slots (int32 [M]) hold other rows from now on; returns the stamp of their batch."""
        self._stamp += 1
        self._whole = None
        if len(self._written):
            self._written[slots] = self._stamp
        return self._stamp

    def add(self, packed: np.ndarray, priorities: np.ndarray, stamp: int) -> None:
        """Takes a batch that has been trained on. What other rows than its own have overwritten since is never drawn.

        Args:
          packed: int32 [K, B, 2*stack + 4], of `train_step.pack_batch`; not kept.
          priorities: float32 [K, B]; where one is not finite, the transition is not taken.
          stamp: of its rows.
        """
        if not len(self._written):
            return
        transitions = packed.reshape(-1, packed.shape[-1])
        places = transitions[:, self._stack - 1]
        self._transitions[places] = transitions
        self._stamps[places] = stamp
        self._whole = None
        self.update(places, priorities)

    def update(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities (float32 [K, B]) of what was drawn from `places`."""
        masses = np.power(np.maximum(priorities.reshape(-1), 0.0), self._exponent, dtype=np.float32)
        self._masses[places] = np.where(np.isfinite(masses), masses, 0.0)

    def draw(self, minibatches: int, batch_size: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Draws a batch by priority, with replacement, as the site's replay does.

        Returns:
          The packed batch int32 [K, B, 2*stack + 4] and places int64 [K*B] for `update`; None if nothing is held. Its
          probabilities are those of this draw, up to a factor, the same for all of it, that what is passed over makes:
          importance weights are relative to the batch's largest.
        """
        places = np.zeros(minibatches * batch_size, np.int64)
        todo = np.arange(len(places))
        while len(todo):
            sums = np.cumsum(self._masses, dtype=np.float64)
            if not len(sums) or not sums[-1] > 0:
                return None
            # A sum's rounding must not lead past the end, nor to a transition of no mass there.
            last = np.searchsorted(sums, sums[-1])
            chosen = np.searchsorted(sums, self._rng.random(len(todo)) * sums[-1], side="right")
            places[todo] = np.minimum(chosen, last)
            lost = ~self._is_whole(places[todo])
            todo = todo[lost]
            self._masses[places[todo]] = 0.0
        packed = self._transitions[places]
        packed[:, _PROBABILITY] = (self._masses[places] / sums[-1]).astype(np.float32).view(np.int32)
        return packed.reshape(minibatches, batch_size, -1), places

    def _is_whole(self, places: np.ndarray) -> np.ndarray:
        """Returns bool [N]: whether the cache still holds every row of the transitions there."""
        slots = self._transitions[places, : 2 * self._stack]
        return (self._written[slots] <= self._stamps[places, None]).all(axis=1)

    def forget(self) -> None:
        """Empties it, since the cache does not hold what it should; what is still to be added for older rows, too."""
        self.rows_written(np.arange(len(self._written)))

    def __len__(self) -> int:
        """Transitions that the cache still holds; a look at all of them, once after each batch that has come."""
        if self._whole is None:
            self._whole = int(self._is_whole(np.flatnonzero(self._stamps > _NEVER)).sum())
        return self._whole
