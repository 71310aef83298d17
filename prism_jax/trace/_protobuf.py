"""Reading the wire format of protocol buffers, as far as Chakra's messages need it.

The format is small (protobuf.dev, "Encoding"). The library would need classes that its compiler
makes from a schema, which are more lines than these, and a pinned version.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO


class WireError(Exception):
    """The bytes are not a message."""


def fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """The number, the wire type and the value of each field: a whole number for wire type 0, else
    its bytes.

    **Raises:**

    `WireError` if the bytes are not a message.
    """
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield number, wire, value
            continue
        if wire == 2:
            length, place = _varint(message, place)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise WireError
        if place + length > end:
            raise WireError
        yield number, wire, message[place : place + length]
        place += length


_FIXED = {1: 8, 5: 4}


def whole_numbers(packed: bytes) -> Iterator[int]:
    """The numbers of a packed repeated field."""
    place = 0
    while place < len(packed):
        value, place = _varint(packed, place)
        yield value


def signed(value: int) -> int:
    """A whole number that may be negative, as `int32` and `int64` are written."""
    return value - 2**64 if value >= 2**63 else value


def real(value: bytes) -> float:
    """A `float` or a `double`."""
    return struct.unpack("<f" if len(value) == 4 else "<d", value)[0]


def messages(file: BinaryIO, most: int) -> Iterator[bytes]:
    """Messages of a file, each behind its length.

    **Raises:**

    `WireError` where one has more than `most` bytes, `EOFError` where the file ends within one.
    """
    while first := file.read(1):
        length, shift = 0, 0
        while True:
            length |= (first[0] & 0x7F) << shift
            if first[0] < 0x80:
                break
            shift += 7
            if shift > 63:
                raise WireError
            first = file.read(1)
            if not first:
                raise EOFError
        if length > most:
            raise WireError
        message = file.read(length)
        if len(message) < length:
            raise EOFError
        yield message


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value, shift = 0, 0
    while place < len(message) and shift < 70:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise WireError
