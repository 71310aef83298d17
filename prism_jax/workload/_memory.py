"""The memory of each stage on one GPU: parameters, and activations of a microbatch."""

import functools as ft
import itertools as it
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ._architecture import LayerPart, Parts, recomputed, total_parameters
from ._by_op import kept_results
from ._costs import Costs
from ._listed import listed
from ._residual import kept_around
from ._split import Held, check_split, deal, held_of
from ._units import (
    gathered_bytes,
    instance,
    reduces_each_microbatch,
    sharded_parameters,
    shared,
    shared_of_unit,
)
from .modules import EmbeddingBags


Sizes = dict[str, float]  # In bytes, by part.


def add_sizes(total: Sizes, more: Mapping[str, float], times: float = 1) -> Sizes:
    """Adds `times` the sizes of `more` to a total, in place, and returns it."""
    for name, size in more.items():
        total[name] = total.get(name, 0.0) + times * size
    return total


def total(sizes: Mapping[str, float]) -> float:
    """The sum of the sizes of all parts."""
    return sum(sizes.values())


class StageMemory(NamedTuple):
    """The memory of one stage on one GPU, in bytes by part.

    **Attributes:**

    - `held`: what it always holds: `parameters`, `gradients`, `optimizer`, the values of embedding
        `tables`, and parameters that are `frozen`, which are not trained.
    - `kept`: the activations of each microbatch that are kept from its forward to its backward.
    - `forward`: the additional memory at the end of its forward.
    - `backward`: the additional memory at the start of its backward.
    - `closing`: the same at the end of its backward.
    - `made`: its gradients, if they are not held but made by its first backward.
    - `copied`: the float32 copy of its gradients for the optimizer, if it is made then.
    - `summed`: its gradients, if they are unsharded only while they are accumulated and
        reduce-scattered.
    - `offloaded`: the activations of each microbatch that the host keeps instead.
    """

    held: Mapping[str, float]
    kept: Mapping[str, float]
    forward: Mapping[str, float]
    backward: Mapping[str, float]
    closing: Mapping[str, float]
    made: float = 0.0
    copied: float = 0.0
    summed: float = 0.0
    offloaded: float = 0.0


def memory_of_stages(job: Costs, stage_to_rank: Sequence[int]) -> tuple[StageMemory, ...]:
    """The memory of each global virtual stage; the arguments are those of `lower`.

    **Raises:**

    A `ValueError` if the layout does not fit the model.
    """
    check_split(job.model, job.layout, job.schedule, job.training)
    stages = deal(job, stage_to_rank)
    # Most stages are equal.
    of_stage = ft.cache(ft.partial(_stage_memory, job))
    return tuple(map(of_stage, stages.parts))


def offloaded_bytes(costs: Costs, parts: Parts) -> float:
    """The activations of a microbatch that the host keeps of a stage, on each GPU."""
    offloads = "activations" in costs.training.offload
    return _stage_memory(costs, parts).offloaded if offloads else 0.0


def held_by_stages(job: Costs, stage_to_rank: Sequence[int]) -> tuple[Sizes, ...]:
    """The parameters, gradients and optimizer states of each stage on one GPU, in bytes. The
    arguments are those of `lower`.
    """
    of_stage = ft.cache(ft.partial(_static, job))  # Most stages are equal.
    return tuple({**of_stage(held)} for held in deal(job, stage_to_rank).held)


