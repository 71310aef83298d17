import dataclasses
from typing import ClassVar, Literal

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Open, Result
from .._costs import Costs
from ._base import AbstractPairModule, Parameters, closed
from ._core import Core, check_context, copied_values, core_buffers, core_of, output_bytes, run_core
from ._gather import cast, cast_gradient, check_divides, gradients


@dataclasses.dataclass(frozen=True)
class Attention(AbstractPairModule):
    """Multi-head or grouped-query attention: causal, bidirectional, or cross-attention.

    **Attributes:**

    - `num_heads`: the number of query heads.
    - `num_kv_heads`: the number of heads of keys and values; by default `num_heads`.
    - `head_size`: the size of a head; by default the hidden size over `num_heads`.
    - `window`: how many keys a query attends to, including its own; by default all before it.
    - `qkv_bias`: whether the first matrix has a bias even if the model has none.
    - `qk_norm`: whether there is a norm of the queries and keys of each head, or of all heads
        together (`whole`), whose communication between ranks is not counted.
    - `causal`: whether a query attends to no later keys.
    - `context_length`: for cross-attention, the number of context tokens for each sequence, such as
        the output of an encoder or a text. Keys and values are computed from these instead of the
        sequence itself.
    - `context_size`: the width of the context tokens; by default the hidden size.
    - `span`: how many tokens attend to one another: those of one frame of a video (spatial
        attention), or those at one place in all frames (temporal attention); by default all tokens
        of a sequence.
    """

    kind: ClassVar[str] = "attention"

    num_heads: Count
    num_kv_heads: Count | None = None
    head_size: Count | None = None
    window: Count | None = None
    qkv_bias: bool = False
    qk_norm: bool | Literal["whole"] = False
    causal: bool = True
    context_length: Count | None = None
    context_size: Count | None = None
    span: Count | None = None

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
        dim = self.head_dim(model)
        qkv = (self.num_heads + 2 * self.kv_heads) * dim
        split = model.hidden_size * (qkv + self.num_heads * dim)
        if self.context_size is not None:
            split += 2 * self.kv_heads * dim * (self.context_size - model.hidden_size)
        normed = self.num_heads + self.kv_heads if self.qk_norm == "whole" else 2
        copied = normed * dim if self.qk_norm else 0
        if model.bias or self.qkv_bias:
            split += qkv
        return Parameters(split, copied + (model.hidden_size if model.bias else 0))

    def adapted(self, model: Model) -> dict[str, Parameters]:
        dim = self.head_dim(model)
        made = self.num_heads + (2 * self.kv_heads if self.context_length is None else 0)
        return {
            "linear_qkv": Parameters(model.hidden_size + made * dim),
            "linear_proj": Parameters(self.num_heads * dim + model.hidden_size),
        }

    def linears(self, costs: Costs) -> list[Linear]:
        tokens, width, qkv = self._shape(costs)
        hidden, of_keys = costs.model.hidden_size, (qkv - width) // 2
        made = (width, of_keys, of_keys) if self.context_length is None else (width,)
        first = costs.linears(tokens, made, hidden, "linear_qkv")
        last = costs.linear(tokens, hidden, width, name="linear_proj")
        return [first, last, *self._of_context(costs)]

    def between(
        self, costs: Costs, made: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        tokens, width, _ = self._shape(costs)
        core, of_context = self._core(costs), self._of_context(costs)
        if backward:
            segments, left = run_core(costs, core, made, backward=True)
            left = [*left, *self._rotary(costs), *self._norms(costs, 3)]
            left += [kernel for one in of_context for kernel in gradients(one, weights)]
            return segments, [*left, *cast_gradient(costs, self._made(costs))]
        made = [*made, *(one.forward for one in of_context)]
        made += [*self._norms(costs, 2), *self._rotary(costs)]
        segments, left = run_core(costs, core, made, backward=False)
        return segments, [*left, *cast(costs, tokens * width)]

    def normed_bytes(self, costs: Costs) -> float:
        return costs.input_bytes("linear_qkv")

    def activations(self, costs: Costs) -> dict[str, float]:
        tokens, width, qkv = self._shape(costs)
        normed = qkv - (qkv - width) // 2 if self.qk_norm else 0
        core = self._core(costs)
        values = self._made(costs) + tokens * normed + copied_values(costs, core)
        size = costs.activation_bytes * values + output_bytes(costs, tokens * width)
        return {"attention": size, **core.activations(costs)}

    def results(self, costs: Costs) -> list[Result]:
        first, last, *of_context = self.linears(costs)
        made = [result for linear in (first, *of_context) for result in linear.results]
        return [*made, *self._core(costs).results(costs), *closed(costs, last)]

    def buffers(self, costs: Costs) -> float:
        return core_buffers(costs, self._core(costs))

    def _shape(self, costs: Costs) -> tuple[int, int, int]:
        """Tokens, width of the values and width of queries, keys and values of one rank."""
        dim, tp = self.head_dim(costs.model), costs.layout.tp
        qkv = (self.num_heads + 2 * self.kv_heads) * dim // tp
        return costs.tokens, self.num_heads * dim // tp, qkv

    def _made(self, costs: Costs) -> int:
        """How many elements queries, keys and values have."""
        tokens, width, qkv = self._shape(costs)
        seen = tokens if self.context_length is None else self._context_tokens(costs)
        return tokens * width + seen * (qkv - width)

    def _of_context(self, costs: Costs) -> list[Linear]:
        """The matrix that computes keys and values from a context."""
        if self.context_length is None:
            return []
        _, width, qkv = self._shape(costs)
        inputs = self.context_size or costs.model.hidden_size
        made = 2 * [(qkv - width) // 2]
        return [costs.linears(self._context_tokens(costs), made, inputs)]

    def _context_tokens(self, costs: Costs) -> int:
        return costs.training.microbatch_size * (self.context_length or 0)

    def _core(self, costs: Costs) -> Core:
        tp, dim = costs.layout.tp, self.head_dim(costs.model)
        heads = (self.num_heads // tp, self.kv_heads // tp, dim, dim)
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
        values = costs.tokens * self._qk_width(costs)
        return [costs.move("elementwise", costs.training.rotary_bytes * values)]

    def _norms(self, costs: Costs, passes: int) -> list[Kernel]:
        if not self.qk_norm:
            return []
        return [costs.move("norm", 2 * passes * costs.tokens * self._qk_width(costs))]

    def _qk_width(self, costs: Costs) -> int:
        return (self.num_heads + self.kv_heads) * self.head_dim(costs.model) // costs.layout.tp


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
