"""The first module of a recommender: tables of embeddings, which GPUs share, and the bottom MLP."""

import dataclasses
import functools as ft
import heapq
from typing import ClassVar, Literal, NamedTuple

from ...data import Count, Layout, Model, Positive, Training
from .._block import Kernel, Segment
from .._costs import Costs
from .._parts import segment
from ._base import AbstractModule, Parameters
from ._dense_layers import DenseLayers
from ._gather import gradients


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
def place(tables: tuple[EmbeddingTable, ...], gpus: int) -> tuple[Shards, ...]:
    """The shards of each GPU. Each shard, that with most to look up and send first, goes to the GPU
    with least so far, as by the greedy partitioner of TorchRec's planner.
    """
    shards: list[Shards] = []
    for one in (table for table in tables if table.sharding != "data_parallel"):
        parts = 1 if one.sharding == "table_wise" else one.shards or gpus
        width = 1 / parts if one.sharding == "column_wise" else 1.0
        shards += [Shards(one.pooling_factor / parts, width, one.rows / parts)] * parts
    placed = [(0.0, Shards())] * gpus
    for shard in sorted(shards, key=lambda one: one.looked_up + one.sums, reverse=True):
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
    rows, sums, _ = zip(*place(tables, gpus), strict=True)
    copied = sum(table.pooling_factor for table in tables if table.sharding == "data_parallel")
    return copied + gpus * max(rows), gpus * max(sums), sum(sums)


@dataclasses.dataclass(frozen=True)
class EmbeddingBags(AbstractModule):
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
    in_residual = False

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
        for one in self.tables:
            where = "copied" if one.sharding == "data_parallel" else "tables"
            total = total.plus(Parameters(**{where: one.rows * model.hidden_size}))
        return total

    def fullest(self, gpus: int) -> float:
        """The share of the rows that GPUs share on the GPU with the most."""
        held = [one.held for one in place(self.tables, gpus)]
        return max(held) / (sum(held) or 1)

    def forward(self, costs: Costs, before: list[Kernel]) -> list[Segment]:
        bottom = [one.forward for one in self.bottom.linears(costs)]
        looked_up, sent, received, whole = self._values(costs)
        # Reads rows in float32, and writes their sums.
        pool = costs.move("embedding", 4 * looked_up + 2 * sent)
        # The sums of the shards of a table become one vector, beside the others of the sample.
        joined = costs.move("elementwise", 2 * (received + whole))
        return [self._exchanged(costs, [*before, pool], bottom), segment([joined])]

    def backward(
        self, costs: Costs, before: list[Kernel], *, weights: bool = True
    ) -> list[Segment]:
        """Nothing waits for this, so it belongs to backward-weight."""
        if not weights:
            return [segment(before)]
        # Without the first, which is the gradient of the features.
        bottom = [k for one in self.bottom.linears(costs) for k in gradients(one, True)]
        # Of each row that was looked up: reads its gradient, the row and its state; writes both.
        update = costs.move("embedding", 18 * self._values(costs)[0])
        return [self._exchanged(costs, before, bottom[1:]), segment([update])]

    def backward_weight(self, costs: Costs) -> list[Segment]:
        return self.backward(costs, [])

    def activations(self, costs: Costs) -> dict[str, float]:
        # Indices of rows, of eight bytes, and the vectors.
        looked_up, _, _, whole = self._values(costs)
        size = 8 * looked_up / costs.model.hidden_size + costs.activation_bytes * whole
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
        exchange = costs.collective("all_to_all", 2 * sent, costs.ep)
        return segment(first, None, costs.beside(bottom, exchange), members=costs.expert_ranks)
