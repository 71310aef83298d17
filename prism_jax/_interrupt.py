"""Ctrl-C in long loops on the host: it is handled between batches of work, never within one."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn


# A command ends so many seconds after Ctrl-C at the latest; if it has begun to write what it has
# done until then, it gets so many more.
_PATIENCE, _PATIENCE_TO_END = 2.8, 1.6
# Seconds between two looks of the main thread, so that Ctrl-C arrives on all systems.
_STEP = 0.1


class Interrupt:
    """Whether Ctrl-C came, for the thread that looks for it.

    **Attributes:**

    - `came`: whether Ctrl-C came and has not been handled.
    - `handled`: whether work has ended because of it.
    - `told`: whether a sentence has said what was done until then.
    - `blocks`: how many blocks of work, one within another, look for it now.
    - `thread`: the thread that looks for it.
    """

    came = False
    handled = False
    told = False
    blocks = 0

    def __init__(self) -> None:
        self.thread = _this()

    def take(self) -> bool:
        """Whether Ctrl-C came; from now on it counts as handled."""
        came, self.came = self.came, False
        self.handled |= came
        return came

    def check(self) -> None:
        """Raises a `KeyboardInterrupt` if Ctrl-C came."""
        if self.take():
            raise KeyboardInterrupt


_this = threading.current_thread
# Of a command, or of the outermost block that holds Ctrl-C back. A signal belongs to the process,
# and so does this.
_holding: list[Interrupt] = []


def _held() -> Interrupt | None:
    """That which this thread looks for, if Ctrl-C is held back for it."""
    return _holding[0] if _holding and _holding[0].thread is _this() else None


class _OfThread(Interrupt):
    """That of a thread to which Ctrl-C never comes. But Python may end."""

    def take(self) -> bool:
        if _python_ends:
            with _working:
                _at_work[:] = [thread for thread in _at_work if thread is not _this()]
                _working.notify_all()
            threading.Event().wait()  # Until the process ends.
        return False


# The threads to which Ctrl-C never comes that are in blocks of work, each once for each block.
_at_work: list[threading.Thread] = []
_working = threading.Condition()
_python_ends = False
# For so many seconds Python's end waits for what a thread has in hand: a batch, or a compilation.
_MOST_SECONDS = 60.0


def stop_threads() -> None:
    """Lets no thread begin another batch of work, and waits until they have done those in hand. To
    be called when Python ends: a daemon thread that it ends within JAX aborts the process.
    """
    global _python_ends
    _python_ends = True
    last = time.monotonic() + _MOST_SECONDS
    with _working:
        while any(thread.is_alive() for thread in _at_work) and time.monotonic() < last:
            _working.wait(0.1)


@contextlib.contextmanager
def working() -> Iterator[Interrupt]:
    """A block of work in JAX. Python's end waits for it where Ctrl-C never comes to the thread."""
    thread = _this()
    if thread is threading.main_thread() or _held():
        yield Interrupt()
        return
    interrupt = _OfThread()
    interrupt.take()
    with _working:
        _at_work.append(thread)
    try:
        yield interrupt
    finally:
        with _working:
            _at_work.remove(thread)
            _working.notify_all()


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Delays Ctrl-C until it is checked for, or to the end, so that no work is lost. A second
    Ctrl-C is not delayed. Nested blocks share the same state.
    """
    if (held := _held()) is not None:
        with _block(held):
            yield held
        return
    if _this() is not threading.main_thread():
        with working() as interrupt:
            yield interrupt
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # Where Ctrl-C is ignored, it stays so.
        yield Interrupt()
        return
    interrupt = Interrupt()
    _holding.append(interrupt)

    def hold(number, frame):
        if interrupt.came:
            before(number, frame)
        interrupt.came = True

    signal.signal(signal.SIGINT, hold)
    try:
        with _block(interrupt):
            yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
        _holding.clear()


def told_interrupt() -> None:
    """Notes that a sentence has said what a command has done until Ctrl-C."""
    if _holding:
        _holding[0].told = True


def check_interrupt() -> None:
    """Raises a `KeyboardInterrupt` if Ctrl-C came to a command that has no work in hand."""
    if (held := _held()) is not None and not held.blocks:
        held.check()


@contextlib.contextmanager
def _block(interrupt: Interrupt) -> Iterator[Interrupt]:
    """A block of work. The outermost one does not begin, nor end in silence, after Ctrl-C."""
    check_interrupt()
    interrupt.blocks += 1
    try:
        yield interrupt
    finally:
        interrupt.blocks -= 1
    check_interrupt()


def run_command(command: Callable[[], int]) -> NoReturn:
    """Runs a command in a thread, and ends the process: with the exit status of the command, or 130
    if Ctrl-C came, also where the command does not look for it in time.

    Python raises `KeyboardInterrupt` in the main thread, which only waits: within a callback of
    JAX it would be swallowed. The thread finds it where work looks for it: see [`interruptible`][].
    A second Ctrl-C ends the process at once.
    """
    ended, results, stderr = threading.Event(), [], -1
    with contextlib.suppress(OSError):  # Closed.
        stderr = os.dup(2)  # While some libraries work, 2 leads nowhere.
    interrupt = Interrupt()
    _holding.append(interrupt)

    def run():
        interrupt.thread = _this()
        try:
            results.append(command())
        except BaseException as error:  # Also `SystemExit`, of `--help`.
            results.append(error)
        ended.set()

    def ends(seconds: float) -> bool:
        last = time.monotonic() + seconds
        while not ended.wait(_STEP) and time.monotonic() < last:
            pass
        return ended.is_set()

    came = False
    try:
        threading.Thread(target=run, daemon=True).start()
        ends(math.inf)
    except KeyboardInterrupt:
        came = interrupt.came = True
        with contextlib.suppress(KeyboardInterrupt):
            if not ends(_PATIENCE) and interrupt.handled:
                ends(_PATIENCE_TO_END)
    if not ended.is_set():
        with contextlib.suppress(OSError):
            os.write(stderr, b"prism-jax: interrupted.\n")
        os._exit(130)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # All is printed; the process ends.
    (code,) = results
    if isinstance(code, BaseException):
        raise code
    if came and code == 0:
        if not interrupt.told:
            print("prism-jax: interrupted when all was done.", file=sys.stderr)
        code = 130
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # Closed, or none.
            stream.flush()
    # To take Python down takes as long as a small command, and crashes where XLA compiles.
    os._exit(code)
