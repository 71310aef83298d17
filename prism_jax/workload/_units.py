"""Each layer, and each end of the model, is a unit: its segments, those of its modules with a norm
before and a residual after each, and the collectives of its parameters and gradients.

The replicas may share parameters and gradients (ZeRO-2, ZeRO-3 and FSDP; Zhao et al. 2023,
arXiv:2304.11277). Before a microbatch runs through a unit, all_gathers gather its parameters; after
its backward, reduce_scatters reduce its gradients. If there are copies of the shards
(`optimizer_instances`, known as hybrid sharding), the copies reduce the gradients of their shards
among themselves.
"""

import itertools as it
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ..cluster import Group
from ..data import Training
from ._architecture import LayerPart, Parts, recomputed
from ._block import Block, Kernel, Segment, Segments, weights_of
from ._by_op import without_kept
from ._costs import Costs
from ._listed import listed, waits_for_host
from ._parts import block, block_mean, segment, until_all, without_end
from ._residual import around, mixing_of
from ._split import Held, held_of
from .modules import Head, PatchHead


class Unit(NamedTuple):
    """A layer, or an end of the model, in one phase.

    **Attributes:**

    - `segments`: its segments.
    - `gathers`: the collectives that gather its parameters before it runs.
    - `reductions`: the collectives that reduce its gradients after it has run.
    - `copies`: the copies of activations to or from the host while it runs.
    """

    segments: Segments
    gathers: tuple[Kernel, ...] = ()
    reductions: tuple[Kernel, ...] = ()
    copies: tuple[Kernel, ...] = ()


def unit_of(costs: Costs, phase: str, part: LayerPart, again: bool) -> Unit:
    """A unit in a phase of ops, as those of `lower`; `again` says whether its backward recomputes
    it.
    """
    training, weights = costs.training, phase in ("B", "W")
    # The backward of the last part of a model directly follows its forward, so that it still has
    # its parameters: PyTorch's FSDP keeps those of the root, and torchtitan those of the head.
    last = isinstance(part.modules[-1], Head | PatchHead)
    kept = phase != "F" and (phase == "W" or last or not training.reshard_after_forward)
    gathered = () if kept else _collectives(costs, part, "all_gather")
    reduced = _collectives(costs, part, "reduce_scatter") if weights else ()
    copied = _copies(costs, part, gathered=bool(gathered), reduced=bool(reduced))
    if phase == "F":
        segments = launched([*copied, *forward_part(costs, part)], launches(costs, part))
        return Unit(segments, gathered)
    if phase == "W":
        part_costs, part = part.costs(costs), listed(costs, part)
        segments: Segments = []
        for module in reversed(part.modules):
            segments += module.backward_weight(part_costs)
            segments.append(segment(weights_of(*mixing_of(part_costs, module))))
    else:
        segments = backward_part(costs, part, again, weights=weights)
        segments = launched(segments, (1 + again) * launches(costs, part))
    return Unit([*segments, *copied], gathered, reduced)


def forward_part(costs: Costs, part: LayerPart, *, again: bool = False) -> Segments:
    """The segments of the forward of one layer, or end of the model, and microbatch. With `again`,
    it is recomputed for the backward, which may not need its end.
    """
    costs, part = part.costs(costs), listed(costs, part)
    segments: Segments = []
    before: list[Kernel] = []
    for module, norms in part.normed:
        kernels = around(costs, module, norms)
        segments += module.forward(costs, [*before, *kernels.before])
        before = kernels.after
    last = part.modules[-1].last_product(costs)
    if again and last is not None and costs.training.recompute_early_stop:
        return without_end(segments, last)
    return [*segments, segment(before)]


def backward_part(costs: Costs, part: LayerPart, again: bool, *, weights: bool = True) -> Segments:
    """The segments of the backward of one layer, or end of the model, and microbatch. With `again`,
    they include its forward, or what is recomputed of it. Without `weights`, they are those of its
    phase backward-input.
    """
    segments = forward_part(costs, part, again=True) if again else []
    if again and costs.training.recompute == "by-op":
        segments = without_kept(costs, part, segments)
    costs, part = part.costs(costs), listed(costs, part)
    before: list[Kernel] = []
    for module, norms in reversed(part.normed):
        kernels = around(costs, module, norms, weights=weights)
        segments += module.backward(costs, [*before, *kernels.before_gradients], weights=weights)
        before = kernels.after_gradients
    return [*segments, segment(before)]


def launches(costs: Costs, part: LayerPart) -> float:
    """How long the host takes to launch a pass through a layer, or an end, in seconds."""
    training = costs.training
    if training.cuda_graphs == "iteration":
        return 0.0
    usual, experts = training.host_module_s, training.host_experts_s
    if training.cuda_graphs == "modules":
        usual, experts = 0.0, experts / 2
    kinds = (module.kind for module in part.modules if module.in_residual)
    return sum(experts if kind == "moe" else usual for kind in kinds)


