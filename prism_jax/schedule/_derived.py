"""Schedules that are made of another one."""

import dataclasses

from ._base import AbstractSchedule, check_positive
from ._ops import actions_of, ops_of, schedule_parts


@dataclasses.dataclass(frozen=True)
class _OfAnother(AbstractSchedule):
    """A schedule of the ranks and stages of another."""

    schedule: AbstractSchedule

    @property
    def num_ranks(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.schedule.num_ranks

    @property
    def num_microbatches(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.schedule.num_microbatches

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return self.schedule.stage_to_rank

    @property
    def chain_starts(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.schedule.chain_starts


@dataclasses.dataclass(frozen=True)
class ForwardOnly(_OfAnother):
    """The forwards of a schedule in its order, as for an evaluation or a prefill."""

    def orders(self) -> list[list[str]]:
        parts = schedule_parts(self.schedule)
        orders: list[list[str]] = [[] for _ in range(self.num_ranks)]
        columns = (parts.phase.tolist(), parts.rank.tolist(), parts.stage, parts.microbatch)
        for phase, rank, stage, microbatch in zip(*columns, strict=True):
            if phase == "F":
                orders[rank].append(f"{stage}F{microbatch}")
        return orders


ForwardOnly.__init__.__doc__ = """**Arguments:**

- `schedule`: the schedule of a step with backwards.
"""


@dataclasses.dataclass(frozen=True)
class Repeated(_OfAnother):
    """Several steps of a schedule without a barrier between them.

    By default, a step ends when all ranks have agreed on the norm of the gradients. With
    post-validation (Qi et al., 2023), each rank continues at once, and reverts its update if the
    norm turns out too large; so a rank that ends early starts its next step early. The time of a
    step is then the time of `num_steps` steps minus that of `num_steps - 1`. There are no
    optimizers and reductions between the steps: a program has them only once, at its end.
    """

    num_steps: int

    def __post_init__(self) -> None:
        check_positive(num_steps=self.num_steps)

    @property
    def num_microbatches(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.schedule.num_microbatches * self.num_steps

    def orders(self) -> list[list[str]]:
        ops = ops_of(self.schedule)
        each = self.schedule.num_microbatches // len(self.chain_starts)
        actions = actions_of(ops)
        return [
            [
                one._replace(
                    microbatch=one.microbatch + each * step,
                    other_microbatch=one.other_microbatch + each * step,
                ).token
                for step in range(self.num_steps)
                for one in actions[order.start : order.stop]
            ]
            for order in ops.orders
        ]


Repeated.__init__.__doc__ = """**Arguments:**

- `schedule`: the schedule of one step.
- `num_steps`: the number of steps.
"""
