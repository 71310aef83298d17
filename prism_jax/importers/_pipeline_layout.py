"""Megatron's text for a pipeline, such as `Et*7|t*7mL`: what each virtual stage has."""

import re


def layers_of_layout(text: str) -> list[int]:
    """How many layers (`t`) each virtual stage has; stages are parted by `|`, `x*3` or `(...)*3`
    repeats, `E` is the embedding, `L` the loss and `m` a layer of multi-token prediction.

    **Raises:**

    A `ValueError` where it cannot be read, or an end is elsewhere than at its end.
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

    A `ValueError` where it is neither.
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
