"""Standard errors from independent batches, which hold for every figure and its derivatives."""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from .._estimate import Estimate, half_width
from ..engine import Composed, check_num_samples


NUM_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Batched:
    """Figures from independent batches of steps.

    **Attributes:**

    - `of_batches`: `(batches, figures)`.
    - `of_all`: `(figures,)`, from all steps together. Quantiles of few steps are biased, and the
        mean over small batches would keep this bias.
    """

    of_batches: Float[np.ndarray, "batches figures"]
    of_all: Float[np.ndarray, " figures"]

    @property
    def standard_error(self) -> Float[np.ndarray, " figures"]:
        """The standard error of the mean over batches, from their scatter. It is nearly that of the
        figure of all steps.
        """
        scatter = np.std(self.of_batches, axis=0, ddof=1)
        return np.asarray(scatter / np.sqrt(len(self.of_batches)))

    def through(self, function: Callable[[np.ndarray], np.ndarray]) -> "Batched":
        """Figures computed from these: `function` takes and returns rows of figures."""
        return Batched(function(self.of_batches), np.asarray(function(self.of_all[None])[0]))

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """A confidence interval for each figure."""
        half = half_width(level, len(self.of_batches) - 1) * self.standard_error
        return np.asarray(self.of_all - half), np.asarray(self.of_all + half)

    def estimates(self) -> list[Estimate]:
        """An `Estimate` of each figure, in their order."""
        pairs = zip(self.of_all.flat, self.standard_error.flat, strict=True)
        degrees = float(len(self.of_batches) - 1)
        return [Estimate(float(value), float(error), degrees) for value, error in pairs]


def batched(composed: Composed, figures: Callable[[np.ndarray], np.ndarray]) -> Batched:
    """The figures of each batch of steps, and of all steps."""
    batches = np.split(composed.steps, composed.batches)
    return Batched(np.stack([figures(batch) for batch in batches]), figures(composed.whole))


def beside(*found: Batched) -> Batched:
    """The figures of several `Batched`, which have the same batches, in one row."""
    of_batches = np.concatenate([one.of_batches for one in found], axis=1)
    return Batched(of_batches, np.concatenate([one.of_all for one in found]))


def whole_batches(num_samples: int) -> int:
    """The number of steps in all batches together: `num_samples`, rounded down to whole batches.

    **Raises:**

    `ValueError` for fewer than two steps in a batch.
    """
    num_samples = check_num_samples(num_samples)
    if num_samples < 2 * NUM_BATCHES:
        raise ValueError(
            f"`num_samples={num_samples}` must be at least {2 * NUM_BATCHES}, two for each of the "
            f"{NUM_BATCHES} batches that standard errors are taken from."
        )
    return num_samples // NUM_BATCHES * NUM_BATCHES
