"""How a model is dealt to stages, and whether it fits its layout."""

import itertools as it

from ..data import Layout, Model, ScheduleConfig, Training


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


def stages_of_rank(layout: Layout, schedule: ScheduleConfig, rank: int) -> tuple[int, ...]:
    """The global virtual stages of a pipeline rank, which are dealt in turns."""
    return tuple(range(rank, layout.pp * schedule.virtual_stages, layout.pp))


def parameters_of_rank(
    model: Model, layout: Layout, schedule: ScheduleConfig, rank: int
) -> tuple[float, ...]:
    """The parameters that one GPU of a pipeline rank holds of each of its virtual stages."""
    layers = layers_of_stages(model, layout, schedule)
    last = len(layers) - 1
    parameters = []
    for stage in stages_of_rank(layout, schedule, rank):
        count = layers[stage] * model.layer_parameters
        if stage == 0:
            count += model.embedding_parameters
        if stage == last:
            count += model.norm_parameters
            # A tied head on another rank has a copy of the embedding.
            if not model.tied_embeddings or layout.pp > 1:
                count += model.vocab_size * model.hidden_size
        parameters.append(count / layout.tp)
    return tuple(parameters)


def pairs_of_ranks(layout: Layout, schedule: ScheduleConfig) -> tuple[tuple[int, int], ...]:
    """Pairs (from, to) of neighbouring pipeline ranks; where stages wrap, the ends are too."""
    pairs = set(it.pairwise(range(layout.pp)))
    if schedule.virtual_stages > 1 and layout.pp > 1:
        pairs.add((layout.pp - 1, 0))
    return tuple(sorted(pairs | {(b, a) for a, b in pairs}))
