"""What a workload hands to a program: kernels, and the blocks that they form."""

import msgspec


class Kernel(msgspec.Struct, frozen=True):
    """A GPU kernel or collective at one size; the key of a latency table.

    **Attributes:**

    - `kind`: its class, which decides its variability: `gemm`, `attention`, `elementwise`, ... or
        a collective: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send_recv`.
    - `size`: the rest of its name: dtype and shape, or bytes, group and link.
    - `mean`: its mean latency, in seconds.
    - `link`: the name of the cluster's link that a collective uses; `None` for compute.
    """

    kind: str
    size: str
    mean: float
    link: str | None = None


class Segment(msgspec.Struct, frozen=True):
    """Kernels that every member of a tensor- and context-parallel group runs by itself.

    **Attributes:**

    - `kernels`: each kernel with how often it runs, in any order: they are serial.
    - `collective`: what closes the segment: it starts when the slowest member arrives. `None` where
        nobody waits within the group.
    """

    kernels: tuple[tuple[Kernel, int], ...]
    collective: Kernel | None = None


Block = tuple[tuple[Segment, int], ...]  # Each segment with how often it occurs.


class Workload(msgspec.Struct, frozen=True):
    """The kernels of one step, for each stage and phase, and what follows the pipeline.

    **Attributes:**

    - `forward`, `backward`: the block of one microbatch, for each (global virtual) stage.
    - `backward_input`, `backward_weight`: the two parts of a backward that is split.
    - `send_recv`: for each pair (from rank, to rank) of neighbouring pipeline ranks, its kernel.
    - `reduce_scatter`: for each pipeline rank, the part of the gradients' reduction over the
        replicas that nothing hides; an empty block where there is none.
    - `tail`: grad-norm, optimizer and the parameters' all-gather that nothing hides, after all
        pipeline ranks of all replicas have met.
    - `group_size`: ranks of a tensor- and context-parallel group, the members of a segment.
    """

    forward: tuple[Block, ...]
    backward: tuple[Block, ...]
    backward_input: tuple[Block, ...]
    backward_weight: tuple[Block, ...]
    send_recv: dict[tuple[int, int], Kernel]
    reduce_scatter: tuple[Block, ...]
    tail: Block
    group_size: int
