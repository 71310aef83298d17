import dataclasses

from ._base import AbstractSchedule, check_positive


@dataclasses.dataclass(frozen=True)
class ZBH1(AbstractSchedule):
    """Zero bubble within the memory of 1F1B: the weight gradients of a backward run on their own.

    Rank `r` of `p` runs as [`prism_jax.OneFOneB`][] does, but puts off the weight gradients of its
    first `r` microbatches, so that at most `p` of these are held on any rank. Handcrafted ZB-H1
    of Qi et al., 2023, which their code calls ZB1P.
    """

    kind = "zb-h1"

    num_ranks: int
    num_microbatches: int

    def __post_init__(self):
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))

    def orders(self) -> list[list[str]]:
        p, m = self.num_ranks, self.num_microbatches
        orders = []
        for stage in range(p):
            warmup = min(p - 1 - stage, m)
            order = [f"{stage}F{i}" for i in range(warmup)]
            for i in range(m):
                order += [f"{stage}F{warmup + i}"] * (warmup + i < m) + [f"{stage}I{i}"]
                order += [f"{stage}W{i - stage}"] * (i >= stage)
            orders.append(order + [f"{stage}W{i}" for i in range(max(m - stage, 0), m)])
        return orders


ZBH1.__init__.__doc__ = """**Arguments:**

- `num_ranks`: the number of pipeline ranks, which is the number of stages.
- `num_microbatches`: the number of microbatches in a step.
"""