def _stage_memory(costs: Costs, parts: Parts) -> StageMemory:
    """The memory of a stage."""
    training = costs.training
    (held, tables), (frozen, fixed) = (
        _held(costs, parts, frozen=is_frozen) for is_frozen in (False, True)
    )
    runs = recomputed(parts, training)
    sizes_of = {part: _kept(part.costs(costs), listed(costs, part)) for part, _ in parts}
    num_layers = sum(count for part, count, _ in runs if part.is_layer)
    uniform = training.recompute == "full" and training.recompute_method == "uniform"
    together = training.recompute_layers if uniform else 1
    offloads = "activations" in training.offload
    sent = min(training.offload_layers or num_layers, num_layers) if offloads else 0
    gone = min(sent, max(num_layers - 2, 0))  # One computes while one is copied.
    kept, offloaded, layers = Sizes(), 0.0, it.count()
    again, at_once = ([0.0] * (num_layers + 1) for _ in range(2))
    for part, count, runs_again in runs:
        results = kept_results(costs, part) if runs_again else sizes_of[part]
        states = float(costs.residual_bytes * part.costs(costs).stream_states * runs_again)
        size, size_of_results = total(sizes_of[part]), total(results)
        inputs = stay = 0
        for _ in range(count):
            layer = next(layers) if part.is_layer else num_layers
            at_once[layer // together] += size * part.is_layer
            again[layer // together] += size - size_of_results
            # Layers that are computed again together keep the input of the first.
            first = layer % together == 0
            offloaded += (size_of_results + states * first) * (layer < sent)
            inputs += first * (layer >= gone)
            stay += layer >= gone
        add_sizes(kept, {"checkpoints": states} if runs_again else {}, inputs)
        add_sizes(kept, results, stay)
    # A layer's backward needs gradients, about as many as the activations that a module
    # keeps, and the buffers of that module.
    wide = replace(costs, training=replace(training, narrow_inputs=False, adapters=None))
    of_modules = (
        sum(module.activations(part.costs(wide)).values()) + module.buffers(part.costs(costs))
        for part, _, _ in runs
        for module in listed(costs, part).modules
        if part.is_layer
    )
    most = max(of_modules, default=0.0)
    logits = kept.get("logits", 0.0)
    of_head = max((sizes.get("logits", 0.0) for sizes in sizes_of.values()), default=0.0)
    # What the loss needs is gone when the gradients of the layers are computed. Of several heads
    # (multi-token prediction) one at a time needs more than it keeps.
    first, kept_bytes, last = costs.logit_bytes
    whole, scattered = _units(costs, parts)
    work: Sizes = {"workspace": most + max(again), "gathered": whole + scattered}
    # The layer that is the last of a backward has its activations until it ends.
    closing = work | {"workspace": most + max(at_once)}
    forward: Sizes = {"logits": (first / kept_bytes - 1) * of_head, "gathered": whole}
    loss: Sizes = {"logits": (last / kept_bytes - 1) * of_head, "gathered": whole}
    # A name may keep the logits until the step ends.
    named = (
        costs.activation_bytes / kept_bytes * logits
        if training.loss in ("eager-named", "eager-float32")
        else 0.0
    )
    backward = max(loss, work | {"logits": named - logits}, key=total)
    closing |= {"logits": named}
    if training.plain:
        # Of a tied matrix the embedding's gradient is another tensor, and the last that is made.
        words = costs.weight_bytes * costs.model.vocab_size * costs.model.hidden_size
        words = words if costs.model.tied_embeddings else -words
        words = 0 if training.adapters else words
        closing["workspace"] = max(closing["workspace"] - max(-words, 0), words, 0)
    static, summed = _static(costs, held), _summed(costs, held)
    copied = static.pop("copied", 0.0)
    # PyTorch's own gradients are freed after a step (`zero_grad`), Megatron-LM's have buffers.
    freed = training.zero == 3 or training.plain
    gradients = static.pop("gradients", 0.0) if freed else 0.0
    value = 4 if training.forward_only else 8  # A value of a table, and its one moment.
    # Those of frozen tables are in float32, too.
    # FSDP shards what adapters leave as it is; in fp8 this has a transpose, too.
    resharded = training.adapters and training.zero == 3 and training.reshard_after_forward
    size = 4 if training.plain and training.weights == "fp32" else costs.activation_bytes
    stays = size * (sharded_parameters(costs, frozen) if resharded else sum(frozen)) + 4 * fixed
    static |= {"tables": value * tables, "frozen": stays}
    if training.forward_only:
        kept, backward, closing, summed, offloaded = {}, {}, {}, 0.0, 0.0
        # Until the next layer: what a layer, or an end, would keep, of that which would keep most.
        forward = {**max(sizes_of.values(), key=total, default={}), "gathered": whole}
    peaks = (forward, backward, closing)
    return StageMemory(static, kept, *peaks, gradients, copied, summed, offloaded)


def _static(costs: Costs, held: Held) -> Sizes:
    """The parameters, gradients and optimizer states of a stage, in bytes. FSDP has shards in
    float32 alone; the others have parameters of 16 bits, which are gathered once, and update a
    float32 copy by float32 gradients, of which there is a copy meanwhile if they have another
    dtype. Parameters in float32 have no copy.
    """
    training, gradient, narrow = costs.training, costs.gradient_bytes, costs.activation_bytes
    parameters, sharded = sum(held), sharded_parameters(costs, held)
    on_device = sharded * (1 - costs.optimizer_on_host)
    resharded = training.zero == 3 and training.reshard_after_forward
    if training.forward_only:
        return {"parameters": narrow * (sharded if resharded else parameters)}
    if training.plain:
        size = costs.weight_bytes
        held_here = sharded if training.zero == 3 else parameters
        return {
            "parameters": size * held_here
            + narrow * parameters * (training.zero == 3 and not resharded),
            "gradients": size * (sharded if training.zero >= 2 else parameters),
            "optimizer": 2 * size * on_device,
            # DDP has gradients in buckets besides.
            "buckets": size * sum(n for n, _ in shared(costs, held)) * (training.zero == 0),
        }
    if training.zero == 3:
        return {
            "parameters": 4 * sharded + (0 if resharded else narrow * parameters),
            "gradients": 4 * sharded,
            "optimizer": costs.moment_bytes * on_device,
        }
    return {
        "parameters": narrow * parameters,
        "gradients": gradient * (sharded if training.zero == 2 else parameters),
        "optimizer": (costs.copy_bytes + costs.moment_bytes) * on_device,
        "copied": (0 if gradient == 4 else 4) * on_device,
    }


def _held(costs: Costs, parts: Parts, *, frozen: bool) -> tuple[Held, float]:
    """The parameters of a stage on one GPU, and the values of embedding tables on the GPU with the
    most of them; of what is trained, or of what is `frozen`, of which each replica has all.
    """
    parameters = total_parameters(costs.model, parts, frozen=frozen)
    modules = (module for part, _ in parts if part.frozen or not frozen for module in part.modules)
    shares = (
        module.fullest(costs.layout.ep) for module in modules if isinstance(module, EmbeddingBags)
    )
    return held_of(parameters, costs.layout), parameters.tables * sum(shares)


def _summed(costs: Costs, held: Held) -> float:
    """The gradients of a stage that are unsharded until they are reduce-scattered."""
    training = costs.training
    if training.zero < 2 or reduces_each_microbatch(training):
        return 0.0
    return costs.gradient_bytes * sum(
        number for number, group in shared(costs, held) if instance(costs, group).size > 1
    )


def _units(costs: Costs, parts: Parts) -> tuple[float, float]:
    """The bytes of units that are unsharded at a time. Parameters: those of the layer that runs,
    and of those that are gathered ahead. Gradients: those of the layer that runs and, if
    collectives overlap with compute, of the layer that is being reduce-scattered. The ends of the
    model are FSDP's root, whose parameters and 16-bit gradients are there until all of its backward
    is done.
    """
    training = costs.training
    gathers = training.zero == 3 and training.reshard_after_forward
    sent = costs.sent_gradient_bytes if reduces_each_microbatch(training) else 0
    layers: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    for part, count in parts:
        whole = shared(costs, gathered_bytes(costs, ((part, 1),))) if gathers else ()
        unit = sum(size for size, _ in whole), sum(n for n, _ in shared_of_unit(costs, part))
        (layers if part.is_layer or training.zero < 3 else ends).extend([unit] * count)
    gathered, scattered = ([unit[which] for unit in layers] for which in (0, 1))
    root, waiting = (sum(unit[which] for unit in ends) for which in (0, 1))
    ahead = training.prefetch
    gradients = sent * _most(scattered, 1 + min(ahead, 1)) + (
        costs.activation_bytes * waiting if sent else 0
    )
    return root + _most(gathered, 1 + ahead), gradients


def _most(sizes: Sequence[float], number: int) -> float:
    """The most that so many neighbours have together."""
    return max((sum(sizes[at : at + number]) for at in range(len(sizes))), default=0.0)


def _kept(costs: Costs, part: LayerPart) -> Sizes:
    """The activations of one microbatch that a layer, or an end of the model, keeps."""
    parts: Sizes = {}
    for module, norms in part.normed:
        add_sizes(parts, module.activations(costs))
        add_sizes(parts, kept_around(costs, module, norms))
    return parts
