"""Reads a JSON file whose array of events may be larger than memory.

The file is cut into pieces, which msgspec decodes to records. ijson 3.6 with its C backend reads
50 to 57 MB of events as records in a second of CPU, compared with 130 to 199 MB here (2026-11-25, a
file of 55 MB of `benchmarks/reading.py`, two shared CPU cores), and needs another pass for each key
beside the array. It also refuses the NaN that some profilers write.
"""

import collections
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec

from .._misc import quoted


# The bytes that are read at once; their objects take about ten times as much memory.
_CHUNK = 2**22
# The most bytes before or after the events, and of one event.
_MOST_BESIDE = 2**26
# Where one object of an array may end. Texts and inner arrays may have such places, too; a cut
# there is noticed, because the pieces are not JSON.
_BETWEEN = re.compile(rb"\}(?=\s*,\s*\{)")
_LAST = 2**16  # The size of the end of a piece, where the last such place is looked for first.
# Some profilers write these, which are not JSON.
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)[-+]?(?:nan|inf|infinity)\b", re.IGNORECASE)
# PyTorch's execution trace, and the JSON of Chakra's feeder.
_TALKS = (5, 6, 7)  # Types of nodes that communicate.
_GRAPH = re.compile(rb'"schema"\s*:\s*"[^"]*chakra|"workload_graph"\s*:\s*\[')


def read_array(
    file: BinaryIO, key: str, kind: Any, add: Callable[[list], None]
) -> tuple[dict[str, Any], int, bool]:
    """Reads a JSON file, plain or gzip, that is an array of objects, or an object with such an
    array under `key`. Calls `add` with lists of objects, decoded to `kind`, in the order of the
    file, and returns the other keys of the object, as far as they can be read; the bytes of text,
    after decompression; and whether the file ends before the end of its array.

    Text is decoded in pieces of some megabytes, so that memory does not grow with the file. A file
    that ends early is read as far as it goes.

    **Raises:**

    `ValueError` for a file that cannot be read, is not JSON, has no such array, or objects that are
    not of that kind.
    """
    text = _Text(file)
    before = _up_to_array(text, key)
    decoder = msgspec.json.Decoder(list[kind])
    unfinished = True
    while unfinished and not text.ended:
        unfinished = text.read()
        while not text.ended and (objects := _whole_objects(text, decoder)):
            add(objects)
    while text.read() and len(text.rest) < _MOST_BESIDE:
        pass
    cut = not text.ended
    after = {} if cut else _table(b"{" + text.rest.lstrip(b" \t\r\n,"))
    return before | after, text.size, cut


class _Text:
    """The text of a file: `rest` has been read but not yet decoded, after `number` events. `ended`
    says whether the array has ended there.
    """

    def __init__(self, file: BinaryIO):
        self.rest = b""
        self.size = 0
        self.number = 0
        self.ended = False
        self._chunks = _uncompressed(file)

    def read(self) -> bool:
        """Reads more text. Returns `False` at the end."""
        chunk = next(self._chunks, b"")
        self.rest += chunk
        self.size += len(chunk)
        return bool(chunk)


def _up_to_array(text: _Text, key: str) -> dict[str, Any]:
    """Advances to the first object of the array, and returns the text before it."""
    opening = re.compile(rb'"%s"\s*:\s*\[' % re.escape(key.encode()))
    while text.read() and len(text.rest) < _MOST_BESIDE:
        start = text.rest.lstrip(b"\xef\xbb\xbf \t\r\n")
        if start[:1] == b"[":
            text.rest = start[1:]
            return {}
        if start[:1] != b"{":
            break
        if match := opening.search(text.rest):
            before = text.rest[: match.start()].rstrip(b" \t\r\n,") + b"}"
            text.rest = text.rest[match.end() :]
            return _table(before)
    check_times(text.rest)
    problem = "it is not a JSON trace with" if text.size else "it is empty, without"
    raise ValueError(f"{problem} an array `{key}`; give one that a profiler has written.")


def check_times(start: bytes) -> None:
    """Raises a `ValueError` if a file that starts so is an execution trace without times."""
    if _GRAPH.search(start[:_MOST_BESIDE]):
        format = "an execution trace, which says what waits for what, and not when"
        if older := _table(start).get("workload_graph"):
            format = f"the older JSON of Chakra, whose nodes have no starts{_durations(older)}"
        raise ValueError(
            f"this is {format}; join it "
            "with the profiler's trace by `chakra_trace_link`, convert that to Chakra, and give "
            "the `.et` files with `--format chakra`."
        )


