import dataclasses
import math
import operator
from collections.abc import Sequence

from ._base import AbstractSchedule
from ._needs import find_needs
from ._ops import parse_orders
from ._token import parse_token


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
        if chains is not None:
            starts = _check_chains(chains, len(stages))
        elif _is_dual_pipe(tokens, stages):
            starts = (0, len(stages) // 2)
        else:
            starts = (0,)
        ops = parse_orders(tokens)
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


def _is_dual_pipe(orders: tuple[tuple[str, ...], ...], stages: tuple[int, ...]) -> bool:
    """Whether the rank in the middle of a V runs both ways against the direction of one chain.

    One chain has the forward of the lower middle stage before that of the upper, and the backwards
    the other way round; two chains that come from both ends meet there and have neither.
    """
    num_stages = len(stages)
    if num_stages < 4 or num_stages % 2 or stages != stages[::-1]:
        return False
    upper = num_stages // 2
    rank = stages[upper]
    first = {}
    for position, token in enumerate(orders[rank]):
        for phase, stage, _ in parse_token(token, rank, position).parts:
            first.setdefault(("F" if phase == "F" else "B", stage), position)
    forward_up, forward_down, backward_up, backward_down = (
        first.get((phase, stage), math.inf) for phase in "FB" for stage in (upper, upper - 1)
    )
    return forward_up < forward_down and backward_down < backward_up
