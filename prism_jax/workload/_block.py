"""What a workload hands to a program: kernels, and the blocks that they form."""

import msgspec


class Load(msgspec.Struct, frozen=True):
    """How unevenly the ranks of an expert-parallel group are loaded. See `program.Loads`.

    **Attributes:**

    - `concentration`: of the popularity of experts.
    - `members`: parts over which the experts are distributed.
    - `counts`: tokens of a microbatch of all of them, once for each expert that a token goes to.
    - `experts`: of a member.
    - `split`: ranks that share a member's experts.
    - `capacity`: the most tokens that an expert takes, over the mean; infinite for any number.
    - `popularity`: of each expert, member by member, where it is known and stays; only its
        proportions count. Empty where it is drawn anew for each microbatch.
    """

    concentration: float
    members: int
    counts: int
    experts: int
    split: int
    capacity: float
    popularity: tuple[float, ...] = ()


class Kernel(msgspec.Struct, frozen=True):
    """A GPU kernel or collective at one size; the key of a latency table.

    **Attributes:**

    - `kind`: its class, which decides its variability: `gemm`, `attention`, `elementwise`, ... or
        a collective: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send_recv`.
    - `size`: the rest of its name: dtype and shape, or bytes, group and link.
    - `mean`: its mean latency, in seconds.
    - `link`: the name of the cluster's link that a collective uses; `None` for compute.
    - `load`: what it takes longer by on each member: in proportion to the member's load, and a
        collective to that of the fullest; `None` for equal loads.
    - `group`: the name of the ranks that run a collective together, such as `tp`.
    - `flop`: floating-point operations of its products.
    """

    kind: str
    size: str
    mean: float
    link: str | None = None
    load: Load | None = None
    group: str = ""
    flop: float = 0.0


Row = tuple[tuple[Kernel, int], ...]  # Serial kernels in any order, each with how often it runs.


Block = tuple[tuple["Segment", int], ...]  # Each segment with how often it occurs.


class Branches(msgspec.Struct, frozen=True):
    """What runs side by side: compute of every member, and collectives of the whole group.

    The collectives start when the slowest member has come so far. Who has ended its compute, and
    the collectives, goes on. Rows of collectives do not slow one another.

    **Attributes:**

    - `compute`: the kernels that every member runs by itself.
    - `communication`: the rows of collectives, one for each stream.
    - `within`: instead of `compute`, a block whose segments have collectives of their own: such as
        a layer beside the collectives of the parameters of its neighbours. Contention slows all of
        it. Its segment has nothing else.
    - `contention`: by what part compute takes longer while collectives run, and they while compute
        does; the product of the two is at most one.
    """

    compute: Row
    communication: tuple[Row, ...]
    contention: tuple[float, float] = (0.0, 0.0)
    within: Block = ()

    def __post_init__(self) -> None:
        if not all(self.communication) or not self.communication:
            raise ValueError("Branches without a collective are no branches; give kernels alone.")
        if self.within and (self.compute or any(_nests(one) for one, _ in self.within)):
            raise ValueError(
                "Branches have either `compute` or a block `within` them, in which no block is "
                "within branches again; leave one out."
            )
        compute, communication = self.contention
        if not (compute >= 0 and communication >= 0 and compute * communication <= 1):
            raise ValueError(
                f"`contention={self.contention}` must hold two numbers that are not negative and "
                "whose product is at most 1."
            )

    @property
    def slowdowns(self) -> tuple[float, float]:
        """What compute that ends last has taken longer by, as a part of the collectives' latency
        alone; and what collectives that end last have, as a part of that of compute.

        With `x = C (1 + a)` and `y = K (1 + b)`, what takes longer is done at full speed when the
        other has ended: `max(x + (y - x) / (1 + b), y + (x - y) / (1 + a))`, which is
        `max(K + beta C, C + alpha K)`, exact for `a b <= 1`.
        """
        a, b = self.contention
        return a * (1 + b) / (1 + a), b * (1 + a) / (1 + b)


