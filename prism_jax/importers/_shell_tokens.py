"""The words and operators of a shell script."""

import functools as ft
import re
from collections.abc import Iterator
from typing import NamedTuple


# A name of a variable.
NAME = r"[A-Za-z_]\w*"


class Token(NamedTuple):
    """A word, or an operator such as `&&`, the end of a line, or the text of a here-document."""

    kind: str
    text: str


@ft.cache
def _special(stops: str) -> re.Pattern[str]:
    """A letter that `end_of` looks at."""
    return re.compile(rf"[\\$\"'`(){{}}{re.escape(stops)}]")


def end_of(text: str, start: int, stops: str) -> int:
    """Where the first letter of `stops` is that is in no quotation marks and no brackets."""
    inside: list[str] = []
    special, i = _special(stops), start
    while match := special.search(text, i):
        i = match.start()
        letter, closes = text[i], inside[-1] if inside else ""
        if closes == "'":
            if letter == "'":
                inside.pop()
        elif letter == "\\":
            i += 1
        elif letter == closes:
            inside.pop()
        elif not inside and letter in stops:
            return i
        elif letter == "$" and text[i + 1 : i + 2] in ("(", "{"):
            i += 1
            inside.append(")" if text[i] == "(" else "}")
        elif letter in '"`' or (letter == "'" and closes != '"'):
            inside.append(letter)
        elif letter == "(" and (closes == ")" or (not inside and stops == ")")):
            inside.append(")")
        i += 1
    if inside:
        raise ValueError(f"a `{inside[-1]}` is {'missing' if inside[-1] in ')}' else 'not closed'}")
    return len(text)


def _word_end(text: str, i: int) -> int:
    """Where a word ends. Brackets within it, which a shell would not read, are part of it."""
    while True:
        i = end_of(text, i, " \t\r\n;&|()<>")
        if text[i : i + 1] != "(" or text[i + 1 : i + 2] == ")":
            return i
        i = end_of(text, i + 1, ")") + 1


_SPACE = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_OPERATOR = re.compile(r"\n|;;|&&|\|\||\d?[<>]{1,3}&?(?:\d(?!\w)|-(?!\w))?|&>>?|[;&|()]")
_HERE = re.compile(rf"<<-?[ \t]*(['\"\\]?)({NAME})['\"]?")
_ARRAY = re.compile(rf"({NAME})\+?=\(")


def tokens(text: str, comments: list[str]) -> Iterator[Token]:
    """The words and operators of a script; an assignment of a list is a word before a bracket."""
    i, after_here, in_command = 0, 0, False
    while i < len(text):
        if match := _SPACE.match(text, i):
            i = match.end()
        elif text[i] == "#":
            stop = text.find("\n", i) % (len(text) + 1)
            comments.append(text[i:stop])
            i = stop
        elif match := _HERE.match(text, i):
            # Its text is below the line, and below those of others in the line.
            start = after_here or text.find("\n", i) % len(text) + 1
            ends = re.compile(rf"^\t*{match[2]}[ \t\r]*$", re.MULTILINE).search(text, start)
            body = text[start : ends.start() if ends else None]
            body = re.sub(r'(["\\$`])' if match[1] else '(")', r"\\\1", body)
            yield Token("here", f'"{body}"')
            i, after_here = match.end(), ends.end() if ends else len(text)
        elif text.startswith("((", i):
            stop = end_of(text, i + 2, ")")
            yield Token("word", f"(({text[i + 2 : stop]}))")
            i = stop + 2
        elif text[i] == "(" and in_command and text[i + 1 : i + 2] != ")":
            stop = _word_end(text, i)
            yield Token("word", text[i:stop])
            i = stop
        elif match := _OPERATOR.match(text, i):
            i, in_command = match.end(), False
            if match[0] == "\n":
                i, after_here = after_here or i, 0
            yield Token("operator", match[0])
        elif match := _ARRAY.match(text, i):
            i, in_command = match.end(), True
            yield Token("array", match[0][:-1])
        else:
            stop, in_command = _word_end(text, i), True
            yield Token("word", text[i:stop])
            i = stop
    yield Token("operator", "\n")
