"""Handles Ctrl-C between batches of work, never within one."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupt:
    """Whether Ctrl-C came.

    **Attributes:**

    - `came`: whether Ctrl-C came and has not been handled.
    - `late`: whether it came after all work was done, so that there was nothing to end.
    """

    came = False
    late = False

    def check(self) -> None:
        """Raises a `KeyboardInterrupt` if Ctrl-C came."""
        if self.came:
            self.came = False
            raise KeyboardInterrupt


# Of the outermost block that holds Ctrl-C back. A signal belongs to the process, and so does this.
_holding: list[Interrupt] = []


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Delays Ctrl-C until it is checked for, or to the end, so that no work is lost. A second
    Ctrl-C is not delayed. Nested blocks share the same state.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt()  # Signals come to the main thread alone.
        return
    before = signal.getsignal(signal.SIGINT)
    if _holding or not callable(before):  # Where Ctrl-C is ignored, it stays so.
        yield _holding[0] if _holding else Interrupt()
        return
    interrupt = Interrupt()
    _holding.append(interrupt)

    def hold(number, frame):
        if interrupt.came:
            before(number, frame)
        interrupt.came = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
        _holding.clear()
    interrupt.check()
