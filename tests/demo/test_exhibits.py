"""The pictures that come with the demo model are small, valid and answered; their questions are of every kind."""

from __future__ import annotations

import io
from collections import Counter

from PIL import Image

from airside.cluster.demo_model.exhibits import FOLDER, digit_exhibits, exhibits
from airside.cluster.demo_model.training.questions import ABOUT_TWO, SHOWN


def test_three_of_each_kind() -> None:
    shown = exhibits()
    assert Counter(exhibit.kind for exhibit in shown) == {str(kind): 3 for kind in SHOWN}
    assert len({exhibit.title for exhibit in shown}) == len(shown)
    assert {exhibit.answer for exhibit in digit_exhibits()} <= set("0123456789")


def test_pictures_are_whole_files_of_both_formats_and_many_sizes() -> None:
    shown = exhibits()
    images = [Image.open(io.BytesIO(data)) for exhibit in shown for data in exhibit.pictures]
    for image in images:
        image.load()
    assert {image.format for image in images} == {"PNG", "JPEG"}
    assert len({image.size for image in images}) > 20
    assert all(len(exhibit.pictures) == (2 if exhibit.kind in ABOUT_TWO else 1) for exhibit in shown)


def test_every_file_is_used_and_all_are_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.suffix != ".json"}
    assert set(files) == {name for exhibit in exhibits() for name in exhibit.names}
    assert sum(files.values()) < 250_000
