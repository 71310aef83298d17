"""Reads Chakra execution traces (mlcommons/chakra, `schema/protobuf/et_def.proto`), one per rank.

A trace is `GlobalMetadata` followed by nodes: either as protocol buffers, each preceded by its
length (`.et`), or as the JSON that Chakra writes. Field numbers are those of schema version 0.0.4.
"""

import collections
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from .._installed import needed
from .._misc import plural
from ._json_array import check_times
from ._protobuf import message_classes
from ._spans import MOST_NS, UNITS, Kind, Message, RankTrace, SpanList, collective_of


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
# The fields of each message that are read. An attribute's values that are lists or bytes are not.
_SCHEMA = {
    "Attribute": """
        string name 1, double double_val 3, float float_val 5, int32 int32_val 7, int64 int64_val 9,
        uint32 uint32_val 11, uint64 uint64_val 13, sint32 sint32_val 15, sint64 sint64_val 17,
        fixed32 fixed32_val 19, fixed64 fixed64_val 21, sfixed32 sfixed32_val 23,
        sfixed64 sfixed64_val 25, bool bool_val 27, string string_val 29""",
    "Metadata": "Attribute* attr 2",
    "Node": """
        uint64 id 1, string name 2, uint64 type 3, uint64* ctrl_deps 4, uint64* data_deps 5,
        uint64 start_time_micros 6, uint64 duration_micros 7, Attribute* attr 10""",
}


class _ForeignError(Exception):
    """The file is something else."""


@dataclasses.dataclass
class _Node:
    """A node, with the times of the file."""

    id: int = 0
    name: str = ""
    type: str = _TYPES[0]
    before: list[int] = dataclasses.field(default_factory=list)
    start: float = 0
    duration: float = 0
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_chakra(file: BinaryIO, time_unit: str | None = None) -> list[RankTrace]:
    """Reads a Chakra execution trace whose nodes have times, such as one from a profiler.

    Nodes with the attribute `is_cpu_op` are operators of the host, or ranges if their name has no
    `::`. All other nodes ran on the device and were launched by the host node on which they depend.
    A node on which no other node depends is an op by itself, with its name.

    **Arguments:**

    - `file`: an `.et` file or a JSON file, open.
    - `time_unit`: the unit of `start_time_micros` and `duration_micros`, if not microseconds.

    **Raises:**

    `ValueError` for a file that cannot be read, ends early, is not such a trace or has no times.
    """
    nodes, metadata = [], {}
    for node in _nodes(file):
        if not node.name and node.type == _TYPES[0]:
            metadata |= node.attributes
        else:
            nodes.append(node)
    if not nodes:
        raise ValueError("it has no nodes; give a Chakra execution trace.")
    if not any(node.duration > 0 for node in nodes):
        raise ValueError(
            f"none of its {plural(len(nodes), 'node')} has a duration, so no latency is known; "
            "link it with a profiler's trace first."
        )
    timed = [node for node in nodes if node.duration > 0]
    if len(timed) > 1 and len({node.start for node in timed}) == 1:
        raise ValueError(
            f"its {plural(len(timed), 'node')} with a duration all start at {timed[0].start:g}: "
            "the starts were not recorded; link it with a profiler's trace first."
        )
    spans = SpanList()
    _add_spans(spans, nodes, UNITS[time_unit or "us"])
    events = dict(collections.Counter(node.type for node in nodes))
    rank = metadata.get("rank")
    rank = rank if isinstance(rank, int) and abs(rank) < 2**31 else None
    world_size = metadata.get("world_size")
    return [RankTrace(spans.spans(), events, os.path.getsize(file.name), rank, world_size)]


def _add_spans(spans: SpanList, nodes: list[_Node], unit: int) -> None:
    times, launches = [], {}
    for node in nodes:
        times_ns = node.start * unit, (node.start + node.duration) * unit
        if not 0 <= times_ns[0] <= times_ns[1] <= MOST_NS:
            raise ValueError(
                f"node {node.id} starts at {node.start:g} and takes {node.duration:g}, which is "
                "beyond any clock; correct the trace."
            )
        start, end = map(round, times_ns)
        times.append((start, end))
        if node.attributes.get("is_cpu_op") and node.duration > 0:
            launches[node.id] = start, end
    for number, (node, (start, end)) in enumerate(zip(nodes, times, strict=True)):
        if node.duration <= 0 or node.type == "METADATA_NODE":
            continue
        lane = str(node.attributes.get("stream", node.attributes.get("tid", "")))
        if node.attributes.get("is_cpu_op"):
            kind = Kind.on_host(node.name, "::" not in node.name)
            spans.add(kind, start, end, node.name, f"host {lane}")
            continue
        launched = [launches[parent] for parent in node.before if parent in launches]
        if not launched:  # An op by itself; it may be a collective too.
            launched = [(start, start)]
            spans.add(Kind.RANGE, start, max(end, start + 1), node.name, "host")
        spans.add(Kind.LAUNCH, *max(launched), "launch", "host", number)
        spans.add(Kind.KERNEL, start, end, node.name, lane, number, _message(node))


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


