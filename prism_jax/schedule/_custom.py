"""Schedules whose orders are given or made of others, and files of PyTorch's schedule runtime."""

import csv
import dataclasses
import io
import operator
import os
import re
from collections.abc import Sequence

import numpy as np

from .._files import shown, written_whole
from ..data import read_text
from ._base import AbstractSchedule, check_positive, described
from ._needs import find_needs
from ._ops import ScheduledOps, actions_of, ops_of, parse_orders, parts_of, schedule_parts


_MOST_BYTES = 2**23  # A million ops.
# Actions that PyTorch adds when it lowers a schedule; here they follow from the ops.
_ADDED = re.compile(r"\d+((SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)")


@dataclasses.dataclass(frozen=True, init=False)
class CustomSchedule(AbstractSchedule):
    """Any order of ops on each rank, given as the tokens that PyTorch prints.

    This covers zero-bubble schedules, in which a backward is two ops; V-shaped placements of
    stages; and DualPipe, in which ops overlap and the stages form two independent chains.
    """

    _orders: tuple[tuple[str, ...], ...] = dataclasses.field(repr=False)
    _stage_to_rank: tuple[int, ...]
    chain_starts: tuple[int, ...]
    num_ranks: int
    num_microbatches: int

    def __init__(
        self,
        orders: Sequence[Sequence[str]],
        stage_to_rank: Sequence[int],
        *,
        chains: Sequence[Sequence[int]] | None = None,
    ):
        """**Arguments:**

        - `orders`: for each rank, the tokens of its ops in the order in which it runs them: `3F7`
            (forward of microbatch 7 on stage 3), `2B0` (backward), `0I2` (backward-input), `5W1`
            (backward-weight), `(0F3;7B1)OVERLAP_F_B` (a forward and a backward as one op).
        - `stage_to_rank`: the rank of each stage.
        - `chains`: the first and the last stage of each independent chain of stages. The default is
            one chain of all stages, except for orders that run the two stages in the middle of a
            V-shaped placement against the direction of one chain, as DualPipe does. Those are two
            chains.

        **Raises:**

        A `ValueError` that names rank, stage and microbatch, for a token that is not valid, or an
        op that is on the wrong rank, occurs twice, or has no producer.
        """
        stages = _check_stages(stage_to_rank, len(orders))
        for rank, order in enumerate(orders):
            if isinstance(order, str):
                raise ValueError(
                    f"The order of rank {rank} is one string; `.split()` it into a list of tokens."
                )
        tokens = tuple(tuple(order) for order in orders)
        starts = None if chains is None else _check_chains(chains, len(stages))
        ops = parse_orders(tokens)
        if starts is None:
            starts = (0, len(stages) // 2) if _is_dual_pipe(ops, stages) else (0,)
        if not len(ops.rank):
            raise ValueError("The orders hold no op; give at least one token, as in `0F0`.")
        find_needs(ops, stages, starts)
        last = int(max(ops.microbatch.max(), ops.other_microbatch.max()))
        object.__setattr__(self, "_orders", tokens)
        object.__setattr__(self, "_stage_to_rank", stages)
        object.__setattr__(self, "chain_starts", starts)
        object.__setattr__(self, "num_ranks", len(tokens))
        object.__setattr__(self, "num_microbatches", last + 1)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        return self._stage_to_rank

    def orders(self) -> list[list[str]]:
        return [list(order) for order in self._orders]


def _check_stages(stage_to_rank: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    stages = tuple(operator.index(rank) for rank in stage_to_rank)
    for stage, rank in enumerate(stages):
        if not 0 <= rank < num_ranks:
            raise ValueError(
                f"`stage_to_rank` puts stage {stage} on rank {rank}, but there are orders for "
                f"{num_ranks} ranks; use 0 to {num_ranks - 1}, or give an order for each rank."
            )
    return stages


def _check_chains(chains: Sequence[Sequence[int]], num_stages: int) -> tuple[int, ...]:
    covered = [stage for first, last in chains for stage in range(first, last + 1)]
    if covered != list(range(num_stages)) or any(last < first for first, last in chains):
        raise ValueError(
            f"`chains={[tuple(chain) for chain in chains]}` must give the first and last stage of "
            f"each chain, and hold each of the stages 0 to {num_stages - 1} once, in order."
        )
    return tuple(first for first, _ in chains)


def _is_dual_pipe(ops: ScheduledOps, stages: tuple[int, ...]) -> bool:
    """Whether the rank in the middle of a V runs both ways against the direction of one chain.

    One chain has the forward of the lower middle stage before that of the upper, and the backwards
    the other way round; two chains that come from both ends meet there and have neither.
    """
    num_stages = len(stages)
    if num_stages < 4 or num_stages % 2 or stages != stages[::-1]:
        return False
    upper = num_stages // 2
    parts = parts_of(ops)
    here = parts.rank == stages[upper]
    forward = parts.phase == "F"

    def first(forwards: bool, stage: int) -> int:
        ops_of_stage = parts.op[here & (forward == forwards) & (parts.stage == stage)]
        return int(ops_of_stage.min(initial=len(ops.rank)))

    return first(True, upper) < first(True, upper - 1) and (
        first(False, upper - 1) < first(False, upper)
    )


def load_schedule(path: str | os.PathLike[str]) -> CustomSchedule:
    """Reads a schedule from a CSV file of PyTorch's schedule runtime.

    Idle slots and the communication of a lowered schedule (`3SEND_F7`, `3UNSHARD`) are ignored,
    because sends and receives follow from the ops.

    **Arguments:**

    - `path`: the file. It has a line for each rank, with the tokens of its ops, as in
        `CustomSchedule`, in the order in which it runs them.

    **Returns:**

    A [`prism_jax.CustomSchedule`][]. Each stage is placed on the first rank that runs one of its
    ops.

    **Raises:**

    A `ValueError` that names the file, if it is not such a schedule.
    """
    # An empty line is a rank that is always idle.
    reader = csv.reader(io.StringIO(read_text(path, _MOST_BYTES), newline=""))
    try:
        cells = [[cell.strip() for cell in row] for row in reader]
    except csv.Error as error:
        raise ValueError(
            f"{shown(path)}, line {reader.line_num}: this is not valid CSV: {error}."
        ) from None
    orders = [[cell for cell in row if cell and not _ADDED.fullmatch(cell)] for row in cells]
    try:
        return CustomSchedule(orders, places(orders))
    except ValueError as error:
        raise ValueError(f"{shown(path)}: {error}") from None


def save_schedule(schedule: AbstractSchedule, path: str | os.PathLike[str]) -> None:
    """Writes a schedule as a CSV file that PyTorch's schedule runtime loads.

    PyTorch only runs schedules with one chain of stages. Others are written too, for
    `load_schedule`.

    **Arguments:**

    - `schedule`: any schedule.
    - `path`: the file. An existing file is replaced.
    """
    with written_whole(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(schedule.orders())


def places(orders: Sequence[Sequence[str]]) -> list[int]:
    """The rank of each stage, from the first of its ops.

    **Raises:**

    A `ValueError` where a stage is missing.
    """
    parts = parts_of(parse_orders(orders))
    stages, first = np.unique(parts.stage, return_index=True)
    missing = np.flatnonzero(stages != np.arange(len(stages)))
    if len(missing):
        raise ValueError(
            f"no rank runs stage {missing[0]}, but there is a stage {stages[-1]}; number the "
            "stages from 0 without a gap."
        )
    return parts.rank[first].tolist()


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


@described
class ForwardOnly(_OfAnother):
    """The forwards of a schedule in its order, as for an evaluation or a prefill.

    **Arguments:**

    - `schedule`: the schedule of a step with backwards.
    """

    def orders(self) -> list[list[str]]:
        parts = schedule_parts(self.schedule)
        orders: list[list[str]] = [[] for _ in range(self.num_ranks)]
        columns = (parts.phase.tolist(), parts.rank.tolist(), parts.stage, parts.microbatch)
        for phase, rank, stage, microbatch in zip(*columns, strict=True):
            if phase == "F":
                orders[rank].append(f"{stage}F{microbatch}")
        return orders


@described
class Repeated(_OfAnother):
    """Several steps of a schedule without a barrier between them.

    By default, a step ends when all ranks have agreed on the norm of the gradients. With
    post-validation (Qi et al., 2023), each rank continues at once, and reverts its update if the
    norm turns out too large; so a rank that ends early starts its next step early. The time of a
    step is then the time of `num_steps` steps minus that of `num_steps - 1`. There are no
    optimizers and reductions between the steps: a program has them only once, at its end.

    **Arguments:**

    - `schedule`: the schedule of one step.
    - `num_steps`: the number of steps.
    """

    num_steps: int

    def __post_init__(self) -> None:
        check_positive(num_steps=self.num_steps)

    @property
    def num_microbatches(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.schedule.num_microbatches * self.num_steps

    def orders(self) -> list[list[str]]:
        ops = ops_of(self.schedule)
        per_chain = self.schedule.num_microbatches // len(self.chain_starts)
        actions = actions_of(ops)
        return [
            [
                action._replace(
                    microbatch=action.microbatch + per_chain * step,
                    other_microbatch=action.other_microbatch + per_chain * step,
                ).token
                for step in range(self.num_steps)
                for action in actions[order.start : order.stop]
            ]
            for order in ops.orders
        ]
