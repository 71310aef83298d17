"""Where the time of a rank's steps goes: compute, communication and what of it is exposed, phases,
collectives, and why the device is idle.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from .._misc import plural
from ._rank_ops import RankOps
from ._spans import LEAST_CALL_NS, OPTIMIZE, PHASES, Kind, Spans
from ._steps import NO_STEP, Steps, whole_recording
from ._trace import COMPUTE, INPUT
from ._work import COMPUTES, COPIES, TALKS, Work, covered, covered_seconds, union


# Exchanges between two stages wait for these; compute cannot hide them.
_NEVER_HIDDEN = ("send", "recv", "send_recv", "barrier")
# The bytes of elements; others have four.
_SIZES = {8: ("double", "long", "long int", "int64"), 1: ("bool", "byte", "char", "int8")}
_SIZES |= {2: ("bfloat16", "half", "float16", "short")}
_BYTES: dict[str, int] = {name: size for size, names in _SIZES.items() for name in names}
_MOST_REGIONS = 100
# What kernels do, as predictions name it, by a part of their names; the first that matches.
_KINDS = tuple(
    (re.compile(text, re.IGNORECASE), kind)
    for text, kind in (
        (r"flash|fmha|attention|_attn|sdpa", "attention"),
        (r"gemm|nvjet|cutlass|cublas|xmma|matmul|Cijk_|wgmma|conv\d?d?|[dw]grad|\bdot", "gemm"),
        (r"adam|sgd|optimizer", "optimizer"),
        (r"norm", "norm"),
        (r"softmax|cross_entropy|nll_loss", "loss"),
        (r"embedding|index|gather|scatter", "embedding"),
        (
            r"reduce|copy|cat|fill|memset|elementwise|multi_tensor|_poi_|_red_|pointwise|fusion",
            "elementwise",
        ),
    )
)


@dataclasses.dataclass(frozen=True)
class StepSplit:
    """The parts of a step in seconds: in which the device computes, in which it communicates, in
    which it only communicates (copies aside), and in which it does nothing.
    """

    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind and size in one process group, in a step.

    **Attributes:**

    - `kind`: such as `all_reduce`, or `unknown`.
    - `group`, `ranks`: the process group, and how many ranks it has, if these are known.
    - `size`: how many elements a rank puts into each, if that is known.
    - `calls`, `bytes`: how many there are, and the bytes that a rank puts into all of them.
    - `seconds`, `exposed_s`: how long they run, and how long of this without compute beside them.
    """

    kind: str
    group: str | None
    ranks: int | None
    size: int | None
    calls: float
    bytes: float | None
    seconds: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class Idle:
    """Seconds of a step in which the device is idle: because `launches` came late, the host waited
    for its `input` or within a call of this name, or for a reason of the `device`; `unknown`
    where launches were not recorded.
    """

    cause: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Region:
    """The kernels that a named region of a program launches in a step: a module, or what a compiler
    made.
    """

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class RankWhere:
    """Where the time of the steps of a rank goes: medians over its steps, in seconds.

    **Attributes:**

    - `rank`: its number.
    - `step_numbers`, `step_times_s`, `step_time_s`: its steps on the device, and their median.
    - `step_cv`: their coefficient of variation, of four steps or more.
    - `split`, `collectives`, `idle`: see these.
    - `copies_s`: what remains of a step beside the parts of `split`, in which it only copies.
    - `own_s`: the forwards and backwards, or the whole step if no names tell these, without the
        time in which the rank only communicates. Barriers make the steps of all ranks equally long,
        but not this: the rank that the others wait for has the longest.
    - `hideable_s`: the collectives that could overlap with compute, and their part that does not.
    - `phases`: seconds of kernels that are the forward, the backward, the optimizer, and copies; or
        `None` if phases are not known.
    - `kinds`: seconds of kernels that compute, by what they do, such as `gemm` or `attention`;
        those of the phase of the optimizer are `optimizer`.
    - `regions`: the seconds of kernels of modules and compiled regions.
    - `warm_up`: how many first steps were left out.
    """

    rank: int
    step_numbers: tuple[int, ...]
    step_times_s: tuple[float, ...]
    step_time_s: float
    step_cv: float | None
    split: StepSplit | None
    copies_s: float
    own_s: float
    hideable_s: tuple[float, float]
    phases: dict[str, float] | None
    collectives: tuple[Collective, ...]
    idle: tuple[Idle, ...]
    kinds: dict[str, float]
    regions: tuple[Region, ...]
    warm_up: int


