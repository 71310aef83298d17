"""The spans of one rank, which all readers of profiles yield, and the ops that are among them."""

import array
import collections
import dataclasses
import enum
import itertools as it
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int


class Kind(enum.IntEnum):
    """What a span is."""

    RANGE = 0  # A range that a program has named: `record_function`, NVTX.
    KERNEL = 1  # Work of a device: a kernel, a copy, a collective.
    LAUNCH = 2  # The host's call that launched such work.
    HOST_OP = 3  # An operator on the host; used as a kernel if there is no device.
    BACKWARD = 4  # A node of autograd on the host.
    MESSAGE = 5  # The host's call of a collective.
    CALL = 6  # Another call of the host to the driver, which may block it.
    ARROW = 7  # From the start of an operator to that of its node of autograd.

    @classmethod
    def on_host(cls, name: str, is_range: bool) -> "Kind":
        """The kind of what the host ran under a name."""
        if _AUTOGRAD_NODE.match(name):
            return cls.BACKWARD
        return cls.RANGE if is_range else cls.HOST_OP


PHASES = ("forward", "backward", "optimizer")
FORWARD, BACKWARD, OPTIMIZE = range(3)
# Shorter calls of the host to its driver are not told apart from what is between them.
LEAST_CALL_NS = 50_000
# Units of time in nanoseconds.
UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
# A time of so many nanoseconds is in the year 2116; the difference of two fits into 64 bits.
MOST_NS = 2**62
# Names of its nodes; PyTorch before 1.10 has only those of their functions.
_AUTOGRAD_NODE = re.compile(r"autograd::engine::evaluate_function|\w+Backward\d*$")
# Operators of the host that wait for others.
_WAITING = ("c10d::", "_c10d_functional::", "record_param_comms")

# In the order of a search: longer names first. NCCL, PyTorch and gloo use them in their names.
COLLECTIVES = (
    *("reduce_scatter", "all_reduce", "all_gather", "all_to_all", "send_recv", "broadcast"),
    *("barrier", "gather", "scatter", "reduce", "send", "recv"),
)

_COPY = re.compile(
    r"(?:cuda|hip)?memcpy|copy(?:host|device)|copy-(?:start|done)|async-copy", re.IGNORECASE
)


def is_copy(name: str) -> bool:
    """Whether a kernel of this name copies between memories."""
    return _COPY.match(name) is not None


def collective_of(name: str) -> str:
    """`all_reduce` for `allreduce_coalesced`, and so on; the name itself for what is unknown."""
    plain = re.sub("[-_]", "", name.lower())
    return next((known for known in COLLECTIVES if known.replace("_", "") in plain), name)


class Message(NamedTuple):
    """A collective, as one rank knows it.

    **Attributes:**

    - `name`: its name in this package, such as `all_reduce`, or else the name in the profile.
    - `group`: the process group.
    - `members`: how many ranks the group has; 0 if it is not known.
    - `size`: how many elements a rank contributes.
    - `dtype`: the dtype of the elements.
    """

    name: str
    group: str = ""
    members: int = 0
    size: int = 0
    dtype: str = ""


@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of time of one rank, with a column for each property. Times are in nanoseconds.

    **Attributes:**

    - `kind`: a `Kind`.
    - `start`, `end`: on the clock of the rank.
    - `name`, `message`: indices of `names` and of `messages`, or -1.
    - `lane`: the number of the thread or stream.
    - `link`: an id that a kernel shares with its launch, or -1.
    - `sequence`: the number of a collective within its group, or -1.
    - `phase`: an index of `PHASES`, if a kernel says it by itself, or -1.
    """

    kind: Int[np.ndarray, " spans"]
    start: Int[np.ndarray, " spans"]
    end: Int[np.ndarray, " spans"]
    name: Int[np.ndarray, " spans"]
    lane: Int[np.ndarray, " spans"]
    link: Int[np.ndarray, " spans"]
    message: Int[np.ndarray, " spans"]
    sequence: Int[np.ndarray, " spans"]
    phase: Int[np.ndarray, " spans"]
    names: tuple[str, ...]
    messages: tuple[Message, ...]

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(
        self, chosen: Bool[np.ndarray, " spans"] | Int[np.ndarray, " chosen"]
    ) -> "Spans":
        """Some of the spans."""
        return dataclasses.replace(self, **{c: getattr(self, c)[chosen] for c in _COLUMNS})

    def named(self, holds: Callable[[str], bool]) -> Bool[np.ndarray, " spans"]:
        """Which spans have a name for which something holds."""
        return np.array([holds(name) for name in self.names] or [False])[self.name]

    def waits(self) -> Bool[np.ndarray, " spans"]:
        """Which spans wait for other ranks, by their names."""
        return self.named(lambda name: name.startswith(_WAITING))


# The columns, with their types in an `array`.
_COLUMNS = {"kind": "b", "start": "q", "end": "q", "name": "i", "lane": "i", "link": "q"}
_COLUMNS |= {"message": "i", "sequence": "q", "phase": "b"}


class SpanList:
    """Spans that are being read, in little memory."""

    def __init__(self):
        self._columns = {name: array.array(code) for name, code in _COLUMNS.items()}
        self._appends = tuple(column.append for column in self._columns.values())
        # Each new key gets the next number.
        self._names = collections.defaultdict[str, int](it.count().__next__)
        self._lanes = collections.defaultdict[str, int](it.count().__next__)
        self._messages = collections.defaultdict[Message, int](it.count().__next__)

    def add(
        self,
        kind: int,
        start: int,
        end: int,
        name: str,
        lane: str,
        link: int = -1,
        message: Message | None = None,
        sequence: int = -1,
        phase: int = -1,
    ) -> None:
        """Adds a span.

        **Raises:**

        `OverflowError` for times beyond any clock, and for a span that ends before it starts;
        `TypeError` for numbers that are not whole.
        """
        if not -MOST_NS <= start <= end <= MOST_NS:
            raise OverflowError
        number = -1 if message is None else self._messages[message]
        row = (kind, start, end, self._names[name], self._lanes[lane])
        row += (link, number, sequence, phase)
        for append, value in zip(self._appends, row, strict=True):
            append(value)

    def spans(self) -> Spans:
        columns = {
            name: np.frombuffer(column, f"i{column.itemsize}") if column else np.zeros(0, np.int32)
            for name, column in self._columns.items()
        }
        return Spans(**columns, names=tuple(self._names), messages=tuple(self._messages))


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """The trace of a profiler on one rank.

    **Attributes:**

    - `spans`: the spans.
    - `events`: how many events of each category the file has, including those that are not used.
    - `size`: the bytes of the file's text, or of the file.
    - `rank`, `world_size`, `host`: the rank, the number of ranks as the file has it, and the host,
        as far as they are known.
    - `notes`: warnings for readers.
    - `cut`: whether the file ends early.
    """

    spans: Spans
    events: dict[str, int]
    size: int
    rank: int | None = None
    world_size: Any = None
    host: str = ""
    notes: tuple[str, ...] = ()
    cut: bool = False


@dataclasses.dataclass(frozen=True)
class RankOp:
    """One op of one rank; times in nanoseconds. `microbatch` and `stage` are -1 if names do not
    give them.
    """

    step: int
    op: str
    microbatch: int
    stage: int
    start: int
    end: int