class Segment(msgspec.Struct, frozen=True):
    """Kernels that every member of a tensor- and context-parallel group runs by itself.

    **Attributes:**

    - `kernels`: what each member runs alone, before the branches.
    - `collective`: what closes the segment: it starts when the slowest member arrives. `None` where
        nobody waits within the group.
    - `branches`: what then runs side by side, one after the other, before the closing collective.
        A segment that has them ends when all members have ended them.
    - `members`: how many ranks wait there; `None`: those of a tensor- and context-parallel group.
    """

    kernels: Row
    collective: Kernel | None = None
    branches: tuple[Branches, ...] = ()
    members: int | None = None

    def __post_init__(self) -> None:
        if _nests(self) and (self.kernels or self.collective or len(self.branches) > 1):
            raise ValueError(
                "A segment with a block within its branches has nothing else; give what comes "
                "before and after as segments of their own."
            )


def _nests(one: Segment) -> bool:
    return any(branches.within for branches in one.branches)


class Reduction(msgspec.Struct, frozen=True):
    """Gradients of a pipeline rank that are reduced over the replicas together.

    **Attributes:**

    - `kernels`: the collectives.
    - `stages`: the stage whose last backward makes the gradients, and those on other ranks that
        hold copies of it; empty: all stages of the rank.
    - `piece`: the part of that backward that ends with these gradients, where it makes those of
        several reductions, which stand in its order; `None`: all of it.
    - `each_turn`: whether they are reduced after each row of backwards of the stage, of whichever
        microbatches; otherwise after the last one only.
    """

    kernels: Block
    stages: tuple[int, ...] = ()
    piece: Block | None = None
    each_turn: bool = False


# What runs one after the other, each list of segments with how often in a row.
Ordered = tuple[tuple[tuple[Segment, ...], int], ...]


class Passes(msgspec.Struct, frozen=True):
    """Stages in the order in which they run, where tokens of one microbatch may travel to experts
    beside the compute of another.

    **Attributes:**

    - `forward`, `backward`: of each (global virtual) stage.
    - `contention`: as of `Branches`.
    """

    forward: tuple[Ordered, ...]
    backward: tuple[Ordered, ...]
    contention: tuple[float, float]


class Workload(msgspec.Struct, frozen=True):
    """The kernels of one step, for each stage and phase, and what follows the pipeline.

    **Attributes:**

    - `forward`, `backward`: the block of one microbatch, for each (global virtual) stage.
    - `backward_input`, `backward_weight`: the two parts of a backward that is split.
    - `send_recv`: for each pair (from rank, to rank) of neighbouring pipeline ranks, its kernel.
    - `reductions`: for each pipeline rank, those of its gradients over the replicas.
    - `tail`: grad-norm, optimizer and the parameters' all-gather that nothing hides, after all
        pipeline ranks of all replicas have met.
    - `contention`: what part of its own latency a reduction adds to the compute beside it.
    - `members`: ranks of a tensor- and context-parallel group, the members of a segment.
    - `group_size`: ranks of a stage that meet in every microbatch: those, and all that share
        experts with them.
    - `passes`: what an overlapped pair of a forward and a backward is made of; `None` where these
        take as long as one after the other.
    """

    forward: tuple[Block, ...]
    backward: tuple[Block, ...]
    backward_input: tuple[Block, ...]
    backward_weight: tuple[Block, ...]
    send_recv: dict[tuple[int, int], Kernel]
    reductions: tuple[tuple[Reduction, ...], ...]
    tail: Block
    contention: float
    members: int
    group_size: int
    passes: Passes | None = None

    @property
    def reduce_scatter(self) -> tuple[Block, ...]:
        """For each pipeline rank, all collectives that reduce its gradients."""
        return tuple(
            tuple(part for one in reductions for part in one.kernels)
            for reductions in self.reductions
        )
