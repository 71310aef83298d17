"""The spans of one rank, from any profiler."""

import array
import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int


# Kinds of spans.
RANGE = 0  # A range that a program has named: `record_function`, NVTX.
KERNEL = 1  # Work of a device: a kernel, a copy, a collective.
LAUNCH = 2  # The host's call that launched such work.
HOST_OP = 3  # An operator on the host; used as a kernel if there is no device.
BACKWARD = 4  # A node of autograd on the host.
MESSAGE = 5  # The host's call of a collective.


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

    - `kind`: one of the constants above.
    - `start`, `end`: on the clock of the rank.
    - `name`, `lane`, `message`: indices of `names`, of `lanes` (threads and streams), and of
        `messages`, or -1.
    - `link`: an id that a kernel shares with its launch, or -1.
    - `sequence`: the number of a collective within its group, or -1.
    """

    kind: Int[np.ndarray, " spans"]
    start: Int[np.ndarray, " spans"]
    end: Int[np.ndarray, " spans"]
    name: Int[np.ndarray, " spans"]
    lane: Int[np.ndarray, " spans"]
    link: Int[np.ndarray, " spans"]
    message: Int[np.ndarray, " spans"]
    sequence: Int[np.ndarray, " spans"]
    names: tuple[str, ...]
    lanes: tuple[str, ...]
    messages: tuple[Message, ...]

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, chosen: Bool[np.ndarray, " spans"] | Int[np.ndarray, " chosen"]):
        """Some of the spans."""
        return dataclasses.replace(self, **{c: getattr(self, c)[chosen] for c in _COLUMNS})

    def moved(self, offset: int) -> "Spans":
        """The same spans, `offset` nanoseconds later."""
        return dataclasses.replace(self, start=self.start + offset, end=self.end + offset)

    def texts(self) -> list[str]:
        """The name of each span."""
        return [self.names[i] for i in self.name.tolist()]


_COLUMNS = {
    "kind": "b",
    "start": "q",
    "end": "q",
    "name": "i",
    "lane": "i",
    "link": "q",
    "message": "i",
    "sequence": "q",
}


_NONE = np.zeros(0, np.int32)


class SpanList:
    """Spans that are being read, in little memory."""

    def __init__(self):
        self._columns = {name: array.array(code) for name, code in _COLUMNS.items()}
        self._appends = tuple(column.append for column in self._columns.values())
        self._names: dict[str, int] = {}
        self._lanes: dict[str, int] = {}
        self._messages: dict[Message, int] = {}

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
    ) -> None:
        row = (
            kind,
            start,
            end,
            self._names.setdefault(name, len(self._names)),
            self._lanes.setdefault(lane, len(self._lanes)),
            link,
            -1 if message is None else self._messages.setdefault(message, len(self._messages)),
            sequence,
        )
        for append, value in zip(self._appends, row, strict=True):
            append(value)

    def spans(self) -> Spans:
        columns = {
            name: np.frombuffer(column, np.dtype(f"i{column.itemsize}")) if column else _NONE
            for name, column in self._columns.items()
        }
        return Spans(
            **columns,
            names=tuple(self._names),
            lanes=tuple(self._lanes),
            messages=tuple(self._messages),
        )


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """The trace of a profiler on one rank.

    **Attributes:**

    - `path`: the file.
    - `rank`, `world_size`, `host`: the rank, the number of ranks and the host, as far as they are
        known.
    - `spans`: the spans.
    - `events`: how many events of each category the file has, including those that are not used.
    - `size`: the bytes of the file's text, or of the file.
    - `notes`: warnings for readers.
    - `cut`: whether the file ends early.
    """

    path: str
    rank: int | None
    world_size: int | None
    host: str
    spans: Spans
    events: dict[str, int]
    size: int
    notes: tuple[str, ...]
    cut: bool = False
