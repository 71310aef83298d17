"""The layouts that divide a model, its batch and the ranks evenly."""

import dataclasses
import functools as ft
import itertools as it
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from ..data import (
    Cluster,
    Count,
    Job,
    Kernels,
    Layout,
    Model,
    ScheduleConfig,
    Training,
    load_software,
)
from ..schedule import schedule_class
from ..workload import check_split, has_experts, has_tables


# Where a space does not say: no larger degrees of sequences and experts are in use.
_CONTEXT_DEGREES, _EXPERT_DEGREES = range(1, 9), range(1, 65)
# All sizes where one more matters; of larger ones, each costs as much time to look at.
_MICROBATCH_SIZES = (*range(1, 9), *(2**i for i in range(4, 31)))
# Schedules that a name leaves out: a layout with virtual stages is interleaved.
_USUAL = ("1f1b", "interleaved-1f1b")


class LayoutSpace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which layouts to consider: all combinations of these values that divide evenly.

    **Attributes:**

    - `tp`: degrees of tensor parallelism; by default all divisors of the number of GPUs up to the
        group size of the innermost link, because tensor-parallel collectives are frequent.
    - `pp`: degrees of pipeline parallelism; by default all divisors of the number of GPUs. No
        layout has more stages than the model has layers.
    - `schedule`: kinds of schedules, by the names that job files use. Schedules with virtual stages
        get at least two of them. Interleaved schedules get multiples of `pp` microbatches, as
        Megatron-LM requires.
    - `virtual_stages`: numbers of stages on each rank; by default all that divide the layers.
    - `cp`, `ep`: degrees of context and expert parallelism; by default all divisors, of `cp` up to
        8, and of `ep` up to 64 if the model has experts. The `etp` of experts is `tp`.
    - `microbatch_size`: numbers of sequences in a microbatch; by default all that divide the batch
        of a replica up to 8, and powers of two above.
    - `zero`: what is sharded over the replicas, as in `Training`; 3 is FSDP.
    - `recompute`: what the backward recomputes, as in `Training`; `selective` in the sense of the
        job's software stack.
    """

    tp: tuple[Count, ...] | None = None
    pp: tuple[Count, ...] | None = None
    schedule: tuple[str, ...] = _USUAL
    virtual_stages: tuple[Count, ...] | None = None
    cp: tuple[Count, ...] | None = None
    ep: tuple[Count, ...] | None = None
    microbatch_size: tuple[Count, ...] | None = None
    zero: tuple[Literal[0, 1, 2, 3], ...] = (1, 2, 3)
    recompute: tuple[Literal["none", "selective", "by-op", "full"], ...] = ("none", "full")


@dataclasses.dataclass(frozen=True)
class Question:
    """The inputs of a search: the model, the machine and the batch.

    **Attributes:**

    - `model`, `cluster`, `kernels`: the model, the machine and the profile of its kernels.
    - `training`: how a step is computed. `microbatch_size`, `zero` and `recompute` come from the
        space instead.
    - `batch_size`: the number of sequences in a step.
    - `space`: which layouts to consider.
    """

    model: Model
    cluster: Cluster
    kernels: Kernels
    training: Training
    batch_size: int
    space: LayoutSpace

    @ft.cached_property
    def expert_degrees(self) -> Sequence[int]:
        """The values of `ep`."""
        shared = has_experts(self.model) or has_tables(self.model)
        return self.space.ep or (_EXPERT_DEGREES if shared else (1,))

    @ft.cached_property
    def recompute(self) -> tuple[str, ...]:
        """The values of `recompute`, where a stack calls another one `selective`."""
        values, stack = self.space.recompute, self.training.software
        if stack and "selective" in values:
            selective = load_software(stack).selective
            values = (selective if value == "selective" else value for value in values)
        return (*dict.fromkeys(values),)


def layouts_of(question: Question, world_size: int) -> Iterator[Job]:
    """All layouts that divide evenly, in the order of the fields of `LayoutSpace`: `recompute`
    changes fastest. They may need too much memory.
    """
    space = question.space
    tps = space.tp or range(1, min(question.cluster.links[0].group, world_size) + 1)
    pps = space.pp or range(1, min(question.model.num_layers, world_size) + 1)
    for tp in _dividing(tps, world_size):
        of_tp = world_size // tp
        for pp in _dividing(pps, of_tp):
            splits = [
                cp
                for cp in _dividing(space.cp or _CONTEXT_DEGREES, of_tp // pp)
                if question.batch_size % (of_tp // pp // cp) == 0
            ]
            degrees = _dividing(question.expert_degrees, of_tp // pp)
            for config, cp, ep in it.product([*_pipelines(question, pp)], splits, degrees):
                layout = Layout(tp=tp, pp=pp, dp=of_tp // pp // cp, cp=cp, ep=ep)
                if _splits(question, layout, config):
                    yield from layout_variants(question, layout, config)


def _dividing(choices: Iterable[int], number: int) -> list[int]:
    return [degree for degree in choices if number % degree == 0]


def _pipelines(question: Question, pp: int) -> Iterator[ScheduleConfig]:
    """The schedules, and how the layers are distributed over their stages. If the stages do not
    divide the layers, the embedding and the head count as one layer each, as in Megatron-LM.
    """
    layers = question.model.num_layers
    for kind in question.space.schedule:
        fields: Any = dataclasses.fields(schedule_class(kind))  # pyright: ignore
        several = "virtual_stages" in [field.name for field in fields]
        if several and pp == 1:
            continue
        chunks = question.space.virtual_stages or range(2, layers // pp + 1)
        for virtual_stages in chunks if several else (1,):
            stages = pp * virtual_stages
            for ends in (False, True):
                if stages <= layers and (layers + 2 * ends) % stages == 0:
                    names = ("embedding_counts_as_layer", "head_counts_as_layer")
                    counts: Any = dict.fromkeys(names, ends)
                    yield ScheduleConfig(kind, 1, virtual_stages, **counts)
                    break


def _splits(question: Question, layout: Layout, config: ScheduleConfig) -> bool:
    try:
        check_split(question.model, layout, config, question.training)
    except ValueError:
        return False
    return True


def layout_variants(question: Question, layout: Layout, config: ScheduleConfig) -> Iterator[Job]:
    """The layout with all microbatch sizes, kinds of sharding and kinds of recomputation."""
    space, order = question.space, schedule_class(config.kind)
    of: dict[str, Any] = {
        "model": question.model,
        "cluster": question.cluster,
        "kernels": question.kernels,
    }
    of_replica = question.batch_size // layout.dp
    for size in space.microbatch_size or _MICROBATCH_SIZES:
        number, remainder = divmod(of_replica, size)
        if remainder or (order.whole_groups and number % layout.pp) or number < 1:
            continue
        if number < order.microbatches_per_rank * layout.pp:
            continue
        schedule = msgspec.structs.replace(config, num_microbatches=number)
        # One replica has no other replica to share with.
        shares = space.zero if layout.dp * layout.cp > 1 else space.zero[:1]
        for zero, recompute in it.product(shares, question.recompute):
            training = msgspec.structs.replace(
                question.training, microbatch_size=size, zero=zero, recompute=recompute
            )
            name = layout_name(layout, schedule, training)
            yield Job(layout, schedule, **of, training=training, name=name)


def layout_name(layout: Layout, schedule: ScheduleConfig, training: Training) -> str:
    """The differences between layouts, in a line."""
    stages = f" x {schedule.virtual_stages}" if schedule.virtual_stages > 1 else ""
    kind = "" if schedule.kind in _USUAL else f"{schedule.kind} "
    degrees = f"{kind}tp {layout.tp} pp {layout.pp}{stages} dp {layout.dp}"
    degrees += "".join(f" {k} {getattr(layout, k)}" for k in ("cp", "ep") if getattr(layout, k) > 1)
    again = f" recompute {training.recompute}" if training.recompute != "none" else ""
    return f"{degrees} mbs {training.microbatch_size} zero {training.zero}{again}"
