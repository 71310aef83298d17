from typing import ClassVar

from ._one_stage import AbstractOneStage


class ZBH2(AbstractOneStage):
    """Zero bubble with twice the memory of 1F1B: more forwards fill the bubbles of the warm-up.

    Rank `r` of `p` first runs `2 (p - r) - 1` forwards, and defers the weight gradients of its
    first `2 r` microbatches. If all ops take equally long, each rank is busy without a pause from
    its first op to its last. This shortens steps only if the optimizer of a rank does not wait for
    all other ranks. Handcrafted ZB-H2 of Qi et al., 2023.
    """

    kind: ClassVar[str] = "zb-h2"

    def orders(self) -> list[list[str]]:
        p, m = self.num_ranks, self.num_microbatches
        orders = []
        for stage in range(p):
            warmup, late = min(2 * (p - stage) - 1, m), 2 * stage
            order = [f"{stage}F{i}" for i in range(warmup)]
            for i in range(m):
                order += [f"{stage}I{i}"] + [f"{stage}W{i - late}"] * (i >= late)
                order += [f"{stage}F{warmup + i}"] * (warmup + i < m)
            orders.append(order + [f"{stage}W{i}" for i in range(max(m - late, 0), m)])
        return orders
