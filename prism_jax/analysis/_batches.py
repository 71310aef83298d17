"""Standard errors by independent batches, which are right for every figure and its derivatives."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from .._estimate import Estimate, half_width
from .._progress import progress_bar
from ..engine import check_num_samples


NUM_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Batched:
    """Figures from independent batches of steps.

    **Attributes:**

    - `of_batches`: `(batches, figures)`.
    - `of_all`: `(figures,)`, of all steps together; `None` where it is the mean over batches. Few
        steps bias a quantile, and means over small batches keep that bias.
    - `num_samples`: steps in all batches together.
    """

    of_batches: np.ndarray
    of_all: np.ndarray | None = None
    num_samples: int = 0

    @property
    def value(self) -> np.ndarray:
        """Of all steps, or the mean over batches."""
        whole = np.mean(self.of_batches, axis=0) if self.of_all is None else self.of_all
        return np.asarray(whole)

    @property
    def standard_error(self) -> np.ndarray:
        """From the scatter of batches: of their mean, and nearly of the figure of all steps."""
        scatter = np.std(self.of_batches, axis=0, ddof=1)
        return np.asarray(scatter / np.sqrt(len(self.of_batches)))

    def through(self, function: Callable[[np.ndarray], np.ndarray]) -> "Batched":
        """Figures made of these: `function` takes and gives rows of figures."""
        of_all = None if self.of_all is None else np.asarray(function(self.of_all[None])[0])
        return Batched(function(self.of_batches), of_all, self.num_samples)

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """A confidence interval for each figure."""
        half = half_width(level, len(self.of_batches) - 1) * self.standard_error
        return np.asarray(self.value - half), np.asarray(self.value + half)

    def estimates(self) -> list[Estimate]:
        """One for each figure, in their order."""
        pairs = zip(self.value.flat, self.standard_error.flat, strict=True)
        degrees = float(len(self.of_batches) - 1)
        return [Estimate(float(value), float(error), degrees) for value, error in pairs]


def batch_size(num_samples: int, num_batches: int = NUM_BATCHES) -> int:
    """How many steps a batch has; what does not fill the batches is left out.

    **Raises:**

    `ValueError` for fewer than two steps in a batch.
    """
    num_samples = check_num_samples(num_samples)
    if num_samples < 2 * num_batches:
        raise ValueError(
            f"`num_samples={num_samples}` must be at least {2 * num_batches}, two for each of the "
            f"{num_batches} batches that standard errors are taken from."
        )
    return num_samples // num_batches


def batches(
    num_samples: int,
    key: PRNGKeyArray,
    *,
    num_batches: int = NUM_BATCHES,
    progress: bool = False,
    what: str = "batches",
) -> Iterator[tuple[int, PRNGKeyArray]]:
    """Divides steps among batches: how many each has, and its key.

    **Arguments:**

    - `num_samples`: in all batches together, see `batch_size`.
    - `progress`, `what`: whether to show a bar on stderr, and of what.
    """
    count = batch_size(num_samples, num_batches)
    with progress_bar(num_batches, progress, what) as advance:
        for each in jax.random.split(key, num_batches):
            yield count, each
            advance(1)


def in_batches(
    function: Callable[[int, PRNGKeyArray], np.ndarray],
    *,
    num_samples: int,
    key: PRNGKeyArray,
    **options: Any,
) -> Batched:
    """Figures of each batch, made by `function` from a number of steps and a key. See `batches`."""
    found, total = [], 0
    for count, each in batches(num_samples, key, **options):
        found.append(function(count, each))
        total += count
    return Batched(np.stack(found), num_samples=total)


def pooled(
    draw: Callable[[int, PRNGKeyArray], list[np.ndarray]],
    figures: Callable[[list[np.ndarray]], np.ndarray],
    *,
    num_samples: int,
    key: PRNGKeyArray,
    **options: Any,
) -> Batched:
    """Figures of all steps together, and of each batch to say how they scatter.

    **Arguments:**

    - `draw`: from a number of steps and a key to arrays, such as the steps of several programs.
    - `figures`: from such arrays, of a batch or of all batches one after the other, to figures.
    """
    drawn, total = [], 0
    for count, each in batches(num_samples, key, **options):
        drawn.append(draw(count, each))
        total += count
    whole = [np.concatenate(parts) for parts in zip(*drawn, strict=True)]
    return Batched(np.stack([figures(one) for one in drawn]), figures(whole), total)
