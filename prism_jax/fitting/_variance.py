"""A variance that was estimated, and the component that it makes."""

import dataclasses

import numpy as np

from ..data import Component


# Latencies whose logarithms differ by no more are alike: rounding.
ALIKE = 1e-9
_SEEN = 3.0


@dataclasses.dataclass(frozen=True)
class Variance:
    """A variance with its standard error; `None` where it is not told, for the reason `note`.
    `chance` is the standard error that it would have if there were none.
    """

    value: float | None
    error: float = 0.0
    note: str = ""
    chance: float = 0.0

    @property
    def known(self) -> float:
        """The variance, zero where it is not told or negative."""
        return max(self.value or 0.0, 0.0)

    @property
    def by_chance(self) -> bool:
        """Whether it is within three standard errors of none."""
        return bool(self.known <= _SEEN * self.chance)

    def component(self, name: str) -> Component:
        """The standard deviation under a name, with its standard error."""
        if self.value is None:
            return Component(name, None, None, self.note)
        if max(self.known, self.error) <= ALIKE**2:
            return Component(name, None, None, "no spread at all is seen")
        deviation = float(np.sqrt(self.known))
        # Near zero the deviation is known to the root of what its square is.
        error = self.error / (2 * max(deviation, np.sqrt(self.error)))
        if self.by_chance:  # It is within three standard errors of none, as its square is.
            error = max(error, deviation / _SEEN)
        return Component(name, deviation, float(error), self.note)
