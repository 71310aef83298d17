"""Modules whose operators each run as kernels of their own, as in eager PyTorch: matrix products,
fused attention, and what the lists of a framework (`kernels/operators/`) have beside them; and how
long a GPU waits for a host that launches each kernel.
"""

import dataclasses
import itertools as it
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import msgspec

from ..cluster import compute_latency
from ..data import Layout, Model, Training
from ._architecture import LayerPart, Parts
from ._block import Kernel, Segments
from ._costs import Costs
from ._parts import block, block_mean, rows_of, segment
from ._residual import parameters_around
from .modules import MLP, AbstractModule, Head, Operator, Parameters, norm_name


# Of which part of a step, or of memory, an operator is; others are named after their module.
_KINDS = {"norm": "norm", "loss": "loss", "embedding": "embedding"}
_KEPT = {"norm": "norm", "input": "inputs", "matrix": "casts"}
# Parameters of operators; a tied matrix is one tensor of two operators.
_TENSORS = {"matrix": 1, "bias": 1, "norm": 1, "embedding": 1, "positions": 1, "tied": -1}
_TENSORS |= {"experts": 1, "adapter-matrix": 1}


_Phase: TypeAlias = Literal["forward", "backward", "weights"]


@dataclasses.dataclass(frozen=True)
class Listed(AbstractModule):
    """A module with the norm before it and the residual after it."""

    in_residual = False

    module: AbstractModule
    norms: int = 1

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        self.module.check(model, layout, training)

    def parameters(self, model: Model) -> Parameters:
        around = parameters_around(model, self.module, self.norms)
        return self.module.parameters(model).plus(around)

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        kernels = (_kernels(costs, operator, "forward") for operator in _operators_of(costs, self))
        return [segment([*before, *it.chain.from_iterable(kernels)])]

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        operators = _operators_of(costs, self)[::-1]
        kernels = [
            *it.chain.from_iterable(_kernels(costs, operator, "backward") for operator in operators)
        ]
        if weights:
            kernels += _of_all_weights(costs, operators)
        return [segment([*before, *kernels])]

    def backward_weight(self, costs: Costs) -> Segments:
        return [segment(_of_all_weights(costs, _operators_of(costs, self)))]

    def activations(self, costs: Costs) -> dict[str, float]:
        sizes: dict[str, float] = {}
        weights, lists = costs.operands, costs.kernels.operators
        assert lists is not None
        for operator in _operators_of(costs, self):
            name = _KEPT.get(_kind_of(operator), self.module.kind or "others")
            terms = lists.terms(weights, operator.name, "kept")
            if operator.trained:
                terms += lists.terms(weights, operator.name, "kept_for_weights")
            for term in terms:
                sizes[name] = sizes.get(name, 0.0) + term.num_bytes * operator.values[term.values]
            if (core := operator.core) is not None and costs.training.attention == "unfused":
                # A softmax in float32 and its cast (modeling_llama.py, eager_attention_forward).
                scores = core.sequences * core.num_heads * core.queries * core.keys
                sizes[name] = sizes.get(name, 0.0) + 6 * scores
        if isinstance(self.module, Head):
            sizes["logits"] = self.module.activations(costs)["logits"]
        return sizes

    def last_product(self, costs: Costs) -> Kernel | None:
        if not isinstance(self.module, MLP):
            return None
        *_, last = (operator for operator in _operators_of(costs, self) if operator.matrix)
        return _product(costs, last, "forward")


def listed(costs: Costs, part: LayerPart) -> LayerPart:
    """A layer, or an end, whose modules run op by op, if the job has lists of operators. Modules
    of other kinds, and products in fp8 or float32, keep their kernels.
    """
    if costs.kernels.operators is None or not costs.training.listed:
        return part
    modules = tuple(
        module if module.operators(costs) is None else Listed(module, norms)
        for module, norms in part.normed
    )
    return part._replace(modules=modules)


def tensors_of(costs: Costs, parts: Parts) -> int:
    """How many tensors of parameters the operators of some parts have."""
    number = 0
    for part, count in parts:
        for module in listed(costs, part).modules:
            operators = _operators_of(costs, module) if isinstance(module, Listed) else []
            tensors = (_TENSORS.get(_kind_of(operator), 0) for operator in operators)
            biases = sum(operator.name.startswith("layernorm") for operator in operators)
            number += count * (sum(tensors) + biases)
    return number


def optimizer_of(costs: Costs, parameters: float, tensors: int) -> list[Kernel]:
    """The kernels that clip gradients to their norm and update so many parameters, in PyTorch; of a
    `loop` with the wait for the host, which launches eight for each tensor.
    """
    size = costs.weight_bytes
    # Each op reads and writes parameters, gradients and moments again: decay, two moments, their
    # root, its scale and epsilon, and the update (torch/optim/adamw.py).
    update = 7 if costs.training.optimizer_kernels == "fused" else 20
    moved = {"optimizer-norm": 1, "optimizer-clip": 2, "optimizer-adam": update}
    narrow = "-16" * (size == 2)
    kernels = [
        _moved(costs, "optimizer", rate + narrow, n * size * parameters)
        for rate, n in moved.items()
    ]
    if costs.training.optimizer_kernels == "loop":
        launched = 8 * tensors * costs.training.host_backward_s
        wait = max(launched - sum(kernel.mean for kernel in kernels), 0.0)
        kernels.append(Kernel("host", "launches of the optimizer", wait))
    return kernels


