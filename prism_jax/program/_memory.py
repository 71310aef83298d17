"""The memory of each pipeline rank: what it holds, and the most that it keeps at once."""

import itertools as it
from collections.abc import Sequence

import msgspec
import numpy as np
from jaxtyping import Bool, Float, Int

from ..data import Job
from ..schedule import AbstractSchedule, order_of, schedule_parts
from ..workload import Sizes, StageMemory, add_sizes, memory_of_stages


# What libraries allocate for themselves: workspaces of cuBLAS and fused kernels. In Megatron-LM's
# golden values on A100 (its functional tests), what is allocated after a step is 0.06 to 0.07 GB
# above parameters, gradients and optimizer.
_LIBRARIES = 64 * 2**20
# Outside of the framework's allocator: the context of CUDA takes about half a gigabyte, the buffers
# of NCCL's communicators some ten megabytes each (NVIDIA, NCCL documentation: NCCL_BUFFSIZE is 4
# MiB, for each channel and peer).
_RUNTIME = 2**30


class RankMemory(msgspec.Struct, frozen=True):
    """The memory of the GPUs of one pipeline rank when it is fullest.

    **Attributes:**

    - `rank`: of the pipeline.
    - `bytes`: all of it.
    - `parts`: what it is made of, in bytes: `parameters`, `gradients`, `optimizer`, activations by
        module, `logits`, `communication` and the overhead, `libraries` and `runtime`.
    """

    rank: int
    bytes: float
    parts: dict[str, float]

    @property
    def allocated(self) -> float:
        """What a framework's allocator counts: all but the runtime, in bytes."""
        return self.bytes - self.parts["runtime"]


class Memory(msgspec.Struct, frozen=True):
    """The memory of a job.

    **Attributes:**

    - `ranks`: of the pipeline, in order.
    - `device_bytes`: what a device has.
    """

    ranks: tuple[RankMemory, ...]
    device_bytes: float

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.bytes)

    @property
    def fits(self) -> bool:
        return self.fullest.bytes <= self.device_bytes


def memory(job: Job) -> Memory:
    """The memory that a job needs, for each pipeline rank at its fullest.

    Weights have two bytes, gradients what `training.gradient_dtype` says, and Adam in float32
    twelve (a copy of the weights and two moments), and four more where gradients are not in
    float32; ZeRO deals them to the replicas, and `gathered` is what is whole of a few layers.
    Activations are what each module says that it keeps (Korthikanti et al. 2022,
    arXiv:2205.05198), of as many microbatches as the schedule has between forward and backward.

    **Arguments:**

    - `job`: with model, cluster and training.

    **Returns:**

    A [`Memory`][].

    **Raises:**

    `ValueError` where the job has no model, or its layout does not fit it.
    """
    if job.model is None or job.cluster is None or job.training is None or job.kernels is None:
        raise ValueError(
            f"Job `{job.name}` has a layout and a schedule only; add `model`, `cluster` and "
            "`training` to tell its memory."
        )
    parts = (job.model, job.layout, job.schedule, job.training, job.cluster, job.kernels)
    try:
        order = order_of(job.schedule, job.layout)
        # Each chain of stages is the whole model.
        ends = it.pairwise((*order.chain_starts, order.num_stages))
        chains = [memory_of_stages(*parts, order.stage_to_rank[a:b]) for a, b in ends]
    except ValueError as error:
        raise ValueError(f"Job `{job.name}`: {error}") from None
    stages = [*it.chain(*chains)]
    static = [_static(job, one) for one in stages]
    ranks = []
    for rank, peak in enumerate(_peaks(order, stages)):
        found: Sizes = {"libraries": _LIBRARIES, "runtime": _RUNTIME, **_communication(job)}
        for stage, where in enumerate(order.stage_to_rank):
            if where == rank:
                add_sizes(found, static[stage])
        add_sizes(found, peak)
        held = {name: float(size) for name, size in found.items() if size}
        ranks.append(RankMemory(rank, sum(held.values()), held))
    return Memory(tuple(ranks), job.cluster.device.memory_bytes)


