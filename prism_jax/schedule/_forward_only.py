import dataclasses

from ._base import AbstractSchedule
from ._ops import action, ops_of


@dataclasses.dataclass(frozen=True)
class ForwardOnly(AbstractSchedule):
    """The forwards of a schedule in its order, as for an evaluation or a prefill."""

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

    def orders(self) -> list[list[str]]:
        ops = ops_of(self.schedule)
        return [
            [
                f"{stage}F{microbatch}"
                for op in order
                for phase, stage, microbatch in action(ops, op).parts
                if phase == "F"
            ]
            for order in ops.orders
        ]


ForwardOnly.__init__.__doc__ = """**Arguments:**

- `schedule`: the schedule of a step with backwards.
"""
