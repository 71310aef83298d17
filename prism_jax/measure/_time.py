"""Times calls, in rounds, and splits the scatter of their latencies into what varies with each
call, with the moment, and between devices.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .._interrupt import interruptible
from .._progress import progress_bar
from ..data import Job
from ._calls import KernelCall, calls_of, grid_job, stream_calls


FEWEST_ROUNDS = 10
KINDS = ("gemm", "convolution", "attention", "attention_backward", "norm", "elementwise")
KINDS += ("embedding", "loss", "optimizer", "copies")
_CLASSES = {"attention": "attention", "softmax": "loss", "optimizer": "optimizer"}
_CLASSES |= {"gather": "embedding", "reduce": "norm", "columns": "norm", "fused-norm": "norm"}
# Fewer tell nothing of what rounds have in common.
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 2000
# A call that is not this many times as long as an empty one is not told from its dispatch.
_SHORTEST = 1.5
# Widths from 256 to 8,192.
_LEVELS = 6
# A correlation nearer to one is a drift, which so few rounds do not tell from one.
_MOST_CORRELATED = 0.95
# A pass over a level of the grid is about this many times as long as one over the level below.
_GROWTH = 8.0


@dataclasses.dataclass(frozen=True)
class Timed:
    """Measured latencies.

    **Attributes:**

    - `calls`: what was measured.
    - `seconds`: the latency of each call on each device in each round, without dispatch.
    - `dispatch_s`: how long an empty call takes, the median.
    - `left_out`: how many calls were too short to be told from dispatch.
    - `interrupted`: whether Ctrl-C ended it early.
    """

    calls: tuple[KernelCall, ...]
    seconds: Float[np.ndarray, "devices calls rounds"]
    dispatch_s: float
    left_out: int = 0
    interrupted: bool = False

    @property
    def kinds(self) -> list[str]:
        """The kind of kernel of each call, which decides its variability."""
        return [variability_kind(call.kernel) for call in self.calls]


def variability_kind(kernel: str) -> str:
    """The kind of kernel that decides the variability of one of a table: that of a job's kernels,
    of which the classes of operators are elementwise or as they are listed here.
    """
    if kernel in KINDS:
        return kernel.removesuffix("_backward")
    return next((kind for word, kind in _CLASSES.items() if kernel.startswith(word)), "elementwise")


def time_calls(
    calls_on: Sequence[Sequence[KernelCall]],
    seconds: float,
    *,
    progress: bool = False,
    empty: Callable[[], object] | None = None,
) -> Timed:
    """Times calls in rounds: each round runs every call once on one device after the other, so that
    what changes slowly is the same for all calls of a round and not noise of one of them.

    A call is timed from its launch until its result is ready, and was run before. That includes the
    dispatch by the host, so each round also times an empty call, and the median of these is
    subtracted. Calls of less than 1.5 times as much are left out, because nothing is known of what
    would be left of them.

    **Arguments:**

    - `calls_on`: for each device, the same calls, with arguments on that device.
    - `seconds`: for how long to compile and to measure, but at least three rounds. Calls that are
        not compiled in half of the time are left out, if there are products and others before.
        After Ctrl-C the rounds so far count, if they are ten.
    - `progress`: whether to show a progress bar.
    - `empty`: the empty call, if it is not one of JAX.
    """
    begin, num_calls = time.perf_counter(), len(calls_on[0])
    calls_on = _compiled(calls_on, begin + seconds / 2)
    nothings = [empty or _empty(calls) for calls in calls_on]
    rounds, end, stopped = [], begin + seconds, False
    with progress_bar(None, progress, "measuring", "round") as advance, interruptible() as ended:
        while len(rounds) < _LEAST_ROUNDS or (
            time.perf_counter() < end and len(rounds) < _MOST_ROUNDS
        ):
            pairs = zip(nothings, calls_on, strict=True)
            rounds.append([[_once(nothing), *(_once(c.run) for c in cs)] for nothing, cs in pairs])
            advance(1)
            if stopped := ended.take():
                if len(rounds) < FEWEST_ROUNDS:
                    raise KeyboardInterrupt("interrupted before the tenth round.")
                break
    seconds_of = np.moveaxis(np.array(rounds), 0, -1)
    dispatch = np.median(seconds_of[:, 0], axis=-1)
    alone = seconds_of[:, 1:] - dispatch[:, None, None]
    short = np.median(alone, axis=-1) < (_SHORTEST - 1) * dispatch[:, None]
    kept = np.flatnonzero(~short.any(axis=0)).tolist()
    calls = tuple(calls_on[0][i] for i in kept)
    if len({bool(call.dtype) for call in calls}) < 2:
        raise ValueError(
            f"All products, or all calls that only move bytes, take less than {_SHORTEST:g} times "
            "as long as an empty call; give a `--job` with larger layers."
        )
    # A call that ran while its dispatch was slow is not shorter than a tenth of what was seen.
    clear = np.maximum(alone, 0.1 * seconds_of[:, 1:])[:, kept]
    return Timed(calls, clear, float(np.median(dispatch)), num_calls - len(kept), stopped)


def _compiled(calls_on: Sequence[Sequence[KernelCall]], until: float) -> list[list[KernelCall]]:
    """The calls that are compiled by then, at least one product and one other, on each device."""
    compiled: list[list[KernelCall]] = []
    for calls in zip(*calls_on, strict=True):
        kinds = {bool(calls_of_kind[0].dtype) for calls_of_kind in compiled}
        if len(kinds) == 2 and time.perf_counter() > until:
            break
        for call in calls:
            jax.block_until_ready(call.run())
        compiled.append([*calls])
    return [list(calls) for calls in zip(*compiled, strict=True)]


def calls_for(job: Job | None, devices: Sequence[Any], seconds: float) -> list[list[KernelCall]]:
    """The calls to time on each device: those of a job's kernels, or of a grid of layers, and those
    of the main memory.

    The grid begins with a width of 256, and doubles it up to 8,192 as long as ten rounds are
    expected to end in time, and half of it is left when those of a width are compiled.

    **Arguments:**

    - `job`: whose kernels have the shapes; `None` for the grid.
    - `devices`: the devices.
    - `seconds`: for how long they will be timed.
    """
    jobs, spent = [] if job is None else [job], 0.0
    begin = time.perf_counter()
    with jax.default_device(devices[0]):
        for level in range(_LEVELS if job is None else 0):
            jobs.append(grid_job(level))
            calls = calls_of(jobs[-1])
            _, last = (sum(_once(call.run) for call in calls) for _ in range(2))
            spent += last
            expected = (spent + _GROWTH * last) * FEWEST_ROUNDS * len(devices)
            if max(expected, 2 * (time.perf_counter() - begin)) > seconds:
                break
    calls_on = []
    for device in devices:
        with jax.default_device(device):
            calls_on.append(
                [*stream_calls(), *(call for job_of_grid in jobs for call in calls_of(job_of_grid))]
            )
    return calls_on


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Standard deviations of logarithms of latencies.

    **Attributes:**

    - `residual`: of each call by itself, for each kind of kernel.
    - `step`: of what all calls of a round have in common.
    - `autocorrelation`: of that in consecutive rounds.
    - `rank`: between devices; `None` if there is only one.
    """

    residual: dict[str, float]
    step: float
    autocorrelation: float
    rank: float | None = None

    @property
    def autocorrelation_time(self) -> float:
        r"""After how many rounds they are as good as new: $(1 + \rho) / (1 - \rho)$."""
        return (1 + self.autocorrelation) / (1 - self.autocorrelation)


