"""The layers in arguments of Megatron-LM: of a decoder, of BERT, and of T5, which has both."""

import itertools as it
import re

from ._problems import Reader, Table


_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WORD_PIECE = ("bert", "vocab.txt")


def is_encoder(read: Reader) -> bool:
    """Whether the arguments are of BERT, as its vocabulary or `bert-no-binary-head` shows."""
    words = read.text("vocab-file").startswith(_WORD_PIECE)
    return not has_encoder(read) and (words or read.flag("bert-no-binary-head"))


def has_encoder(read: Reader) -> bool:
    """Whether the arguments are of T5."""
    return "encoder-num-layers" in read


def encoder_and_decoder(read: Reader) -> tuple[list[Table], Table]:
    """The layers of T5 and their modules. The encoder has a sequence length of its own."""
    length = read.count("encoder-seq-length", read.count("seq-length", 512))
    if read.count("pipeline-model-parallel-size", 1) > 1:
        read.problems.append("a pipeline whose first stages are an encoder")
    layers = [
        {
            "modules": ["encoder_attention", "mlp"],
            "repeat": read.count("encoder-num-layers"),
            "sequence_length": length,
        },
        {
            "modules": ["attention", "cross_attention", "mlp"],
            "repeat": read.count("decoder-num-layers", read.count("encoder-num-layers")),
        },
    ]
    modules = {
        "encoder_attention": {"kind": "attention", "causal": False},
        "cross_attention": {"kind": "attention", "causal": False, "context_length": length},
    }
    return layers, modules


def layers_of(read: Reader, attention: str) -> tuple[list[Table], int]:
    """The layers, with equal neighbours merged, and the number of multi-token-prediction layers."""
    mtp = read.count("mtp-num-layers", 0, least=0)
    if read.flag("mtp-use-repeated-layer"):
        read.problems.append("`mtp-use-repeated-layer` (a layer that is used several times)")
    pattern = read.text("hybrid-layer-pattern") or read.text("hybrid-override-pattern")
    if pattern:
        main, *further = pattern.split("/")
        unknown = set(main) - {*_SYMBOLS, "|"}
        if unknown:
            read.problems.append(f"`hybrid-layer-pattern` with {' '.join(sorted(unknown))}")
        if further:
            read.problems.append("further layers of multi-token prediction in a hybrid pattern")
        names = [(_SYMBOLS[symbol],) for symbol in main if symbol in _SYMBOLS]
        read.get("num-layers")
    else:
        count = read.count("num-layers", 1 if has_encoder(read) else None)
        names = [(attention, what) for what in _feed_forwards(read, count)]
    runs = [(list(name), len([*group])) for name, group in it.groupby(names)]
    return [{"modules": name, "repeat": count} for name, count in runs], mtp


def _feed_forwards(read: Reader, count: int) -> list[str]:
    if "num-experts" not in read:
        return ["mlp"] * count
    given = read.text("moe-layer-freq", "1")
    if given.isdigit() and int(given) > 0:
        return ["mlp" if i % int(given) else "moe" for i in range(count)]
    try:
        found = repeated(given)
    except ValueError as error:
        read.problems.append(f"`moe-layer-freq` of {error}")
        found = [1] * count
    if len(found) != count:
        read.problems.append(f"`moe-layer-freq` for {len(found)} layers of {count}")
    return ["moe" if one else "mlp" for one in found]


def repeated(text: str) -> list[int]:
    """The entries of `([0]*3+[1]*11)` or `[0, 1, 1]`.

    **Raises:**

    A `ValueError` if it is neither.
    """
    compact = re.sub(r"[\s()]", "", text)
    found: list[int] = []
    for term in compact.split("+"):
        match = re.fullmatch(r"\[(\d(?:,\d)*)\](?:\*(\d{1,5}))?", term)
        if not match:
            raise ValueError(f"`{text[:40]}`, which is no list of zeros and ones")
        found += [int(digit) for digit in match[1].split(",")] * int(match[2] or 1)
        if len(found) > 10**5:
            raise ValueError("more layers than any model has")
    return found
