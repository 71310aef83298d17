"""Models of images and videos: FLUX.1 beside its measured step, with what is not known of it
assumed another way, and shares of time beside published ones.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

from ._means import VARIABILITY
from ._tables import table


_JOB, _UNET, _VIDEO = "flux1-gb300-72", "stable-diffusion-2-a100-8", "latte-xl-2-a100-8"
_KEYS = {
    "as shipped": (),
    "products in bf16": ("training.dtype=bf16",),
    "products in NVFP4": ("training.dtype=fp4",),
    "attention in fp8, too": ("training.fp8_attention=true",),
    "parameters sharded (FSDP)": ("training.zero=3",),
    "texts of 512 tokens": (
        "model.modules.double.text_length=512",
        'model.layers=[{modules=["text"],sequence_length=512},{modules=["vector"],sequence_length=1'
        '},{modules=["double"],repeat=19,sequence_length=768},{modules=["single"],repeat=38,'
        "sequence_length=768}]",
    ),
}
_FORWARD = "training.forward_only=true"
_CASES = {
    "forward, one image": (_FORWARD, "training.microbatch_size=1"),
    "forward, 32 images": (_FORWARD,),
    "forward, 32 images, unfused attention": (_FORWARD, "training.attention=unfused"),
    "training, 32 images": (),
}
_FRAMES = 'model.layers=[{modules = ["adaln", "spatial", "mlp"], repeat = 14}]'
# Golden et al. 2023 (arXiv:2312.14385), abstract: of models of images with fused attention, and of
# attention in models of videos.
_PUBLISHED = {"convolutions": "up to 44 %", "attention across frames": "over 60 %"}


def image_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """FLUX.1 by what is `assumed`, then shares of time; `folder` is not read."""
    import prism_jax as prism

    jobs: Any = {about: prism.load_job(_JOB, keys) for about, keys in _KEYS.items()}
    measured = jobs["as shipped"].measured.mean_s
    predicted = {about: VARIABILITY * prism.predict(job).mean for about, job in jobs.items()}
    rows = [{"assumed": a, "predicted": x, "error": x / measured - 1} for a, x in predicted.items()]
    return [*rows, *_shares()]


def _shares() -> Iterator[dict[str, Any]]:
    import prism_jax as prism

    def seconds(job: str, *keys: str) -> dict[str, float]:
        return prism.predict(prism.load_job(job, keys)).breakdown

    for about, keys in _CASES.items():
        found = seconds(_UNET, *keys)
        share = found["convolution"] / sum(found.values())
        yield {"of": "convolutions", "job": f"{_UNET}, {about}", "share": share}
    for about, keys in {"forward": (_FORWARD,), "training": ()}.items():
        within = seconds(_VIDEO, *keys, _FRAMES, "model.num_layers=14")["attention"]
        share = 1 - within / seconds(_VIDEO, *keys)["attention"]
        yield {"of": "attention across frames", "job": f"{_VIDEO}, {about}", "share": share}


def image_table(rows: list[dict[str, Any]]) -> str:
    """Two tables in Markdown."""
    assumed = [
        (row["assumed"], f"{row['predicted']:.3f}", f"{100 * row['error']:+.0f} %")
        for row in rows
        if "assumed" in row
    ]
    shares = [
        (row["of"], row["job"], f"{100 * row['share']:.0f} %", _PUBLISHED[row["of"]])
        for row in rows
        if "of" in row
    ]
    return "\n\n".join(
        [
            table((_JOB, "predicted (s)", "error"), assumed),
            table(("share of", "job", "predicted", "published"), shares),
        ]
    )
