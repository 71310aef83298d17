"""Megatron-LM's notation for the virtual stages of a pipeline, such as `Et*7|t*7mL`."""

import re


def layers_of_layout(text: str) -> list[int]:
    """The number of layers (`t`) in each virtual stage. Stages are separated by `|`, `x*3` and
    `(...)*3` repeat, `E` is the embedding, `L` the loss and `m` a multi-token-prediction layer.

    **Raises:**

    A `ValueError` if it cannot be read, or if the embedding or the loss is not at its end.
    """
    spread = "".join(text.split()).replace(",", "")
    for _ in range(100):
        spread, found = re.subn(
            r"(?:\(([^()]*)\)|([EtmL|]))\*(\d{1,4})",
            lambda match: (match[1] if match[2] is None else match[2]) * int(match[3]),
            spread,
            count=1,
        )
        if not found or len(spread) > 10**5:
            break
    spread = re.sub(r"[()]", "", spread)
    stages = spread.split("|")
    if not re.fullmatch(r"E[t|]*m*L", spread):
        raise ValueError("a pipeline whose ends are not on its outer stages")
    return [stage.count("t") for stage in stages]


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