def rank_where(ops: RankOps, spans: Spans, work: Work) -> RankWhere:
    """Where the time of a rank's steps goes; without steps, that of the whole recording."""
    steps, rank = ops.steps, ops.rank
    times, numbers = steps.seconds, tuple(steps.number.tolist())
    if not len(steps) and len(work.start):
        steps = whole_recording(work)
    if not len(steps):
        nothing = (None, None, 0.0, 0.0, (0.0, 0.0), None, (), (), {}, ())
        return RankWhere(rank, (), (), 0.0, *nothing, steps.warm_up)
    seconds = steps.seconds
    cover = _Cover(work)
    covers = (cover.computes, cover.talks, cover.either, cover.busy)
    computes, talks, either, busy = (covered_seconds(x, steps.start, steps.end) for x in covers)
    shares = (computes, talks, either - computes, seconds - busy)
    never = np.array([message.name in _NEVER_HIDDEN for message in work.messages] or [False])
    hideable = (work.activity == TALKS) & ~never[work.message]
    hiding, with_compute = (
        covered_seconds(covered(work.start[chosen], work.end[chosen]), steps.start, steps.end)
        for chosen in (hideable, hideable | (work.activity == COMPUTES))
    )
    passes = [(op.step, op.start, op.end) for op in ops.ops if op.op in COMPUTE]
    whole = np.stack([steps.number, steps.start, steps.end], axis=1)
    of_step, *parts = np.array(passes or whole, np.int64).reshape(-1, 3).T
    own_s = (parts[1] - parts[0]) * 1e-9 - covered_seconds(cover.either, *parts)
    own_s = np.bincount(
        np.searchsorted(steps.number, of_step),
        own_s + covered_seconds(cover.computes, *parts),
        len(steps),
    )
    cv = float(times.std() / times.mean()) if len(times) >= 4 else None
    place = steps.of_kernels(work)
    lasts = (work.end - work.start) * 1e-9

    def median(chosen: Bool[np.ndarray, " kernels"]) -> float:
        chosen = chosen & (place >= 0)
        return float(np.median(np.bincount(place[chosen], lasts[chosen], len(steps))))

    computing, phases = work.activity == COMPUTES, None
    if work.phases_known:
        phases = {name: median(computing & (work.phase == i)) for i, name in enumerate(PHASES)}
        phases["copies"] = median(work.activity == COPIES)
    by_name = np.array([kind_of(name) for name in spans.names] or [""])
    by_kernel = np.where(work.phase == OPTIMIZE, "optimizer", by_name[work.name])
    kinds = {
        kind: median(computing & (by_kernel == kind)) for kind in {*by_kernel[computing].tolist()}
    }
    return RankWhere(
        rank,
        numbers,
        tuple(times.tolist()),
        float(np.median(times)) if len(times) else 0.0,
        cv,
        StepSplit(*(float(np.median(x)) for x in shares)),
        float(np.median(busy - either)),
        float(np.median(own_s)),
        (float(np.median(hiding)), float(np.median(with_compute - computes))),
        phases,
        _collectives(work, cover, place, len(steps)),
        tuple(Idle(*pair) for pair in _idle(spans, work, steps).items()) if work.on_device else (),
        dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
        _regions(spans, work, place, len(steps)),
        steps.warm_up,
    )


def kind_of(name: str) -> str:
    """What a kernel of this name does."""
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), "other")


class _Cover:
    """How many nanoseconds before a time a device does either, both, or anything at all."""

    def __init__(self, work: Work):
        masks = (
            work.activity == COMPUTES,
            work.activity == TALKS,
            work.activity != COPIES,
            work.activity >= 0,
        )
        covers = (covered(work.start[mask], work.end[mask]) for mask in masks)
        self.computes, self.talks, self.either, self.busy = covers


def _collectives(
    work: Work, cover: _Cover, place: Int[np.ndarray, " kernels"], number: int
) -> tuple[Collective, ...]:
    talks = np.flatnonzero((work.activity == TALKS) & (place >= 0))
    lasts = (work.end[talks] - work.start[talks]) * 1e-9
    exposed = lasts - covered_seconds(cover.computes, work.start[talks], work.end[talks])
    alike = collections.defaultdict[tuple, list[int]](list)
    for i, message in enumerate(work.message[talks].tolist()):
        kind, group, ranks, size, dtype = work.messages[message]
        alike[kind, group or None, ranks or None, size or None, _size_of(dtype)].append(i)
    collectives = []
    for (kind, group, ranks, size, element), chosen in alike.items():
        sums = [np.bincount(place[talks[chosen]], x[chosen], number) for x in (lasts, exposed)]
        # Of a kind that most steps do not have, the mean.
        seconds, bare = (float(np.median(x) if np.median(sums[0]) else x.mean()) for x in sums)
        calls = len(chosen) / number
        total = size and calls * size * element
        collectives.append(Collective(kind, group, ranks, size, calls, total, seconds, bare))
    return tuple(sorted(collectives, key=lambda collective: -collective.seconds))


def _size_of(dtype: str) -> int:
    """The bytes of an element; four if the type is not known, and one for those of eight bits."""
    name = dtype.lower().removeprefix("c10::")
    is_byte = name.startswith(("float8", "uint8", "unsigned char", "signed char"))
    return _BYTES.get(name, 1 if is_byte else 4)


