"""The vision ledger without sockets: what it asks for, event by event. `test_vision_simulation.py` has the storms."""

from __future__ import annotations

import weakref

import pytest

from airside.controller.vision.dispatch import VisionLimits
from airside.controller.vision.effects import PixelsReady, Send, ShapeKnown, VisionFailed
from airside.controller.vision.ledger import ImageFile, VisionLedger
from airside.proto.image_content import ANY_PIXELS, PixelRange
from airside.proto.messages import (
    Cancel,
    Fetched,
    Job,
    PixelsRef,
    Probe,
    Release,
)
from tests.controller.ledger_script import (
    ARENA_BYTES,
    EXPANSION,
    LARGE,
    NOW,
    add,
    done,
    files,
    jobs,
    known,
    ledger_with,
    of,
    pixels,
    probes,
    shape,
)


def test_an_image_goes_from_probe_to_release() -> None:
    ledger = ledger_with(("v0", 1))
    effects = ledger.add(1, files(1), NOW)
    assert effects == [Send("v0", Probe(1, 0, 1), (memoryview(b"image 0"),))]
    effects = ledger.shape("v0", shape(1, 0), NOW + 1)
    assert effects == [ShapeKnown(1, 0, EXPANSION, b"", 3), Send("v0", Job(1, 0, 1), (memoryview(b"image 0"),))]
    (ready,) = of(PixelsReady, ledger.pixels_in("v0", pixels("v0", 1, 0, slab=128), [], NOW + 3))
    assert (ready.seq_id, ready.image_index, ready.num_tokens, ready.is_cached) == (1, 0, 5, False)
    stages = ready.stages
    assert (stages.fetch_s, stages.queue_s, stages.decode_s, stages.process_s) == (0, 1, 0.5, 0.25)
    assert stages.transport_s == 1.25
    assert ledger.bytes_waiting == 0
    assert ledger.pixels(1, 0) == (PixelsRef("airside-t-v0", 128, 64, []), b"")
    assert ledger.end(1, NOW) == [Send("v0", Release(128))]
    assert ledger.jobs_done() == {"v0": 1}
    ledger.check()


def test_images_wait_for_the_first_worker_and_are_probed_when_it_joins() -> None:
    ledger = VisionLedger()
    assert ledger.add(1, files(2), NOW) == []
    assert (ledger.num_queued, ledger.load(NOW).workers) == (2, 0)
    effects = ledger.join("v0", "airside-t-v0", ARENA_BYTES, NOW)
    assert probes(effects) == [("v0", (1, 0, 1)), ("v0", (1, 1, 1))]
    assert jobs(ledger.shape("v0", shape(1, 1), NOW)) == []  # no credit yet
    assert jobs(ledger.credit("v0", 1, NOW)) == [("v0", (1, 1, 1))]


def test_probes_go_to_the_worker_with_the_fewest() -> None:
    ledger = ledger_with(("v0", 0), ("v1", 0))
    assert [worker for worker, _ in probes(ledger.add(1, files(4), NOW))] == ["v0", "v1", "v0", "v1"]


def test_one_requests_images_are_spread_over_workers_and_wait_without_credit() -> None:
    ledger = ledger_with(("v0", 2), ("v1", 1))
    assert jobs(add(ledger, 1, *files(4))) == [("v0", (1, 0, 1)), ("v1", (1, 1, 1)), ("v0", (1, 2, 1))]
    assert ledger.num_queued == 1
    assert jobs(ledger.credit("v1", 1, NOW)) == [("v1", (1, 3, 1))]


def test_a_worker_gets_a_second_job_only_while_both_are_small() -> None:
    ledger = ledger_with(("v0", 4))
    assert jobs(add(ledger, 1, *files(2), size=LARGE)) == [("v0", (1, 0, 1))]
    assert jobs(add(ledger, 2, *files(1))) == []
    assert jobs(ledger.pixels_in("v0", pixels("v0", 1, 0), [], NOW)) != []


def test_small_pictures_pass_a_large_one_but_not_for_ever() -> None:
    ledger = ledger_with(("v0", 1))
    add(ledger, 1, *files(1))
    add(ledger, 2, *files(1), size=LARGE)
    add(ledger, 3, *files(1), now=NOW + 0.1)
    assert jobs(done(ledger, "v0", 1, 0, 1)) == [("v0", (3, 0, 1))]
    add(ledger, 4, *files(1), now=NOW + 60)
    assert jobs(done(ledger, "v0", 3, 0, 1, slab=64)) == [("v0", (2, 0, 1))]


