"""Standard errors by independent batches, which are right for every figure and its derivatives."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from ..engine import check_num_samples


NUM_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Batched:
    """Figures from independent batches of steps.

    **Attributes:**

    - `of_batches`: `(batches, figures)`.
    - `num_samples`: steps in all batches together.
    """

    of_batches: np.ndarray
    num_samples: int = 0

    @property
    def value(self) -> np.ndarray:
        """The mean over batches."""
        return np.asarray(np.mean(self.of_batches, axis=0))

    @property
    def standard_error(self) -> np.ndarray:
        """Of the mean over batches."""
        scatter = np.std(self.of_batches, axis=0, ddof=1)
        return np.asarray(scatter / np.sqrt(len(self.of_batches)))

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """A confidence interval: Student's t, with a degree of freedom for each batch but one."""
        from scipy.stats import t

        half = t.ppf(0.5 + level / 2, len(self.of_batches) - 1) * self.standard_error
        return np.asarray(self.value - half), np.asarray(self.value + half)


def in_batches(
    function: Callable[[int, PRNGKeyArray], np.ndarray],
    *,
    num_samples: int,
    key: PRNGKeyArray,
    num_batches: int = NUM_BATCHES,
) -> Batched:
    """Divides steps among batches with keys of their own.

    **Arguments:**

    - `function`: from a number of samples and a key to figures.
    - `num_samples`: in all batches together; what does not fill them is left out.

    **Raises:**

    `ValueError` for fewer than two steps in a batch.
    """
    num_samples = check_num_samples(num_samples)
    if num_samples < 2 * num_batches:
        raise ValueError(
            f"`num_samples={num_samples}` must be at least {2 * num_batches}, two for each of the "
            f"{num_batches} batches that standard errors are taken from."
        )
    keys = jax.random.split(key, num_batches)
    count = num_samples // num_batches
    return Batched(np.stack([function(count, each) for each in keys]), count * num_batches)
