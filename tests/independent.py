"""A training step, simulated as the documents describe it: NumPy only, and every kernel of every
member of every replica is drawn (docs/concepts, docs/glossary.md, docs/data_format.md).

It takes kernels with their mean latencies, and the order of ops, and shares no code with the
package's sampling, its collapse of blocks, or its rules of replicas. Arrays have the axes
`(members, microbatches, replicas, steps)`, or the last of these.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np


_score = statistics.NormalDist().inv_cdf


@dataclasses.dataclass(frozen=True)
class Laws:
    """What varies. Factors are log-normal with mean one, given by the sigma of their logarithm.

    **Attributes:**

    - `residual`: by kind of kernel.
    - `rank`, `step`, `worker_step`, `microbatch`: of the shared factors.
    - `network`: the probability that a step is congested, and how many times as long communication
        between nodes then takes.
    - `stalls`: by kind, the rate per call, and the median (in seconds) and sigma of a stall's size.
    - `means`: factors on the mean latencies of some kinds of kernel.
    """

    residual: Mapping[str, float]
    rank: float = 0.0
    step: float = 0.0
    worker_step: float = 0.0
    microbatch: float = 0.0
    network: tuple[float, float] = (0.0, 1.0)
    stalls: Mapping[str, tuple[float, float, float]] = dataclasses.field(default_factory=dict)
    means: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """What runs in a step.

    **Attributes:**

    - `forward`, `backward`: the block of one microbatch on each stage, one stage to a rank.
    - `send_recv`: the kernel that sends from one rank to another.
    - `reductions`: the collectives by which each rank reduces its gradients at its end.
    - `tail`: the block that all GPUs run together at the end.
    - `orders`: the tokens of each rank, such as `"0F3"`.
    - `members`: of a tensor-parallel group.
    - `replicas`: how many copies of the pipeline run.
    - `network_links`: the links between nodes.
    """

    forward: Sequence
    backward: Sequence
    send_recv: Mapping
    reductions: Sequence
    tail: Sequence
    orders: Sequence[Sequence[str]]
    members: int
    replicas: int
    network_links: frozenset[str]


def simulate_steps(step: Step, laws: Laws, num_steps: int, seed: int) -> np.ndarray:
    """The times of steps, each on GPUs of its own, in seconds.

    Numbers of one seed are the same whatever the values of the laws.
    """
    return steps_of_laws(step, [laws], num_steps, seed)[0]


def steps_of_laws(step: Step, laws: Sequence[Laws], num_steps: int, seed: int) -> list[np.ndarray]:
    """The times of the same steps by each of several laws, for which numbers are drawn once."""
    batches = [
        [batch.step_times() for batch in by_law] for by_law in _batches(step, laws, num_steps, seed)
    ]
    return [np.concatenate(times) for times in zip(*batches, strict=True)]


def simulate_block(block, members: int, laws: Laws, number: int, seed: int, network_links=()):
    """How long a block takes that `members` run, in seconds; the factor of the slowest of their
    GPUs; and whether the network is congested.
    """
    links = frozenset(network_links)
    alone = Step([block], [()], {}, [()], (), [["0F0"]], members, 1, links)
    rows = [
        (batch.step_times(), batch.gpu.max(axis=(0, 1, 2, 3)), batch.congestion > 1)
        for (batch,) in _batches(alone, [laws], number, seed)
    ]
    return tuple(np.concatenate(column) for column in zip(*rows, strict=True))


def _batches(step: Step, laws: Sequence[Laws], num_steps: int, seed: int):
    rng = np.random.Generator(np.random.SFC64(seed))
    size = 250  # So many at once stay in the cache.
    for start in range(0, num_steps, size):
        number, kept = min(size, num_steps - start), []
        draws = (_Draws(rng, kept, len(laws) > 1) for _ in laws)
        yield (_Batch(step, law, number, drawn) for law, drawn in zip(laws, draws, strict=True))


@dataclasses.dataclass
class _Draws:
    """Random numbers, which are kept for other laws that draw as many in the same order."""

    rng: np.random.Generator
    kept: list[np.ndarray]
    keeps: bool
    place: int = 0

    def __call__(self, draw) -> np.ndarray:
        if not self.keeps:
            return draw(self.rng)
        if self.place == len(self.kept):
            self.kept.append(draw(self.rng))
        self.place += 1
        return self.kept[self.place - 1]


class _Batch:
    """Some steps."""

    def __init__(self, step: Step, laws: Laws, number: int, draws: _Draws):
        self.step, self.laws, self.number, self.draws = step, laws, number, draws
        ranks, alike = len(step.orders), (step.replicas, number)
        microbatches = sum("F" in token for token in step.orders[0])
        # Stalls and their sizes have a stream of their own: their number depends on the laws.
        seed = int(draws(lambda rng: rng.integers(2**32)))
        self.stall_rng = np.random.Generator(np.random.SFC64(seed))
        # Of each GPU; of each pipeline rank of a replica; of the data of each microbatch of a
        # replica, on all stages; and of the whole step.
        self.gpu = self.factor(laws.rank, (ranks, step.members, 1, *alike))
        self.worker = self.factor(laws.worker_step, (ranks, 1, 1, *alike))
        self.microbatch = self.factor(laws.microbatch, (microbatches, *alike))
        # These two are dealt evenly over the steps, which leaves less noise.
        self.whole = np.exp(laws.step * self.dealt(_score) - laws.step**2 / 2)
        probability, slowdown = laws.network
        congested = self.dealt(lambda share: share < probability)
        calm = 1 / (1 + probability * (slowdown - 1))  # So that the mean is one.
        self.congestion = np.where(congested, np.float32(slowdown * calm), np.float32(calm))

    def dealt(self, of_share) -> np.ndarray:
        """A function of the shares from 0 to 1, one of as many equal parts for each step."""
        order = self.draws(lambda rng: rng.permutation(self.number))
        return np.array([of_share((i + 0.5) / self.number) for i in range(self.number)])[order]

    def factor(self, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
        z = self.draws(lambda rng: rng.standard_normal(shape, np.float32)) * np.float32(sigma)
        z -= np.float32(sigma**2 / 2)
        return np.exp(z, out=z)

    def call(self, kernel, factors, shape: tuple[int, ...]) -> np.ndarray:
        """One call of a kernel by each of so many: its mean, its own noise and what it shares with
        others, and now and then a stall. The step's factor comes at the end.
        """
        seconds = self.factor(self.laws.residual[kernel.kind], shape)
        seconds *= np.float32(kernel.mean * self.laws.means.get(kernel.kind, 1.0))
        seconds *= factors
        if kernel.kind in self.laws.stalls:
            rate, median, sigma = self.laws.stalls[kernel.kind]
            calls = self.stall_rng.integers(
                seconds.size, size=self.stall_rng.poisson(rate * seconds.size)
            )
            sizes = median * np.exp(sigma * self.stall_rng.standard_normal(len(calls)))
            np.add.at(seconds.reshape(-1), calls, sizes.astype(np.float32))
        return seconds

    def row(self, row, factors, shape: tuple[int, ...]) -> np.ndarray:
        """Kernels one after the other."""
        total = np.zeros(shape, np.float32)
        for kernel, count in row:
            for _ in range(count):
                total += self.call(kernel, factors, shape)
        return total

    def collectives(self, row, shape: tuple[int, ...]) -> np.ndarray:
        """Collectives one after the other: each is one call for its whole group. No factor of a
        GPU, a worker or a microbatch acts on them; between nodes, the network's does.
        """
        total = np.zeros(shape, np.float32)
        for kernel, count in row:
            between_nodes = kernel.link in self.step.network_links
            factors = self.congestion if between_nodes else np.float32(1)
            total += self.row([(kernel, count)], factors, shape)
        return total

    def block(self, block, factors, shape: tuple[int, ...]) -> np.ndarray:
        """How long a block takes whose compute has `factors`, member by member on the first axis.

        In each of its segments the members run by themselves, also from one pair of branches to
        the next; the segment ends when all of them have.
        """
        total = np.zeros(shape[1:], np.float32)
        for segment, times in block:
            for _ in range(times):
                reached = self.row(segment.kernels, factors, shape)
                for branches in segment.branches:
                    reached = self.side_by_side(branches, reached, factors, shape)
                total += reached.max(axis=0)
                if segment.collective is not None:
                    total += self.collectives([(segment.collective, 1)], shape[1:])
        return total

    def side_by_side(self, branches, reached, factors, shape) -> np.ndarray:
        """When each member has computed, and the collectives beside this have ended. They start
        when the slowest member has come to them.
        """
        start = reached.max(axis=0)
        rows = [self.collectives(row, shape[1:]) for row in branches.communication]
        y = np.maximum.reduce(rows) * np.float32(1 + branches.contention[1])
        left = reached + self.row(branches.compute, factors, shape) - start
        if branches.within:  # A block, which ends for all members at once.
            left = left + self.block(branches.within, factors, shape)
        x = np.maximum(left, 0) * np.float32(1 + branches.contention[0])
        # Each at its slower speed while both run, and then at its own.
        a, b = (np.float32(1 / (1 + slower)) for slower in branches.contention)
        return start + np.where(x > y, y + (x - y) * a, x + (y - x) * b)

    def pipelines(self) -> np.ndarray:
        """When each pipeline rank of each replica ends: `(ranks, replicas, steps)`."""
        step, shape = self.step, (self.step.members, *self.microbatch.shape)
        latency = {}
        for rank in range(len(step.orders)):
            factors = self.gpu[rank] * self.worker[rank] * self.microbatch
            latency["F", rank] = self.block(step.forward[rank], factors, shape)
            latency["B", rank] = self.block(step.backward[rank], factors, shape)
        sent = {
            pair: self.collectives([(kernel, 1)], shape[1:])
            for pair, kernel in step.send_recv.items()
        }
        last, done = len(step.orders) - 1, {}
        left = [list(order) for order in step.orders]
        free = np.zeros((len(left), *shape[2:]), np.float32)
        while any(left):
            for rank, order in enumerate(left):
                while order:
                    phase, microbatch = order[0][1], int(order[0][2:])
                    if phase == "F":
                        source = (phase, rank - 1) if rank else None
                    else:
                        source = (phase, rank + 1) if rank < last else ("F", rank)
                    start = free[rank]
                    if source is not None:
                        if (*source, microbatch) not in done:
                            break
                        arrived = done[*source, microbatch]
                        if source[1] != rank:
                            arrived = arrived + sent[source[1], rank][microbatch]
                        start = np.maximum(start, arrived)
                    end = start + latency[phase, rank][microbatch]
                    free[rank] = done[phase, rank, microbatch] = end
                    order.pop(0)
        return free

    def step_times(self) -> np.ndarray:
        step, number = self.step, self.number
        # All replicas together reduce the gradients of a rank, and then all ranks meet.
        ends = self.pipelines().max(axis=1)
        reduced = [self.block(block, np.float32(1), (1, number)) for block in step.reductions]
        barrier = (ends + np.stack(reduced)).max(axis=0)
        everyone = (self.gpu * self.worker).reshape(-1, number)
        tail = self.block(step.tail, everyone, everyone.shape)
        return self.whole * (barrier.astype(float) + tail)
