"""The peak memory of each pipeline rank, and what it consists of."""

import itertools as it
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Bool, Float, Int

from .._summary import GIB, Column, Shown, Table, picked_attributes
from ..cluster import Group, find_link, group_of
from ..data import Cluster, Job
from ..lowering import job_parts
from ..schedule import AbstractSchedule, order_of, schedule_parts
from ..workload import (
    Costs,
    Sizes,
    StageMemory,
    add_sizes,
    has_experts,
    held_by_stages,
    memory_of_stages,
    total,
)


# The memory of libraries: PyTorch's workspace of cuBLAS, and small tensors. In Megatron-LM's golden
# values on A100 (its functional tests), the memory after a step is 0.06 to 0.07 GB above that of
# parameters, gradients and optimizer, with the workspace of Transformer Engine.
_LIBRARIES = 60 * 2**20
# That workspace, by whether a device is older than Hopper, which multiplies in fp8 (Transformer
# Engine, get_cublas_workspace_size_bytes). Grouped products have four more, one for each stream.
_WORKSPACE = {True: 32 * 2**20, False: 4 * 2**20}
# The context of CUDA: of the 150,109,880,320 bytes of an H200, 149,557,477,376 are free when a
# process of PyTorch begins (driver 580.159, PyTorch 2.11). This and what follows is taken to be so
# on other devices, too.
_CONTEXT = 150_109_880_320.0 - 149_557_477_376
# The buffers of a communicator of NCCL, for each channel and peer: of two devices, and of more
# (NVIDIA/nccl issue 964: measured with an all_reduce of 4 MB on A100 with NVLink).
_OF_TWO, _OF_MORE = 544 * 2**20, 688 * 2**20
# The share of what is free that PyTorch's allocator cannot use: the fullest run on that H200, GPT-2
# XL with 17 sequences, had allocated 147,105,245,696 bytes, 98.4 % of what was free. Of what
# Megatron-LM reserved on a B300, 275,802,750,976 bytes, it had allocated 98.6 %.
_FRAGMENTED = 1 - 147_105_245_696 / 149_557_477_376
# Moments of the optimizer, which the first step makes, split blocks that its activations have left,
# so that a tensor as large may find no room although enough is free. Which share of the largest one
# is lost: chosen between 0.3 (8 sequences of Llama 3.2 1B run out in the second step) and 0.7 (17
# of GPT-2 XL run) on that H200.
_SPLIT = 1 / 3
# So that of each float32 tensor of a loss another block is reserved in the next step: of logits, of
# their log-softmax, and of the gradients of both. In 14 runs on that H200 from 0.02 to 3.8 such
# blocks were reserved but not allocated, most with recomputation, whose layers leave no activations
# that moments could split instead.
_LOST = 4 * 4


class RankMemory(msgspec.Struct, frozen=True):
    """The memory that a GPU of one pipeline rank has allocated at its peak.

    **Attributes:**

    - `rank`: the pipeline rank.
    - `bytes`: the total, in bytes.
    - `parts`: the parts of the total, in bytes: `parameters`, `gradients`, `optimizer`, the
        activations of each kind of module, `tables`, `frozen`, `logits`, `gathered` (see
        [`memory`][]), `communication`, the workspaces of `libraries`, and others.
    """

    rank: int
    bytes: float
    parts: dict[str, float]