def test_a_large_picture_gets_the_worker_that_becomes_free() -> None:
    """Small ones that come meanwhile go to the other worker, and do not keep both busy for ever."""
    ledger = ledger_with(("v0", 4), ("v1", 4))
    add(ledger, 1, *files(2))
    add(ledger, 2, *files(1), size=LARGE)
    assert jobs(add(ledger, 3, *files(1), now=NOW + 60)) == [("v1", (3, 0, 1))]
    assert jobs(done(ledger, "v0", 1, 0, 1)) == [("v0", (2, 0, 1))]


# --- equal pictures ---------------------------------------------------------------------------------------------------


def test_equal_pictures_are_made_once() -> None:
    ledger = ledger_with(("v0", 4))
    assert jobs(add(ledger, 1, known(7))) == [("v0", (1, 0, 1))]
    assert add(ledger, 2, known(7), known(7)) == [
        ShapeKnown(2, 0, EXPANSION, b"", 3),
        ShapeKnown(2, 1, EXPANSION, b"", 3),
    ]
    assert ledger.bytes_waiting == 9
    ready = of(PixelsReady, done(ledger, "v0", 1, 0, 1))
    assert [(r.seq_id, r.image_index, r.is_cached) for r in ready] == [(1, 0, False), (2, 0, True), (2, 1, True)]
    assert (ledger.num_hits, ledger.num_misses) == (2, 1)
    assert [ledger.end(seq_id, NOW) for seq_id in (1, 2)] == [[], []]
    assert ledger.cache_bytes == 64
    effects = ledger.add(3, [known(7)], NOW)
    assert effects[0] == ShapeKnown(3, 0, EXPANSION, b"", 3)
    assert of(PixelsReady, effects)[0].is_cached
    assert ledger.cache_bytes == 0  # in use again
    ledger.check()


def test_salts_keep_equal_pictures_apart() -> None:
    ledger = ledger_with(("v0", 4))
    ledger.add(1, [known(7)], NOW, "a")
    assert probes(ledger.add(2, [known(7)], NOW, "b")) == [("v0", (2, 0, 1))]
    assert probes(ledger.add(3, [known(7)], NOW, "a")) == []
    for seq_id in (1, 2):
        ledger.shape("v0", shape(seq_id, 0), NOW)
        done(ledger, "v0", seq_id, 0, 1, slab=64 * seq_id)
    hashes = [ledger.pixels(seq_id, 0)[1] for seq_id in (1, 2, 3)]
    assert hashes[0] == hashes[2] != hashes[1]
    assert all(len(found) == 16 and found != known(7).hash for found in hashes)


def test_whoever_waits_for_the_same_picture_takes_over_the_place_of_one_that_ends() -> None:
    ledger = ledger_with(("v0", 1))
    add(ledger, 1, known(7))
    add(ledger, 2, known(7))
    assert ledger.end(1, NOW) == []  # not cancelled
    assert ledger.knows(1)  # its name is still in use
    (ready,) = of(PixelsReady, done(ledger, "v0", 1, 0, 1))
    assert (ready.seq_id, ready.is_cached) == (2, True)
    assert not ledger.knows(1)


def test_a_picture_that_was_fetched_is_known_by_its_content() -> None:
    ledger = ledger_with(("v0", 4))
    add(ledger, 1, known(7))
    done(ledger, "v0", 1, 0, 1)
    effects = ledger.add(2, [ImageFile(memoryview(b""), "http://t/7")], NOW)
    assert effects == [Send("v0", Probe(2, 0, 1, "http://t/7"))]
    effects = ledger.fetched("v0", Fetched(2, 0, 1, known(7).hash, 0.5), [memoryview(b"file")], NOW)
    assert effects[0] == ShapeKnown(2, 0, EXPANSION, known(7).hash, 3)
    (ready,) = of(PixelsReady, effects)
    assert (ready.is_cached, ready.stages.fetch_s) == (True, 0.5)


def test_the_continuations_of_a_request_fetch_a_picture_once() -> None:
    ledger = ledger_with(("v0", 4))
    there = ImageFile(memoryview(b""), "http://t/7")
    assert probes(ledger.add(1, [there], NOW)) == [("v0", (1, 0, 1))]
    assert ledger.add(2, [there, there], NOW) == []
    assert probes(ledger.add(3, [there], NOW, "salt")) == [("v0", (3, 0, 1))]  # for its own kind
    ledger.fetched("v0", Fetched(1, 0, 1, b"h" * 16, 0.5), [memoryview(b"file")], NOW)
    told = of(ShapeKnown, ledger.shape("v0", shape(1, 0), NOW))
    assert [(known.seq_id, known.image_index, known.content_hash) for known in told] == [
        (1, 0, b"h" * 16),
        (2, 0, b"h" * 16),
        (2, 1, b"h" * 16),
    ]
    assert probes(ledger.add(4, [there], NOW)) == [("v0", (4, 0, 1))]  # by now it may be another picture
    ready = of(PixelsReady, done(ledger, "v0", 1, 0, 1))
    assert [(r.seq_id, r.is_cached) for r in ready] == [(1, False), (2, True), (2, True)]
    assert (ledger.num_hits, ledger.num_misses) == (2, 1)
    ledger.fetched("v0", Fetched(4, 0, 1, b"h" * 16, 0.5), [memoryview(b"file")], NOW)
    assert (ledger.num_hits, ledger.num_misses) == (3, 1)
    ledger.check()