def _static(job: Job, stage: StageMemory) -> Sizes:
    """Parameters, gradients and optimizer of a stage."""
    layout, training = job.layout, job.training
    assert training is not None
    gradient = 4 if training.gradient_dtype == "fp32" else 2
    # Adam reads float32 gradients; where they are reduced in another dtype it has a copy.
    state = 12 if gradient == 4 else 16
    replicas = expert_replicas = 1
    if training.zero:
        instances, stage_ranks = training.optimizer_instances, layout.tp * layout.cp * layout.dp
        replicas = layout.dp * layout.cp // instances
        expert_replicas = stage_ranks // (layout.ep * layout.expert_tp) // instances
    both = stage.dense + stage.experts
    sharded = stage.dense / replicas + stage.experts / expert_replicas
    resharded = training.zero == 3 and training.reshard_after_forward
    return {
        "parameters": 2 * (sharded if resharded else both),
        "gradients": gradient * (sharded if training.zero >= 2 else both),
        "optimizer": state * sharded,
    }


def _communication(job: Job) -> Sizes:
    """Buffers: the gathered input of a module, and what neighbours of a pipeline send and take."""
    layout, training, model = job.layout, job.training, job.model
    assert training is not None
    assert model is not None
    states = 2.0 * training.microbatch_size * training.sequence_length * model.hidden_size
    states /= layout.cp
    split = training.sequence_parallel and layout.tp > 1
    gathered = states if split else 0.0
    sent = 2 * states / (layout.tp if split else 1) if layout.pp > 1 else 0.0
    return {"communication": gathered + sent}


def _peaks(order: AbstractSchedule, stages: Sequence[StageMemory]) -> list[Sizes]:
    """For each rank, its activations when there are most of them."""
    parts = schedule_parts(order)
    forward = parts.phase == "F"
    lets_go = (parts.phase == "B") | (parts.phase == "W")
    kept = np.array([sum(one.kept.values()) for one in stages], float)
    extra = np.array(
        [(sum(one.backward.values()), sum(one.forward.values())) for one in stages], float
    )
    summed = np.array([one.summed for one in stages], float)
    stage, during = parts.stage, extra[parts.stage, forward.astype(int)]
    starts = np.searchsorted(parts.rank, range(order.num_ranks + 1))  # They come rank after rank.
    return [
        _peak(
            forward[a:b],
            lets_go[a:b],
            stage[a:b],
            kept[stage[a:b]],
            during[a:b],
            _whole(lets_go[a:b], stage[a:b], summed),
            stages,
        )
        for a, b in it.pairwise(starts.tolist())
    ]


def _whole(
    makes: Bool[np.ndarray, " parts"],
    stage: Int[np.ndarray, " parts"],
    summed: Float[np.ndarray, " stages"],
) -> Float[np.ndarray, " parts"]:
    """During each op, the gradients that are whole: those of the stage that sums up its own, and of
    the one before it, which deals them meanwhile.
    """
    found = np.zeros(len(stage))
    ops = np.flatnonzero(makes)
    turns = ops[np.append(True, np.diff(stage[ops]) != 0)[: len(ops)]]
    own = summed[stage[turns]]
    for op, whole in zip(turns, own + np.append(0.0, own)[: len(own)], strict=True):
        found[op:] = whole
    return found


def _peak(
    forward: Bool[np.ndarray, " parts"],
    lets_go: Bool[np.ndarray, " parts"],
    stage: Int[np.ndarray, " parts"],
    kept: Float[np.ndarray, " parts"],
    extra: Float[np.ndarray, " parts"],
    whole: Float[np.ndarray, " parts"],
    stages: Sequence[StageMemory],
) -> Sizes:
    """Runs through the ops of a rank with what is between a forward and its backward."""
    after = np.cumsum(kept * forward - kept * lets_go)
    # An op lets go of what is kept at its end.
    during = np.where(forward, after, np.append(0.0, after)[: len(after)]) + extra + whole
    if not np.any(during > 0):
        return {}
    at = int(np.argmax(during))
    found = dict(stages[stage[at]].forward if forward[at] else stages[stage[at]].backward)
    add_sizes(found, {"gradients": float(whole[at])} if whole[at] else {})
    counts = np.bincount(stage[: at + 1], forward[: at + 1], len(stages))
    counts -= np.bincount(stage[:at], lets_go[:at], len(stages))
    for one in np.flatnonzero(counts).tolist():
        add_sizes(found, stages[one].kept, float(counts[one]))
    return found
