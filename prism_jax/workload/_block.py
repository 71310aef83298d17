"""The interface between workloads and programs: kernels, and the blocks that they form."""

import msgspec


class Load(msgspec.Struct, frozen=True):
    """How unevenly the ranks of an expert-parallel group are loaded. See `loads.Loads`.

    **Attributes:**

    - `concentration`: the concentration of the popularity of experts.
    - `members`: over how many members the experts are distributed.
    - `counts`: the tokens of a microbatch of all members, once for each expert that a token goes
        to.
    - `experts`: how many experts a member has.
    - `split`: how many ranks share a member's experts and load.
    - `capacity`: the most tokens that an expert takes, over the mean; infinite for no limit.
    - `popularity`: the popularity of each expert, member by member, if it is known and constant;
        only proportions matter. Empty if it is drawn anew for each microbatch.
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
    - `load`: the loads to which its latency is proportional: on each member to that of the member,
        for a collective to that of the fullest member; `None` for equal loads.
    - `group`: the name of the ranks that run a collective together, such as `tp`.
    - `flop`: the floating-point operations of its matrix products.
    """

    kind: str
    size: str
    mean: float
    link: str | None = None
    load: Load | None = None
    group: str = ""
    flop: float = 0.0


class Result(msgspec.Struct, frozen=True):
    """What a forward makes and `recompute = "by-op"` may keep: that of every other matrix product,
    and that of all else.

    **Attributes:**

    - `num_bytes`: its size on each GPU.
    - `of`: the kernel that makes it, perhaps with others, if it is a matrix product.
    - `again`: the kernel that makes it alone; `None` if it is always kept.
    """

    num_bytes: float
    of: Kernel | None = None
    again: Kernel | None = None


class Linear(msgspec.Struct, frozen=True):
    """The kernels of a matrix of the model, or of several that read the same.

    **Attributes:**

    - `forward`, `dgrad`, `wgrad`: its product, the gradient of its input, and its own gradient;
        `None` if the matrix is not trained.
    - `results`: the result of its product, or of each.
    """

    forward: Kernel
    dgrad: Kernel
    wgrad: Kernel | None
    results: tuple[Result, ...] = ()


def weights_of(*linears: Linear) -> list[Kernel]:
    """The products of the gradients of those matrices that are trained."""
    return [linear.wgrad for linear in linears if linear.wgrad is not None]


Row = tuple[tuple[Kernel, int], ...]  # Serial kernels in any order, each with how often it runs.


# Each segment with how often it occurs; negative for one that is left out of what others contain.
Block = tuple[tuple["Segment", int], ...]


class Branches(msgspec.Struct, frozen=True):
    """Concurrent branches: compute of every member, and collectives of the whole group.

    The collectives start when the slowest member has reached the branches. A member continues when
    its compute and the collectives have ended. Rows of collectives do not slow one another.

    **Attributes:**

    - `compute`: the kernels that every member runs by itself.
    - `communication`: the rows of collectives, one for each stream.
    - `within`: instead of `compute`, a block whose segments have collectives of their own, such as
        a layer that overlaps with the collectives of its neighbours' parameters. Contention slows
        all of it. Its segment has nothing else.
    - `contention`: by which share compute is slower while collectives run, and collectives while
        compute runs. The product of the two is at most one.
    """

    compute: Row
    communication: tuple[Row, ...]
    contention: tuple[float, float] = (0.0, 0.0)
    within: Block = ()

    def __post_init__(self) -> None:
        if not all(self.communication) or not self.communication:
            raise ValueError("Branches need at least one collective; without one, give kernels.")
        if self.within and (self.compute or any(_nests(segment) for segment, _ in self.within)):
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
        """By how much compute that ends last takes longer, as a share of the latency of the
        collectives alone; and by how much collectives that end last take longer, as a share of that
        of compute.

        With `x = C (1 + a)` and `y = K (1 + b)`, the longer one runs at full speed after the other
        has ended: `max(x + (y - x) / (1 + b), y + (x - y) / (1 + a))`, which is `max(K + beta C, C
        + alpha K)`, exact for `a b <= 1`.
        """
        a, b = self.contention
        return a * (1 + b) / (1 + a), b * (1 + a) / (1 + b)


