"""Shared by modules: how their input is gathered and their output scattered.

The forward of a module is two segments: the kernels before its input is gathered (all_gather), and
the kernels before its output is scattered (reduce_scatter). In the backward, the second segment
also gathers the input again, overlapped with the dgrad GEMM, and scatters the gradient of the
input, overlapped with the wgrad GEMM. Without sequence parallelism, an all_reduce ends each module.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ...data import Layout, Model
from .._block import Kernel, Linear, Segment, Segments, weights_of
from .._costs import Costs
from .._parts import row, segment, without


def open_module(costs: Costs, kernels: list[Kernel], gemm: Kernel, segments: Segments) -> Segments:
    """The kernels before a gather, and the segments after it. In the first of these, `gemm` may
    overlap with the pieces of the gather.
    """
    if not costs.splits_sequence:
        return [segment(kernels), *segments]
    first, *later = segments
    # A product that other pieces run beside already hides none of these.
    if not costs.training.tp_overlap or gemm not in dict(first.kernels):
        return [segment(kernels, gather_states(costs)), *segments]
    bare, beside = costs.in_pieces("all_gather", tp_bytes(costs), gemm)
    changed = msgspec.structs.replace(
        first, kernels=without(first.kernels, gemm), branches=(beside, *first.branches)
    )
    return [segment(kernels, bare), changed, *later]


def close_module(costs: Costs, kernels: list[Kernel], gemm: Kernel | None = None) -> Segments:
    """The kernels before the output of a module, of which `gemm`, if it is one, is the last."""
    if costs.layout.tp == 1:
        return [segment(kernels)]
    kind = "reduce_scatter" if costs.splits_sequence else "all_reduce"
    if gemm is None or not (costs.splits_sequence and costs.training.tp_overlap):
        return [segment(kernels, costs.collective(kind, tp_bytes(costs), costs.group("tp")))]
    bare, beside = costs.in_pieces(kind, tp_bytes(costs), gemm)
    return [Segment(without(row(kernels), gemm), bare, (beside,))]


def close_backward(costs: Costs, kernels: list[Kernel], inputs: Linear, weights: bool) -> Segments:
    """The end of a backward: the gradients of the matrix that reads the gathered input."""
    return gradients_of_input(costs, kernels, [inputs], weights, tp_bytes(costs))


def gradients_of_input(
    costs: Costs, kernels: list[Kernel], linears: Sequence[Linear], weights: bool, num_bytes: int
) -> Segments:
    """The same for matrices whose input and input gradient each have `num_bytes`."""
    dgrad = [linear.dgrad for linear in linears]
    wgrad = weights_of(*linears) if weights else []
    if costs.layout.tp == 1:
        return [segment([*kernels, *dgrad, *wgrad])]
    beside = costs.training.overlap_tp_backward
    if not costs.splits_sequence:
        reduce = costs.collective("all_reduce", num_bytes, costs.group("tp"))
        if not (wgrad and beside):
            # A backward-input ends with the reduction, so nothing is left to run beside it.
            return [segment([*kernels, *dgrad, *wgrad], reduce)]
        return [segment([*kernels, *dgrad], None, costs.beside(wgrad, reduce))]
    scatter = costs.collective("reduce_scatter", num_bytes, costs.group("tp"))
    if not wgrad:
        return [segment([*kernels, *dgrad], scatter)]
    gather = costs.collective("all_gather", num_bytes, costs.group("tp"))
    if not beside:
        return [segment([*kernels, *dgrad], gather), segment(wgrad, scatter)]
    branches = costs.beside(dgrad, gather), costs.beside(wgrad, scatter)
    return [segment(kernels, None, *branches)]


def weight_gradients(costs: Costs, inputs: Linear, *linears: Linear) -> Segments:
    """The phase backward-weight. The input is gathered again beside kernels without it."""
    of_linears, of_inputs = weights_of(*linears), weights_of(inputs)
    if not (costs.splits_sequence and of_inputs):
        return [segment([*of_linears, *of_inputs])]
    gather = gather_states(costs)
    if not (of_linears and costs.training.overlap_tp_backward):
        return [segment(of_linears, gather), segment(of_inputs)]
    return [segment(of_inputs, None, costs.beside(of_linears, gather))]


def gradients(linear: Linear, weights: bool) -> list[Kernel]:
    """The kernels of a matrix in a backward."""
    return [linear.dgrad, *(weights_of(linear) if weights else [])]


def gather_states(costs: Costs) -> Kernel:
    """Gathers the hidden states of a microbatch."""
    return costs.collective("all_gather", tp_bytes(costs), costs.group("tp"))


def tp_bytes(costs: Costs) -> int:
    """The bytes of the gathered hidden states of a microbatch."""
    return costs.activation_bytes * costs.tokens * costs.model.hidden_size


# How much more casts move with a scale for each row: also along columns, for the gradients of
# weights. Llama 3 8B on 8 H100 trains at 6,768 tokens/s with these and at 7,690 with a scale for
# each tensor (pytorch/ao, torchao/float8, README.md): 0.145 s more for 8,192 tokens, 0.060 s for
# each time that casts move as much again. It is not the products that take longer: in a
# tensor-parallel group, whose ranks cast all of a gathered input, a step grows by a third.
_BY_ROWS = 3.4


# The bytes that are moved for a value, by what its scale is of; and without transposes, which the
# gradients of weights need, not those of adapters.
_CAST = {"delayed": (3, 0), "tensor": (5, 5), "row": (5 * _BY_ROWS, 5)}
_CAST_GRADIENT = {"delayed": (4, 3), "tensor": (9, 5), "row": (9 * _BY_ROWS, 5)}


def cast(costs: Costs, values: int) -> list[Kernel]:
    """Casts values to fp8 or narrower. Their producer writes the values; a kernel writes their
    transpose for the backward. If they give the scale, they are read for their maximum, and cast.
    """
    return _cast(costs, _CAST, values)


def cast_gradient(costs: Costs, values: int) -> list[Kernel]:
    """Casts a gradient to fp8 or narrower. It is read once, and written as it is and transposed.
    If it gives the scale, it is also read for its maximum, and the input is cast again, transposed.
    """
    return _cast(costs, _CAST_GRADIENT, values)


def _cast(costs: Costs, moved: Mapping[str, Sequence[float]], values: int) -> list[Kernel]:
    training = costs.training
    num_bytes = moved[training.scaling][training.adapters is not None]
    narrow = training.dtype != costs.base_dtype
    return [costs.move("elementwise", num_bytes * values)] if narrow and num_bytes else []


def check_divides(layout: Layout, key: str, value: int) -> None:
    """Raises if the tensor-parallel degree of a layout does not divide a size of the model."""
    if value % layout.tp != 0:
        raise ValueError(
            f"`layout.tp` = {layout.tp} does not divide `model.{key}` = {value}; use a divisor."
        )


def check_data_parallel(kind: str, layout: Layout) -> None:
    """Raises a `ValueError` of one sentence if a layout splits samples or the model."""
    if layout.world_size != layout.dp:
        raise ValueError(
            f"`layout` has tp*pp*cp = {layout.tp}*{layout.pp}*{layout.cp}, but a model with "
            f"`{kind}` is data parallel; use of `layout` only `dp`."
        )


def norm_parameters(model: Model) -> int:
    """The number of parameters of one norm of the hidden states."""
    return model.hidden_size * {"layernorm": 2, "without-weights": 0}.get(model.norm, 1)