def waits_for_host(
    costs: Costs, passes: Iterable[tuple[Iterable[tuple[Segments, int]], bool]]
) -> list[float]:
    """How long the GPU waits in each of some passes, one after the other, in seconds.

    The host launches the kernels of a unit one by one, from a moment at which it has waited for the
    GPU. A unit starts when the GPU has ended the one before, and its first kernel is launched; it
    ends no earlier than its last kernel is launched. Passes are units in their order with their
    numbers, and whether they are backwards.
    """
    training, waits = costs.training, []
    launched = ended = 0.0
    for units, back in passes:
        launch_s = training.host_backward_s if back else training.host_forward_s
        begin, busy = ended, 0.0
        for segments, count in units:
            seconds = block_mean(block([(segments, 1)]))
            host = launch_s * sum(_launches(segments))
            for _ in range(count):
                start = max(ended, launched)
                launched += host
                ended = max(start + seconds, launched)
                busy += seconds
        waits.append(max(ended - begin - busy, 0.0))
    return waits


def _launches(segments: Segments) -> Iterator[int]:
    for whole in segments:
        for row, by_member in rows_of(whole):
            yield sum(count for _, count in row) if by_member else len(row)


def _operators_of(costs: Costs, listed: Listed) -> list[Operator]:
    """The operators of a module, and those around it, in the order of its forward."""
    operators = listed.module.operators(costs) or []
    if listed.module.in_residual:
        operators = _in_residual(costs, listed, operators)
    if costs.training.adapters is None:
        return operators
    return [
        operator._replace(trained=operator.name.startswith("adapter")) for operator in operators
    ]


def _in_residual(costs: Costs, listed: Listed, operators: list[Operator]) -> list[Operator]:
    around, norm = {"h": costs.states, "t": costs.tokens}, norm_name(costs.model)
    norms = [Operator(norm, around), Operator(f"{norm}-of-product", around)][: listed.norms]
    dropped = [Operator("dropout", around)] * costs.model.dropout
    return [*norms[:1], *operators, *norms[1:], *dropped, Operator("residual", around)]


def _kind_of(operator: Operator) -> str:
    return "norm" if "norm" in operator.name else operator.name


def _kernels(costs: Costs, operator: Operator, phase: _Phase) -> Iterator[Kernel]:
    """The kernels of an operator, without those of the gradients of weights."""
    yield from _terms(costs, operator, phase)
    if operator.core is not None:
        yield from operator.core.kernels(costs, backward=phase == "backward")
    if operator.matrix is not None:
        yield _product(costs, operator, phase)


def _of_all_weights(costs: Costs, operators: Iterable[Operator]) -> Iterator[Kernel]:
    return it.chain.from_iterable(
        _of_weights(costs, operator) for operator in operators if operator.trained
    )


def _of_weights(costs: Costs, operator: Operator) -> Iterator[Kernel]:
    """The gradient of the weights of an operator, and what is done with it; from the second
    microbatch on that of a matrix is added to that of the first.
    """
    if operator.matrix is not None:
        yield _product(costs, operator, "weights")
    yield from _terms(costs, operator, "weights")
    count = costs.schedule.num_microbatches
    if count > 1 and operator.matrix is not None:
        for kernel in _terms(costs, operator._replace(name="accumulated"), "weights"):
            yield msgspec.structs.replace(kernel, mean=kernel.mean * (1 - 1 / count))


def _terms(costs: Costs, operator: Operator, phase: _Phase) -> Iterator[Kernel]:
    lists, kind = costs.kernels.operators, _KINDS.get(_kind_of(operator), "elementwise")
    assert lists is not None
    for term in lists.terms(costs.operands, operator.name, phase):
        yield _moved(costs, kind, term.rate, term.num_bytes * operator.values[term.values])


def _moved(costs: Costs, kind: str, rate: str, num_bytes: float) -> Kernel:
    """A kernel that moves bytes at the rate of its class."""
    mean = compute_latency(rate, "", 0, num_bytes, costs.cluster.device, costs.kernels)
    return Kernel(kind, f"{round(num_bytes)}B {rate}", mean)


def _product(costs: Costs, operator: Operator, phase: _Phase) -> Kernel:
    """A product of a matrix, whose result is written after it was computed. Rows that do not begin
    at 16 bytes leave the fast kernels.
    """
    assert operator.matrix is not None
    (inputs, outputs), groups = operator.matrix, operator.groups
    rows = costs.tokens * operator.copies / groups
    m, n, k = {
        "forward": (rows, outputs, inputs),
        "backward": (rows, inputs, outputs),
        "weights": (outputs, inputs, rows),
    }[phase]
    kernel = costs.gemm(m, n, k, operator.dtype, batch=groups, parts=groups)
    on, tables = (costs.cluster.device, costs.kernels), costs.kernels.find_efficiency
    mean = kernel.mean
    if any(width % 8 for width in operator.matrix) and tables("gemm-unaligned", ""):
        mean = compute_latency("gemm-unaligned", costs.training.dtype, kernel.flop, 0, *on)
    if tables("gemm-output", ""):
        mean += compute_latency("gemm-output", "", 0, costs.activation_bytes * groups * m * n, *on)
    return msgspec.structs.replace(kernel, mean=mean)
