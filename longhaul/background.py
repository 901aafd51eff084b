"""A worker thread for work where only the newest matters: publishing weights, writing checkpoints."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from longhaul.errors import Stopped, WorkerFailed

T = TypeVar("T")


class NewestOnly(Generic[T]):
    """Handles the newest item submitted, in a thread of its own; an item that a newer one overtakes is dropped.

    The thread ends at the first error, which `submit`, `check` and `close` raise again in the caller's thread.

    Args:
      name: of the thread, for messages.
      handle: called with one item at a time; Stopped from it is an end, not an error.
    """

    def __init__(self, name: str, handle: Callable[[T], None]):
        self._name = name
        self._handle = handle
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, item: T) -> None:
        """Hands over an item without waiting."""
        self.check()
        with self._changed:
            self._waiting = [item]
            self._changed.notify()

    def check(self) -> None:
        """Raises the thread's error, if it had one."""
        if self._error is not None:
            raise self._error

    def close(self, timeout_s: float) -> None:
        """Lets the item at hand and the one that waits be handled, and ends the thread; may be called twice.

        Raises:
          WorkerFailed: the thread is still busy after `timeout_s` seconds.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self.check()
        if self._thread.is_alive():
            raise WorkerFailed(f"{self._name} is still busy after {timeout_s:.0f} s; its last item may be lost")

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    # Without a deadline: submit and close both notify, and the thread is a daemon.
                    self._changed.wait_for(lambda: self._waiting or self._closing)
                    if not self._waiting:
                        return
                    item = self._waiting.pop()
                self._handle(item)
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
