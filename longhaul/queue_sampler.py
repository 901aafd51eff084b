"""Draws for a site that forwards in order of arrival: everything once, oldest first, and kept until it has arrived.

The table is a queue then (`buffer.ReplayServer` with order "arrival"): an item leaves it when it is drawn, and where
more wait than the queue holds, the oldest is dropped.
"""

import threading

from longhaul.buffer import ReplaySampler, ReplayServer
from longhaul.errors import ConfigError, Stopped
from longhaul.types import DrawnSamples

_LOOK_S = 0.02
_AHEAD = 64


class QueueSampler:
    """Draws whole batches in order of arrival; what is not confirmed is drawn again after a rollback.

    One thread draws; the other methods may be called by others.

    Args:
      server: a queue.
      batch: transitions per draw.

    Raises:
      ConfigError: the queue never holds a batch.
    """

    def __init__(self, server: ReplayServer, batch: int):
        if batch > server.capacity:
            raise ConfigError(
                f"config.replay.spool is {server.capacity}, and must be at least {batch}, the transitions of one batch "
                "(config.learner.batch_size * config.learner.minibatches_per_pull)"
            )
        self._server = server
        self._batch = batch
        self._sampler = ReplaySampler(server, batch, ahead=_AHEAD)
        self._kept: list[DrawnSamples] = []  # drawn and not confirmed, oldest first
        self._next = 0  # place in it of the next draw
        self._drawn = server.info()[2]  # by now, over all samplers of the table
        self._lock = threading.Lock()

    def draw(self, stop: threading.Event) -> DrawnSamples:
        """Returns the next batch, waiting until so many transitions are there.

        Raises:
          Stopped: the stop event was set meanwhile.
          WorkerFailed: the replay server is gone.
        """
        with self._lock:
            drawn = self._kept[self._next] if self._next < len(self._kept) else None
        if drawn is None:
            # A draw that waited for its last transitions could not be stopped without losing those it has.
            while self._waiting() < self._batch:
                if stop.wait(_LOOK_S):
                    raise Stopped("drawing from the queue was stopped")
            drawn = self._sampler.draw(stop)
            self._drawn += self._batch
        with self._lock:
            if self._next == len(self._kept):
                self._kept.append(drawn)
            self._next += 1
        return drawn

    def close(self) -> None:
        """Ends the sampler's thread."""
        self._sampler.close()

    def _waiting(self) -> int:
        """Returns how many transitions are in the queue, or have left it and wait in Reverb's sampler."""
        size, _, sampled = self._server.info()
        return size + sampled - self._drawn

    def confirm(self) -> None:
        """Says that the oldest batch has arrived."""
        with self._lock:
            del self._kept[0]
            self._next -= 1

    def give_up(self, drawn: DrawnSamples) -> None:
        """Takes a batch out that was drawn and will not be sent."""
        with self._lock:
            place = next(i for i, kept in enumerate(self._kept) if kept is drawn)
            del self._kept[place]
            self._next -= place < self._next

    def roll_back(self, arrived: int) -> None:
        """Draws again all but the `arrived` oldest of the batches that are not confirmed."""
        with self._lock:
            self._next = arrived