def launched(segments: Segments, seconds: float) -> Segments:
    """Segments, followed by what is left of the time that the host needs to launch them.

    The host runs ahead of the GPU, so that only the sum over a layer counts, not each kernel.
    """
    exposed = seconds - block_mean(block([(segments, 1)])) if seconds else 0.0
    return [*segments, segment([Kernel("host", "launches", exposed)])] if exposed > 0 else segments


def launched_units(costs: Costs, parts: Parts, *, back: bool) -> Iterator[tuple[Segments, int]]:
    """The units of a stage in the order of its forward, or of its backward, with their numbers."""
    runs = [*recomputed(parts, costs.training, back=back)]
    for part, count, again in runs[::-1] if back else runs:
        yield unit_of(costs, "B" if back else "F", part, again).segments, count


def host_waits(
    costs: Costs, passes: Iterable[tuple[Iterable[tuple[Segments, int]], bool]]
) -> list[Block]:
    """How long a GPU waits in each of some passes for a host that launches each kernel."""
    passes = [*passes]
    if not costs.training.host_forward_s:
        return [()] * len(passes)
    waits = waits_for_host(costs, passes)
    kernels = [Kernel("host", "launches", seconds) for seconds in waits]
    return [block([([segment([kernel])], 1)]) if kernel.mean else () for kernel in kernels]


def row_of_units(
    costs: Costs,
    units: Sequence[tuple[Unit, int]],
    before: Unit | None = None,
    after: Unit | None = None,
    then: Segments | None = None,
) -> Block:
    """The block of units in the order in which they run, each with its number of repetitions, and
    of what runs `before` and `after` them; `then` is what runs in the next block until all wait.

    Units with equal neighbours become one segment with its number of occurrences.
    """
    meets = any(unit.gathers or unit.reductions for unit, _ in units)
    units = [
        (unit._replace(segments=_until_met(costs, unit, meets)), count) for unit, count in units
    ]
    order = [number for number, (_, count) in enumerate(units) for _ in range(count)]
    neighbours = Counter(zip([-1, *order], order, [*order[1:], len(units)], strict=False))
    of_number = {-1: before or Unit([]), len(units): after or Unit([])}
    of_number |= {number: unit for number, (unit, _) in enumerate(units)}

    parts = [
        (list(_beside(costs, *map(of_number.__getitem__, numbers))), times)
        for numbers, times in neighbours.items()
    ]
    ranks = costs.expert_ranks or 1
    if not meets and ranks > _worker(costs):
        # Units without experts, whose ranks wait at the exchange after them.
        dense = [part for part in parts if not any(segment.members == ranks for segment in part[0])]
        experts = [part for part in parts if part not in dense]
        parts = [*experts, (until_all(dense, segment([], members=ranks)), 1)]
    if not meets and overlaps_layers(costs.training):
        # All wait where the next gradients are reduced: for the sum of these units and what runs
        # until there, of which the next block has the wait for the latter alone.
        end, later = segment([], members=_in_lines(costs)), (then or [], 1)
        parts = [(until_all([*parts, later], end), 1), (until_all([later], end), -1)]
    return block(parts)


def _beside(costs: Costs, before: Unit, unit: Unit, after: Unit) -> Iterator[Segment]:
    """A unit between two others, and the exposed part of its collectives."""
    ahead, behind = costs.training.prefetch > 0, costs.training.overlap_grad_reduce
    hidden = (after.gathers if ahead else ()) + (before.reductions if behind else ())
    streams = [stream for stream in (hidden, unit.copies) if stream]
    if not (ahead and before.segments):
        yield from (segment([], collective) for collective in unit.gathers)
    if streams:
        yield costs.beside_block(block([(unit.segments, 1)]), *streams)
    else:
        yield from unit.segments
    if not (behind and after.segments):
        yield from (segment([], collective) for collective in unit.reductions)


def _until_met(costs: Costs, unit: Unit, meets: bool) -> Segments:
    """The segments of a unit, which end where ranks wait for all that share its experts and, if
    they gather its parameters or reduce its gradients together (`meets`), at its end for all of
    these. What runs behind its last exchange otherwise waits for the first one of the next unit.
    """
    segments, ranks, worker = unit.segments, costs.expert_ranks, _worker(costs)
    ends = [i for i, part in enumerate(segments) if ranks and part.members == ranks > worker]
    after, met = segments[ends[-1] + 1 :] if ends else segments, []
    for begin, end in it.pairwise([-1, *ends]):
        before = after if begin < 0 and not meets else []
        met += until_all([([*before, *segments[begin + 1 : end]], 1)], segments[end])
    if not meets:
        return met if ends else after
    if ranks != _every(costs):
        met, after = [], [*met, *after]
    return [*met, *until_all([(after, 1)], segment([], members=_every(costs)))]


def _every(costs: Costs) -> int:
    """The ranks that share parameters or reduce gradients within a microbatch."""
    return _worker(costs) * costs.layout.dp // costs.training.optimizer_instances


