"""Placement: which node should run which pipeline rank of which replica."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._estimate import Estimate
from .._installed import needed
from .._progress import progress_bar
from .._summary import Shown, Table, picked_attributes
from ..analysis import (
    AbstractObjective,
    Quantile,
    bandwidth,
    check_objective,
    check_reached,
    check_steps,
)
from ..engine import check_num_samples, check_program
from ..latency import LogNormal
from ..program import Program
from ._exchange import best_order
from ._placed import Nodes, Placed, nodes_of, placed, replicas_ready
from ._trials import Order, Trials, most_ops


# Figures are from so many op evaluations each, within these numbers of steps.
_OPS = 2**28
_STEPS = (512, 4096)
_FEWEST = 32
# The search for the worst order may take so much of that for the best.
_WORST = 0.2


@dataclasses.dataclass(frozen=True, repr=False)
class Placement(Shown):
    """The result of `place`. Each figure is in the unit of the objective, from steps that the
    search did not use.

    **Attributes:**

    - `order`: `(nodes,)`, for each place, the node that should take it.
    - `objective`, `unit`: the name of the figure, and its unit.
    - `before`: the figure with the nodes in the given order.
    - `after`: the figure with the nodes in `order`.
    - `gain`: by how much the figure falls from `before` to `after`.
    - `worst`: the figure with the worst order that was found.
    - `bound`: a lower bound of the figure over all placements, from steps that are stochastically
        faster than those of any placement; `None` for a figure that may fall when steps get slower,
        such as `Std()`.
    - `places`: for each place, its first `replica` and pipeline `rank`, the `node` that should take
        it, and the `factor` of the slowest GPU of that node, relative to the mean GPU.
    - `num_samples`: how many steps each figure is from.
    - `num_placements`: how many different placements were tried.
    """

    order: Order
    objective: str
    unit: str
    before: Estimate
    after: Estimate
    gain: Estimate
    worst: Estimate
    bound: Estimate | None
    places: dict[str, np.ndarray]
    num_samples: int
    num_placements: int

    def table(self) -> Any:
        """A polars frame with a row for each place."""
        pl = needed("polars")
        return pl.DataFrame(self.places).rename({"factor": "factor [1]"})

    def to_json(self) -> dict[str, Any]:
        """Its figures, and the node for each place."""
        figures = ("objective", "unit", "before", "after", "gain", "worst", "bound")
        known = picked_attributes(self, *figures, "num_samples", "num_placements")
        return known | {"order": self.order.tolist()}

    def summary(self) -> Table:
        moved = int(np.sum(self.order != np.arange(len(self.order))))
        figures = {
            "as given": self.before,
            "as placed": self.after,
            "gain": self.gain,
            "the worst found": self.worst,
            "no placement is below": self.bound,
        }
        rows = [pair for pair in figures.items() if pair[1] is not None]
        title = (
            f"Placement of {len(self.order):,} nodes, {moved:,} of them moved; the best of "
            f"{self.num_placements:,} tried"
        )
        unit = "" if self.unit == "1" else f" ({self.unit})"
        return Table(("nodes", f"{self.objective}{unit}"), rows, title)


def place(
    program: Program,
    factors: Float[np.ndarray, " gpus_or_nodes"],
    *,
    devices_per_node: int,
    objective: AbstractObjective | None = None,
    num_samples: int | None = None,
    key: "jax.Array",
    progress: bool = False,
) -> Placement:
    """Assigns nodes to the pipeline ranks of the replicas, to lower a figure of the step time.

    Every replica is simulated, on GPUs whose factors are known. If at most 8,192 placements differ,
    all are tried. Otherwise, a local search starts from the best of these: the given order; slow
    nodes together in few replicas; slow nodes at the ranks that matter least; and a linear
    assignment by the gradient, which is exact if the step is a sum. The search then exchanges pairs
    of nodes, first those that gain most according to the gradient. For large jobs, it approximates
    replicas by their means and scatter.

    **Arguments:**

    - `program`: the step. The known factors replace its law of GPU factors.
    - `factors`: how long compute takes on each GPU or each node, in any common unit; they are
        divided by their mean. They are in the order of ranks: tensor- and context-parallel
        neighbours first, then replicas, then pipeline ranks.
    - `devices_per_node`: the number of GPUs in a node. Nodes are moved as a whole.
    - `objective`: the figure; `Quantile(0.95)` by default.
    - `num_samples`: how many steps the reported figures are from; by default 4,096, or fewer for
        large jobs, but at least 512.
    - `key`: a `jax.random` key.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A [`Placement`][].

    **Raises:**

    `ValueError` if the factors do not fit the job, or if the job is on a single node.
    """
    objective = Quantile(0.95) if objective is None else objective
    check_program(program, key)
    check_objective(objective)
    nodes = nodes_of(program, factors, devices_per_node)
    if num_samples is None:
        ops_a_step = program.num_ops * nodes.num_replicas
        num_samples = int(np.clip(_OPS // ops_a_step, *_STEPS))
    num_samples = check_num_samples(num_samples)
    if not _FEWEST <= num_samples < 2**32 / nodes.factors.size:
        raise ValueError(
            f"`num_samples={num_samples}` must be at least {_FEWEST}, and times the "
            f"{nodes.factors.size} GPUs below 2^32."
        )
    check_steps(objective, num_samples)
    program = _with_known_gpus(program, nodes)
    of_search, of_report = jax.random.split(key)
    # A search ends when it settles, mostly before all of its work is done.
    most = round((1 + _WORST) * most_ops(program, nodes))
    with progress_bar(most, progress, "search, at most", "op") as advance:
        best = Trials(program, nodes, objective, of_search, advance)
        check_reached(objective, float(best.values([np.arange(len(nodes.factors))])[0]))
        order = best_order(best)
        worst = best.reversed(_WORST)
        worst_order = best_order(worst)

    steps = placed(program, num_samples=num_samples, key=of_report)
    before, after, at_worst = (
        _step_times(steps, nodes, tried) for tried in (np.arange(len(order)), order, worst_order)
    )
    replica, rank = np.divmod(nodes.places[:, 0], nodes.num_ranks)
    largest = nodes.factors[order].max(axis=1)
    return Placement(
        order=order,
        objective=str(objective),
        unit=objective.unit,
        before=_figure(objective, before),
        after=_figure(objective, after),
        gain=_figure(objective, before, than=after),
        worst=_figure(objective, at_worst),
        bound=_figure(objective, _at_least(steps, nodes)) if objective.monotone else None,
        places={"replica": replica, "rank": rank, "node": order, "factor": largest},
        num_samples=num_samples,
        num_placements=best.tried,
    )


def _with_known_gpus(program: Program, nodes: Nodes) -> Program:
    """The program with a law of GPU factors that is as wide as the known factors. It gives the
    factors of the other GPUs of a group below the slowest one.
    """
    logarithms = np.log(nodes.factors)
    dtype = program.latencies.mean.dtype
    rank = LogNormal(
        jnp.asarray(np.exp(logarithms.mean()), dtype), jnp.asarray(logarithms.std(), dtype)
    )
    variability = dataclasses.replace(program.variability, rank=rank)
    return dataclasses.replace(program, variability=variability)


def _step_times(steps: Placed, nodes: Nodes, order: Order) -> Float[np.ndarray, " steps"]:
    return steps.times(replicas_ready(steps, *nodes.slowest(order)).max(axis=0))


def _figure(
    objective: AbstractObjective, steps: np.ndarray, than: np.ndarray | None = None
) -> Estimate:
    """The figure of some steps, or by how much it is above that of the same steps elsewhere."""
    value, influence = (
        objective.value(steps),
        objective.influence(steps, bandwidth(steps, objective)),
    )
    if than is not None:
        value -= objective.value(than)
        influence = influence - objective.influence(than, bandwidth(than, objective))
    return Estimate(value, float(np.std(influence)) / math.sqrt(len(steps)))


def _at_least(steps: Placed, nodes: Nodes) -> Float[np.ndarray, " steps"]:
    """Step times that are stochastically below those of any placement.

    The k slowest ranks of replicas lie in at least k / num_ranks replicas. So the j-th replica has
    a rank that is at least as slow as the (j * num_ranks)-th of all; here at whichever position
    makes the least of it in each step, with the fastest of all around it. Where all replicas would
    take too long, only those with the slowest ranks count.
    """
    ranks, least = nodes.num_ranks, nodes.least()
    cost = ranks * steps.num_steps * steps.run.program.num_ops
    replicas = min(max(_OPS // cost, 1), nodes.num_replicas)
    rows = np.full((replicas, ranks, ranks), least[-1])
    position = np.arange(ranks)
    rows[:, position, position] = least[::ranks][:replicas, None]
    noise = np.repeat(np.arange(replicas), ranks)
    ready = replicas_ready(steps, rows.reshape(-1, ranks), noise)
    return steps.times(ready.reshape(replicas, ranks, -1).min(axis=1).max(axis=0))
