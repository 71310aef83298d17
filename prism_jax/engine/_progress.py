"""A progress bar on stderr for the host loop."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int, show: bool) -> Iterator[Callable[[int], object]]:
    """Gives a function that is told how much more is done."""
    if not show:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="sample", unit_scale=True, leave=False, delay=1.0) as bar:
        yield bar.update
