"""The segments of one transformer layer.

Forward, a half layer (attention or MLP) is two segments: what comes before its input is gathered
(all_gather) and what comes before its output is scattered (reduce_scatter). Backward, it is three:
up to the gathering of the gradient; up to the gathering, once more, of the input, beside the dgrad
GEMM; and up to the scattering of the input's gradient, beside the wgrad GEMM. Without sequence
parallelism an all_reduce closes each half.
"""

from ._block import Kernel, Segment
from ._costs import Costs
from ._parts import segment


def forward_layer(costs: Costs) -> list[Segment]:
    """The segments of the forward of one layer and microbatch."""
    model, tp = costs.model, costs.layout.tp
    tokens, hidden = costs.tokens, model.hidden_size
    qkv = (model.num_heads + 2 * model.kv_heads) * model.head_dim // tp
    width = model.num_heads * model.head_dim // tp
    ffn = model.ffn_size // tp
    up = model.gate_factor * ffn
    qkv_gemm = costs.gemm(tokens, qkv, hidden)
    out_gemm = costs.gemm(tokens, hidden, width)
    up_gemm = costs.gemm(tokens, up, hidden)
    down_gemm = costs.gemm(tokens, hidden, ffn)
    before = [*_cast(costs, tokens * hidden), qkv_gemm, *_rotary(costs)]
    after = [*_core_forward(costs), *_cast(costs, tokens * width), out_gemm]
    mlp = [
        *_cast(costs, tokens * hidden),
        up_gemm,
        costs.move("elementwise", 2 * tokens * (up + ffn)),
    ]
    mlp += [*_cast(costs, tokens * ffn), down_gemm]
    if costs.layout.cp > 1:
        gather = costs.collective("all_gather", _kv_bytes(costs), costs.cp)
        attention = [segment(before, gather), *_close(costs, after, out_gemm)]
    else:
        attention = _close(costs, before + after, out_gemm)
    return [
        *_open(costs, [_norm(costs)], qkv_gemm),
        *attention,
        *_open(costs, [_residual(costs), _norm(costs)], up_gemm),
        *_close(costs, mlp, down_gemm),
        segment([_residual(costs)]),
    ]


def backward_layer(costs: Costs, *, weights: bool = True) -> list[Segment]:
    """The segments of the backward of one layer and microbatch, with what it computes again.

    Without `weights`, of its phase backward-input.
    """
    model, tp = costs.model, costs.layout.tp
    tokens, hidden = costs.tokens, model.hidden_size
    qkv = (model.num_heads + 2 * model.kv_heads) * model.head_dim // tp
    width = model.num_heads * model.head_dim // tp
    ffn = model.ffn_size // tp
    up = model.gate_factor * ffn
    again = forward_layer(costs) if costs.training.recompute == "full" else []
    down = [costs.gemm(tokens, ffn, hidden)]
    out = [costs.gemm(tokens, width, hidden)]
    if weights:
        down.append(costs.weight_gemm(ffn, hidden, tokens))
        out.append(costs.weight_gemm(width, hidden, tokens))
    # Reads the gradient and the inputs of the activation, writes the gradient of the inputs.
    act = costs.move("elementwise", 2 * tokens * (ffn + 2 * up))
    mlp = [*_cast_gradient(costs, tokens * hidden), *down, act, *_cast_gradient(costs, tokens * up)]
    attention = [*_cast_gradient(costs, tokens * hidden), *out, *_core_backward(costs)]
    inputs = [*_rotary(costs), *_cast_gradient(costs, tokens * qkv)]
    segments = [
        *again,
        *_open(costs, [_residual_backward(costs)], down[0]),
        *_close_backward(
            costs,
            mlp,
            costs.gemm(tokens, hidden, up),
            costs.weight_gemm(hidden, up, tokens) if weights else None,
        ),
        *_open(costs, [_norm_backward(costs), _residual_backward(costs)], out[0]),
    ]
    if costs.layout.cp > 1:
        scatter = costs.collective("reduce_scatter", _kv_bytes(costs), costs.cp)
        segments.append(segment(attention, scatter))
        attention = []
    segments += _close_backward(
        costs,
        attention + inputs,
        costs.gemm(tokens, hidden, qkv),
        costs.weight_gemm(hidden, qkv, tokens) if weights else None,
    )
    segments.append(segment([_norm_backward(costs)]))
    return segments


def backward_weight_layer(costs: Costs) -> list[Segment]:
    """The segments of the gradients of the weights of one layer and microbatch."""
    model, tp = costs.model, costs.layout.tp
    tokens, hidden = costs.tokens, model.hidden_size
    qkv = (model.num_heads + 2 * model.kv_heads) * model.head_dim // tp
    width = model.num_heads * model.head_dim // tp
    ffn = model.ffn_size // tp
    halves = [(ffn, model.gate_factor * ffn), (width, qkv)]
    segments = []
    for inner, outer in halves:
        last = costs.weight_gemm(inner, hidden, tokens)
        first = costs.weight_gemm(hidden, outer, tokens)
        segments += backward_weight(costs, last, first)
    return segments


def backward_weight(costs: Costs, other: Kernel | None, gathered: Kernel) -> list[Segment]:
    """Gradients of weights: the input of one GEMM is gathered once more, beside the other."""
    others = [] if other is None else [other]
    if not costs.splits_sequence:
        return [segment([*others, gathered])]
    gather = costs.collective("all_gather", _tp_bytes(costs), costs.tp)
    if other is not None:
        gather = costs.overlapped(gather, other)
    return [segment(others, gather), segment([gathered])]


def _tp_bytes(costs: Costs) -> int:
    return 2 * costs.tokens * costs.model.hidden_size