class Memory(Shown, msgspec.Struct, frozen=True):
    """The memory of a job.

    **Attributes:**

    - `ranks`: the memory of each pipeline rank, in order.
    - `device_bytes`: the memory of a device, as its driver reports it, in bytes.
    - `reserved`: what of it no tensor can have, in bytes: the `context` of the device, the buffers
        of `communicators`, and the `fragmentation` of the allocator, a share of what is left.
    - `lost_bytes`: the most that PyTorch's allocator holds besides, in bytes, so that `nvidia-smi`
        shows it: blocks that no tensor needs at the peak, but that others could have. Zero where
        it is not known.
    """

    ranks: tuple[RankMemory, ...]
    device_bytes: float
    reserved: dict[str, float] = {}
    lost_bytes: float = 0.0

    @property
    def usable_bytes(self) -> float:
        """The memory of a device without what is reserved, in bytes."""
        return self.device_bytes - sum(self.reserved.values())

    def to_json(self) -> dict[str, Any]:
        """Its fields, what is usable, and whether the job fits."""
        return picked_attributes(self, *self.__struct_fields__, "usable_bytes", "fits")

    def summary(self) -> Table:
        names = dict.fromkeys(name for rank in self.ranks for name in rank.parts)
        parts = [
            Column(name, lambda rank, name=name: rank.parts.get(name, 0.0), ".2f", scale=1 / GIB)
            for name in names
        ]
        columns = (Column("rank"), Column("all", "bytes", ".2f", scale=1 / GIB), *parts)
        notes = []
        if self.lost_bytes:
            most = (self.fullest.bytes + self.lost_bytes) / GIB
            notes.append(
                f"PyTorch's allocator reserves from {self.fullest.bytes / GIB:.2f} to "
                f"{min(most, self.usable_bytes / GIB):.2f} GiB, as nvidia-smi shows"
            )
        title = "Memory of each pipeline rank at its peak, in GiB"
        return Table(columns, self.ranks, title, notes)

    @property
    def fullest(self) -> RankMemory:
        """The memory of the pipeline rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.bytes)

    @property
    def fits(self) -> bool:
        """Whether every pipeline rank fits into what is usable of the memory of a device."""
        return self.fullest.bytes <= self.usable_bytes


def memory(job: Job) -> Memory:
    """Computes the peak memory that a job needs on each pipeline rank.

    Per parameter, weights take two bytes, gradients the size of `training.gradient_dtype`, and Adam
    twelve bytes (a float32 copy of the weights and two moments; Adagrad has one moment), and four
    more while it runs if gradients are not in float32. ZeRO shards some or all of these over the
    replicas. FSDP (`zero = 3`) has shards in float32 alone, of weights, moments and, from the first
    backward on, gradients; `gathered` is the weights and gradients of the few layers, and of the
    ends of the model, that are unsharded at a time. Shared embedding tables are in float32, with
    one moment. Activations are those that each module keeps for its backward (Korthikanti et al.
    2022, arXiv:2205.05198), for as many microbatches as the schedule has in flight; `logits` are
    what the loss holds of them (`training.loss`). The peak is at the end of a forward, at either
    end of a backward, or in the optimizer.

    **Arguments:**

    - `job`: a job with `model`, `cluster` and `training`.

    **Returns:**

    A [`Memory`][].

    **Raises:**

    `ValueError` if the job has no model, or if its layout does not fit the model.
    """
    parts = job_parts(job, "compute its memory")
    try:
        order = order_of(parts.schedule, parts.layout, parts.training)
        # Each chain of stages is the whole model.
        chains = [memory_of_stages(parts, ranks) for ranks in order.ranks_of_chains]
    except ValueError as error:
        raise ValueError(f"Job `{job.name}`: {error}") from None
    stages = [*it.chain(*chains)]
    ranks = []
    for rank, peak in enumerate(_peaks(order, stages)):
        sizes: Sizes = {"libraries": _libraries(parts), **_communication(parts)}
        copied: Sizes = {"gradients": 0.0}
        for stage, where in zip(stages, order.stage_to_rank, strict=True):
            if where == rank:
                add_sizes(sizes, stage.held)
                copied["gradients"] += stage.copied
        add_sizes(sizes, max(peak, copied, key=total))
        held = {name: float(size) for name, size in sizes.items() if size}
        ranks.append(RankMemory(rank, total(held), held))
    device_bytes = parts.cluster.device.memory_bytes
    lost = _LOST * parts.tokens * parts.model.vocab_size if parts.training.plain else 0.0
    return Memory(tuple(ranks), device_bytes, _reserved(parts), float(lost))


def _reserved(parts: Costs) -> dict[str, float]:
    """What no tensor can have of a device, by what has it."""
    layout, device_bytes = parts.layout, parts.cluster.device.memory_bytes
    names = ["tp", "cp", *["dp"] * (layout.dp > 1), *["ep", "edp"] * (layout.ep > 1)]
    groups = [group_of(name, layout) for name in names]
    groups.append(Group("pp", layout.pp, layout.tp * layout.cp * layout.dp))
    buffers = sum(_buffers(group, parts.cluster) for group in groups)
    fragmentation = (device_bytes - _CONTEXT - buffers) * _FRAGMENTED
    if parts.training.plain:
        # The largest tensors of such a step are of float32 logits.
        largest = 4 * parts.tokens * parts.model.vocab_size
        fragmentation = max(fragmentation, _SPLIT * largest)
    return {"context": _CONTEXT, "communicators": buffers, "fragmentation": fragmentation}


def _buffers(group: Group, cluster: Cluster) -> float:
    """Of a communicator. A ring beyond a node has as many channels as its node's network needs."""
    if group.size == 1:
        return 0.0
    inner, link = cluster.links[0], find_link(cluster, group)
    network = cluster.devices_per_node * link.bandwidth_bytes_per_s
    share = min(1.0, network / inner.bandwidth_bytes_per_s) if link.name != inner.name else 1.0
    return share * (_OF_TWO if group.size == 2 else _OF_MORE)


def fits(job: Job, margin: float = 0.0) -> bool:
    """Whether a job leaves a share of what is usable of its devices' memory free. It looks at the
    activations only if the job fits without them.
    """
    most = usable_bytes(job) * (1 - margin)
    return least_bytes(job) <= most and memory(job).fullest.bytes <= most


def usable_bytes(job: Job) -> float:
    """What a job can allocate of the memory of a device, in bytes."""
    parts = job_parts(job)
    return parts.cluster.device.memory_bytes - sum(_reserved(parts).values())