def split_scatter(
    seconds: Float[np.ndarray, "devices calls rounds"], kinds: Sequence[str]
) -> Scatter:
    r"""Splits the scatter by the method of moments, for $\log t_{dcr} = m_c + u_d + s_{dr} +
    e_{dcr}$.

    Every second call of a round is in one half, and the others in the other. The times of the two
    halves over their means, $a_r$ and $b_r$, have only the moment in common, so
    $\exp(\sigma_s^2) - 1 = \mathrm{cov}(a_r, b_r)$, and its autocovariance is
    $\mathrm{cov}(a_r, b_{r+1})$. A call has $\sigma_e^2 = \mathrm{var}(\log t) - \sigma_s^2$;
    those of a kind count with the square of their latency, as they do in the variance of a step.
    Means of devices over the rounds vary by $\sigma_u^2$, and by what of the moments a mean over
    rounds leaves.

    A pause that is longer than a call but shorter than a round counts for the moment, because
    neighbouring calls are in different halves.

    **Arguments:**

    - `seconds`: latencies; at least two calls and three rounds.
    - `kinds`: the kind of kernel of each call.
    """
    rounds, means = seconds.shape[2], seconds.mean((0, 2))
    spread = np.var(np.log(seconds), axis=2, ddof=1).mean(0)
    halves = [seconds[:, start::2].sum(1) for start in (0, 1)]
    a, b = (half / half.mean(1, keepdims=True) - 1 for half in halves)
    common = max(float(np.mean(np.sum(a * b, axis=1) / (rounds - 1))), 0.0)
    beside = (a[:, :-1] * b[:, 1:] + b[:, :-1] * a[:, 1:]) / 2
    shared = float(np.mean(np.sum(beside, axis=1) / (rounds - 1)))
    correlation = min(max(shared / common, 0.0), _MOST_CORRELATED) if common else 0.0
    step, residual = math.log1p(common), {}
    for kind in dict.fromkeys(kinds):
        weights = means**2 * [of_call == kind for of_call in kinds]
        residual[kind] = math.sqrt(max(float(np.average(spread, weights=weights)) - step, 0.0))
    scatter = Scatter(residual, math.sqrt(step), correlation)
    if len(seconds) == 1:
        return scatter
    total = np.log(seconds.sum(1))
    unexplained = np.var(total, axis=1, ddof=1).mean() / rounds * scatter.autocorrelation_time
    between = float(np.var(total.mean(1), ddof=1) - unexplained)
    return dataclasses.replace(scatter, rank=math.sqrt(max(between, 0.0)))


def _once(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _empty(calls: Sequence[KernelCall]) -> Callable[[], object]:
    """A call that does nothing, on the device of others."""
    (device,) = jax.tree.leaves(calls[0].run())[0].devices()
    nothing, on = jax.jit(lambda x: x + 1), jax.device_put(jnp.zeros(1, jnp.int32), device)
    jax.block_until_ready(nothing(on))
    return lambda: nothing(on)
