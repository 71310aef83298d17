"""Schedules whose stages are dealt out to the ranks in turns: one to each, or several."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from ._base import AbstractCounted, check_positive, described


def alternate(tokens: Iterable[Sequence[str]], warmup: int, late: int = 0) -> list[str]:
    """An order that alternates between a forward and a backward, after a warm-up of forwards.

    **Arguments:**

    - `tokens`: of the forwards, of the backwards and, where these are split, of their
        backward-weights.
    - `warmup`: how many forwards come before all others.
    - `late`: each backward-weight is deferred by so many backwards.
    """
    forwards, backwards, *weights_by_phase = tokens
    backward_weights = [token for phase in weights_by_phase for token in phase]
    order = [*forwards[:warmup]]
    for k, backward in enumerate(backwards):
        order += [*forwards[warmup + k : warmup + k + 1], backward]
        order += backward_weights[k - late : k - late + 1] if k >= late else ()
    return [*order, *backward_weights[max(len(backward_weights) - late, 0) :]]


@described
class AbstractOneStage(AbstractCounted):
    """Abstract base class for schedules with one stage on each rank.

    **Arguments:**

    - `num_ranks`: the number of pipeline ranks, which is the number of stages.
    - `num_microbatches`: the number of microbatches in a step.
    """

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))

    def _of_phase(self, phase: str, stage: int) -> list[str]:
        """The ops of a phase and stage."""
        return [f"{stage}{phase}{i}" for i in range(self.num_microbatches)]


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
        tokens = (self._of_phase(phase, rank) for phase in "FB")
        return alternate(tokens, self.num_ranks - 1 - rank)


class ZBH1(AbstractOneStage):
    """Zero bubble within the memory of 1F1B, with separate ops for weight gradients.

    Rank `r` of `p` runs as in [`prism_jax.OneFOneB`][], but defers the weight gradients of its
    first `r` microbatches. So any rank holds the activations of at most `p` microbatches.
    Handcrafted ZB-H1 of Qi et al., 2023, which is called ZB1P in their code.
    """

    kind: ClassVar[str] = "zb-h1"

    def _order(self, rank: int) -> list[str]:
        tokens = (self._of_phase(phase, rank) for phase in "FIW")
        return alternate(tokens, self.num_ranks - 1 - rank, late=rank)


class ZBH2(AbstractOneStage):
    """Zero bubble with twice the memory of 1F1B: more forwards fill the bubbles of the warm-up.

    Rank `r` of `p` first runs `2 (p - r) - 1` forwards, and defers the weight gradients of its
    first `2 r` microbatches. If all ops take equally long, each rank is busy without a pause from
    its first op to its last. This shortens steps only if the optimizer of a rank does not wait for
    all other ranks. Handcrafted ZB-H2 of Qi et al., 2023.
    """

    kind: ClassVar[str] = "zb-h2"

    def _order(self, rank: int) -> list[str]:
        tokens = (self._of_phase(phase, rank) for phase in "FIW")
        return alternate(tokens, 2 * (self.num_ranks - 1 - rank), late=2 * rank)


@described
class AbstractLooped(AbstractCounted):
    """Abstract base class for schedules whose stage `c * num_ranks + r` is on rank `r`.

    **Arguments:**

    - `num_ranks`: the number of pipeline ranks.
    - `num_microbatches`: the number of microbatches in a step.
    - `virtual_stages`: the number of stages on each rank.
    """

    virtual_stages: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(virtual_stages=self.virtual_stages)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks)) * self.virtual_stages

    def _stages(self, rank: int) -> range:
        return range(rank, self.num_stages, self.num_ranks)


class LoopedBFS(AbstractLooped):
    """Breadth-first: a rank runs all microbatches through one of its stages, then through the next.

    Stage `c * num_ranks + r` is on rank `r`. The backwards run in reverse order of stages, and of
    microbatches in each stage.
    """

    kind: ClassVar[str] = "looped-bfs"

    def _order(self, rank: int) -> list[str]:
        stages, microbatches = self._stages(rank), range(self.num_microbatches)
        forwards = [f"{stage}F{i}" for stage in stages for i in microbatches]
        return forwards + [f"{s}B{i}" for s in reversed(stages) for i in reversed(microbatches)]


@described
class AbstractInterleaved(AbstractLooped):
    """Abstract base class for schedules that run groups of microbatches through each stage in turn.

    Stage `c * num_ranks + r` is on rank `r`.

    **Arguments:**

    - `num_ranks`: the number of pipeline ranks.
    - `num_microbatches`: the number of microbatches in a step.
    - `virtual_stages`: the number of stages on each rank.
    - `microbatch_group_size`: how many microbatches run through a stage before the rank turns to
        its next stage (Megatron's `microbatch_group_size_per_vp_stage`); the last group may be
        shorter. Default `num_ranks`. PyTorch's `Interleaved1F1B` and `InterleavedZeroBubble` have
        `num_microbatches // max(1, num_microbatches // num_ranks)`.
    """

    whole_groups = True  # With others, orders can deadlock.

    microbatch_group_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.microbatch_group_size is not None:
            check_positive(microbatch_group_size=self.microbatch_group_size)

    @property
    def group_size(self) -> int:
        """How many microbatches run through a stage before the rank turns to its next stage."""
        return self.microbatch_group_size or self.num_ranks

    def _turns(self, phase: str, rank: int) -> list[str]:
        """The ops of a phase on a rank in their order: backwards take the last stage first."""
        m, size, stages = self.num_microbatches, self.group_size, self._stages(rank)
        return [
            f"{stage}{phase}{i}"
            for start in range(0, m, size)
            for stage in (stages if phase == "F" else reversed(stages))
            for i in range(start, min(start + size, m))
        ]

    def _warmup(self, rank: int, hops: int) -> int:
        """How many forwards precede the first backward: `hops` for each rank behind this one, and
        the first group in all stages except the last.
        """
        return hops * (self.num_ranks - 1 - rank) + (self.virtual_stages - 1) * self.group_size


class InterleavedOneFOneB(AbstractInterleaved):
    """One forward, one backward with several stages per rank, as Megatron-LM interleaves them.

    Stage `c * num_ranks + r` is on rank `r`. A rank runs a group of microbatches through each of
    its stages in turn, then the next group. With `virtual_stages=1` this is *not*
    [`prism_jax.OneFOneB`][]: its warm-up is twice as long.

    !!! note

        If the last group has fewer than `num_ranks` microbatches, the orders can deadlock;
        `evaluate` and `compile_job` then raise a `ValueError`. Megatron-LM refuses all such inputs.
    """

    kind: ClassVar[str] = "interleaved-1f1b"

    def _order(self, rank: int) -> list[str]:
        return alternate((self._turns(phase, rank) for phase in "FB"), self._warmup(rank, 2))


class OverlappedOneFOneB(AbstractInterleaved):
    """[`prism_jax.InterleavedOneFOneB`][] in which the forward of one microbatch and the backward
    of another run as a pair, as with Megatron-Core's `--overlap-moe-expert-parallel-comm`.

    The warm-up has one more forward, so that no backward is paired with a forward that it waits
    for. With one rank and one stage, neighbouring microbatches are paired.

    !!! note

        If the last group has fewer than `num_ranks` microbatches, the orders can deadlock;
        `evaluate` and `compile_job` then raise a `ValueError`.
    """

    kind: ClassVar[str] = "overlapped-1f1b"

    def _order(self, rank: int) -> list[str]:
        forwards, backwards = (self._turns(phase, rank) for phase in "FB")
        warmup = self._warmup(rank, 2) + 1
        ahead = forwards[warmup:]
        pairs = [f"({f};{b})OVERLAP_F_B" for f, b in zip(ahead, backwards, strict=False)]
        return [*forwards[:warmup], *pairs, *backwards[len(pairs) :]]


class InterleavedZeroBubble(AbstractInterleaved):
    """Interleaved 1F1B with separate ops for weight gradients, as in PyTorch.

    Its warm-up is shorter than that of [`prism_jax.InterleavedOneFOneB`][] by `p - 1 - r` on rank
    `r` of `p`, and its first `r` weight gradients are deferred. With `virtual_stages=1` it is
    [`prism_jax.ZBH1`][].

    !!! note

        If the last group has fewer than `num_ranks` microbatches, the orders can deadlock;
        `evaluate` and `compile_job` then raise a `ValueError`.
    """

    kind: ClassVar[str] = "interleaved-zero-bubble"

    def _order(self, rank: int) -> list[str]:
        tokens = (self._turns(phase, rank) for phase in "FIW")
        return alternate(tokens, self._warmup(rank, 1), late=rank)
