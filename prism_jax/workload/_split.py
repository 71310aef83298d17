"""How a model is distributed over stages, and whether it fits its layout."""

import functools as ft
import itertools as it
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Float

from ..data import Layout, Model, ScheduleConfig, Training, balances
from ._architecture import (
    LayerPart,
    Parts,
    check_modules,
    ends_of,
    layers_of,
    parts_of_stages,
    total_parameters,
)
from ._costs import Costs
from .modules import Parameters


# Ends of stages that are looked at together.
_ROWS = 64


class Held(NamedTuple):
    """The numbers of parameters on one GPU: those of experts, and all others, without those of
    embedding tables.
    """

    dense: float
    experts: float


class Stages(msgspec.Struct, frozen=True):
    """How the layers of a model are distributed over stages, and the stages over pipeline ranks.

    **Attributes:**

    - `layers`: the number of layers in each global virtual stage.
    - `parts`: the parts of each stage.
    - `held`: the parameters of each stage on one GPU, with a copy of the embedding where needed.
    - `rank`: the pipeline rank of each stage.
    - `group`: how many microbatches a rank runs through one of its stages before the next stage.
    """

    layers: tuple[int, ...]
    parts: tuple[Parts, ...]
    held: tuple[Held, ...]
    rank: tuple[int, ...]
    group: int

    @property
    def ends(self) -> set[int]:
        """The ranks of the first and the last stage."""
        return {self.rank[0], self.rank[-1]}

    @property
    def num_frozen(self) -> int:
        """How many of the first stages have nothing that is trained, and so no backward."""
        trained = (not all(part.frozen for part, _ in parts) for parts in self.parts)
        return next((stage for stage, trains in enumerate(trained) if trains), len(self.parts))

    def of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, holder in enumerate(self.rank) if holder == rank)

    def held_by_rank(self, rank: int) -> tuple[Held, ...]:
        """The parameters that one GPU of a pipeline rank holds of each of its stages."""
        return tuple(self.held[stage] for stage in self.of_rank(rank))


def deal(job: Costs, stage_to_rank: Sequence[int]) -> Stages:
    """Distributes the layers over the stages. See `layers_of_stages`."""
    schedule = job.schedule
    group = min(schedule.microbatch_group_size or job.layout.pp, schedule.num_microbatches)
    layers = layers_of_stages(job.model, job.layout, schedule)
    apart = stage_to_rank[0] != stage_to_rank[-1]
    parts = parts_of_stages(job.model, layers, apart, job.training.adapters)
    held = ft.cache(lambda stage: held_of(total_parameters(job.model, stage), job.layout))
    # Most stages are equal.
    return Stages(layers, parts, tuple(map(held, parts)), tuple(stage_to_rank), group)


