"""Draws `assets/exhibits/`: run by hand, with scikit-learn.

    python -m airside.cluster.demo_model.training.make_exhibits

Of each kind that is shown, the first three held-out questions that `SEED` makes about pictures of no more than
`SIDE_PX_MAX` pixels, so that the files stay small. PNG and JPEG take turns.
"""

from __future__ import annotations

import io
import json

import numpy as np
from PIL import Image

from airside.cluster.demo_model.exhibits import CATALOGUE, FOLDER
from airside.cluster.demo_model.training.exam import file
from airside.cluster.demo_model.training.questions import SHOWN, Kind, Question, ask, scenes_for
from airside.cluster.demo_model.training.scans import Scans, load_scans
from airside.cluster.demo_model.training.world import Random, Scene

SEED = 7
PER_KIND = 3
SIDE_PX_MAX = 480
SUFFIXES = ("png", "jpg")
PNG_COLOURS = 64  # drawn pictures have few; a palette makes the files a third as large


def main() -> None:
    """Writes the files and the catalogue, and says how large they are."""
    FOLDER.mkdir(exist_ok=True)
    scans = load_scans()
    for old in FOLDER.iterdir():
        old.unlink()
    entries = []
    for turn in range(PER_KIND):
        for number, kind in enumerate(SHOWN):
            random = np.random.default_rng([SEED, number, turn])
            question, scenes = _first(kind, scans, random)
            suffix = SUFFIXES[(turn + number) % 2]
            name = kind.name.lower().replace("_", "-")
            names = [f"{name}-{turn + 1}{'ab'[i] if len(scenes) == 2 else ''}.{suffix}" for i in range(len(scenes))]
            for path, scene in zip(names, scenes, strict=True):
                (FOLDER / path).write_bytes(_small(file(scene, scans, random, suffix)))
            entry = {"kind": str(kind), "question": question.text, "answer": question.answer, "pictures": names}
            entries.append(entry)
    CATALOGUE.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{sum(path.stat().st_size for path in FOLDER.iterdir()):,} bytes in {FOLDER}")


def _first(kind: Kind, scans: Scans, random: Random) -> tuple[Question, list[Scene]]:
    while True:
        scenes = scenes_for(kind, scans, True, random)
        question = ask(kind, scenes, random)
        if question is not None and all(max(s.width_px, s.height_px) <= SIDE_PX_MAX for s in scenes):
            return question, scenes


def _small(data: bytes) -> bytes:
    picture = Image.open(io.BytesIO(data))
    if picture.format != "PNG":
        return data
    out = io.BytesIO()
    picture.quantize(PNG_COLOURS).save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
