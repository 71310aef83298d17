import abc
import dataclasses
import inspect
import itertools as it
import operator
from typing import ClassVar, TypeVar, dataclass_transform


T = TypeVar("T")


class AbstractSchedule(abc.ABC):
    """Abstract base class for all pipeline schedules: the order in which each rank runs its ops.

    A schedule has stages, microbatches and phases, but knows nothing of models or latencies.
    Subclasses are frozen dataclasses: immutable, hashable and compared by value. In all of them,
    there are `num_ranks` pipeline ranks, `num_microbatches` microbatches in a step, and
    `virtual_stages` stages on each rank. A `stage` is a global virtual stage, numbered as in
    PyTorch.

    A job file names a schedule by its `kind`. The arguments of `make_schedule` that are fields of
    the class can be set in the file.
    """

    # The name in job files; None if job files cannot express the schedule.
    kind: ClassVar[str | None] = None
    # Whether send_recvs block by default.
    blocking: ClassVar[bool] = False
    # The least number of microbatches for each rank that the order is defined for.
    microbatches_per_rank: ClassVar[int] = 0
    # Whether a search for layouts gives it a multiple of `num_ranks` microbatches only.
    whole_groups: ClassVar[bool] = False

    num_ranks: int
    num_microbatches: int
    # The first stage of each independent chain of stages; pipes from both ends are two chains.
    chain_starts: tuple[int, ...] = (0,)
    # How many microbatches a rank runs through one of its stages before the next; None: num_ranks.
    microbatch_group_size: int | None = None

    @property
    @abc.abstractmethod
    def stage_to_rank(self) -> tuple[int, ...]:
        """The pipeline rank of each global virtual stage."""

    @abc.abstractmethod
    def orders(self) -> list[list[str]]:
        """The ops of each rank in the order in which it runs them.

        **Returns:**

        A list of tokens for each rank, as PyTorch prints them. `3F7` is the forward of microbatch 7
        on stage 3. `B` stands for a whole backward, `I` for a backward-input, `W` for a
        backward-weight, and `(0F3;7B1)OVERLAP_F_B` for a forward and a backward that run as one op.
        """

    def with_costs(
        self,
        *,
        forward: tuple[float, ...],
        backward_input: tuple[float, ...],
        backward_weight: tuple[float, ...],
        send_recv: float,
    ) -> "AbstractSchedule":
        """The schedule, optimised for given mean latencies of its stages and of a send_recv, in
        seconds.

        Most schedules do not depend on costs. A schedule that was given costs keeps them.
        """
        del forward, backward_input, backward_weight, send_recv
        return self

    @property
    def ranks_of_chains(self) -> list[tuple[int, ...]]:
        """The pipeline rank of each stage, chain after chain."""
        ends = it.pairwise((*self.chain_starts, self.num_stages))
        return [self.stage_to_rank[a:b] for a, b in ends]

    @property
    def num_stages(self) -> int:
        """The number of global virtual stages."""
        return len(self.stage_to_rank)


@dataclass_transform(frozen_default=True)
def described(cls: type[T]) -> type[T]:
    """A frozen dataclass whose `__init__` is described by the arguments in its docstring."""
    made = dataclasses.dataclass(frozen=True)(cls)
    made.__init__.__doc__ = "".join(inspect.cleandoc(cls.__doc__ or "").partition(_ARGUMENTS)[1:])
    return made


_ARGUMENTS = "**Arguments:**"


def check_positive(**counts: object) -> None:
    """Raises a `ValueError` for the first argument that is not a positive integer."""
    for name, count in counts.items():
        try:
            positive = not isinstance(count, bool) and operator.index(count) >= 1  # pyright: ignore
        except TypeError:
            positive = False
        if not positive:
            raise ValueError(f"`{name}={count!r}` must be a positive integer; use 1 or more.")


@dataclasses.dataclass(frozen=True)
class AbstractCounted(AbstractSchedule):
    """Abstract base class for schedules that follow from how many ranks and microbatches there are.

    Subclasses have a method `_order`, or `orders` if they find those of all ranks together.
    """

    num_ranks: int
    num_microbatches: int

    def __post_init__(self) -> None:
        check_positive(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)

    def orders(self) -> list[list[str]]:
        return [self._order(rank) for rank in range(self.num_ranks)]

    def _order(self, rank: int) -> list[str]:
        """The ops of a rank in the order in which it runs them."""
        raise NotImplementedError

    def _check_enough(self) -> None:
        """Raises a `ValueError` for fewer microbatches than the schedule is defined for."""
        p, m, least = self.num_ranks, self.num_microbatches, self.microbatches_per_rank
        if m < least * p:
            raise ValueError(
                f"`num_microbatches={m}` is too few for `{self.kind}` on {p} ranks; use "
                f"{least * p} or more."
            )
