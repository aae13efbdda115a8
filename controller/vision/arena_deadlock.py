"""Vision workers that wait for room which nobody will ever give back. Pure.

A worker goes on when a sequence that holds room in its segment ends. A sequence ends after its last picture is made. A
picture is made when its worker goes on, or, if nobody has it in hand, when any does. Where such chains lead nowhere but
back to themselves, somebody has to fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from airside.controller.vision.peers import VisionPeer
from airside.controller.vision.pixel_jobs import Image, JobState, PixelJob


def deadlocked(
    peers: Sequence[VisionPeer], sequences: Iterable[Sequence[Image]], soon_free: Iterable[str]
) -> list[VisionPeer]:
    """The workers that wait for room in vain.

    Args:
        peers: all of them.
        sequences: the images of each live sequence.
        soon_free: segments with slabs that no live sequence has, which therefore come back.
    """
    holders: dict[str, list[Sequence[Image]]] = {}
    for images in sequences:
        for segment in {image.slab.ref.segment for image in images if image.slab}:
            holders.setdefault(segment, []).append(images)
    free = set(soon_free)
    moving = {peer.name for peer in peers if _moves(peer, free, holders)}
    takers = {peer.name for peer in peers if not peer.is_draining}
    while True:
        some_take = bool(takers & moving) or not takers  # when there are none, others are about to come
        released = [
            peer.name
            for peer in peers
            if peer.name not in moving
            and any(_ends(images, moving, some_take) for images in holders.get(peer.segment, ()))
        ]
        if not released:
            return [peer for peer in peers if peer.name not in moving]
        moving.update(released)


def _moves(peer: VisionPeer, free: set[str], holders: dict[str, list[Sequence[Image]]]) -> bool:
    """Whether a worker goes on by itself: it does not wait, or has been helped already, or is about to be."""
    return not peer.room_wanted or peer.was_helped or peer.segment in free or peer.segment not in holders


def _ends(images: Sequence[Image], moving: set[str], some_take: bool) -> bool:
    """Whether a sequence comes to its end. One that has failed, with an image that has neither, is about to."""
    if any(not image.job and not image.slab for image in images):
        return True
    return all(_is_made(image.job, moving, some_take) for image in images if image.job)


def _is_made(job: PixelJob, moving: set[str], some_take: bool) -> bool:
    if job.worker is None:
        return some_take
    return job.worker in moving or job.state is not JobState.PROCESSING  # files and headers need no room
