"""The progress of long loops on the host: a bar or, where there is no terminal, a line every ten
seconds.
"""

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


# Seconds between two lines.
EVERY = 10.0
# What shows the progress of work now: by itself, or by a text for the lines of a command.
_shown: list[Callable[[], str] | None] = []
# Whether a command tells its progress by lines alone, since when any are printed, and what they say
# otherwise.
_by_lines = False
_began: float | None = None
_doing = ""


@contextlib.contextmanager
def progress_bar(
    total: int | None, show: bool, task: str, unit: str = "batch"
) -> Iterator[Callable[[float], object]]:
    """Yields a function that advances the bar by a given amount.

    **Arguments:**

    - `total`: the amount of work.
    - `show`: whether to show a bar. It appears after a second, and disappears at the end. Without
        tqdm, lines take its place. A command that tells its progress by lines tells that of the
        outermost work in any case.
    - `task`, `unit`: the name of the work, and its unit.
    """
    by_lines = _by_lines and (show or not _shown)
    if not (show or by_lines):
        yield lambda count: None
        return
    bar_of, done = None if by_lines else _tqdm(), 0.0

    def advance(count: float) -> None:
        nonlocal done
        done += count

    def told() -> str:
        from ._misc import plural

        progress = "" if total is None else f"{done:,.0f} of "
        return f"{task}: {progress}{plural(round(done) if total is None else total, unit)}"

    if bar_of is None:
        with said_how_far(told, not by_lines):
            yield advance
        return
    large = total is None or total >= 1000
    look = {"unit": unit, "unit_scale": large, "leave": False, "delay": 1.0}
    with said_how_far(None, False), bar_of(total=total, desc=task, **look) as bar:
        yield bar.update


def _tqdm() -> Any:
    """What makes a bar, if tqdm is installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("tqdm").tqdm


@contextlib.contextmanager
def said_to_work(command: str, show: bool) -> Iterator[None]:
    """Prints a line every ten seconds while no bar shows the progress of a command. Where stderr is
    no terminal, no bar does. Within another such block, this prints nothing.
    """
    global _by_lines, _began, _doing
    if not show or _began is not None:
        yield
        return
    ended, _by_lines, _began = threading.Event(), not on_terminal(), time.monotonic()
    _doing = f"{command} goes on"
    threading.Thread(target=_say_it_works, args=(ended.wait,), daemon=True).start()
    try:
        yield
    finally:
        _by_lines, _began = False, None
        ended.set()


@contextlib.contextmanager
def said_how_far(told: Callable[[], str] | None, show: bool) -> Iterator[None]:
    """Lets the lines say what `told` returns: those of a command or, with `show`, of this block.
    `None` stands for work that shows its progress by a bar.
    """
    with said_to_work("", show):
        _shown.append(told)
        try:
            yield
        finally:
            _shown.pop()


def say_doing(task: str, now: bool) -> None:
    """Lets the lines say what a command does, where its work does not say how far it is; the first
    of them at once, or when it is due.
    """
    global _doing
    _doing = task
    if now:
        say_how_far()


def say_how_far() -> None:
    """Prints a line of progress at once, if lines are printed and no bar shows it."""
    began, text_of = _began, _shown[-1] if _shown else lambda: _doing
    if text_of is not None and began is not None:
        line = f"prism-jax: {time.monotonic() - began:.0f} s: {text_of()}"
        print(line, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether somebody sees stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def _say_it_works(wait: Callable[[float], bool]) -> None:
    """Prints the lines until `wait` says that the command has ended."""
    while not wait(EVERY):
        say_how_far()