class Segment(msgspec.Struct, frozen=True):
    """Kernels that every member of a tensor- and context-parallel group runs by itself.

    **Attributes:**

    - `kernels`: what each member runs alone, before the branches.
    - `collective`: the collective that ends the segment. It starts when the slowest member arrives.
        `None` if members do not wait for one another.
    - `branches`: concurrent branches, one after the other, which run before that collective. A
        segment with branches ends when all members have ended them.
    - `members`: how many ranks wait there; by default those of a tensor- and context-parallel
        group. Before the end of the step, more than a stage has stand for lines of so many times as
        many GPUs, which are on several pipeline ranks and differ less.
    - `before`: instead of `kernels` and `branches`, a block that smaller groups of these ranks run,
        each by itself.
    """

    kernels: Row
    collective: Kernel | None = None
    branches: tuple[Branches, ...] = ()
    members: int | None = None
    before: Block = ()

    def __post_init__(self) -> None:
        alone = not (self.kernels or self.branches)
        if self.before and not (alone and self.members):
            raise ValueError(
                "A segment with a block before it has no kernels or branches of its own, but "
                "`members`, which wait; give what comes after as another segment."
            )
        if _nests(self) and (self.kernels or self.collective or len(self.branches) > 1):
            raise ValueError(
                "A segment with a block within its branches has nothing else; give what comes "
                "before and after as segments of their own."
            )


def _nests(segment: Segment) -> bool:
    return any(branches.within for branches in segment.branches)


Segments = list[Segment]  # In order.

# Segments in order, and the kernels of another one after them, which is not closed yet.
Open = tuple[Segments, list[Kernel]]


class Reduction(msgspec.Struct, frozen=True):
    """Gradients of a pipeline rank that are reduced over the replicas together.

    **Attributes:**

    - `kernels`: the collectives.
    - `stages`: the stage whose last backward gives the gradients, and the stages on other ranks
        with copies of it; empty for all stages of the rank.
    - `piece`: the part of this backward that ends with these gradients, if it gives those of
        several reductions, which are in its order; `None` for all of it.
    - `each_turn`: whether they are reduced after each row of consecutive backwards of the stage;
        otherwise only after the last backward.
    """

    kernels: Block
    stages: tuple[int, ...] = ()
    piece: Block | None = None
    each_turn: bool = False


# Serial lists of segments, each with the number of times that it runs in a row.
Ordered = tuple[tuple[tuple[Segment, ...], int], ...]


class Passes(msgspec.Struct, frozen=True):
    """The segments of stages in order, in which the exchanges with experts of one microbatch may
    overlap with the compute of another.

    **Attributes:**

    - `forward`, `backward`: of each (global virtual) stage its segments, and how long the host
        takes to launch them, in seconds.
    - `contention`: as in `Branches`.
    """

    forward: tuple[tuple[Ordered, float], ...]
    backward: tuple[tuple[Ordered, float], ...]
    contention: tuple[float, float]


class Workload(msgspec.Struct, frozen=True):
    """The kernels of one step, for each stage and phase, and what follows the pipeline.

    **Attributes:**

    - `forward`, `backward`: the block of one microbatch, for each (global virtual) stage.
    - `backward_input`, `backward_weight`: the two halves of a split backward.
    - `send_recv`: the send_recv kernel of each pair (sending rank, receiving rank) of neighbouring
        pipeline ranks. Pairs that only gradients would take to frozen stages are left out.
    - `reductions`: the gradient reductions over the replicas of each pipeline rank.
    - `tail`: gradient norm, optimizer and the exposed part of the parameter all_gather, after all
        pipeline ranks of all replicas have met.
    - `contention`: the part of its own latency that a reduction adds to the compute that it
        overlaps.
    - `members`: the number of ranks in a tensor- and context-parallel group, the members of a
        segment.
    - `group_size`: the number of ranks of a stage that meet in every microbatch: the members, and
        all ranks that share experts with them.
    - `passes`: the segments of overlapped pairs of a forward and a backward; `None` if a pair takes
        as long as its two parts.
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
            tuple(part for reduction in reductions for part in reduction.kernels)
            for reductions in self.reductions
        )
