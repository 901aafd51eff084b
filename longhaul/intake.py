"""The gateway's end of an actor's Insert stream: rows into the row store, then the transitions that refer to them.

A message is answered once all of its transitions are in the replay. An actor that was cut off sends again what has not
been answered; its transitions are numbered over its whole life, so that none is written twice.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from longhaul.buffer import ItemWriter, ReplayServer
from longhaul.errors import Corruption, Stopped
from longhaul.proto import longhaul_pb2 as pb
from longhaul.records import MOST_TRANSITIONS, unpack_records
from longhaul.row_store import RowStore

_MOST_WRITERS = 4096  # remembered, the last that came
_UNCONFIRMED = 32  # Reverb warns of more than 50
_LOOK_S = 0.5  # between looks at whether the actor is still there, while the replay takes nothing


class _Account:
    """How many transitions of one actor are in the replay; its lock keeps two connections of it apart."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.written = 0


class Accounts:
    """The accounts of all actors, by the random number that each gives itself. Thread-safe.

    Attributes:
      learned: whether any of them has acted on a learner's weights.
    """

    def __init__(self) -> None:
        self.learned = False
        self._lock = threading.Lock()
        self._accounts: OrderedDict[int, _Account] = OrderedDict()

    def of(self, writer_id: int) -> _Account:
        with self._lock:
            account = self._accounts.setdefault(writer_id, _Account())
            self._accounts.move_to_end(writer_id)
            if len(self._accounts) > _MOST_WRITERS:
                self._accounts.popitem(last=False)
            return account


class Intake:
    """What one actor brings in, over one connection. Not thread-safe.

    Args:
      first: the stream's first message.
      table: the replay.
      rows: the site's row store.
      accounts: shared by all connections.
      gone: whether the actor has hung up, or the node is stopping.

    Raises:
      Corruption: figures that can't be.
    """

    def __init__(
        self,
        first: pb.InsertRequest,
        table: ReplayServer,
        rows: RowStore,
        accounts: Accounts,
        gone: Callable[[], bool],
    ):
        self._spec = table.spec
        self._rows = rows
        self._feed = rows.open(first.streams, first.keep_rows, MOST_TRANSITIONS)
        self._accounts = accounts
        self._account = accounts.of(first.writer_id)
        self._items = ItemWriter(table)
        self._initial_priority = table.initial_priority
        self._gone = gone

    def take(self, request: pb.InsertRequest) -> pb.InsertResponse:
        """Stores a message's rows, then writes its transitions; returns the answer once they are in the replay.

        Raises:
          Corruption: what is in it can't be; nothing of it is taken, or its rows alone.
          Stopped: the actor is gone.
          WorkerFailed: the replay server is gone.
        """
        if len(request.places) % 4:
            raise Corruption(f"{len(request.places)} bytes are no list of streams")
        records = unpack_records(request.transitions, self._spec.stack, self._spec.num_actions)
        if len(records) > MOST_TRANSITIONS:
            raise Corruption(f"{len(records)} transitions in a message, at most {MOST_TRANSITIONS} may be")
        self._feed.put(np.frombuffer(request.places, "<i4").tolist(), list(request.cells))
        if not self._rows.holds(np.unique(records["step"]["row_ids"]).tolist()):
            raise Corruption("a transition refers to rows that have not come")
        if records["step"]["policy_version"].any():  # else random weights
            self._accounts.learned = True
        account = self._account
        with account.lock:
            new = records[max(0, account.written - request.first_transition) :]
            steps = new["step"].copy().view(np.uint8).reshape(len(new), new["step"].itemsize)
            priorities = self._initial_priority.of(new["priority"]).tolist()
            for count, (step, priority) in enumerate(zip(steps, priorities), 1):
                self._items.write(step, priority)
                if count % _UNCONFIRMED == 0:
                    self._flush(_UNCONFIRMED // 2)
            self._flush(0)
            account.written = max(account.written, request.first_transition + len(records))
        self._feed.settle(len(new))
        return pb.InsertResponse(written=account.written)

    def _flush(self, unconfirmed: int) -> None:
        while not self._items.flush(unconfirmed, _LOOK_S):
            if self._gone():
                raise Stopped("the actor is gone")

    def close(self) -> None:
        """Lets go of the connection; what it has brought stays."""
        self._feed.close()
        self._items.close()
