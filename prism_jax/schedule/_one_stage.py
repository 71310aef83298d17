"""Schedules with one stage on each rank."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ._base import AbstractCounted


def alternate(
    forwards: Sequence[str],
    backwards: Sequence[str],
    warmup: int,
    weights: Sequence[str] = (),
    late: int = 0,
) -> list[str]:
    """An order that alternates between a forward and a backward, after a warm-up of forwards.

    **Arguments:**

    - `forwards`, `backwards`: the tokens of both.
    - `warmup`: how many forwards come before all others.
    - `weights`: the backward-weights of the backwards.
    - `late`: each of them is deferred by so many backwards.
    """
    order = [*forwards[:warmup]]
    for k, backward in enumerate(backwards):
        order += [*forwards[warmup + k : warmup + k + 1], backward]
        order += weights[k - late : k - late + 1] if k >= late else ()
    return [*order, *weights[max(len(weights) - late, 0) :]]


@dataclasses.dataclass(frozen=True)
class AbstractOneStage(AbstractCounted):
    """Abstract base class for schedules with one stage on each rank."""

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))

    def _of_phase(self, phase: str, stage: int) -> list[str]:
        """The ops of a phase and stage."""
        return [f"{stage}{phase}{i}" for i in range(self.num_microbatches)]


AbstractOneStage.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which is the number of stages.
- `num_microbatches`: the number of microbatches in a step.
"""


class GPipe(AbstractOneStage):
    """All forwards, then all backwards, one stage per rank.

    The backwards run in the same order of microbatches as the forwards, as in PyTorch. (In the
    paper they run in reverse order; the makespan is the same if all microbatches cost the same.)
    """

    kind: ClassVar[str] = "gpipe"

    def _order(self, rank: int) -> list[str]:
        return self._of_phase("F", rank) + self._of_phase("B", rank)


class OneFOneB(AbstractOneStage):
    """One forward, one backward (PipeDream-flush), one stage per rank.

    Rank `r` of `p` runs `p - 1 - r` forwards, then alternates between a forward and a backward,
    then runs the remaining backwards. It has at most `p - r` microbatches in flight.
    """

    kind: ClassVar[str] = "1f1b"
    blocking = True  # As Megatron-LM's, which cannot overlap them.

    def _order(self, rank: int) -> list[str]:
        forwards, backwards = (self._of_phase(phase, rank) for phase in "FB")
        return alternate(forwards, backwards, self.num_ranks - 1 - rank)


class ZBH1(AbstractOneStage):
    """Zero bubble within the memory of 1F1B, with separate ops for weight gradients.

    Rank `r` of `p` runs as in [`prism_jax.OneFOneB`][], but defers the weight gradients of its
    first `r` microbatches. So any rank holds the activations of at most `p` microbatches.
    Handcrafted ZB-H1 of Qi et al., 2023, which is called ZB1P in their code.
    """

    kind: ClassVar[str] = "zb-h1"

    def _order(self, rank: int) -> list[str]:
        forwards, backwards, weights = (self._of_phase(phase, rank) for phase in "FIW")
        return alternate(forwards, backwards, self.num_ranks - 1 - rank, weights, late=rank)


class ZBH2(AbstractOneStage):
    """Zero bubble with twice the memory of 1F1B: more forwards fill the bubbles of the warm-up.

    Rank `r` of `p` first runs `2 (p - r) - 1` forwards, and defers the weight gradients of its
    first `2 r` microbatches. If all ops take equally long, each rank is busy without a pause from
    its first op to its last. This shortens steps only if the optimizer of a rank does not wait for
    all other ranks. Handcrafted ZB-H2 of Qi et al., 2023.
    """

    kind: ClassVar[str] = "zb-h2"

    def _order(self, rank: int) -> list[str]:
        forwards, backwards, weights = (self._of_phase(phase, rank) for phase in "FIW")
        warmup = 2 * (self.num_ranks - 1 - rank)
        return alternate(forwards, backwards, warmup, weights, late=2 * rank)