def _kv_bytes(costs: Costs) -> int:
    """Keys and values of the whole sequence, for the heads of one rank."""
    model, layout = costs.model, costs.layout
    return 2 * 2 * costs.tokens * layout.cp * model.kv_heads * model.head_dim // layout.tp


def _open(costs: Costs, kernels: list[Kernel], gemm: Kernel) -> list[Segment]:
    """What comes before a gather, beside which `gemm` may run."""
    if not costs.splits_sequence:
        return [segment(kernels)]
    gather = costs.collective("all_gather", _tp_bytes(costs), costs.tp)
    return [segment(kernels, costs.pipelined(gather, gemm))]


def _close(costs: Costs, kernels: list[Kernel], gemm: Kernel) -> list[Segment]:
    """What comes before a half layer's output, the last of it `gemm`."""
    if costs.layout.tp == 1:
        return [segment(kernels)]
    kind = "reduce_scatter" if costs.splits_sequence else "all_reduce"
    collective = costs.collective(kind, _tp_bytes(costs), costs.tp)
    if costs.splits_sequence:
        collective = costs.pipelined(collective, gemm)
    return [segment(kernels, collective)]


def _close_backward(
    costs: Costs, kernels: list[Kernel], dgrad: Kernel, wgrad: Kernel | None
) -> list[Segment]:
    """What ends with the GEMMs of a layer whose input was gathered.

    A backward-input has no `wgrad`, beside which its last collective could run.
    """
    gemms = [dgrad] if wgrad is None else [dgrad, wgrad]
    if costs.layout.tp == 1:
        return [segment([*kernels, *gemms])]
    kind = "reduce_scatter" if costs.splits_sequence else "all_reduce"
    closing = costs.collective(kind, _tp_bytes(costs), costs.tp)
    if wgrad is None:
        return [segment([*kernels, dgrad], closing)]
    closing = costs.overlapped(closing, wgrad)
    if not costs.splits_sequence:
        return [segment([*kernels, dgrad, wgrad], closing)]
    gather = costs.collective("all_gather", _tp_bytes(costs), costs.tp)
    return [
        segment([*kernels, dgrad], costs.overlapped(gather, dgrad)),
        segment([wgrad], closing),
    ]


def _norm(costs: Costs) -> Kernel:
    return costs.move("norm", 2 * 2 * costs.norm_tokens * costs.model.hidden_size)


def _norm_backward(costs: Costs) -> Kernel:
    return costs.move("norm", 2 * 3 * costs.norm_tokens * costs.model.hidden_size)


def _residual(costs: Costs) -> Kernel:
    # Reads two, writes one; a mask of one byte where there is dropout.
    bytes_per_value = 7 if costs.model.dropout else 6
    return costs.move("elementwise", bytes_per_value * costs.norm_tokens * costs.model.hidden_size)


def _residual_backward(costs: Costs) -> Kernel:
    # The sum of two gradients; dropout reads its mask and writes a gradient of its own.
    bytes_per_value = 6 + (5 if costs.model.dropout else 0)
    return costs.move("elementwise", bytes_per_value * costs.norm_tokens * costs.model.hidden_size)


def _rotary(costs: Costs) -> list[Kernel]:
    model = costs.model
    if model.position != "rotary":
        return []
    width = (model.num_heads + model.kv_heads) * model.head_dim // costs.layout.tp
    return [costs.move("elementwise", 2 * 2 * costs.tokens * width)]


def _cast(costs: Costs, values: int) -> list[Kernel]:
    """To fp8: its producer writes the values, a kernel their transpose for the backward."""
    return [costs.move("elementwise", 3 * values)] if costs.training.dtype == "fp8" else []


def _cast_gradient(costs: Costs, values: int) -> list[Kernel]:
    """To fp8: read once, written as it is and transposed."""
    return [costs.move("elementwise", 4 * values)] if costs.training.dtype == "fp8" else []


def _core_forward(costs: Costs) -> list[Kernel]:
    if costs.training.attention == "flash":
        return [costs.attention(backward=False)]
    scores, (batch, queries, keys, width) = _scores(costs)
    dtype = costs.base_dtype
    kernels = [
        costs.gemm(queries, keys, width, dtype, batch),
        costs.move("elementwise", 4 * scores),  # Scale, mask and softmax are one kernel.
        costs.gemm(queries, width, keys, dtype, batch),
    ]
    if costs.model.dropout:
        kernels.append(costs.move("elementwise", 5 * scores))
    return kernels


def _core_backward(costs: Costs) -> list[Kernel]:
    if costs.training.attention == "flash":
        return [costs.attention(backward=True)]
    scores, (batch, queries, keys, width) = _scores(costs)
    dtype = costs.base_dtype
    kernels = _core_forward(costs) if costs.training.recompute == "selective" else []
    kernels += [
        costs.gemm(keys, width, queries, dtype, batch),
        costs.gemm(queries, keys, width, dtype, batch),
        costs.move("elementwise", 6 * scores),
        costs.gemm(queries, width, keys, dtype, batch),
        costs.gemm(keys, width, queries, dtype, batch),
    ]
    if costs.model.dropout:
        kernels.append(costs.move("elementwise", 5 * scores))
    return kernels


def _scores(costs: Costs) -> tuple[int, tuple[int, int, int, int]]:
    """How many attention scores there are, and the shape of the products: batch, q, k, width."""
    training, layout = costs.training, costs.layout
    batch = training.microbatch_size * costs.model.num_heads // layout.tp
    queries, keys = training.sequence_length // layout.cp, training.sequence_length
    return batch * queries * keys, (batch, queries, keys, costs.model.head_dim)
