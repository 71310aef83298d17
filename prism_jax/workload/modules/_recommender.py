"""Recommenders: the tables of embeddings, which GPUs share, and the dense layers that every GPU has
whole, for the samples of its own.
"""

import dataclasses
import functools as ft
import heapq
import itertools as it
from typing import ClassVar, Literal, NamedTuple

from msgspec.structs import astuple, replace

from ...cluster import gemm_latency
from ...data import Count, Layout, Model, Positive, Training
from .._block import Kernel, Linear, Segment, Segments
from .._costs import Costs
from .._parts import segment
from ._base import AbstractFirstModule, AbstractSampleModule, Parameters
from ._gather import gradients


def short_linear(costs: Costs, n: int, k: int) -> Linear:
    """The matrix that takes `k` values of each of a GPU's samples to `n`. Its products take
    microseconds. If the device was measured by shape, they take as long as measured: efficiencies
    were chosen with the products of language models.
    """
    m, on = costs.tokens, costs.kernels
    linear = costs.linear(m, n, k, costs.base_dtype)
    kernels: list[Kernel] = []
    for kernel, shape in zip(astuple(linear)[:3], ((m, n, k), (m, k, n), (k, n, m)), strict=True):
        # Tables are of 16 bits; bf16 is as fast as fp16.
        seconds = gemm_latency(on, "bf16", *shape) if not costs.training.in_float32 else None
        mean = kernel.mean if seconds is None else max(on.compute * seconds, on.floor_s)
        kernels.append(replace(kernel, mean=mean, size=f"{kernel.size} short"))
    return Linear(kernels[0], kernels[1], kernels[2])


@dataclasses.dataclass(frozen=True)
class DenseLayers(AbstractSampleModule):
    """Matrices one after the other, each with a bias and an activation, which are parts of the
    product's kernel (the epilogues of cuBLASLt). As the last module of a recommender its one output
    is the logit of a click, whose loss takes no time.

    **Attributes:**

    - `layer_sizes`: the width of the input, and that after each matrix.
    """

    kind: ClassVar[str] = "dense-layers"

    layer_sizes: tuple[Count, ...]

    def parameters(self, model: Model) -> Parameters:
        return Parameters(copied=sum((n + 1) * m for n, m in it.pairwise(self.layer_sizes)))

    def activations(self, costs: Costs) -> dict[str, float]:
        return {"dense": costs.activation_bytes * costs.tokens * sum(self.layer_sizes)}

    def linears(self, costs: Costs) -> list[Linear]:
        return [short_linear(costs, n, k) for k, n in it.pairwise(self.layer_sizes)]


@dataclasses.dataclass(frozen=True)
class CrossLayer(AbstractSampleModule):
    """A cross layer of DCN-V2 (Wang et al. 2021, arXiv:2008.13535): the output of a square matrix,
    or of two of low rank, times the features, added to the layer's input.

    **Attributes:**

    - `width`: the width of the features: those of all tables, and the dense ones.
    - `low_rank`: the width between two matrices; by default one matrix.
    """

    kind: ClassVar[str] = "cross-layer"

    width: Count
    low_rank: Count | None = None

    def parameters(self, model: Model) -> Parameters:
        between = 2 * self.low_rank if self.low_rank else self.width
        return Parameters(copied=self.width * (between + 1))

    def activations(self, costs: Costs) -> dict[str, float]:
        values = costs.tokens * (2 * self.width + (self.low_rank or 0))
        return {"interaction": costs.activation_bytes * values}

    def linears(self, costs: Costs) -> list[Linear]:
        sizes = (self.width, self.low_rank, self.width) if self.low_rank else (self.width,) * 2
        return DenseLayers(sizes).linears(costs)

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        # Reads product, features and input, writes their sum. The backward reads the gradient,
        # the product, the features and their gradient, and writes two gradients.
        return [
            costs.move_values("elementwise", (6 if backward else 4) * costs.tokens * self.width)
        ]


