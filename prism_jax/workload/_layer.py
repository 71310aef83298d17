"""The segments of a layer: those of its modules, with a norm before and a residual after each."""

from ._architecture import Part
from ._block import Kernel, Segment
from ._costs import Costs
from ._parts import block, block_mean, segment, without


def forward_part(costs: Costs, part: Part, *, again: bool = False) -> list[Segment]:
    """The segments of the forward of one layer, or end of the model, and microbatch. With `again`,
    it is recomputed for the backward, which may not need its end.
    """
    costs = part.costs(costs)
    segments: list[Segment] = []
    before: list[Kernel] = []
    for module in part.modules:
        norm = [costs.norm()] if module.in_residual else []
        segments += module.forward(costs, [*before, *norm])
        before = [costs.residual()] if module.in_residual else []
    last = part.modules[-1].last_product(costs)
    if again and last is not None and costs.training.recompute_early_stop:
        return _without_end(segments, last)
    return [*segments, segment(before)]


def _without_end(segments: list[Segment], product: Kernel) -> list[Segment]:
    """The segments of a module before its last product, with which its output is scattered."""
    *rest, last = segments
    if product in dict(last.kernels):
        return [*rest, Segment(without(last.kernels, product), None, last.branches)]
    return [*rest, Segment(last.kernels, None, last.branches[:-1])]


def backward_part(costs: Costs, part: Part, *, again: bool, weights: bool = True) -> list[Segment]:
    """The segments of the backward of one layer, or end of the model, and microbatch. With `again`,
    they include its forward, which is recomputed. Without `weights`, they are those of its phase
    backward-input.
    """
    costs = part.costs(costs)
    segments = forward_part(costs, part, again=True) if again else []
    before: list[Kernel] = []
    for module in reversed(part.modules):
        residual = [costs.residual_backward()] if module.in_residual else []
        if module.in_residual and costs.recomputes("layernorm"):
            residual.append(costs.norm())
        segments += module.backward(costs, [*before, *residual], weights=weights)
        before = [costs.norm(3)] if module.in_residual else []
    return [*segments, segment(before)]


def backward_weight_part(costs: Costs, part: Part) -> list[Segment]:
    """The segments of the gradients of the weights of one layer, or end, and microbatch."""
    costs = part.costs(costs)
    return [one for module in reversed(part.modules) for one in module.backward_weight(costs)]


def launches(costs: Costs, part: Part) -> float:
    """How long the host takes to launch a pass through a layer, or an end, in seconds."""
    training = costs.training
    if training.cuda_graphs == "iteration":
        return 0.0
    usual, experts = training.host_module_s, training.host_experts_s
    if training.cuda_graphs == "modules":
        usual, experts = 0.0, experts / 2
    kinds = (module.kind for module in part.modules if module.in_residual)
    return sum(experts if kind == "moe" else usual for kind in kinds)


def launched(segments: list[Segment], seconds: float) -> list[Segment]:
    """Segments, followed by what is left of the time that the host needs to launch them.

    The host runs ahead of the GPU, so that only the sum over a layer counts, not each kernel.
    """
    left = seconds - block_mean(block([(segments, 1)])) if seconds else 0.0
    return [*segments, segment([Kernel("host", "launches", left)])] if left > 0 else segments