def _in_lines(costs: Costs) -> int:
    """The ranks that wait at the end of forwards. On the longest path of a step a microbatch first
    passes through all pipeline ranks, on lines of GPUs whose deviations add up in squares; then
    follow forwards of one pipeline rank. So as many ranks wait as have the same mean deviation.
    """
    schedule, ranks = costs.schedule, costs.layout.pp
    if costs.training.optimizer_instances > 1:
        return _every(costs)
    forwards = schedule.num_microbatches * schedule.virtual_stages - 1
    return round(_every(costs) * ((ranks + forwards) / (ranks**0.5 + forwards)) ** 2)


def _worker(costs: Costs) -> int:
    """The ranks that run one microbatch of one stage together."""
    return costs.layout.tp * costs.layout.cp


def reduces_each_microbatch(training: Training) -> bool:
    """Whether each microbatch reduces its gradients, layer by layer."""
    return not (training.accumulate_gradients if training.zero >= 2 else training.no_sync)


def overlaps_layers(training: Training) -> bool:
    """Whether each microbatch gathers parameters or reduce-scatters gradients layer by layer."""
    return training.zero == 3 or reduces_each_microbatch(training)


def instance(costs: Costs, group: Group) -> Group:
    """Of a group that reduces gradients: the ranks of one optimizer."""
    return Group(group.name, group.size // costs.training.optimizer_instances, group.stride)


def shared(costs: Costs, held: Held) -> tuple[tuple[float, Group], ...]:
    """The numbers of parameters that one GPU holds and others hold too, each with the group of
    replicas that reduce their gradients and can shard them.
    """
    groups = zip(held, costs.replicas, strict=True)
    return tuple((number, group) for number, group in groups if number and group.size > 1)


def shared_of_unit(costs: Costs, part: LayerPart) -> tuple[tuple[float, Group], ...]:
    """`shared` of the unsharded parameters of a unit that are trained."""
    return shared(costs, held_of(part.parameters(costs.model), costs.layout))


def sharded_parameters(costs: Costs, held: Held) -> float:
    """The number of parameters that a GPU updates."""
    if not costs.training.zero:
        return sum(held)
    groups = zip(held, costs.replicas, strict=True)
    return sum(number / instance(costs, group).size for number, group in groups)


def gathered_bytes(costs: Costs, parts: Parts) -> Held:
    """The bytes of the parameters of units, unsharded and in the dtype in which they are gathered;
    those of the ends of a model are never in fp8.
    """
    training = costs.training
    dtype = None if training.weights == "bf16" else training.gather_dtype
    size = {None: costs.activation_bytes, "fp32": 4, "fp8": 1}.get(dtype, 2)
    total = [0.0, 0.0]
    for part, count in parts:
        bytes_each = count * (size if part.is_layer else max(size, 2))
        parameters = part.sharded if training.zero == 3 else part.parameters
        held = held_of(parameters(costs.model), costs.layout)
        total = [before + bytes_each * number for before, number in zip(total, held, strict=True)]
    return Held(*total)


def scattered(costs: Costs, parameters: float, group: Group) -> Iterator[Kernel]:
    """The collectives that reduce the gradients of parameters, which are sharded or not."""
    size, inner = costs.sent_gradient_bytes * parameters, instance(costs, group)
    if not costs.training.zero:
        yield costs.collective("all_reduce", size, group)
        return
    yield costs.collective("reduce_scatter", size, inner)
    instances = costs.training.optimizer_instances
    if instances > 1:  # The peers of a shard.
        peers = Group(f"{group.name}-peers", instances, inner.size * group.stride)
        yield costs.collective("all_reduce", size / inner.size, peers)


def _collectives(costs: Costs, part: LayerPart, kind: str) -> tuple[Kernel, ...]:
    """The all_gathers of the parameters of a unit, none if each replica has all of them; or the
    reduce_scatters of its gradients, none if they are accumulated first.
    """
    training, collectives = costs.training, []
    if kind == "all_gather" and training.zero == 3:
        gathered = shared(costs, gathered_bytes(costs, ((part, 1),)))
        collectives = [
            costs.collective(kind, size, instance(costs, group)) for size, group in gathered
        ]
    elif kind == "reduce_scatter" and reduces_each_microbatch(training):
        collectives = [
            kernel
            for number, group in shared_of_unit(costs, part)
            for kernel in scattered(costs, number, group)
        ]
    # Those of one rank take no time.
    named = (msgspec.structs.replace(kernel, group="fsdp") for kernel in collectives)
    return tuple(kernel for kernel in named if kernel.mean)


def _copies(costs: Costs, part: LayerPart, *, gathered: bool, reduced: bool) -> Segments:
    """What a unit moves on its own GPU: parameters after they were `gathered`, and gradients before
    they are `reduced`.
    """
    training, held = costs.training, held_of(part.sharded(costs.model), costs.layout)
    parameters = gathered * sum(number for number, _ in shared(costs, held))
    gradients = reduced * sum(number for number, _ in shared_of_unit(costs, part))
    num_bytes = training.gather_copy_bytes * parameters + training.gradient_copy_bytes * gradients
    return [segment([costs.move("copies", num_bytes)])] if num_bytes else []