@dataclasses.dataclass(frozen=True)
class DotInteraction(AbstractSampleModule):
    """The products of each pair of a sample's vectors, each of `hidden_size` values (DLRM, Naumov
    et al. 2019, arXiv:1906.00091).

    **Attributes:**

    - `num_vectors`: how many vectors: those of all tables, and that of the dense features.
    """

    kind: ClassVar[str] = "dot-interaction"

    num_vectors: Count

    def activations(self, costs: Costs) -> dict[str, float]:
        values = costs.tokens * self.num_vectors * costs.model.hidden_size
        return {"interaction": costs.activation_bytes * values}

    def moved(self, costs: Costs, *, backward: bool) -> list[Kernel]:
        """All pairs, of which half are kept. The gradient is one product, as both factors are the
        same vectors.
        """
        n, width = self.num_vectors, costs.model.hidden_size
        sizes = (n, width, n) if backward else (n, n, width)
        pairs = costs.gemm(*sizes, costs.base_dtype, costs.tokens)
        return [pairs, costs.move_values("elementwise", 1.5 * costs.tokens * n * n)]


@dataclasses.dataclass(frozen=True)
class EmbeddingTable:
    """A table of embeddings.

    **Attributes:**

    - `rows`: the number of its rows, each of `hidden_size` values.
    - `pooling_factor`: how many rows of it a sample looks up, on average.
    - `sharding`: in the terms of TorchRec: the table is on one GPU (`table_wise`), its rows or its
        columns are split over GPUs (`row_wise`, `column_wise`), or each GPU has a copy
        (`data_parallel`), whose gradients are reduced as those of other parameters.
    - `shards`: over how many GPUs rows or columns are split; by default all.
    """

    rows: Count
    pooling_factor: Positive = 1.0
    sharding: Literal["table_wise", "row_wise", "column_wise", "data_parallel"] = "table_wise"
    shards: Count | None = None


class Shards(NamedTuple):
    """The shards of tables on one GPU, in vectors of `hidden_size` values.

    **Attributes:**

    - `looked_up`, `sums`: the rows that are looked up for each sample, and their sums.
    - `held`: the rows of the tables.
    """

    looked_up: float = 0.0
    sums: float = 0.0
    held: float = 0.0


@ft.cache
def place_shards(tables: tuple[EmbeddingTable, ...], gpus: int) -> tuple[Shards, ...]:
    """The shards of each GPU. Each shard, that with most to look up and send first, goes to the GPU
    with least so far, as by the greedy partitioner of TorchRec's planner.
    """
    shards: list[Shards] = []
    shared = (table for table in tables if table.sharding != "data_parallel")
    for table in shared:
        parts = 1 if table.sharding == "table_wise" else table.shards or gpus
        width = 1 / parts if table.sharding == "column_wise" else 1.0
        shards += [Shards(table.pooling_factor / parts, width, table.rows / parts)] * parts
    placed = [(0.0, Shards())] * gpus
    for shard in sorted(shards, key=lambda shard: shard.looked_up + shard.sums, reverse=True):
        total = Shards(*(a + b for a, b in zip(placed[0][1], shard, strict=True)))
        heapq.heapreplace(placed, (total.looked_up + total.sums, total))
    return tuple(shard for _, shard in placed)


def vectors_of(tables: tuple[EmbeddingTable, ...], gpus: int) -> tuple[float, float, float]:
    """The rows that are looked up, and the sums of rows that are sent to the GPUs of the samples,
    on the GPUs with the most; and the sums that each GPU gets. All for each sample of one GPU, in
    vectors of `hidden_size` values.

    A GPU looks up its part of the rows or columns for the samples of all GPUs, and sends one sum
    for each: a vector, or its columns.
    """
    rows, sums, _ = zip(*place_shards(tables, gpus), strict=True)
    copied = sum(table.pooling_factor for table in tables if table.sharding == "data_parallel")
    return copied + gpus * max(rows), gpus * max(sums), sum(sums)