def test_a_fetched_file_is_probed_like_any_other() -> None:
    ledger = ledger_with(("v0", 4))
    ledger.add(1, [ImageFile(memoryview(b""), "http://t/7")], NOW)
    effects = ledger.fetched("v0", Fetched(1, 0, 1, b"h" * 16, 0.5), [memoryview(b"file")], NOW + 1)
    assert effects == [Send("v0", Probe(1, 0, 1), (memoryview(b"file"),))]
    assert ledger.bytes_waiting == 4
    effects = ledger.shape("v0", shape(1, 0), NOW + 1)
    assert effects[0] == ShapeKnown(1, 0, EXPANSION, b"h" * 16, 3)
    (ready,) = of(PixelsReady, done(ledger, "v0", 1, 0, 1, now=NOW + 2))
    assert (ready.is_cached, ready.stages.fetch_s, ready.stages.queue_s) == (False, 0.5, 0.5)
    assert ledger.pixels(1, 0)[1] == b"h" * 16


def test_a_fetch_that_nobody_wants_any_more_is_cancelled() -> None:
    ledger = ledger_with(("v0", 4))
    ledger.add(1, [ImageFile(memoryview(b""), "http://t/7")], NOW)
    assert ledger.end(1, NOW) == [Send("v0", Cancel(1, 0, 1))]
    assert ledger.fetched("v0", Fetched(1, 0, 1, b"h" * 16, 0.5), [memoryview(b"file")], NOW) == []
    ledger.check()


def test_the_cache_gives_way_to_a_picture_that_waits_for_room() -> None:
    ledger = ledger_with(("v0", 4))
    for seq_id in (1, 2, 3):
        add(ledger, seq_id, known(seq_id))
        done(ledger, "v0", seq_id, 0, 1, slab=64 * seq_id)
        ledger.end(seq_id, NOW)
    assert ledger.cache_bytes == 192
    ledger.add(4, [known(2)], NOW)  # used lately
    ledger.end(4, NOW)
    add(ledger, 5, known(5))
    assert ledger.arena_full("v0", 100, NOW) == [Send("v0", Release(64)), Send("v0", Release(192))]
    assert ledger.cache_bytes == 64
    ledger.add(6, [known(2)], NOW)
    assert ledger.end(6, NOW) == [Send("v0", Release(128))]  # room is still wanted: not kept


def test_where_the_machine_is_full_every_segment_gives_way() -> None:
    ledger = ledger_with(("v0", 1), ("v1", 1))
    for seq_id in (1, 2):
        add(ledger, seq_id, known(seq_id))
    for seq_id, worker in ((1, "v0"), (2, "v1")):
        done(ledger, worker, seq_id, 0, 1)
        ledger.end(seq_id, NOW)
    add(ledger, 3, known(3))  # v0's
    assert ledger.arena_full("v0", 100, NOW, is_memory_full=True) == [Send("v0", Release(0)), Send("v1", Release(0))]
    assert ledger.cache_bytes == 0
    assert ledger.arena_full("v0", 100, NOW, is_memory_full=True) == []  # it waits, and nobody is blamed for it
    assert ledger.stuck(NOW + 1) == []
    ledger.check()


# --- bounds and numbers -----------------------------------------------------------------------------------------------


def test_files_that_wait_are_bounded() -> None:
    ledger = VisionLedger(VisionLimits(bytes_max=20))
    assert ledger.refusal([known(1)]) is None
    add(ledger, 1, known(1))
    assert ledger.refusal([known(2), known(1), known(2)]) is None  # two are equal, and one waits already
    code, detail = ledger.refusal([known(2), known(3)]) or ("", "")
    assert code == "queue_full"
    assert "9 bytes wait" in detail
    assert "vision.limits.max_waiting_bytes" in detail
    code, detail = ledger.refusal([known(2, size=21)]) or ("", "")
    assert (code, "21 bytes together, at most 20" in detail) == ("invalid", True)
    assert ledger.refusal([]) is None


def test_a_picture_whose_pixels_are_there_takes_no_room_among_files() -> None:
    ledger = ledger_with(("v0", 1), limits=VisionLimits(bytes_max=20, cache_bytes=100))
    add(ledger, 1, known(1))
    done(ledger, "v0", 1, 0, 1)
    add(ledger, 2, known(2, size=20))
    assert ledger.refusal([known(1)]) is None
    assert ledger.refusal([known(3)]) is not None