def _idle(spans: Spans, work: Work, steps: Steps) -> dict[str, float]:
    """The idle seconds of a step by their cause. If the kernel after a gap was launched before it,
    the device has one. Else the host was late: in the driver's calls, waiting for input, or
    launching. If its launch was not recorded, the cause is not known.
    """
    until, ends = union(work.start, work.end)
    begin = np.append(-(2**62), ends[:-1])  # Gaps, each up to a kernel.
    order = np.argsort(work.start, kind="stable")
    after = order[np.searchsorted(work.start[order], until)]
    # The parts of gaps in steps, of which some gaps have two.
    edges = np.sort(np.concatenate([begin, until, steps.start, steps.end]))
    low, high = edges[:-1], edges[1:]
    of_gap = np.searchsorted(begin, low, "right") - 1
    of_step = np.searchsorted(steps.start, low, "right") - 1
    inside = (of_step >= 0) & (low < steps.end[of_step]) & (low < until[of_gap])
    low, high, of_step, of_gap = low[inside], high[inside], of_step[inside], of_gap[inside]
    launched, joined = work.launched[after[of_gap]], work.joined[after[of_gap]]
    is_late = joined & (launched > begin[of_gap])

    def of_steps(seconds: np.ndarray) -> np.ndarray:
        return np.bincount(of_step, seconds, len(steps))

    # In a gap whose kernel was launched within it the host was late until then.
    late, lasts = np.clip(launched, low, high), (high - low) * 1e-9
    of_host = (spans.kind == Kind.CALL) & np.isin(spans.lane, np.unique(work.lane))
    calls = spans[of_host & (spans.end - spans.start >= LEAST_CALL_NS)]
    is_input = spans.named(lambda name: bool(INPUT.fullmatch(name)))
    causes = {spans.names[i]: calls[calls.name == i] for i in np.unique(calls.name).tolist()}
    causes["input"] = spans[(spans.kind == Kind.RANGE) & is_input]
    # What two causes cover counts as the first.
    idle, bounds, before = {}, np.zeros((2, 0), np.int64), np.zeros(len(steps))
    for cause, of_cause in causes.items():
        bounds = np.append(bounds, [of_cause.start, of_cause.end], axis=1)
        sums = of_steps(covered_seconds(covered(*bounds), low, late) * is_late)
        idle[cause], before = sums - before, sums
    idle["launches"] = of_steps(lasts * is_late) - before
    idle |= {"device": of_steps(lasts * (joined & ~is_late)), "unknown": of_steps(lasts * ~joined)}
    medians = {cause.split("_v")[0]: float(np.median(x)) for cause, x in idle.items()}
    return dict(sorted(((c, x) for c, x in medians.items() if x > 0), key=lambda pair: -pair[1]))


def _regions(
    spans: Spans, work: Work, place: Int[np.ndarray, " kernels"], number: int
) -> tuple[Region, ...]:
    """The seconds of kernels of modules and compiled regions, in a step."""
    prefixes = ("nn.Module: ", "## Call Compiled", "Torch-Compiled Region", "FSDP", "CompiledF")
    chosen = spans[spans.named(lambda name: name.startswith(prefixes))]
    seconds_of = collections.defaultdict[str, float](float)
    for lane in np.unique(chosen.lane).tolist():
        of_lane = (work.lane == lane) & (place >= 0)
        sums = np.append(0, np.cumsum((work.end - work.start)[of_lane] * 1e-9))
        regions = chosen[chosen.lane == lane]
        low, high = (
            np.searchsorted(work.launched[of_lane], x) for x in (regions.start, regions.end)
        )
        lasts = (sums[high] - sums[low]).tolist()
        for name, seconds in zip(regions.name.tolist(), lasts, strict=True):
            seconds_of[spans.names[name]] += seconds / number
    pairs = sorted(((n, s) for n, s in seconds_of.items() if s > 0), key=lambda pair: -pair[1])
    return tuple(Region(*pair) for pair in pairs[:_MOST_REGIONS])


def median_step_times(ranks: Sequence[RankWhere]) -> Float[np.ndarray, " steps"]:
    """How long each step takes on the median rank, in seconds, of the steps that all ranks have.

    **Raises:**

    `ValueError` if they have no step in common.
    """
    common = sorted(set[int].intersection(*({*rank.step_numbers} for rank in ranks)))
    if not common:
        if len(ranks) == 1:
            raise ValueError(NO_STEP)
        raise ValueError(
            f"The {plural(len(ranks), 'traced rank')} have no step in common; record the same "
            "steps on all ranks, each in a range such as `ProfilerStep#7`."
        )
    seconds = [dict(zip(rank.step_numbers, rank.step_times_s, strict=True)) for rank in ranks]
    rows = [[of_rank[number] for number in common] for of_rank in seconds]
    return np.sort(rows, axis=0)[(len(rows) - 1) // 2]