@dataclasses.dataclass(frozen=True)
class EmbeddingBags(AbstractFirstModule):
    """Tables of embeddings, which `layout.ep` GPUs share, and the bottom MLP of dense features.

    A GPU looks up rows for the samples of all GPUs, sums those of a sample (its bag), and sends the
    sums to the GPUs of the samples (all_to_all), beside which the bottom MLP runs. The backward
    sends the gradients back and updates the rows at once, in float32, with one state for each value
    (Adagrad), as if no two bags of a batch had a row in common. Which rows samples need is
    exchanged during the step before, as by TorchRec's pipelines and HugeCTR, and takes no time.

    **Attributes:**

    - `tables`: the tables.
    - `bottom`: the `layer_sizes` of the bottom MLP, none of them without dense features.
    """

    kind: ClassVar[str] = "embedding-bags"

    tables: tuple[EmbeddingTable, ...]
    bottom: DenseLayers

    def check(self, model: Model, layout: Layout, training: Training) -> None:
        if layout.world_size != layout.dp or training.sequence_length != 1:
            raise ValueError(
                "A model with `embedding-bags` has samples of one token, which are data parallel; "
                "use `training.sequence_length` = 1, and of `layout` only `dp` and `ep`."
            )
        shared = [table.shards or 1 for table in self.tables if table.sharding != "data_parallel"]
        if shared and (layout.ep != layout.dp or max(shared) > layout.ep):
            raise ValueError(
                f"`layout.ep` = {layout.ep} of {layout.dp} GPUs cannot share the tables of "
                f"`embedding-bags`, of which one has {max(shared)} `shards`; use `layout.ep` = "
                "`layout.dp`, and at most as many shards."
            )

    def parameters(self, model: Model) -> Parameters:
        total = self.bottom.parameters(model)
        for table in self.tables:
            where = "copied" if table.sharding == "data_parallel" else "tables"
            total = total.plus(Parameters(**{where: table.rows * model.hidden_size}))
        return total

    def fullest(self, gpus: int) -> float:
        """The share of the rows that GPUs share on the GPU with the most."""
        held = [shard.held for shard in place_shards(self.tables, gpus)]
        return max(held) / (sum(held) or 1)

    def forward(self, costs: Costs, before: list[Kernel]) -> Segments:
        bottom = [linear.forward for linear in self.bottom.linears(costs)]
        looked_up, sent, received, whole_rows = self._values(costs)
        # Reads rows in float32, and writes their sums.
        pool = costs.move("embedding", 4 * looked_up + costs.activation_bytes * sent)
        # The sums of the shards of a table become one vector, beside the others of the sample.
        joined = costs.move_values("elementwise", received + whole_rows)
        return [self._exchanged(costs, [*before, pool], bottom), segment([joined])]

    def gradients(self, costs: Costs, before: list[Kernel]) -> Segments:
        # Without the first, which is the gradient of the features.
        bottom = [k for linear in self.bottom.linears(costs) for k in gradients(linear, True)]
        # Of each row that was looked up: reads its gradient, the row and its state; writes both.
        size = 16 + costs.activation_bytes
        update = costs.move("embedding", size * self._values(costs)[0])
        return [self._exchanged(costs, before, bottom[1:]), segment([update])]

    def activations(self, costs: Costs) -> dict[str, float]:
        # Indices of rows, of eight bytes, and the vectors.
        looked_up, _, _, whole_rows = self._values(costs)
        size = 8 * looked_up / costs.model.hidden_size + costs.activation_bytes * whole_rows
        return {"embedding": size, **self.bottom.activations(costs)}

    def _values(self, costs: Costs) -> list[float]:
        """`vectors_of` a step in values, and those of the vectors of a GPU's samples."""
        counts = (*vectors_of(self.tables, costs.layout.ep), len(self.tables))
        return [costs.tokens * costs.model.hidden_size * number for number in counts]

    def _exchanged(self, costs: Costs, first: list[Kernel], bottom: list[Kernel]) -> Segment:
        """Kernels, and then the exchange of the sums or their gradients beside the bottom MLP."""
        _, sent, *_ = self._values(costs)
        if costs.layout.ep == 1 or not sent:
            return segment([*first, *bottom])
        exchange = costs.collective("all_to_all", costs.activation_bytes * sent, costs.group("ep"))
        return segment(first, None, costs.beside(bottom, exchange), members=costs.expert_ranks)
