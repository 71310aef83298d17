"""The layers in arguments of Megatron-LM: of a decoder, of BERT, and of T5, which has both."""

import itertools as it
import re

from ._problems import MOST_LAYERS, Reader, Table


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
            "repeat": read.layers("encoder-num-layers"),
            "sequence_length": length,
        },
        {
            "modules": ["attention", "cross_attention", "mlp"],
            "repeat": read.layers("decoder-num-layers", read.layers("encoder-num-layers")),
        },
    ]
    modules = {
        "encoder_attention": {"kind": "attention", "causal": False},
        "cross_attention": {"kind": "attention", "causal": False, "context_length": length},
    }
    return layers, modules


def layers_of(read: Reader, attention: str, *, windowed: bool = False) -> tuple[list[Table], int]:
    """The layers, with equal neighbours merged, and the number of multi-token-prediction layers.

    **Arguments:**

    - `attention`: the module of attention.
    - `windowed`: whether it is the module `local` in layers that see only a window.
    """
    mtp = read.count("mtp-num-layers", 0, least=0)
    pattern = read.text("hybrid-layer-pattern") or read.text("hybrid-override-pattern")
    if pattern:
        main, *further = pattern.split("/")
        unknown = set(main) - {*_SYMBOLS, "|"}
        if unknown:
            read.problems.append(f"`hybrid-layer-pattern` with {' '.join(sorted(unknown))}")
        if further:
            read.problems.append("further layers of multi-token prediction in a hybrid pattern")
        if len(main) > MOST_LAYERS:
            read.problems.append(f"`hybrid-layer-pattern` of {len(main)} layers")
            main = ""
        names = [(_SYMBOLS[symbol],) for symbol in main if symbol in _SYMBOLS]
        read.get("num-layers")
    else:
        count = read.layers("num-layers", 1 if has_encoder(read) else None)
        seen = _seen(read, attention, count) if windowed else [attention] * count
        names = [*zip(seen, _feed_forwards(read, count), strict=True)]
    runs = [(list(name), len([*group])) for name, group in it.groupby(names)]
    return [{"modules": name, "repeat": count} for name, count in runs], mtp


def _feed_forwards(read: Reader, count: int) -> list[str]:
    if "num-experts" not in read:
        return ["mlp"] * count
    found = _frequency(read, "moe-layer-freq", count)
    every = found if isinstance(found, int) else 0
    found = [i % every == 0 for i in range(count)] if isinstance(found, int) else found
    return ["moe" if one else "mlp" for one in found]


def _seen(read: Reader, attention: str, count: int) -> list[str]:
    """The module of attention of each layer, of which some see only a window."""
    if attention != "attention":
        read.problems.append("`window-size` with `multi-latent-attention`")
    if "window-attn-skip-freq" not in read:
        return ["local"] * count
    found = _frequency(read, "window-attn-skip-freq", count)
    if isinstance(found, int):
        every = found
        found = [i % every != 0 for i in range(1, count + 1)]
    return ["local" if one else attention for one in found]


def window_of(read: Reader) -> int | None:
    """The number of keys that a query sees, including its own, from `(keys before, keys after)`;
    `None` if it sees all.
    """
    words = re.sub(r"[\[\](),]", " ", read.text("window-size")).split()
    if len(words) == 2 and words[0] == "-1":
        return None
    if len(words) != 2 or not re.fullmatch(r"\d{1,9}", words[0]) or words[1] not in ("0", "-1"):
        read.problems.append(f"`window-size` {' '.join(words)}")
        return None
    return int(words[0]) + 1


def _frequency(read: Reader, key: str, count: int) -> int | list[int] | list[bool]:
    """A number, or a zero or one for each of `count` layers."""
    given = read.text(key, "1")
    if re.fullmatch(r"0*[1-9]\d{0,8}", given):
        return int(given)
    try:
        found = repeated(given)
    except ValueError as error:
        read.problems.append(f"`{key}` of {error}")
        return 1
    if len(found) != count:
        read.problems.append(f"`{key}` for {len(found)} layers of {count}")
        return 1
    return found


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
        digits, times = [int(digit) for digit in match[1].split(",")], int(match[2] or 1)
        # Before they are written out, which may take more memory than there is.
        if len(found) + len(digits) * times > MOST_LAYERS:
            raise ValueError("more layers than any model has")
        found += digits * times
    return found
