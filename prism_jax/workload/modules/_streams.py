"""The blocks of FLUX.1 and MMDiT, in which images and texts attend to one another."""

import dataclasses
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear
from .._costs import Costs
from ._base import Parameters
from ._context import core_of
from ._core import Core
from ._dense_layers import AbstractSampleModule, check_data_parallel
from ._gather import cast, cast_gradient


@dataclasses.dataclass(frozen=True)
class StreamBlock(AbstractSampleModule):
    """Attention of the tokens of an image and a text to all of both, and an MLP, with norms that a
    matrix of the block modulates (Esser et al. 2024, arXiv:2403.03206; FLUX.1,
    src/flux/modules/layers.py).

    In a double block (`text_length`) the text and the image are streams with matrices of their own,
    and the MLP follows attention. In a single block the streams are one, and attention and MLP run
    side by side: one matrix reads the input of both, and one makes the output of both.

    **Attributes:**

    - `num_heads`: the number of heads; together they have the hidden size.
    - `ffn_size`: the width of the MLP, whose activation is a GELU.
    - `text_length`: the number of tokens of a text, in a double block.
    """

    kind: ClassVar[str] = "stream-block"

    num_heads: Count
    ffn_size: Count
    text_length: Count | None = None

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_data_parallel(self.kind, layout)
        if model.hidden_size % self.num_heads:
            raise ValueError(
                f"`stream-block` has {self.num_heads} heads, which do not divide `hidden_size` = "
                f"{model.hidden_size}; use a divisor."
            )
        length, text = training.sequence_length, self.text_length or 0
        if text >= length:
            raise ValueError(
                f"`stream-block` has a text of {text} of {length} tokens in all, which leaves none "
                "to the image; use a shorter text."
            )

    def parameters(self, model: Model) -> Parameters:
        shapes = [self._modulation(model), *self._shapes(model)]
        matrices = sum(outputs * (inputs + model.bias) for outputs, inputs in shapes)
        # A norm of the queries and keys of each head.
        norms = 2 * model.hidden_size // self.num_heads
        return Parameters(copied=self._streams * (matrices + norms))

    def activations(self, costs: Costs) -> dict[str, float]:
        # Of each norm its input and output, and what is modulated and gated; queries, keys and
        # values, those that are normed, and the output; the MLP's activation and its input.
        hidden = (4 * self._streams + 6) * costs.model.hidden_size
        values = costs.tokens * (hidden + 2 * self.ffn_size)
        kept = self._core(costs).activations(costs)
        return {"stream": costs.activation_bytes * values, **kept}

    def linears(self, costs: Costs) -> list[Linear]:
        batch, found = costs.training.microbatch_size, []
        for tokens in self._tokens(costs):
            found.append(costs.linear(batch, *self._modulation(costs.model), costs.base_dtype))
            found += [costs.linear(tokens, n, k) for n, k in self._shapes(costs.model)]
        return found

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        values, wide = (costs.tokens * n for n in (costs.model.hidden_size, self.ffn_size))
        # Shifted and scaled, and gated, as by `adaln`; queries and keys are rotated.
        sizes = [(12 if backward else 8) * self._streams * values, 8 * values]
        # Streams are joined for attention; or the outputs of attention and MLP for their matrix.
        sizes += [12 * values if self._streams == 2 else 4 * (values + wide)]
        sizes += [(6 if backward else 4) * wide]
        kernels = [costs.move("elementwise", size) for size in sizes]
        passes = 3 if backward else 2
        kernels.append(costs.move("norm", 4 * passes * values))
        residual = costs.residual(backward=backward)
        kernels += self._streams * [costs.norm(passes), residual]
        for outputs, inputs in self._shapes(costs.model):
            if backward:
                kernels += cast_gradient(costs, costs.tokens * outputs)
            else:
                kernels += cast(costs, costs.tokens * inputs)
        core = self._core(costs)
        return kernels + (core.backward(costs) if backward else core.forward(costs))

    @property
    def _streams(self) -> int:
        """Of a double block, which also modulates two modules, not one."""
        return 2 if self.text_length else 1

    def _tokens(self, costs: Costs) -> list[int]:
        """The tokens of each stream."""
        text = costs.training.microbatch_size * (self.text_length or 0)
        return [text, costs.tokens - text] if text else [costs.tokens]

    def _modulation(self, model: Model) -> tuple[int, int]:
        """The outputs and inputs of the matrix of shifts, scales and gates."""
        return 3 * self._streams * model.hidden_size, model.hidden_size

    def _shapes(self, model: Model) -> list[tuple[int, int]]:
        """The outputs and inputs of the other matrices of a stream."""
        hidden, ffn = model.hidden_size, self.ffn_size
        if self._streams == 1:
            return [(3 * hidden + ffn, hidden), (hidden, hidden + ffn)]
        return [(3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn)]

    def _core(self, costs: Costs) -> Core:
        size = costs.model.hidden_size // self.num_heads
        return core_of(costs, self.num_heads, self.num_heads, size, size, causal=False)
