import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Open, Result
from .._costs import Costs
from ._base import AbstractPairModule, Parameters, closed
from ._core import Core, check_context, copied_values, core_buffers, core_of, output_bytes, run_core
from ._gather import cast, cast_gradient, check_divides, gradients
from ._operators import Operator, matrices, matrix, norm_name


@dataclasses.dataclass(frozen=True)
class Attention(AbstractPairModule):
    """Multi-head or grouped-query attention: causal, bidirectional, or cross-attention.

    **Attributes:**

    - `num_heads`: the number of query heads.
    - `num_kv_heads`: the number of heads of keys and values; by default `num_heads`.
    - `head_size`: the size of a head; by default the hidden size over `num_heads`.
    - `value_head_size`: the size of the values of a head; by default `head_size`.
    - `window`: how many keys a query attends to, including its own; by default all before it.
    - `bias`: whether the matrices have a bias; `qkv_bias`, `proj_bias`: the same for the first and
        the last alone.
    - `qk_norm`: whether there is a norm of the queries and keys of each head, or of all heads
        together (`whole`), whose communication between ranks is not counted.
    - `output_gate`: whether a gate scales the output, by a value for each of it or for each head
        (`per_head`), which the first matrix makes.
    - `sinks`: whether each head has a score of its own that only takes from the others.
    - `kv_matrices`: two for keys and values, one if the values are the keys, or none if both are
        those of an earlier layer (Gemma 3n, Gemma 4).
    - `causal`: whether a query attends to no later keys.
    - `context_length`: for cross-attention, the number of context tokens for each sequence, such as
        the output of an encoder or a text. Keys and values are computed from these instead of the
        sequence itself.
    - `context_size`: the width of the context tokens; by default the hidden size.
    - `span`: how many tokens attend to one another: those of one frame of a video (spatial
        attention), or those at one place in all frames (temporal attention); by default all tokens
        of a sequence.
    - `joined_products`: whether one matrix makes queries, keys and values also where the matrices
        of a stack are separate (`training.separate_products`), as GPT-2's `c_attn`.
    """

    kind: ClassVar[str] = "attention"

    num_heads: Count
    num_kv_heads: Count | None = None
    head_size: Count | None = None
    value_head_size: Count | None = None
    window: Count | None = None
    bias: bool = False
    qkv_bias: bool | None = None
    proj_bias: bool | None = None
    qk_norm: bool | Literal["whole"] = False
    output_gate: bool | Literal["per_head"] = False
    sinks: bool = False
    kv_matrices: Literal[0, 1, 2] = 2
    causal: bool = True
    context_length: Count | None = None
    context_size: Count | None = None
    span: Count | None = None
    joined_products: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def head_dim(self, model: Model) -> int:
        return model.hidden_size // self.num_heads if self.head_size is None else self.head_size

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        if self.head_size is None and model.hidden_size % self.num_heads != 0:
            raise ValueError(
                f"`model.num_heads` = {self.num_heads} does not divide `model.hidden_size` = "
                f"{model.hidden_size}; give `model.head_size`."
            )
        if self.kv_matrices == 1 and self.value_head_size not in (None, self.head_dim(model)):
            raise ValueError(
                f"`value_head_size` = {self.value_head_size} of values that are the keys "
                "(`kv_matrices` = 1) differs from the size of these; leave it out."
            )
        check_divides(layout, "num_heads", self.num_heads)
        check_divides(layout, "num_kv_heads", self.kv_heads)
        if self.num_heads % self.kv_heads != 0:
            raise ValueError(
                f"`model.num_kv_heads` = {self.kv_heads} does not divide `model.num_heads` = "
                f"{self.num_heads}; use a divisor."
            )
        if self.span is not None:
            _check_span(self, self.span, layout, training)
        if self.context_length is None:
            if self.context_size is not None:
                raise ValueError(
                    f"`context_size` = {self.context_size} is the width of a context, which the "
                    "module lacks; give `context_length`, too."
                )
            heads = {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads}
            check_context(layout, training, heads, self.window)

    def parameters(self, model: Model) -> Parameters:
        hidden, (queries, keys, values, gate, out) = model.hidden_size, self._widths(model)
        read = self.context_size or hidden
        split = hidden * (queries + gate + out) + read * (keys + values)
        heads = self.num_heads + self.kv_heads * (self.kv_matrices > 0)
        normed = heads if self.qk_norm == "whole" else 1 + (self.kv_matrices > 0)
        copied = normed * self.head_dim(model) if self.qk_norm else 0
        if self.bias if self.qkv_bias is None else self.qkv_bias:
            split += queries + keys + values + gate
        if self.bias if self.proj_bias is None else self.proj_bias:
            copied += hidden
        return Parameters(split + self.num_heads * self.sinks, copied)

    def adapted(self, model: Model) -> dict[str, Parameters]:
        hidden, (queries, keys, values, gate, out) = model.hidden_size, self._widths(model)
        outputs = queries + gate + (keys + values if self.context_length is None else 0)
        return {"linear_qkv": Parameters(hidden + outputs), "linear_proj": Parameters(out + hidden)}

    def linears(self, costs: Costs) -> list[Linear]:
        tokens, (queries, keys, values, gate, out) = costs.tokens, self.widths_of_rank(costs)
        hidden, outputs = costs.model.hidden_size, (queries + gate, keys, values)
        outputs = outputs if self.context_length is None else outputs[:1]
        first = costs.linears(tokens, outputs, hidden, "linear_qkv", joined=self.joined_products)
        last = costs.linear(tokens, hidden, out, name="linear_proj")
        return [first, last, *self._of_context(costs)]

    def between(
        self, costs: Costs, kernels: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        core, of_context = self.core(costs), self._of_context(costs)
        if backward:
            kernels = [*kernels, *self._gated(costs, 5)]
            segments, open_kernels = run_core(costs, core, kernels, backward=True)
            open_kernels = [*open_kernels, *self._rotary(costs), *self._norms(costs, 3)]
            open_kernels += [
                kernel for linear in of_context for kernel in gradients(linear, weights)
            ]
            return segments, [*open_kernels, *cast_gradient(costs, self._made(costs))]
        kernels = [*kernels, *(linear.forward for linear in of_context)]
        kernels += [*self._norms(costs, 2), *self._rotary(costs)]
        segments, open_kernels = run_core(costs, core, kernels, backward=False)
        *_, out = self.widths_of_rank(costs)
        return segments, [*open_kernels, *self._gated(costs, 3), *cast(costs, costs.tokens * out)]

    def normed_bytes(self, costs: Costs) -> float:
        return costs.input_bytes("linear_qkv")

    def activations(self, costs: Costs) -> dict[str, float]:
        tokens, (queries, keys, _, gate, out) = costs.tokens, self.widths_of_rank(costs)
        core = self.core(costs)
        values = self._made(costs) + copied_values(costs, core)
        values += tokens * ((queries + keys) * bool(self.qk_norm) + out * (gate > 0))
        size = costs.activation_bytes * values + output_bytes(costs, tokens * out)
        return {"attention": size, **core.activations(costs)}

    def operators(self, costs: Costs) -> list[Operator]:
        queries, keys, values, gate, out = self.widths_of_rank(costs)
        tokens, hidden, core, lists = (
            *(costs.tokens, costs.model.hidden_size, self.core(costs)),
            costs.kernels.operators,
        )
        biased = self.bias if self.qkv_bias is None else self.qkv_bias
        last_biased = self.bias if self.proj_bias is None else self.proj_bias
        outputs = [width for width in (queries + gate, keys, values) if width]
        separate = costs.training.separate_products and not self.joined_products
        heads = {"q": tokens * queries, "k": tokens * keys}
        # Transformers makes a mask for a window, which no kernel for causal attention takes.
        windowed = core.window is not None and core.window < core.keys
        masked = windowed or (lists is not None and lists.masked)
        read, grouped = heads, core.num_heads > core.kv_heads
        rotary = costs.model.position == "rotary"
        if masked:
            read = {"q": tokens * queries, "k": tokens * queries}
            read["p"] = core.sequences * core.queries * core.keys
            core = core._replace(masked=True, causal=False, window=None, kv_heads=core.num_heads)
        return [
            *matrices(
                costs, outputs if separate else (sum(outputs),), hidden, "linear_qkv", biased=biased
            ),
            *[Operator("joined", heads)] * (not separate),
            # Values stay in what one matrix made; so do queries and keys that are not rotated.
            *[Operator("joined-rotary", heads)] * (rotary and not separate),
            *(self._normed_heads(costs) if self.qk_norm else ()),
            *[Operator("rotary", heads)] * rotary,
            *[Operator("repeated" if masked else "grouped", heads)] * grouped,
            *[Operator("mask", read)] * masked,
            Operator("attention", read, core=core),
            *matrix(costs, (out, hidden), "linear_proj", biased=last_biased),
        ]

    def _normed_heads(self, costs: Costs) -> Iterator[Operator]:
        """The norms of queries and of keys, one for each head."""
        queries, keys, *_ = self.widths_of_rank(costs)
        for width, heads in ((queries, self.num_heads), (keys, self.kv_heads)):
            values = {"h": costs.tokens * width, "t": costs.tokens * heads}
            yield Operator(f"{norm_name(costs.model)}-of-product", values)

    def results(self, costs: Costs) -> list[Result]:
        first, last, *of_context = self.linears(costs)
        results = [result for linear in (first, *of_context) for result in linear.results]
        return [*results, *self.core(costs).results(costs), *closed(costs, last)]

    def buffers(self, costs: Costs) -> float:
        return core_buffers(costs, self.core(costs))

    def _widths(self, model: Model) -> tuple[int, int, int, int, int]:
        """The values of a token that matrices make: its queries, keys and values, the gate; and how
        many the core makes of them.
        """
        size, heads = self.head_dim(model), self.num_heads
        value_size = self.value_head_size or size
        keys, values = (n * self.kv_heads for n in (size, value_size))
        gate = heads * (1 if self.output_gate == "per_head" else value_size)
        keys, values = keys * (self.kv_matrices > 0), values * (self.kv_matrices > 1)
        return heads * size, keys, values, gate * bool(self.output_gate), heads * value_size

    def widths_of_rank(self, costs: Costs) -> tuple[int, ...]:
        """The same on one rank."""
        return tuple(width // costs.layout.tp for width in self._widths(costs.model))

    def _made(self, costs: Costs) -> int:
        """How many values the matrices make."""
        queries, keys, values, gate, _ = self.widths_of_rank(costs)
        seen = costs.tokens if self.context_length is None else self._context_tokens(costs)
        return costs.tokens * (queries + gate) + seen * (keys + values)

    def _of_context(self, costs: Costs) -> list[Linear]:
        """The matrix that computes keys and values from a context."""
        if self.context_length is None:
            return []
        _, keys, values, *_ = self.widths_of_rank(costs)
        inputs = self.context_size or costs.model.hidden_size
        return [costs.linears(self._context_tokens(costs), (keys, values), inputs)]

    def _context_tokens(self, costs: Costs) -> int:
        return costs.training.microbatch_size * (self.context_length or 0)

    def core(self, costs: Costs) -> Core:
        """The core of attention on one rank."""
        tp, dim = costs.layout.tp, self.head_dim(costs.model)
        value_size = self.value_head_size or dim
        heads = (self.num_heads // tp, self.kv_heads // tp, dim, value_size)
        if self.span is not None:
            spans = costs.tokens // self.span
            return Core(spans, self.span, self.span, *heads, self.window, self.causal)
        if self.context_length is None:
            return core_of(costs, *heads, self.window, self.causal)
        # Each rank of a context-parallel group has all of the context.
        batch, queries = costs.training.microbatch_size, costs.training.sequence_length
        shape = (batch, queries // costs.layout.cp, self.context_length)
        return Core(*shape, *heads, self.window, causal=False)

    def _rotary(self, costs: Costs) -> list[Kernel]:
        if costs.model.position != "rotary" or self.context_length is not None:
            return []
        values = costs.tokens * sum(self.widths_of_rank(costs)[:2])
        # In float32 values are read and written, and never cast.
        moved = 8 if costs.training.in_float32 else costs.training.rotary_bytes
        return [costs.move("elementwise", moved * values)]

    def _norms(self, costs: Costs, passes: int) -> list[Kernel]:
        if not self.qk_norm:
            return []
        return [
            costs.move_values("norm", passes * costs.tokens * sum(self.widths_of_rank(costs)[:2]))
        ]

    def _gated(self, costs: Costs, moved: int) -> list[Kernel]:
        """Scales the output by its gate, or computes the gradients of both, moving so many values
        for each of the output.
        """
        *_, gate, out = self.widths_of_rank(costs)
        return [costs.move_values("elementwise", moved * costs.tokens * out)] if gate else []


def _check_span(module: Attention, span: int, layout: Layout, training: Training) -> None:
    if layout.cp > 1:
        raise ValueError(
            f"`layout.cp` = {layout.cp} would split a `span` of {span} tokens; use `cp = 1`."
        )
    if training.sequence_length % span != 0 or module.context_length is not None:
        raise ValueError(
            f"`span` = {span} parts a sequence of {training.sequence_length} tokens that see each "
            "other; use a divisor, and no `context_length`."
        )
