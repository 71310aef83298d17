"""How a model is dealt to stages, and whether it fits its layout."""

import itertools as it
from collections.abc import Sequence

import msgspec

from ..data import Layout, Model, ScheduleConfig, Training


class Stages(msgspec.Struct, frozen=True):
    """How the layers of a model are dealt to stages, and these to pipeline ranks.

    **Attributes:**

    - `layers`: of each global virtual stage.
    - `rank`: of each stage.
    - `group`: how many microbatches a rank runs through one of its stages before the next.
    """

    layers: tuple[int, ...]
    rank: tuple[int, ...]
    group: int

    @property
    def ends(self) -> set[int]:
        """The ranks of the first and the last stage."""
        return {self.rank[0], self.rank[-1]}

    def of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, one in enumerate(self.rank) if one == rank)


def deal(
    model: Model, layout: Layout, schedule: ScheduleConfig, stage_to_rank: Sequence[int]
) -> Stages:
    """Deals the layers. See `layers_of_stages`."""
    group = min(schedule.microbatch_group_size or layout.pp, schedule.num_microbatches)
    return Stages(layers_of_stages(model, layout, schedule), tuple(stage_to_rank), group)


def layers_of_stages(model: Model, layout: Layout, schedule: ScheduleConfig) -> tuple[int, ...]:
    """The number of layers of each global virtual stage.

    **Raises:**

    A `ValueError` where the layers do not divide.
    """
    stages = layout.pp * schedule.virtual_stages
    product = f"pp*virtual_stages = {layout.pp}*{schedule.virtual_stages} = {stages}"
    if schedule.layers_per_stage is not None:
        given = schedule.layers_per_stage
        if len(given) != stages:
            raise ValueError(
                f"`schedule.layers_per_stage` has {len(given)} entries, but there are {product} "
                "stages; give one for each."
            )
        if sum(given) != model.num_layers:
            raise ValueError(
                f"`schedule.layers_per_stage` adds up to {sum(given)} layers, but "
                f"`model.num_layers` is {model.num_layers}; change one of them."
            )
        return given
    first, last = schedule.embedding_counts_as_layer, schedule.head_counts_as_layer
    total = model.num_layers + first + last
    if total % stages != 0 or (stages > 1 and total // stages < max(first, last)):
        raise ValueError(
            f"{product} stages do not divide `model.num_layers` = {model.num_layers}"
            f"{f' (with embedding and head counted: {total})' if first or last else ''}; use a "
            "divisor, or give `schedule.layers_per_stage`."
        )
    layers = [total // stages] * stages
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def check_split(model: Model, layout: Layout, schedule: ScheduleConfig, training: Training) -> None:
    """Raises a `ValueError` of one sentence where a layout does not fit a model."""
    if layout.ep != 1:
        raise ValueError(
            f"`layout.ep` is {layout.ep}, but the model is dense and has no experts; use `ep = 1`."
        )
    if model.head_size is None and model.hidden_size % model.num_heads != 0:
        raise ValueError(
            f"`model.num_heads` = {model.num_heads} does not divide `model.hidden_size` = "
            f"{model.hidden_size}; give `model.head_size`."
        )
    for key in ("num_heads", "kv_heads", "ffn_size"):
        value = getattr(model, key)
        if value % layout.tp != 0:
            name = "num_kv_heads" if key == "kv_heads" else key
            raise ValueError(
                f"`layout.tp` = {layout.tp} does not divide `model.{name}` = {value}; use a "
                "divisor."
            )
    if model.num_heads % model.kv_heads != 0:
        raise ValueError(
            f"`model.num_kv_heads` = {model.kv_heads} does not divide `model.num_heads` = "
            f"{model.num_heads}; use a divisor."
        )
    parts = layout.cp * (layout.tp if training.sequence_parallel else 1)
    if training.sequence_length % parts != 0:
        degrees = "tp*cp" if training.sequence_parallel else "cp"
        raise ValueError(
            f"`training.sequence_length` = {training.sequence_length} is not divisible by "
            f"{degrees} = {parts}; use a multiple of it."
        )
    layers_of_stages(model, layout, schedule)


def parameters_of_rank(
    model: Model, layout: Layout, stages: Stages, rank: int
) -> tuple[float, ...]:
    """The parameters that one GPU of a pipeline rank holds of each of its virtual stages."""
    last = len(stages.layers) - 1
    parameters = []
    for stage in stages.of_rank(rank):
        count = stages.layers[stage] * model.layer_parameters
        if stage == 0:
            count += model.embedding_parameters
        if stage == last:
            count += model.norm_parameters
            # A tied head on another rank has a copy of the embedding.
            if not model.tied_embeddings or len(stages.ends) > 1:
                count += model.vocab_size * model.hidden_size
        parameters.append(count / layout.tp)
    return tuple(parameters)


def pairs_of_ranks(stages: Stages) -> tuple[tuple[int, int], ...]:
    """Pairs (from, to) of pipeline ranks that have stages next to each other."""
    pairs = {(a, b) for a, b in it.pairwise(stages.rank) if a != b}
    return tuple(sorted(pairs | {(b, a) for a, b in pairs}))
