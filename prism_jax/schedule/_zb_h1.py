from typing import ClassVar

from ._one_stage import AbstractOneStage


class ZBH1(AbstractOneStage):
    """Zero bubble within the memory of 1F1B, with separate ops for weight gradients.

    Rank `r` of `p` runs as in [`prism_jax.OneFOneB`][], but defers the weight gradients of its
    first `r` microbatches. So any rank holds the activations of at most `p` microbatches.
    Handcrafted ZB-H1 of Qi et al., 2023, which is called ZB1P in their code.
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
