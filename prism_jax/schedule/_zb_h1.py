from typing import ClassVar

from ._one_stage import AbstractOneStage


class ZBH1(AbstractOneStage):
    """Zero bubble within the memory of 1F1B: the weight gradients of a backward run on their own.

    Rank `r` of `p` runs as [`prism_jax.OneFOneB`][] does, but puts off the weight gradients of its
    first `r` microbatches, so that at most `p` of these are held on any rank. Handcrafted ZB-H1
    of Qi et al., 2023, which their code calls ZB1P.
    """

    kind: ClassVar[str] = "zb-h1"

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
