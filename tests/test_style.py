"""Words that readers stumbled over are not written again: in docs, docstrings and messages."""

import ast
import re

import pytest

from .documents import PAGES, ROOT


# What is refused, with what to write in its place.
_INSTEAD = {
    r"\bbut for\b": "except for",
    r"\b(the|its) (former|latter)\b": "the name of the thing",
    r"\bhence\b|\bthus\b|\btherefrom\b": "so",
    r"\bwhilst\b|\bamongst\b": "while, among",
    r"\bthereof\b|\btherein\b|\bwhereby\b|\bwherein\b|\bhereby\b": "a sentence of its own",
    r"\bfor want of\b|\bfor lack of\b": "because there is no ...",
    r"\bless than nothing\b": "negative",
    r"\bwhat nothing (that|hides)\b": "the exposed part",
    r"\bis no (part|trace|file|key|name) of\b": "is not part of, is not a ... of",
    r"\bis none of\b": "is not of",
    r"\bwhat there is (more|less)\b": "the name of the thing",
    r"\bas it were\b|\bso to speak\b|\bto wit\b": "nothing",
    r"\bless one\b": "minus one",
    r"\bnot mended\b": "is not corrected",
    r"\bin brackets (stands|what)\b": "the brackets hold ...",
    r"\bwhile looking at\b": "with knowledge of",
    r"\bhas and the next has not\b": "varies from one step to the next",
    r"\bdeals? (its |their )?gradients\b": "reduce-scatter",
    r"\bdealt to\b": "distributed over",
    r"\bin order to\b": "to",
    r"\bdue to the fact that\b": "because",
    r"\butili[sz]e\b|\bleverage\b": "use",
    r"\bsimply\b|\bobviously\b|\bof course\b|\beasily\b|\btrivially\b": "nothing",
    r"\brespectively\b": "each value beside its name",
    r"\bi\.e\.": "that is",
    r"\be\.g\.": "such as",
    r"\betc\.": "and the like",
    r"\bw\.r\.t\.": "with respect to",
    r"\band/or\b": "or",
    r"\biteration times?\b": "step time: the glossary has one word for one thing",
    r"\bblazing|\bseamless|\bpowerful\b": "a figure, with the command that prints it",
}


def _texts():
    """The prose of pages, and all strings of the package, by where they are."""
    for page in PAGES:
        yield page.name, page.read_text(encoding="utf-8")
    for file in sorted((ROOT / "prism_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


def _found(text: str) -> list[str]:
    text = " ".join(text.split())
    return [
        f"`{match[0]}`: write {instead}"
        for phrase, instead in _INSTEAD.items()
        for match in re.finditer(phrase, text, re.IGNORECASE)
    ]


def test_no_text_has_words_that_readers_stumbled_over():
    problems = [f"{place}: {found}" for place, text in _texts() for found in _found(text)]
    assert problems == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("All ranks but\nfor the last.", "write except for"),
        ("The former is longer.", "write the name of the thing"),
        ("A file that is no trace of a rank.", "write is not part of"),
        ("Latencies, e.g. of a GEMM", "write such as"),
    ],
)
def test_such_words_are_found_across_lines(text, says):
    (found,) = _found(text)
    assert says in found