def _nodes(file: BinaryIO) -> Iterator[_Node]:
    """The nodes of a file, including the metadata."""
    try:
        if not file.name.endswith(".json"):
            yield from _nodes_of_protobuf(file)
        elif len(text := file.read(_MOST_OF_JSON + 1)) > _MOST_OF_JSON:
            most = f"{_MOST_OF_JSON / 2**20:,.0f} MiB"
            raise ValueError(f"this is larger than the {most} that are read; give a smaller file.")
        else:
            check_times(text)
            yield from _nodes_of_json(text.decode().strip())
    except EOFError:
        raise ValueError("it ends within a node; copy or record the trace again.") from None
    except (_ForeignError, UnicodeDecodeError, TypeError, AttributeError):
        raise ValueError(
            "this is not a Chakra execution trace; give an `.et` file, or the JSON that Chakra "
            "makes from one."
        ) from None


def _nodes_of_protobuf(file: BinaryIO) -> Iterator[_Node]:
    DecodeError = needed("google.protobuf.message").DecodeError
    for number, content in enumerate(_messages(file)):
        try:
            node = message_classes(_SCHEMA)["Node" if number else "Metadata"].FromString(content)
        except DecodeError:
            raise _ForeignError from None
        attributes = {a.name: getattr(a, a.WhichOneof("value") or "", None) for a in node.attr}
        if not number:
            yield _Node(attributes=attributes)
            continue
        type = _TYPES[node.type] if node.type < len(_TYPES) else f"type {node.type}"
        before = [*node.ctrl_deps, *node.data_deps]
        times = node.start_time_micros, node.duration_micros
        yield _Node(node.id, node.name, type, before, *times, attributes)


def _messages(file: BinaryIO) -> Iterator[bytes]:
    """The messages of a file, each behind its length, in seven bits of each byte."""
    while head := file.read(1):
        while head[-1] >= 0x80:
            if len(head) > 9:
                raise _ForeignError
            head += (more := file.read(1))
            if not more:
                raise EOFError
        length = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(head))
        if length > _MOST_OF_A_NODE:
            raise _ForeignError
        message = file.read(length)
        if len(message) < length:
            raise EOFError
        yield message


def _nodes_of_json(text: str) -> Iterator[_Node]:
    """Consecutive objects, as Chakra writes them, or one object with a list of `nodes`."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError):
            if place == 0 and not text.startswith(("{", "[")):
                raise _ForeignError from None
            raise EOFError from None
        except ValueError:  # A number of thousands of digits.
            raise _ForeignError from None
        while place < len(text) and text[place].isspace():
            place += 1
        nodes = value if isinstance(value, list) else value.get("nodes", [value])
        if "traceEvents" in value:
            raise _ForeignError
        yield from map(_node_of_table, nodes)


def _node_of_table(table: dict[str, Any]) -> _Node:
    def get(*names: str, otherwise: Any = 0) -> Any:
        return next((table[name] for name in names if name in table), otherwise)

    kind = get("type", otherwise=_TYPES[0])
    attributes = {}
    for a in get("attr", "attrs", otherwise=[]):
        values = [value for key, value in a.items() if key not in _NO_VALUES]
        attributes[a.get("name", "")] = _plain(values[0]) if values else None
    pairs = (("ctrlDeps", "ctrl_deps"), ("dataDeps", "data_deps"))
    before = [parent for names in pairs for parent in get(*names, otherwise=[])]
    try:
        return _Node(
            int(get("id")),
            str(get("name", otherwise="")),
            _TYPES[kind] if type(kind) is int and 0 <= kind < len(_TYPES) else str(kind),
            [int(x) for x in before],
            float(get("startTimeMicros", "start_time_micros")),
            float(get("durationMicros", "duration_micros")),
            attributes,
        )
    except (ValueError, IndexError, OverflowError):
        raise _ForeignError from None


_NO_VALUES = ("name", "docString", "doc_string", "type")


def _plain(value: Any) -> Any:
    """A value in which 64-bit integers, which are strings in JSON, are numbers."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value) else value
