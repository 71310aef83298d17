"""Reads Chakra execution traces (mlcommons/chakra, `schema/protobuf/et_def.proto`), one per rank.

A trace is `GlobalMetadata` followed by nodes: either as protocol buffers, each preceded by its
length (`.et`), or as the JSON that Chakra writes. Field numbers are those of schema version 0.0.4.
"""

import collections
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from .._files import check_file, read_file, shown
from .._misc import counted
from ._collective_names import collective_of
from ._kineto import NODE, UNITS
from ._protobuf import WireError, fields, messages, real, signed, whole_numbers
from ._spans import BACKWARD, HOST_OP, KERNEL, LAUNCH, RANGE, Message, RankTrace, SpanList


_MOST_BYTES = 2**40
_MOST_OF_JSON = 2**31  # It is read at once.
_MOST_OF_A_NODE = 2**26
_TYPES = (
    *("INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE"),
    *("COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE"),
)
_COLLECTIVES = (
    *("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all"),
    *("reduce_scatter", "reduce_scatter", "barrier"),
)


@dataclasses.dataclass
class _Node:
    """A node, with the times of the file."""

    id: int = -1
    name: str = ""
    type: str = _TYPES[0]
    before: list[int] = dataclasses.field(default_factory=list)
    start: float = 0
    duration: float = 0
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_chakra(path: str | os.PathLike[str], *, time_unit: str | None = None) -> RankTrace:
    """Reads a Chakra execution trace whose nodes have times, such as one from a profiler.

    Nodes with the attribute `is_cpu_op` are operators of the host, or ranges if their name has no
    `::`. All other nodes ran on the device and were launched by the host node on which they depend.
    A node on which no other node depends is an op by itself, with its name.

    **Arguments:**

    - `path`: an `.et` file or a JSON file.
    - `time_unit`: the unit of `start_time_micros` and `duration_micros`, if not microseconds.

    **Raises:**

    `ValueError` for a file that cannot be read, ends early, is not such a trace or has no times.
    """
    spans, events = SpanList(), collections.Counter()
    nodes, rank, world_size = [], None, None
    for node in _nodes(path):
        if not node.name and node.type == _TYPES[0]:  # The metadata.
            rank = node.attributes.get("rank", rank)
            world_size = node.attributes.get("world_size", world_size)
        else:
            nodes.append(node)
            events[node.type] += 1
    if not nodes:
        raise ValueError(f"{shown(path)}: it has no nodes; give a Chakra execution trace.")
    if not any(node.duration > 0 for node in nodes):
        raise ValueError(
            f"{shown(path)}: none of its {counted(len(nodes), 'node')} has a duration, so no "
            "latency is known; link it with a profiler's trace first."
        )
    _add_spans(spans, nodes, UNITS[time_unit or "us"], path)
    return RankTrace(
        os.fspath(path),
        rank if isinstance(rank, int) else None,
        world_size if isinstance(world_size, int) else None,
        "",
        spans.spans(),
        dict(events),
        os.path.getsize(path),
        (),
    )


def _add_spans(
    spans: SpanList, nodes: list[_Node], unit: int, path: str | os.PathLike[str]
) -> None:
    times = {}
    for node in nodes:
        start, end = round(node.start * unit), round((node.start + node.duration) * unit)
        if not 0 <= start <= end < 2**63:
            raise ValueError(
                f"{shown(path)}: node {node.id} starts at {node.start:g} and takes "
                f"{node.duration:g}, which is beyond any clock; correct the trace."
            )
        if node.attributes.get("is_cpu_op") and node.duration > 0:
            times[node.id] = start, end
    for number, node in enumerate(nodes):
        if node.duration <= 0 or node.type == "METADATA_NODE":
            continue
        start, end = round(node.start * unit), round((node.start + node.duration) * unit)
        lane = str(node.attributes.get("stream", node.attributes.get("tid", "")))
        if node.attributes.get("is_cpu_op"):
            operator = BACKWARD if node.name.startswith(NODE) else HOST_OP
            kind = operator if "::" in node.name else RANGE
            spans.add(kind, start, end, node.name, f"host {lane}")
            continue
        launches = [times[parent] for parent in node.before if parent in times]
        if launches:
            launch, message = max(launches), _message(node)
            spans.add(LAUNCH, launch[0], launch[1], "launch", "host", number)
        else:  # An op by itself may be a collective too.
            message = _message(node)
            spans.add(RANGE, start, max(end, start + 1), node.name, "host")
            spans.add(LAUNCH, start, start, "launch", "host", number)
        spans.add(KERNEL, start, end, node.name, lane, number, message)


