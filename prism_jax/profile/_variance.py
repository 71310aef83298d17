"""Estimated variances, and the components that they give."""

import dataclasses

import numpy as np

from ._profile import Component


# Latencies whose logarithms differ by less are equal except for rounding.
ALIKE = 1e-9
_SEEN = 3.0


@dataclasses.dataclass(frozen=True)
class Variance:
    """A variance with its standard error; `None` if it cannot be estimated, for the reason in
    `note`. `chance` is the standard error if the true variance were zero.
    """

    value: float | None
    error: float = 0.0
    note: str = ""
    chance: float = 0.0

    @property
    def known(self) -> float:
        """The variance; zero if it cannot be estimated or is negative."""
        return max(self.value or 0.0, 0.0)

    @property
    def by_chance(self) -> bool:
        """Whether it is within three standard errors of zero."""
        return bool(self.known <= _SEEN * self.chance)

    def component(self, name: str) -> Component:
        """The component with this name: the standard deviation, with its standard error."""
        if self.value is None:
            return Component(name, None, None, self.note)
        if max(self.known, self.error) <= ALIKE**2:
            return Component(name, None, None, "all values are equal")
        deviation = float(np.sqrt(self.known))
        # Near zero, the error of the deviation is the root of the error of the variance.
        error = self.error / (2 * max(deviation, np.sqrt(self.error)))
        if self.by_chance:  # Then the deviation is within three standard errors of zero, too.
            error = max(error, deviation / _SEEN)
        return Component(name, deviation, float(error), self.note)
