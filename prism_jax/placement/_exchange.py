"""The search for an order of nodes: a few to start from, then exchanges of pairs."""

import itertools as it
import math

import numpy as np
from jaxtyping import Float

from ._placed import Nodes, ready_slopes
from ._trials import Order, Trials


# Up to this many different orders are all tried, and up to this many exchanges.
_MOST_ORDERS = 8192
_MOST_EXCHANGES = 64
# The rounds without success after which a search ends, and the exchanges in each round.
_PATIENCE = 8
# Searches with at most this many nodes start from several orders.
_FEW_NODES = 64
_RESTARTS = 3


def best_order(trials: Trials) -> Order:
    """The best order of nodes found."""
    all_orders = _all_orders(trials.nodes)
    if all_orders is not None:
        return all_orders[int(np.argmin(trials.values(all_orders)))]
    return search(trials)


def search(trials: Trials) -> Order:
    """`best_order`, without trying all of few."""
    rng = np.random.default_rng(0)
    starts = _starts(trials, rng)
    values = trials.values(starts)
    restarts = _RESTARTS if len(starts[0]) <= _FEW_NODES else 1
    results = [
        _exchange(trials, starts[i], float(values[i]), rng)
        for i in np.argsort(values, kind="stable")[:restarts]
    ]
    return min(results, key=lambda result: result[0])[1]


def _all_orders(nodes: Nodes) -> list[Order] | None:
    """All orders that differ by more than the numbers of replicas, if they are few."""
    number = len(nodes.factors)
    if number > 8:
        return None
    orders: dict[bytes, Order] = {}
    for order in map(np.array, it.permutations(range(number))):
        rows, leaders = nodes.slowest(order)
        table = np.column_stack([leaders, rows])
        orders.setdefault(table[np.argsort(leaders)].tobytes(), order)
        if len(orders) > _MOST_ORDERS:
            return None
    return list(orders.values())


def _starts(trials: Trials, rng: np.random.Generator) -> list[Order]:
    """The order given; slow nodes replica by replica, at the ranks that matter least first; slow
    nodes at the ranks that matter least, and most; linear assignments by the gradient; any.
    """
    from scipy.optimize import linear_sum_assignment

    nodes = trials.nodes
    replica, rank = np.divmod(nodes.places[:, 0], nodes.num_ranks)
    weight = _rank_weights(trials)[rank]
    by_speed = np.argsort(-nodes.factors.max(axis=1), kind="stable")
    starts = [np.arange(len(by_speed))]
    for keys in ((weight, replica), (replica, weight), (replica, -weight)):
        order = np.empty_like(by_speed)
        order[np.lexsort(keys)] = by_speed
        starts.append(order)
    for order in starts[:2]:
        cost = trials.slopes(order) @ nodes.pieces.T
        starts.append(linear_sum_assignment(cost)[1])
    return [*starts, *(rng.permutation(len(by_speed)) for _ in range(_RESTARTS))]


def _rank_weights(trials: Trials) -> Float[np.ndarray, " ranks"]:
    """How much the factor of each pipeline rank matters to a replica whose GPUs are all alike."""
    number = min(trials.steps.num_steps, 256)
    rows = np.ones((number, trials.nodes.num_ranks))
    return ready_slopes(trials.steps, rows, np.zeros(number, int), np.arange(number)).mean(axis=0)


def _exchange(
    trials: Trials, order: Order, value: float, rng: np.random.Generator
) -> tuple[float, Order]:
    """Exchanges pairs of nodes while that helps; gives the figure and the order."""
    failures, tried = 0, set()
    tries_all = math.comb(len(order), 2) <= _MOST_EXCHANGES
    slopes = np.zeros(0) if tries_all else trials.slopes(order)
    while failures < _PATIENCE and not trials.spent:
        if tries_all:  # All of them.
            pairs = list(it.combinations(range(len(order)), 2))
        else:
            pairs = _pairs(slopes, trials.nodes.pieces[order], rng)
        pairs = [pair for pair in pairs if pair not in tried]
        if not pairs:
            break
        tried.update(pairs)
        values = trials.values_near(order, [_exchanged(order, [pair]) for pair in pairs])
        better = [i for i in np.argsort(values, kind="stable") if values[i] < value]
        if not better:
            failures += 1
            continue
        several = [pairs[i] for i in better]
        orders = [_exchanged(order, several[:1]), _exchanged(order, _disjoint(several))]
        best = [float(values[better[0]]), float(trials.values(orders[1:])[0])]
        value, order = min(best), orders[int(np.argmin(best))]
        failures, tried = 0, set()
        if not tries_all:
            slopes = trials.slopes(order)
    return value, order


def _pairs(slopes, pieces, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Pairs of places to exchange: half of them such as gain most by the gradient, half any with
    one place that matters.

    **Arguments:**

    - `slopes`: `(nodes, pieces)`, from `Trials.slopes`.
    - `pieces`: `(nodes, pieces)`, the factors that are there now.
    """
    number = len(slopes)
    cost = slopes @ pieces.T
    diagonal = np.diag(cost)
    gain = np.triu(diagonal[:, None] + diagonal[None, :] - cost - cost.T, 1).reshape(-1)
    # Some of the best: rounds without success would have nothing else to try.
    many = min(16 * _MOST_EXCHANGES, len(gain))
    most = rng.choice(np.argpartition(-gain, many - 1)[:many], _MOST_EXCHANGES // 2, replace=False)
    pairs = [divmod(int(i), number) for i in most]
    weight = np.abs(slopes).sum(axis=1)
    if weight.sum() > 0:
        first = rng.choice(number, _MOST_EXCHANGES // 2, p=weight / weight.sum())
        second = rng.integers(number, size=len(first))
        pairs += zip(first.tolist(), second.tolist(), strict=True)
    return list(dict.fromkeys((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]))


def _disjoint(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The exchanges that share no place with an earlier one."""
    used: set[int] = set()
    disjoint = []
    for pair in pairs:
        if used.isdisjoint(pair):
            disjoint.append(pair)
            used.update(pair)
    return disjoint


def _exchanged(order: Order, pairs: list[tuple[int, int]]) -> Order:
    """The order after exchanges that share no place."""
    order, (firsts, seconds) = order.copy(), np.transpose(pairs)
    order[firsts], order[seconds] = order[seconds], order[firsts]
    return order
