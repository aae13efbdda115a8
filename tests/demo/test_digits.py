"""The shipped digits are small, valid, labelled pictures."""

from __future__ import annotations

import io
from collections import Counter

from PIL import Image

from airside.cluster.demo_model.digits import FOLDER, digit_pictures


def test_every_digit_is_there_as_png_and_as_jpeg() -> None:
    formats = Counter((picture.label, Image.open(io.BytesIO(picture.data)).format) for picture in digit_pictures())
    assert formats == {(label, kind): 1 for label in range(10) for kind in ("PNG", "JPEG")}


def test_pictures_decode_whole_and_hold_ink() -> None:
    for picture in digit_pictures():
        image = Image.open(io.BytesIO(picture.data)).convert("L")
        darkest, lightest = image.getextrema()
        assert image.width == image.height >= 128
        assert lightest - darkest > 90, picture.name


def test_all_are_held_out_scans() -> None:
    scans = [int(picture.name.split("scan")[1].split(".")[0]) for picture in digit_pictures()]
    assert len(set(scans)) == 20
    assert all(scan % 5 == 0 for scan in scans)


def test_they_stay_under_200_kilobytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 200_000