def _message(node: _Node) -> Message | None:
    """The message of a communication node."""
    if not node.type.startswith("COMM_"):
        return None
    a = node.attributes
    kind = a.get("comm_type", node.name)
    if node.type != "COMM_COLL_NODE":
        name = "send" if node.type == "COMM_SEND_NODE" else "recv"
    elif isinstance(kind, int):
        name = _COLLECTIVES[kind] if 0 <= kind < len(_COLLECTIVES) else node.name
    else:
        name = collective_of(str(kind))
    size = a.get("comm_size", 0)
    group = a.get("pg_name", a.get("comm_group", ""))
    return Message(name, str(group), 0, size if isinstance(size, int) else 0)


def _nodes(path: str | os.PathLike[str]) -> Iterator[_Node]:
    """The nodes of a file, including the metadata."""
    try:
        check_file(path, _MOST_BYTES)
        if os.fspath(path).endswith(".json"):
            yield from _nodes_of_json(path)
            return
        with open(path, "rb") as file:
            for number, message in enumerate(messages(file, _MOST_OF_A_NODE)):
                yield _node(message) if number else _metadata(message)
    except FileNotFoundError:
        raise ValueError(f"{shown(path)}: there is no such file; give another.") from None
    except OSError as error:
        raise ValueError(
            f"{shown(path)}: it cannot be read ({error.strerror}); give another file."
        ) from None
    except EOFError:
        raise ValueError(
            f"{shown(path)}: it ends within a node; copy or record the trace again."
        ) from None
    except (WireError, UnicodeDecodeError, TypeError, AttributeError):
        raise ValueError(
            f"{shown(path)}: this is not a Chakra execution trace; give an `.et` file, or the JSON "
            "that Chakra makes from one."
        ) from None


def _metadata(message: bytes) -> _Node:
    attributes = (value for number, _, value in fields(message) if number == 2)
    return _Node(attributes=dict(_attribute(value) for value in attributes))  # pyright: ignore


def _node(message: bytes) -> _Node:
    node = _Node()
    for number, wire, value in fields(message):
        if number in (1, 3, 6, 7) and wire == 0:
            if number == 3:
                node.type = _TYPES[value] if value < len(_TYPES) else f"type {value}"  # pyright: ignore
            else:
                setattr(node, {1: "id", 6: "start", 7: "duration"}[number], value)
        elif number == 2:
            node.name = value.decode()  # pyright: ignore
        elif number in (4, 5):
            node.before += [value] if wire == 0 else whole_numbers(value)  # pyright: ignore
        elif number == 10:
            name, found = _attribute(value)  # pyright: ignore
            node.attributes[name] = found
    return node


def _attribute(message: bytes) -> tuple[str, Any]:
    """The name and the value of an attribute. Lists are not needed here."""
    name, found = "", None
    for number, wire, value in fields(message):
        if number == 1:
            name = value.decode()  # pyright: ignore
        elif number == 27:
            found = bool(value)
        elif number == 29:
            found = value.decode()  # pyright: ignore
        elif number in (15, 17):  # Zigzag.
            found = (value >> 1) ^ -(value & 1)  # pyright: ignore
        elif wire == 0 and number > 2:
            found = signed(value)  # pyright: ignore
        elif number in (3, 5):
            found = real(value)  # pyright: ignore
        elif wire in (1, 5):
            found = int.from_bytes(value, "little")  # pyright: ignore
    return name, found


def _nodes_of_json(path: str | os.PathLike[str]) -> Iterator[_Node]:
    """Consecutive objects, as Chakra writes them, or one object with a list of `nodes`."""
    text = read_file(path, _MOST_OF_JSON).decode().strip()
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        try:
            found, place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError):
            if place == 0 and not text.startswith(("{", "[")):
                raise WireError from None
            raise EOFError from None
        while place < len(text) and text[place].isspace():
            place += 1
        nodes = found if isinstance(found, list) else found.get("nodes", [found])
        if "traceEvents" in found:
            raise WireError
        for node in nodes:
            yield _node_of_table(node)


def _node_of_table(table: dict[str, Any]) -> _Node:
    def get(*names: str, otherwise: Any = 0) -> Any:
        return next((table[name] for name in names if name in table), otherwise)

    kind = get("type", otherwise=_TYPES[0])
    attributes = {}
    for a in get("attr", "attrs", otherwise=[]):
        values = [value for key, value in a.items() if key not in _NO_VALUES]
        attributes[a.get("name", "")] = _plain(values[0]) if values else None
    before = [
        *get("ctrlDeps", "ctrl_deps", otherwise=[]),
        *get("dataDeps", "data_deps", otherwise=[]),
    ]
    try:
        return _Node(
            int(get("id", otherwise=-1)),
            str(get("name", otherwise="")),
            _TYPES[kind] if isinstance(kind, int) else str(kind),
            [int(x) for x in before],
            float(get("startTimeMicros", "start_time_micros")),
            float(get("durationMicros", "duration_micros")),
            attributes,
        )
    except (ValueError, IndexError):
        raise WireError from None


_NO_VALUES = ("name", "docString", "doc_string", "type")


def _plain(value: Any) -> Any:
    """A value in which 64-bit integers, which are strings in JSON, are numbers."""
    return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value
