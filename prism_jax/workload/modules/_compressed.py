import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ...data import Count, Layout, Model, Training
from .._block import Kernel, Linear, Open
from .._costs import Costs
from ._base import AbstractPairModule, Parameters
from ._core import Core, core_of, output_bytes
from ._gather import cast, cast_gradient, check_divides, gradients
from ._indexer import Indexer


@dataclasses.dataclass(frozen=True)
class CompressedAttention(AbstractPairModule):
    """Attention to the last keys and to compressed ones before them (DeepSeek-V4's report, sections
    2.3.1 and 2.3.2; `modeling_deepseek_v4.py` of Transformers). Queries are made of a latent. All
    heads share one tensor as their keys and values: each token has one, and each window of tokens a
    mean by weights that a matrix makes. The output of each group of heads is narrowed before the
    last matrix.

    In a tensor-parallel group each rank has all latents, keys and compressed keys.

    **Attributes:**

    - `num_heads`, `head_size`: the number of heads of queries, and their size and that of the keys.
    - `q_lora_rank`: the width of the latent of queries.
    - `qk_rope_head_size`: the size of the part of a head with rotary positions.
    - `window`: how many keys a query attends to as they are, including its own.
    - `compress_ratio`: how many tokens a compressed key is of; by default there is none.
    - `num_output_groups`, `output_rank`: the number of groups of heads, and to which width each is
        narrowed.
    - `index_num_heads`, `index_head_size`, `index_top_k`: an indexer, which chooses so many
        compressed keys for each query, by keys that are compressed for it; by default a query
        attends to all. With one, a compressed key is of the tokens of the window before, too.
    """

    kind: ClassVar[str] = "compressed-attention"

    num_heads: Count
    head_size: Count
    q_lora_rank: Count
    num_output_groups: Count
    output_rank: Count
    qk_rope_head_size: Count = 64
    window: Count = 128
    compress_ratio: Count | None = None
    index_num_heads: Count | None = None
    index_head_size: Count = 128
    index_top_k: Count | None = None

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        check_divides(layout, "num_heads", self.num_heads)
        check_divides(layout, "num_output_groups", self.num_output_groups)
        if self.num_heads % self.num_output_groups != 0:
            raise ValueError(
                f"`num_output_groups` = {self.num_output_groups} does not divide `num_heads` = "
                f"{self.num_heads}; use a divisor."
            )
        index = {self.index_num_heads is None, self.index_top_k is None}
        if len(index) > 1 or (False in index and self.compress_ratio is None):
            raise ValueError(
                "An indexer of compressed attention has `index_num_heads` and `index_top_k`, and "
                "its keys a `compress_ratio`; give all three, or neither of the first two."
            )
        if layout.cp > 1:
            raise ValueError(
                f"`layout.cp` = {layout.cp} would split the windows of `{self.kind}`, which is not "
                "known here; use `cp = 1`."
            )

    def parameters(self, model: Model) -> Parameters:
        hidden, heads = model.hidden_size, self.num_heads * self.head_size
        split = heads * (self.q_lora_rank + self.output_rank) + self.num_heads  # With sinks.
        split += self.num_output_groups * self.output_rank * hidden
        # Norms; and of keys that are compressed, the weights of places in a window, and a norm.
        copied = hidden * self._made + self.q_lora_rank + self.head_size
        sizes = [self.head_size, *(index.head_size for index in self._indexer())]
        ratio = self.compress_ratio or 0
        copied += sum(ratio * self._pooled(size) // 2 + size for size in sizes) * (ratio > 0)
        for index in self._indexer():
            copied += sum(m * n for m, n in index.shapes(hidden))
        return Parameters(split, copied)

    def linears(self, costs: Costs) -> Sequence[Linear]:
        tokens, hidden, tp = costs.tokens, costs.model.hidden_size, costs.layout.tp
        width, groups = self.num_heads * self.head_size, self.num_output_groups // tp
        outputs = (self.q_lora_rank, self.head_size, self._pooled(self.head_size))
        return [
            costs.linears(tokens, outputs, hidden),
            costs.linear(tokens, hidden, groups * self.output_rank),
            costs.linear(tokens, width // tp, self.q_lora_rank),
            costs.linear(tokens, self.output_rank, width // tp // groups, groups=groups),
            *(linear for index in self._indexer() for linear in index.linears(costs)),
        ]

    def between(
        self, costs: Costs, kernels: list[Kernel], *, backward: bool, weights: bool = True
    ) -> Open:
        _, _, queries, narrowed, *index_linears = self.linears(costs)
        tokens, latent, cores = costs.tokens, self.q_lora_rank + self.head_size, self._cores(costs)
        of_rank = tokens * self.num_heads // costs.layout.tp
        core = [kernel for keys in cores for kernel in keys.kernels(costs, backward=backward)]
        # Rotary positions of queries, and of the output, in which they are turned back.
        turned = costs.move_values("elementwise", 2 * of_rank * self.qk_rope_head_size)
        # Reads values and weights of compressed keys, and writes keys, which are few.
        pooled = self._pooled(self.head_size) + sum(index.made for index in self._indexer())
        pool = costs.move_values("elementwise", (3 if backward else 1) * tokens * pooled)
        sizes = (tokens * latent, of_rank * self.head_size)
        norms = [costs.move_values("norm", (3 if backward else 2) * size) for size in sizes]
        if backward:
            again = [queries.forward] * costs.recomputes("mla_up_proj")
            open_kernels = [*again, *kernels, *gradients(narrowed, weights), turned, *core]
            for index in self._indexer():
                open_kernels += index.gradients(costs, cores[-1], weights)
            open_kernels += [turned, *norms, *gradients(queries, weights), *[pool] * (pooled > 0)]
            return [], [*open_kernels, *cast_gradient(costs, tokens * self._made)]
        open_kernels = [*kernels, queries.forward, *norms, turned, *[pool] * (pooled > 0)]
        open_kernels += [linear.forward for linear in index_linears]
        for index in self._indexer():
            open_kernels += index.scores(costs, cores[-1], backward=False)
        ranks = self.num_output_groups * self.output_rank // costs.layout.tp
        return [], [*open_kernels, *core, turned, narrowed.forward, *cast(costs, tokens * ranks)]

    def activations(self, costs: Costs) -> dict[str, float]:
        tokens, size = costs.tokens, costs.activation_bytes
        width = self.num_heads * self.head_size // costs.layout.tp
        ranks = self.num_output_groups * self.output_rank // costs.layout.tp
        # What the first matrix makes; the latent normed; queries, before their norm, too.
        queries = 0 if costs.recomputes("mla_up_proj") else 2 * width
        kept = tokens * size * (self._made + self.head_size + queries)
        kept += tokens * costs.input_bytes() * (self.q_lora_rank + ranks)
        kept += output_bytes(costs, tokens * width)
        kept += sum(index.kept(costs) for index in self._indexer())
        cores = [core.activations(costs)["core_attention"] for core in self._cores(costs)]
        return {"attention": kept, "core_attention": sum(cores)}

    def skipped_flop(self, costs: Costs) -> float:
        *_, core = self._cores(costs)
        return sum(index.skipped_flop(costs, core) for index in self._indexer())

    @property
    def _made(self) -> int:
        """What the first matrix makes of a token."""
        return self.q_lora_rank + self.head_size + self._pooled(self.head_size)

    def _pooled(self, size: int) -> int:
        """What matrices make of a token for compressed keys of a size: values and their weights."""
        overlap = 2 if self.index_num_heads else 1
        return 2 * overlap * size if self.compress_ratio else 0

    def _cores(self, costs: Costs) -> list[Core]:
        """The core of attention to the last keys, and to compressed keys."""
        heads, ratio = self.num_heads // costs.layout.tp, self.compress_ratio
        last = core_of(costs, heads, 1, self.head_size, self.head_size, self.window)
        if ratio is None or last.keys < ratio:
            return [last]
        packed = last.packed and last.packed / ratio
        selected = last._replace(keys=last.keys // ratio, window=self.index_top_k, packed=packed)
        return [last, selected]

    def _indexer(self) -> list[Indexer]:
        if self.index_num_heads is None or self.index_top_k is None:
            return []
        size = self.index_head_size
        sizes = (self.index_num_heads, size, self.index_top_k, self.q_lora_rank)
        return [Indexer(*sizes, self._pooled(size))]