def layers_of_stages(model: Model, layout: Layout, schedule: ScheduleConfig) -> tuple[int, ...]:
    """The number of layers of each global virtual stage. Layers that their stages do not divide are
    balanced by cost, unless counting the embedding or the head as a layer would make them divide.

    **Raises:**

    A `ValueError` if the stages do not divide the layers.
    """
    stages = layout.pp * schedule.virtual_stages
    product = f"pp*virtual_stages = {layout.pp}*{schedule.virtual_stages} = {stages}"
    if schedule.layers_per_stage == "auto":
        return balanced_layers(model, stages)
    if schedule.layers_per_stage is not None:
        layers = schedule.layers_per_stage
        if len(layers) != stages:
            raise ValueError(
                f"`schedule.layers_per_stage` has {len(layers)} entries, but there are {product} "
                "stages; give one for each."
            )
        if sum(layers) != model.num_layers:
            raise ValueError(
                f"`schedule.layers_per_stage` adds up to {sum(layers)}, but "
                f"`model.num_layers` is {model.num_layers}; change one of them."
            )
        return layers
    first, last = schedule.embedding_counts_as_layer, schedule.head_counts_as_layer
    total = model.num_layers + first + last
    if not (first or last) and balances(model.num_layers, stages):
        return balanced_layers(model, stages)
    if total % stages != 0 or (stages > 1 and total // stages < max(first, last)):
        raise ValueError(
            f"{product} stages do not divide `model.num_layers` = {model.num_layers}"
            f"{f' (with embedding and head counted: {total})' if first or last else ''}; "
            f"{_how_to_divide(model.num_layers, stages)}."
        )
    layers = [total // stages] * stages
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def _how_to_divide(layers: int, stages: int) -> str:
    keys = ("embedding_counts_as_layer", "head_counts_as_layer")
    counted = {2: "both", 1: "one"}.get(-layers % stages)
    if counted and stages > 1 and layers >= stages - 2:
        settings = " and ".join(f"`schedule.{key} = true`" for key in keys)
        advice = (
            f"set {settings}, as in Megatron-LM" if counted == "both" else f"set one of {settings}"
        )
        return f'{advice}, or `schedule.layers_per_stage = "auto"`'
    return 'use a divisor, or `schedule.layers_per_stage = "auto"`'


def balanced_layers(model: Model, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage, by the parameters at work in a layer, of which frozen
    layers run only a third: a forward, without the two halves of a backward. The head, and layers
    of multi-token prediction, count for the last stage.

    The stage with most work has as little as possible, and then the sum of squares is least.
    """
    at_work = ft.cache(ft.partial(_at_work, model))
    layers = np.array([at_work(part) for part in layers_of(model)])
    head = at_work(ends_of(model)[1])
    last = head + model.num_mtp_layers * (layers[-1] + head)
    ends = np.append(0.0, np.cumsum(layers))
    besides = [*[0.0] * (stages - 1), last]  # The work of a stage besides that of its layers.
    most = best = np.where(ends == 0, 0.0, np.inf)
    for extra in besides:
        most = _least_of_most(most, ends, extra)
    limit = most[-1] * (1 + 1e-9)
    choices = []
    for stage, extra in enumerate(besides):
        # Ends that the stages up to this one can reach, and from which the others reach the last.
        behind = (stages - 1 - stage) * limit - sum(besides[stage + 1 :])
        low = np.searchsorted(ends, ends[-1] - behind * (1 + 1e-9))
        high = np.searchsorted(ends, (stage + 1) * limit * (1 + 1e-9), "right")
        before, best, choice = best, np.full(len(ends), np.inf), np.zeros(len(ends), int)
        for a in range(low, high, _ROWS):
            b = min(a + _ROWS, int(high))
            first = np.searchsorted(ends, ends[a] + extra - limit)
            work = ends[a:b, None] - ends[first:b] + extra
            fits = (work <= limit) & (ends[a:b, None] >= ends[first:b])
            total = before[first:b] + np.where(fits, work**2, np.inf)
            choice[a:b] = first + np.argmin(total, axis=1)
            best[a:b] = np.min(total, axis=1)
        choices.append(choice)
    counts, end = [], len(layers)
    for choice in reversed(choices):
        counts.append(end - int(choice[end]))
        end = int(choice[end])
    return tuple(reversed(counts))


def _least_of_most(
    most: Float[np.ndarray, " ends"], ends: Float[np.ndarray, " ends"], besides: float
) -> Float[np.ndarray, " ends"]:
    """For each end of a stage, the least that the fullest stage up to it may have, from the same of
    the stages before. The later a stage begins, the less it has, and the more those before it.
    """
    crossing = np.searchsorted(most + ends, ends + besides)
    starts = np.clip([crossing - 1, crossing], 0, np.arange(len(ends)))
    return np.min(np.maximum(most[starts], ends - ends[starts] + besides), axis=0)


def _at_work(model: Model, part: LayerPart) -> float:
    """The parameters that a token passes through, times the share of passes that run."""
    total = 0.0
    for module in part.modules:
        of = module.parameters(part.of_width(model))
        total += of.split + of.copied + module.used_experts * of.experts
    return total / 3 if part.frozen else total


def check_split(model: Model, layout: Layout, schedule: ScheduleConfig, training: Training) -> None:
    """Raises a `ValueError` of one sentence if a layout does not fit a model."""
    check_modules(model, layout, training)
    _check_widths(model, layout)
    parts = layout.cp * (layout.tp if training.sequence_parallel else 1)
    own = (layer.sequence_length or parts for layer in model.layers or ())
    lengths = [
        ("training", training.sequence_length),
        *(("model.layers", length) for length in own),
    ]
    for where, length in lengths:
        if length % parts != 0:
            degrees = "tp*cp" if training.sequence_parallel else "cp"
            raise ValueError(
                f"`{where}.sequence_length` = {length} is not divisible by {degrees} = {parts}; "
                "use a multiple of it."
            )
    stage = layout.tp * layout.cp * layout.dp
    if stage % (layout.ep * layout.expert_tp) != 0:
        raise ValueError(
            f"`layout` has ep*etp = {layout.ep}*{layout.expert_tp}, which does not divide the "
            f"tp*cp*dp = {stage} ranks of a stage; use a divisor."
        )
    instances, replicas = training.optimizer_instances, stage // layout.tp
    experts = stage // (layout.ep * layout.expert_tp)
    if replicas % instances != 0 or experts % instances != 0:
        raise ValueError(
            f"`training.optimizer_instances` = {instances} does not divide dp*cp = {replicas} and "
            f"the {experts} replicas of experts; use a divisor of both."
        )
    layers_of_stages(model, layout, schedule)


def _check_widths(model: Model, layout: Layout) -> None:
    """Raises a `ValueError` if stages would send hidden states of several widths."""
    own = {layer.hidden_size or model.hidden_size for layer in model.layers or ()}
    if layout.pp > 1 and own - {model.hidden_size}:
        widths = " and ".join(map(str, sorted(own | {model.hidden_size})))
        raise ValueError(
            f"`layout.pp` is {layout.pp}, but the model has layers and ends of `hidden_size` "
            f"{widths}, and stages send hidden states of one width; use `pp = 1`."
        )


def held_of(total: Parameters, layout: Layout) -> Held:
    """The parameters on one GPU, before sharding over the replicas."""
    experts = total.experts / (layout.ep * layout.expert_tp)
    return Held(total.split / layout.tp + total.copied, experts)


def sum_held(held: Iterable[Held]) -> Held:
    """The sum of parameters on one GPU."""
    return Held(*(sum(column) for column in zip(*held, strict=True)))


def pairs_of_ranks(stages: Stages) -> tuple[tuple[int, int], ...]:
    """Pairs (sender, receiver) of pipeline ranks with neighbouring stages: of activations, and of
    gradients, of which frozen stages get none.
    """
    pairs = [(a, b) for a, b in it.pairwise(stages.rank)]
    back = [(b, a) for a, b in pairs[stages.num_frozen :]]
    return tuple(sorted({(a, b) for a, b in (*pairs, *back) if a != b}))