class File(bytearray):
    """Bytes that a weak reference can point at."""


@pytest.mark.parametrize("until", ["asked for", "probed", "queued", "in hand", "fetched"])
def test_the_end_of_a_sequence_lets_go_of_its_files_at_once(until: str) -> None:
    """Not when a worker is done with them, or time has passed: the file of an aborted picture is memory of nobody's."""
    credits = {"in hand": 2, "queued": 1}.get(until, 0)
    ledger = ledger_with(*([] if until == "asked for" else [("v0", credits)]))
    if until == "queued":
        add(ledger, 9, *files(1))
    file = File(b"picture")
    kept = weakref.ref(file)
    if until == "fetched":
        ledger.add(1, [ImageFile(memoryview(b""), "http://t/7")], NOW)
        ledger.fetched("v0", Fetched(1, 0, 1, b"h" * 16, 0.5), [memoryview(file)], NOW)
    else:
        ledger.add(1, [ImageFile(memoryview(file))], NOW)
    if until in ("queued", "in hand"):
        ledger.shape("v0", shape(1, 0), NOW)
    del file
    assert kept() is not None
    assert ledger.bytes_waiting >= 7
    ledger.end(1, NOW)
    assert kept() is None
    assert ledger.bytes_waiting == (7 if until == "queued" else 0)


def test_a_fetched_file_must_say_what_it_is() -> None:
    ledger = ledger_with(("v0", 4))
    for seq_id, message_hash, count in ((1, b"", 1), (2, b"h" * 16, 0)):
        ledger.add(seq_id, [ImageFile(memoryview(b""), "http://t/7")], NOW)
        effects = ledger.fetched("v0", Fetched(seq_id, 0, 1, message_hash, 0.5), [memoryview(b"file")][:count], NOW)
        assert of(VisionFailed, effects) == [VisionFailed(seq_id, "image 0: the vision worker sent no file")]


def test_the_end_of_a_sequence_makes_room_for_a_fetch() -> None:
    ledger = ledger_with(("v0", 0), limits=VisionLimits(bytes_max=20, file_bytes_max=15))
    add(ledger, 1, known(1))
    assert ledger.add(2, [ImageFile(memoryview(b""), "http://t/7")], NOW) == []
    assert probes(ledger.end(1, NOW)) == [("v0", (2, 0, 1))]


def test_what_is_fetched_is_bounded_before_its_size_is_known() -> None:
    ledger = ledger_with(("v0", 4), limits=VisionLimits(bytes_max=25, file_bytes_max=10))
    urls = [ImageFile(memoryview(b""), f"http://t/{number}") for number in range(4)]
    assert len(probes(ledger.add(1, urls, NOW))) == 2
    assert ledger.refusal([known(1)]) is not None
    effects = ledger.fetched("v0", Fetched(1, 0, 1, b"h" * 16, 0.1), [memoryview(b"file!")], NOW)
    assert probes(effects) == [("v0", (1, 2, 1)), ("v0", (1, 0, 1))]  # 5 bytes are there, and 20 may come


def test_the_load_is_seconds_of_work_over_the_workers() -> None:
    ledger = VisionLedger()
    assert ledger.load(NOW).wait_s == 0
    add(ledger, 1, *files(2))
    waiting = ledger.load(NOW)
    assert (waiting.queued, waiting.in_hand, waiting.workers) == (2, 0, 0)
    assert waiting.wait_s > 0
    for name in ("v0", "v1"):
        ledger.join(name, f"airside-t-{name}", ARENA_BYTES, NOW)
    assert ledger.load(NOW).wait_s == pytest.approx(waiting.wait_s / 2)
    for index, worker in enumerate(("v0", "v1")):
        ledger.shape(worker, shape(1, index, pixels=LARGE), NOW)
    ledger.credit("v0", 1, NOW)
    busy = ledger.load(NOW)
    assert (busy.queued, busy.in_hand, busy.workers) == (1, 1, 2)
    assert ledger.load(NOW + 0.1).wait_s == pytest.approx(busy.wait_s - 0.05)


def test_one_url_within_different_pixels_is_fetched_for_each() -> None:
    ledger = ledger_with(("v0", 4))
    small = PixelRange(max_pixels=9)
    urls = [ImageFile(memoryview(b""), "http://t/7", within=within) for within in (ANY_PIXELS, small, small)]
    assert [send.message for send in of(Send, ledger.add(1, urls, NOW))] == [
        Probe(1, 0, 1, "http://t/7"),
        Probe(1, 1, 1, "http://t/7", 0, 9),
    ]