def least_bytes(job: Job) -> float:
    """A lower bound on the memory of the fullest rank: its parameters, gradients and optimizer
    states, without activations and embedding tables. Unlike [`memory`][], it does not read the ops
    of the schedule.
    """
    parts = job_parts(job)
    order = order_of(parts.schedule, parts.layout, parts.training)
    needed = np.full(order.num_ranks, float(_LIBRARIES))
    for chain in order.ranks_of_chains:
        for rank, held in zip(chain, held_by_stages(parts, chain), strict=True):
            needed[rank] += sum(held.values())
    return float(needed.max())


def _libraries(costs: Costs) -> int:
    workspaces = 5 if has_experts(costs.model) else 1
    return _LIBRARIES + workspaces * _WORKSPACE["fp8" in costs.cluster.device.peak_flop_per_s]


def _communication(costs: Costs) -> Sizes:
    """Buffers: the gathered input of a module, and tensors sent to and from other stages."""
    model = costs.model
    widths = (layer.hidden_size or model.hidden_size for layer in model.layers or ())
    size = float(costs.activation_bytes)
    gathered = size * costs.tokens * max((model.hidden_size, *widths)) * costs.splits_sequence
    sent = 2 * size * costs.stream_states if costs.layout.pp > 1 else 0.0
    return {"communication": gathered + sent}


def _peaks(order: AbstractSchedule, stages: Sequence[StageMemory]) -> list[Sizes]:
    """For each rank, its activations at their peak."""
    parts = schedule_parts(order)
    # Of an overlapped pair, the layers of its backward let go as those of its forward keep.
    pair = np.append(parts.op[1:] == parts.op[:-1], False)[: len(parts.op)]
    turned = np.arange(len(pair)) + pair - np.append(False, pair)[: len(pair)]
    phase, stage = parts.phase[turned], parts.stage[turned]
    lets_go = (phase == "B") | (phase == "W")
    # Of the attributes from `kept` to `closing`, the sums of their parts.
    sizes = np.array(
        [
            (*map(total, stage_memory[1:5]), stage_memory.made, stage_memory.summed)
            for stage_memory in stages
        ],
        float,
    )
    starts = np.searchsorted(parts.rank, range(order.num_ranks + 1))  # They come rank after rank.
    return [
        _peak(phase[a:b] == "F", lets_go[a:b], stage[a:b], sizes, stages)
        for a, b in it.pairwise(starts.tolist())
    ]


def _peak(
    forward: Bool[np.ndarray, " parts"],
    lets_go: Bool[np.ndarray, " parts"],
    stage: Int[np.ndarray, " parts"],
    sizes: Float[np.ndarray, "stages 6"],
    stages: Sequence[StageMemory],
) -> Sizes:
    """Runs through the ops of a rank to find the peak of its activations and gradients. The sizes
    of stages are what they keep, what a forward takes at its end, a backward at its start and at
    its end, the gradients that the first backward makes, and the summed gradients.
    """
    kept, at_end, at_start, closing, made, _ = sizes[stage].T
    first = np.flatnonzero(lets_go)[np.unique(stage[lets_go], return_index=True)[1]]
    making = made * np.isin(np.arange(len(stage)), first)
    gradients = np.cumsum(making) + _whole(lets_go, stage, sizes[:, 5])
    after = np.cumsum(kept * forward - kept * lets_go)
    before = np.append(0.0, after)[: len(after)]
    # When an op ends it has freed its activations, and made its gradients.
    starts = np.where(forward, after + at_end, before + at_start) + gradients - making
    ends = np.where(lets_go, after + closing + gradients, 0.0)
    during = np.maximum(starts, ends)
    if not np.any(during > 0):
        return {}
    at = int(np.argmax(during))
    ended = bool(ends[at] > starts[at])
    op = stages[stage[at]]
    peak = dict(op.closing if ended else op.forward if forward[at] else op.backward)
    if there := float(gradients[at] - (0 if ended else making[at])):
        add_sizes(peak, {"gradients": there})
    counts = np.bincount(stage[: at + 1], forward[: at + 1], len(stages))
    counts -= np.bincount(stage[: at + ended], lets_go[: at + ended], len(stages))
    for number in np.flatnonzero(counts).tolist():
        add_sizes(peak, stages[number].kept, float(counts[number]))
    return peak


def _whole(
    makes: Bool[np.ndarray, " parts"],
    stage: Int[np.ndarray, " parts"],
    summed: Float[np.ndarray, " stages"],
) -> Float[np.ndarray, " parts"]:
    """The unsharded gradients during each op: those of the stage that is accumulating its
    gradients, and those of the stage before it, which are being reduce-scattered meanwhile.
    """
    ops = np.flatnonzero(makes)
    turns = ops[np.append(True, np.diff(stage[ops]) != 0)[: len(ops)]]
    of_turns = summed[stage[turns]]
    # Each turn lasts up to the next; before the first there are none.
    unsharded = np.append(0.0, of_turns + np.append(0.0, of_turns)[: len(of_turns)])
    return np.repeat(unsharded, np.diff(np.concatenate(([0], turns, [len(stage)]))))
