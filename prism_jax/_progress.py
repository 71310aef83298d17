"""A progress bar on stderr, for loops on the host."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    total: int | None, show: bool, what: str, unit: str = "batch"
) -> Iterator[Callable[[float], object]]:
    """Yields a function that advances the bar by a given amount.

    **Arguments:**

    - `total`: the amount of work.
    - `show`: whether to show a bar. It appears after a second, and disappears at the end.
    - `what`, `unit`: the name of the work, and its unit.
    """
    if not show:
        yield lambda count: None
        return
    from tqdm import tqdm

    large = total is None or total >= 1000
    with tqdm(total=total, desc=what, unit=unit, unit_scale=large, leave=False, delay=1.0) as bar:
        yield bar.update
