"""A progress bar on stderr, for loops on the host."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(
    total: int | None, show: bool, what: str, unit: str = "batch"
) -> Iterator[Callable[[float], object]]:
    """Gives a function that is told how much more is done.

    **Arguments:**

    - `total`: how much there is to do.
    - `show`: whether to show a bar; it appears after a second, and goes when all is done.
    - `what`, `unit`: what is done, and what of it is counted.
    """
    if not show:
        yield lambda count: None
        return
    from tqdm import tqdm

    large = total is None or total >= 1000
    with tqdm(total=total, desc=what, unit=unit, unit_scale=large, leave=False, delay=1.0) as bar:
        yield bar.update
