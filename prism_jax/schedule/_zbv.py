from typing import ClassVar

from ._v_shape import AbstractVShape


class ZBV(AbstractVShape):
    """Zero bubble with two stages on each rank, placed in a V, within the memory of 1F1B.

    Rank `r` of `p` has the stages `r` and `2 p - 1 - r`, so that the first and the last stage share
    a rank. A rank holds the activations of at most `2 p` (stage, microbatch) pairs. The order is
    made for at least `2 p - 1` microbatches; with fewer, the ops of the missing microbatches are
    left out. It is the same as PyTorch's `ZBVZeroBubble`.
    """

    kind: ClassVar[str] = "zbv"

    def orders(self) -> list[list[str]]:
        return [self._order(rank) for rank in range(self.num_ranks)]

    def _order(self, rank: int) -> list[str]:
        p, m = self.num_ranks, self.num_microbatches
        most = max(m, 2 * p - 1)
        stages = rank, 2 * p - 1 - rank
        done = dict.fromkeys(((phase, c) for phase in "FIW" for c in (0, 1)), 0)
        order: list[str] = []

        def run(*ops: tuple[str, int]) -> None:
            for phase, c in ops:
                if done[phase, c] < m:
                    order.append(f"{stages[c]}{phase}{done[phase, c]}")
                done[phase, c] += 1

        run(*[("F", 0)] * (2 * (p - rank) - 1))
        run(*[("F", 1), ("F", 0)] * rank)
        run(*[("F", 1), ("I", 1), ("W", 1)] * (p - rank))
        while done["F", 1] < most:
            run(*[("F", 0)] * (done["F", 0] < most))
            run(("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
        run(*[("I", 0), ("I", 1)] * rank)
        run(*[("I", 0), ("W", 0)] * (p - rank))
        for c in (1, 0):
            run(*[("W", c)] * (most - done["W", c]))
        return order
