import dataclasses
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Result, Segments, weights_of
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters, closed
from ._core import Core, check_context, copied_values, core_buffers, core_of, output_bytes, run_core
from ._gather import (
    cast,
    cast_gradient,
    check_divides,
    close_module,
    gather_states,
    gradients,
    gradients_of_input,
)
from ._indexer import Indexer


@dataclasses.dataclass(frozen=True)
class MLA(AbstractModule):
    """Multi-head latent attention: queries, keys and values are computed from narrow latents.

    Every rank of a tensor-parallel group computes the latents of its tokens. These are gathered,
    and each rank computes its own heads from them. They are gathered again for the gradients of the
    matrices that read them.

    **Attributes:**

    - `num_heads`: the number of heads of queries, keys and values.
    - `kv_lora_rank`: the width of the latent of keys and values.
    - `q_lora_rank`: the width of the latent of queries; by default, queries have no latent.
    - `qk_head_size`, `qk_rope_head_size`: the sizes of the parts of a head's queries and keys
        without and with rotary positions. All heads share the rotary part of the keys.
    - `value_head_size`: the size of a head's values.
    - `output_gate`: whether a gate scales the output, by a value for each of it.
    - `index_top_k`: how many keys a query attends to, by default all before it. They are chosen by
        an indexer of `index_num_heads` heads of `index_head_size`; without these numbers, by that
        of an earlier layer. The core then reads the latents of keys and values themselves, which
        all heads share, and the matrices that would make keys and values of these run on queries
        and on what the core makes.
    """

    kind: ClassVar[str] = "mla"

    num_heads: Count
    kv_lora_rank: Count
    q_lora_rank: Count | None = None
    qk_head_size: Count = 128
    qk_rope_head_size: Count = 64
    value_head_size: Count = 128
    output_gate: bool = False
    index_num_heads: Count | None = None
    index_head_size: Count = 128
    index_top_k: Count | None = None

    @property
    def query_size(self) -> int:
        return self.qk_head_size + self.qk_rope_head_size

    @property
    def latent_size(self) -> int:
        """The width of all latents of a token."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_rope_head_size

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_divides(layout, "num_heads", self.num_heads)
        # With an indexer all heads share their keys.
        keys = {} if self.index_top_k is None else {"num_kv_heads": 1}
        check_context(layout, training, {"num_heads": self.num_heads} | keys, self.index_top_k)
        if self.index_num_heads is not None and self.index_top_k is None:
            raise ValueError(
                f"`index_num_heads` = {self.index_num_heads} is of an indexer; give `index_top_k`, "
                "too."
            )

    def parameters(self, model: Model) -> Parameters:
        hidden, heads = model.hidden_size, self.num_heads
        queries = (self.q_lora_rank or hidden) * heads * self.query_size
        keys = self.kv_lora_rank * heads * (self.qk_head_size + self.value_head_size)
        values = heads * self.value_head_size * hidden
        split = queries + keys + values * (1 + self.output_gate)
        # The latents, each with a norm.
        copied = hidden * self.latent_size + (self.q_lora_rank or 0) + self.kv_lora_rank
        for index in self._indexer(model):  # Its keys have a norm with a bias.
            copied += sum(m * n for m, n in index.shapes(hidden)) + 2 * index.head_size
        return Parameters(split, copied)

    def adapted(self, model: Model) -> dict[str, Parameters]:
        read = self.num_heads * self.value_head_size
        return {"linear_proj": Parameters(read + model.hidden_size)}

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        down, _, out = self._linears(costs)
        first = [*before, *cast(costs, costs.states), down.forward, self._latent_norms(costs, 2)]
        core, kernels = self._core(costs), self._heads(costs)
        for index in self._indexer(costs.model):
            kernels += [linear.forward for linear in index.linears(costs)]
            kernels += index.scores(costs, core, backward=False)
        segments, open_kernels = run_core(costs, core, kernels, backward=False)
        values = costs.tokens * self.num_heads // costs.layout.tp * self.value_head_size
        last = [*open_kernels, *self._gated(costs, 3), *cast(costs, values), out.forward]
        closing = close_module(costs, last, out.forward)
        return [*self._gather(costs, first), *segments, *closing]

    def backward(self, costs: Costs, before: list[Kernel], *, weights: bool = True) -> Segments:
        down, ups, out = self._linears(costs)
        again = costs.recomputes("mla_up_proj")
        kernels = [
            *(self._heads(costs) if again else []),
            *cast_gradient(costs, costs.tokens * costs.model.hidden_size),
            *gradients(out, weights),
            *self._gated(costs, 5),
        ]
        last = [
            self._latent_norms(costs, 3),
            *cast_gradient(costs, costs.norm_tokens * self.latent_size),
            *gradients(down, weights),
        ]
        opening: Segments = []
        if costs.splits_sequence:
            opening = [segment(before, gather_states(costs))]
            opening += self._gather(costs, []) if again else []
            before = []
        kernels = [*before, *kernels]
        core = self._core(costs)
        segments, open_kernels = run_core(costs, core, kernels, backward=True)
        for index in self._indexer(costs.model):
            open_kernels = [*open_kernels, *index.gradients(costs, core, weights)]
        inputs = [*open_kernels, self._rotary(costs), *cast_gradient(costs, self._up_size(costs))]
        closing = gradients_of_input(costs, inputs, ups, weights, self._latent_bytes(costs))
        return [*opening, *segments, *closing, segment(last)]

    def backward_weight(self, costs: Costs) -> Segments:
        down, ups, out = self._linears(costs)
        for index in self._indexer(costs.model):
            ups = (*ups, *index.linears(costs))
        return [*self._gather(costs, []), segment(weights_of(out, *ups, down))]

    def activations(self, costs: Costs) -> dict[str, float]:
        heads = self.num_heads // costs.layout.tp
        # Before and after their norms.
        size = costs.activation_bytes
        latents = (size + costs.input_bytes()) * costs.norm_tokens * self.latent_size
        up = costs.tokens * heads * (2 * self.query_size + self.value_head_size)
        if self.index_top_k is not None:
            # What queries and outputs are besides, in the width of latents.
            latent = 2 * self.kv_lora_rank + self.qk_rope_head_size
            up = costs.tokens * heads * (self.query_size + latent + self.value_head_size)
        up += 2 * costs.tokens * heads * self.value_head_size * self.output_gate
        core = self._core(costs)
        output = output_bytes(costs, costs.tokens * heads * self.value_head_size)
        kept = sum(index.kept(costs) for index in self._indexer(costs.model))
        return {
            "attention": latents + output + size * copied_values(costs, core) + kept,
            "mla_up_proj": 0 if costs.recomputes("mla_up_proj") else size * up,
            **core.activations(costs),
        }

    def results(self, costs: Costs) -> list[Result]:
        down, (queries, keys, *gate), out = self._linears(costs)
        of_queries = down.results[: self.q_lora_rank is not None]  # Or that of both as one.
        results = [*of_queries, *queries.results, *down.results[len(of_queries) :], *keys.results]
        results += [result for linear in gate for result in linear.results]
        return [*results, *self._core(costs).results(costs), *closed(costs, out)]

    def skipped_flop(self, costs: Costs) -> float:
        core, indexers = self._core(costs), self._indexer(costs.model)
        return sum(index.skipped_flop(costs, core) for index in indexers)

    def buffers(self, costs: Costs) -> float:
        return core_buffers(costs, self._core(costs))

    def _linears(self, costs: Costs) -> tuple[Linear, tuple[Linear, ...], Linear]:
        """The matrices to the latents, from these to the heads, and from heads to hidden states."""
        hidden, tokens = costs.model.hidden_size, costs.tokens
        heads = self.num_heads // costs.layout.tp
        queries = costs.linear(tokens, heads * self.query_size, self.q_lora_rank or hidden)
        size = self.qk_head_size + self.value_head_size
        keys = costs.linear(tokens, heads * size, self.kv_lora_rank)
        gate = [costs.linear(tokens, heads * self.value_head_size, hidden)] * self.output_gate
        latents = (self.q_lora_rank or 0, self.kv_lora_rank + self.qk_rope_head_size)
        return (
            costs.linears(costs.norm_tokens, latents, hidden),
            (queries, keys, *gate),
            costs.linear(tokens, hidden, heads * self.value_head_size, name="linear_proj"),
        )

    def _heads(self, costs: Costs) -> list[Kernel]:
        """The matrices from the gathered latents to queries, keys and values."""
        _, ups, _ = self._linears(costs)
        width = (self.q_lora_rank or costs.model.hidden_size) + self.kv_lora_rank
        read = cast(costs, costs.tokens * width)
        return [*read, *(up.forward for up in ups), self._rotary(costs)]

    def _up_size(self, costs: Costs) -> int:
        """The number of values that the matrices compute from the latents."""
        heads = self.num_heads // costs.layout.tp
        return costs.tokens * heads * (self.query_size + self.qk_head_size + self.value_head_size)

    def _core(self, costs: Costs) -> Core:
        heads, window = self.num_heads // costs.layout.tp, self.index_top_k
        if window is None:
            return core_of(costs, heads, heads, self.query_size, self.value_head_size)
        latent = self.kv_lora_rank
        return core_of(costs, heads, 1, latent + self.qk_rope_head_size, latent, window)

    def _indexer(self, model: Model) -> list[Indexer]:
        """Its own indexer, if there is one."""
        if self.index_num_heads is None or self.index_top_k is None:
            return []
        read = self.q_lora_rank or model.hidden_size
        return [Indexer(self.index_num_heads, self.index_head_size, self.index_top_k, read)]

    def _gated(self, costs: Costs, moved: int) -> list[Kernel]:
        """As in `Attention`."""
        values = costs.tokens * self.num_heads // costs.layout.tp * self.value_head_size
        return [costs.move_values("elementwise", moved * values)] if self.output_gate else []

    def _latent_bytes(self, costs: Costs) -> int:
        # Queries without a latent read the hidden states themselves, as gates and indexers do.
        states = not self.q_lora_rank or self.output_gate or self.index_num_heads is not None
        width = self.latent_size + costs.model.hidden_size * states
        return costs.activation_bytes * costs.tokens * width

    def _gather(self, costs: Costs, kernels: list[Kernel]) -> Segments:
        if not costs.splits_sequence:
            return [segment(kernels)]
        gather = costs.collective("all_gather", self._latent_bytes(costs), costs.group("tp"))
        return [segment(kernels, gather)]

    def _latent_norms(self, costs: Costs, passes: int) -> Kernel:
        return costs.move_values("norm", passes * costs.norm_tokens * self.latent_size)

    def _rotary(self, costs: Costs) -> Kernel:
        heads = self.num_heads // costs.layout.tp
        # Queries are turned where they are. The keys of all heads are put together with the part
        # that they share, apart from the values (Megatron-Core's fused_mla_yarn_rope_apply.py).
        queries = 2 * self.qk_rope_head_size
        read = self.qk_head_size + self.value_head_size
        values = heads * (queries + read + self.query_size + self.value_head_size)
        return costs.move_values("elementwise", costs.tokens * values)