def _durations(nodes: Any) -> str:
    """How long the nodes of the device take, whose times are in microseconds."""
    milliseconds = collections.defaultdict[bool, float](float)
    for node in nodes if isinstance(nodes, list) else []:
        if isinstance(node, dict) and not node.get("is_cpu_op"):
            runtime, kind = node.get("runtime"), node.get("NodeType")
            if isinstance(runtime, int | float) and kind in (4, *_TALKS):
                milliseconds[kind in _TALKS] += runtime * 1e-3
    if not milliseconds:
        return ""
    computes, talks = (milliseconds[x] for x in (False, True))
    return f" ({computes:.1f} ms of compute and {talks:.1f} ms of communication are in it)"


class _CutError(Exception):
    """The text ends within an object."""


def _whole_objects(text: _Text, decoder: msgspec.json.Decoder) -> list:
    """Decodes objects up to the last complete one; none if more of the text is needed."""
    between = [m.end() for m in _BETWEEN.finditer(text.rest, max(len(text.rest) - _LAST, 0))]
    between = between or [m.end() for m in _BETWEEN.finditer(text.rest)]
    for place in (*_few_of(between), None):
        closing = b"" if place is None else b"]"
        try:
            objects, after = _decode(b"[" + text.rest[:place] + closing, decoder, text)
        except _CutError:
            continue
        tail = b"" if place is None else text.rest[place:]
        text.ended = place is None or after is not None
        if after is None:
            text.rest = tail.lstrip().removeprefix(b",")
        else:
            text.rest = after.removesuffix(closing) + tail
        text.number += len(objects)
        return objects
    if len(text.rest) > _MOST_BESIDE:
        raise ValueError(
            f"event {text.number} is larger than {_MOST_BESIDE // 2**20} MiB; give a trace as it "
            "was recorded."
        )
    return []


def _few_of(places: list[int]) -> list[int]:
    """The last places, the first of all, and ever fewer between them. Nearly all of them are ends
    of objects; where a long text has many of them, each would be tried in vain.
    """
    steps = [*range(1, 9), *(2**k for k in range(4, 64))]
    return [*(places[-step] for step in steps if step < len(places)), *places[:1]]


def _decode(piece: bytes, decoder: msgspec.json.Decoder, text: _Text) -> tuple[list, bytes | None]:
    """The objects of an array, and the text after its end, if it ends within the piece."""
    try:
        return decoder.decode(piece), None
    except msgspec.ValidationError as error:
        raise ValueError(_other_thing(text, str(error))) from None
    except msgspec.DecodeError as error:
        message = str(error)
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _CutError from None
        raise ValueError(
            f"event {text.number} or one after it is not in UTF-8 ({error.reason}); record the "
            "trace again."
        ) from None
    except RecursionError:
        raise ValueError(
            f"event {text.number} or one after it nests too deeply; give a trace as it was "
            "recorded."
        ) from None
    match = re.search(r"(.*) \(byte (\d+)\)", message.removeprefix("JSON is malformed: "))
    problem, place = (match[1], int(match[2])) if match else (message, 0)
    if problem == "trailing characters":  # The message counts from one.
        return decoder.decode(piece[: place - 1]), piece[place - 1 :]
    # The decoder reports a number that is cut as malformed.
    if "truncated" in message or place >= len(piece):
        raise _CutError
    mended = _NOT_A_NUMBER.sub(rb"\1null", piece)
    if mended != piece:
        return _decode(mended, decoder, text)
    byte = text.size - len(text.rest) + max(place - 1, 0)
    raise ValueError(
        f"this is not valid JSON at byte {byte:,} ({quoted(problem)}); record the trace again."
    )


def _other_thing(text: _Text, error: str) -> str:
    problem, _, place = error.partition(" - at `$[")
    index, _, key = place.rstrip("`").partition("]")
    number = text.number + int(index) if index.isdigit() else text.number
    subject = f"`{quoted(key.lstrip('.'))}` of event {number}" if key else f"event {number}"
    problem = quoted(problem[0].lower() + problem[1:])
    return f"{subject} is not part of a trace ({problem}); give a trace as it was recorded."


def _table(text: bytes) -> dict[str, Any]:
    try:
        table = msgspec.json.decode(_NOT_A_NUMBER.sub(rb"\1null", text))
    except (msgspec.DecodeError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _uncompressed(file: BinaryIO) -> Iterator[bytes]:
    """The content in pieces; of a damaged compressed file, the content before the damage."""
    chunk = file.read(_CHUNK)
    inflate = zlib.decompressobj(wbits=31) if chunk[:2] == b"\x1f\x8b" else None
    while chunk:
        if inflate is None:
            yield chunk
            chunk = file.read(_CHUNK)
            continue
        try:
            text = inflate.decompress(chunk, _CHUNK)
        except zlib.error:
            return
        if text:
            yield text
        chunk = inflate.unconsumed_tail
        if inflate.eof:  # A file may have several members.
            chunk, inflate = inflate.unused_data, zlib.decompressobj(wbits=31)
        chunk = chunk or file.read(_CHUNK)
