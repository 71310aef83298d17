"""What modules have in common: how their input is gathered and their output scattered.

Forward, a module is two segments: what comes before its input is gathered (all_gather) and what
comes before its output is scattered (reduce_scatter). Backward, it is three: up to the gathering of
the gradient; up to the gathering, once more, of the input, beside the dgrad GEMM; and up to the
scattering of the input's gradient, beside the wgrad GEMM. Without sequence parallelism an
all_reduce closes each module.
"""

from .._block import Kernel, Segment
from .._costs import Costs, Linear
from .._parts import segment


def open_module(costs: Costs, kernels: list[Kernel], gemm: Kernel) -> list[Segment]:
    """What comes before a gather, beside which `gemm` may run."""
    if not costs.splits_sequence:
        return [segment(kernels)]
    gather = costs.collective("all_gather", tp_bytes(costs), costs.tp)
    return [segment(kernels, costs.pipelined(gather, gemm))]


def close_module(costs: Costs, kernels: list[Kernel], gemm: Kernel) -> list[Segment]:
    """What comes before a module's output, the last of it `gemm`."""
    if costs.layout.tp == 1:
        return [segment(kernels)]
    kind = "reduce_scatter" if costs.splits_sequence else "all_reduce"
    collective = costs.collective(kind, tp_bytes(costs), costs.tp)
    if costs.splits_sequence:
        collective = costs.pipelined(collective, gemm)
    return [segment(kernels, collective)]


def close_backward(
    costs: Costs, kernels: list[Kernel], inputs: Linear, weights: bool
) -> list[Segment]:
    """What ends with the gradients of the matrix that reads the gathered input."""
    dgrad, wgrad = inputs.dgrad, inputs.wgrad
    both = [dgrad, wgrad] if weights else [dgrad]
    if costs.layout.tp == 1:
        return [segment([*kernels, *both])]
    beside = both[-1]
    if not costs.splits_sequence:
        reduce = costs.collective("all_reduce", tp_bytes(costs), costs.tp)
        # A backward-input ends with the reduction, so there is nothing left to run beside it.
        left = costs.overlapped(reduce, beside) if weights else reduce
        return [segment([*kernels, *both], left)]
    scatter = costs.collective("reduce_scatter", tp_bytes(costs), costs.tp)
    if not weights:
        return [segment([*kernels, dgrad], scatter)]
    gather = costs.collective("all_gather", tp_bytes(costs), costs.tp)
    return [
        segment([*kernels, dgrad], costs.overlapped(gather, dgrad)),
        segment([wgrad], costs.overlapped(scatter, wgrad)),
    ]


def weight_gradients(costs: Costs, inputs: Linear, *others: Linear) -> list[Segment]:
    """The phase backward-weight: the input is gathered once more, beside what needs it not."""
    rest = [linear.wgrad for linear in others]
    if not costs.splits_sequence:
        return [segment([*rest, inputs.wgrad])]
    gather = costs.collective("all_gather", tp_bytes(costs), costs.tp)
    if rest:
        gather = costs.overlapped(gather, rest[0])
    return [segment(rest, gather), segment([inputs.wgrad])]


def gradients(linear: Linear, weights: bool) -> list[Kernel]:
    """The kernels of a matrix in a backward."""
    return [linear.dgrad, linear.wgrad] if weights else [linear.dgrad]


def tp_bytes(costs: Costs) -> int:
    """Of the hidden states of a microbatch, gathered."""
    return 2 * costs.tokens * costs.model.hidden_size


def cast(costs: Costs, values: int) -> list[Kernel]:
    """To fp8, or narrower: its producer writes the values, a kernel their transpose for the
    backward."""
    narrow = costs.training.dtype != costs.base_dtype
    return [costs.move("elementwise", 3 * values)] if narrow else []


def cast_gradient(costs: Costs, values: int) -> list[Kernel]:
    """To fp8, or narrower: read once, written as it is and transposed."""
    narrow = costs.training.dtype != costs.base_dtype
    return [costs.move("elementwise", 4 * values)] if narrow else []


def check_divides(layout_degree: tuple[str, int], key: str, value: int) -> None:
    """Raises where a degree of the layout does not divide a size of the model."""
    name, degree = layout_degree
    if value % degree != 0:
        raise ValueError(
            f"`layout.{name}` = {degree} does not divide `model.{key}` = {value}; use a divisor."
        )
