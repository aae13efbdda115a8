"""Draws `assets/digits/`: run by hand, with scikit-learn, `python -m airside.cluster.demo_model.make_digits`.

The first two held-out scans of each digit (index a multiple of five), the first as PNG, the second as JPEG. Each scan
is enlarged, turned, inked in some grey on other grey and, for JPEG, put on noisy paper: the range of the training.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from airside.cluster.demo_model.digits import FOLDER

if TYPE_CHECKING:
    from numpy.typing import NDArray

HELD_OUT_EVERY = 5
SCAN_SIZE = 8
PNG_COLOURS = 64  # ink on plain paper has few; a palette makes the files a third as large
MARGIN = 2  # empty scan pixels around the digit, so that turning it cuts nothing off


def main() -> None:
    """Writes all twenty files and says how large they are."""
    scans, labels = load_digits(return_X_y=True)
    FOLDER.mkdir(exist_ok=True)
    total = 0
    for digit in range(10):
        held_out = [i for i in range(0, len(labels), HELD_OUT_EVERY) if labels[i] == digit]
        for index, suffix in zip(held_out, ("png", "jpg"), strict=False):
            scan = scans[index].reshape(SCAN_SIZE, SCAN_SIZE) / 16
            data = encode(draw(scan, seed=index, noisy=suffix == "jpg"), suffix)
            (FOLDER / f"{digit}-scan{index:04d}.{suffix}").write_bytes(data)
            total += len(data)
    print(f"{total:,} bytes in {FOLDER}")


def draw(scan: NDArray[Any], seed: int, noisy: bool) -> Image.Image:
    """A square RGB picture of one scan; everything random comes from `seed`.

    Args:
        scan: [8, 8], ink from 0 to 1.
    """
    random = np.random.default_rng(seed)
    size = int(random.integers(128, 257))
    dark, light = random.uniform(0, 75), random.uniform(170, 255)
    paper, ink = (light, dark) if random.random() < 0.6 else (dark, light)
    coverage = _enlarge(scan, size, random)[..., None]  # [size, size, 1]
    paper_colour = paper + random.integers(-12, 13, 3)
    ink_colour = ink + random.integers(-12, 13, 3)
    grain = random.normal(0, 8, (size, size, 1)) if noisy else 0.0
    pixels = (paper_colour + grain) * (1 - coverage) + ink_colour * coverage
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _enlarge(scan: NDArray[Any], size: int, random: np.random.Generator) -> NDArray[Any]:
    """How much ink each pixel has: the scan over 76 to 100 % of the picture, turned by at most 15 degrees."""
    padded = np.pad(scan, MARGIN).astype(np.float32)
    side = int(size * random.uniform(0.76, 1.0))
    side_padded = side * padded.shape[0] // SCAN_SIZE
    turned = (
        Image.fromarray(padded)
        .resize((side_padded, side_padded), Image.Resampling.BICUBIC)
        .rotate(random.uniform(-15, 15), Image.Resampling.BICUBIC)
    )
    border = side_padded * MARGIN // padded.shape[0]
    left, top = (int(random.integers(0, size - side + 1)) - border for _ in range(2))
    canvas = Image.new("F", (size, size), 0.0)
    canvas.paste(turned, (left, top))
    coverage: NDArray[Any] = np.clip(np.asarray(canvas), 0, 1)
    return coverage


def encode(picture: Image.Image, suffix: str) -> bytes:
    """The bytes of a PNG or JPEG file."""
    file = io.BytesIO()
    if suffix == "png":
        picture.quantize(PNG_COLOURS).save(file, "PNG", optimize=True)
    else:
        picture.save(file, "JPEG", quality=80)
    return file.getvalue()


if __name__ == "__main__":
    main()
