"""What a request says of its text's form is checked, however bad it is, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import llguidance
import psutil
import pytest

from airside.controller.gateway import grammar_check
from airside.controller.gateway.builder_process import BuilderLost, BuilderProcess, Built, Unusable, Vocabulary
from airside.controller.gateway.errors import RequestError
from airside.controller.gateway.grammar_builder import GrammarTrial, Refused, shown
from airside.controller.gateway.grammar_check import GrammarChecker
from airside.controller.gateway.text_model import TextModel
from airside.proto import airside_pb2 as pb
from airside.proto.settings import GatewaySettings
from tests.checkpoints import make_tokenizer
from tests.gateway.conftest import make_settings
from tests.gateway.grammars import BAD, CRASHES, GOOD, MANY_STATES, SLOW, Bad, Good, large_enum, nested
from tests.gateway.tiny_checkpoint import byte_level_tokenizer, write_checkpoint

SHORT_S = 0.5  # a time limit for what is slow
LONGER_S = 3.0  # one that leaves time for others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))))


@pytest.fixture(scope="module")
def shared(model: TextModel) -> Iterator[GrammarChecker]:
    with contextlib.closing(GrammarChecker(limits(), model)) as checker:
        yield checker


def limits(**changes: object) -> GatewaySettings:
    return dataclasses.replace(make_settings(Path(), Path()), **{"grammar_timeout_s": 20.0, **changes})


@contextlib.asynccontextmanager
async def canary() -> AsyncIterator[list[int]]:
    """Counts the turns of the event loop while it is open."""
    ticks = [0]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.005)
            ticks[0] += 1

    task = asyncio.create_task(tick())
    yield ticks
    task.cancel()


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if "grammar_builder" in " ".join(child.cmdline())}


def refusal(checker: GrammarChecker, structure: pb.Structure) -> RequestError:
    with pytest.raises(RequestError) as refused:
        asyncio.run(checker.check(structure))
    return refused.value


def assert_refused(error: RequestError, bad: Bad) -> None:
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == f"structure.{bad.field}"
    assert error.message.startswith(f"{error.field}: ")
    assert bad.words in error.message


@pytest.mark.parametrize("name", BAD)
def test_what_is_bad_is_refused_by_field(shared: GrammarChecker, name: str) -> None:
    assert_refused(refusal(shared, BAD[name].structure), BAD[name])
    assert asyncio.run(shared.check(pb.Structure(regex="a")))


@pytest.mark.parametrize("name", ["schema_crashes", "schema_cycle", "lark_dead_end", "regex_class", "gbnf_deep"])
def test_what_is_bad_is_refused_as_the_first_of_a_process(model: TextModel, name: str) -> None:
    with contextlib.closing(GrammarChecker(limits(), model)) as checker:
        assert_refused(refusal(checker, BAD[name].structure), BAD[name])
        assert asyncio.run(checker.check(pb.Structure(regex="a")))


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_what_is_good_allows_just_its_texts(shared: GrammarChecker, good: Good) -> None:
    grammar = asyncio.run(shared.check(good.structure))
    tokenizer = byte_level_tokenizer()
    vocabulary = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=[2])

    def is_allowed(text: str) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        ids = [tokenizer.token_to_id(char) for char in _as_bytes(text)]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert [text for text in good.texts if not is_allowed(text)] == []
    assert [text for text in good.others if is_allowed(text)] == []


def _as_bytes(text: str) -> str:
    """Byte by byte, in the letters of byte-level tokenizers: so no special token is taken for its name."""
    tokenizer = byte_level_tokenizer()
    assert tokenizer.pre_tokenizer is not None
    return "".join(letters for letters, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))


def test_no_structure_is_no_grammar(shared: GrammarChecker) -> None:
    assert asyncio.run(shared.check(pb.Structure())) == ""
    assert shared.check_blocking(pb.Structure()) == ""


def test_the_blocking_form_says_the_same(shared: GrammarChecker) -> None:
    structure = pb.Structure(json_object=True)
    assert shared.check_blocking(structure) == asyncio.run(shared.check(structure))
    with pytest.raises(RequestError) as refused:
        shared.check_blocking(BAD["regex_class"].structure)
    assert_refused(refused.value, BAD["regex_class"])


def test_what_is_slow_is_refused_while_others_go_on(model: TextModel) -> None:
    async def run() -> tuple[RequestError, int, list[str]]:
        with contextlib.closing(GrammarChecker(limits(grammar_timeout_s=LONGER_S), model)) as checker:
            async with canary() as ticks:
                await checker.check(pb.Structure(regex="first"))
                before = children()
                slow = asyncio.create_task(checker.check(SLOW))
                await asyncio.sleep(0)
                ticks_before = ticks[0]
                others = [await checker.check(pb.Structure(regex=f"b{i}")) for i in range(3)]
                assert not slow.done()
                with pytest.raises(RequestError) as refused:
                    await slow
                assert len(before - children()) == 1, "the child goes on"
                others.append(await checker.check(pb.Structure(regex="c")))
                return refused.value, ticks[0] - ticks_before, others

    error, ticks, others = asyncio.run(run())
    assert_refused(error, Bad(SLOW, "json_schema", f"takes longer than {LONGER_S:g} s"))
    assert ticks > 50  # of several hundred; a blocked loop would have turned a few times
    assert len(set(others)) == 4


def test_words_that_need_ever_more_states_are_refused() -> None:
    """With tokens of several letters. The lexer keeps what it has seen for as long as its sequence lives."""
    tokenizer = make_tokenizer()
    trial = GrammarTrial(llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=[2]))
    with pytest.raises(Refused) as refused:
        trial.check(llguidance.LLMatcher.grammar_from_regex(MANY_STATES.regex))
    assert "states" in shown(str(refused.value))
    trial.check(llguidance.LLMatcher.grammar_from_regex("[a-z]{1,2000}"))


@pytest.mark.slow
def test_what_is_large_is_built_or_refused_where_the_limit_allows_its_size(model: TextModel) -> None:
    with contextlib.closing(GrammarChecker(limits(grammar_bytes_max=8 << 20), model)) as checker:
        assert "enum" in asyncio.run(checker.check(pb.Structure(json_schema=large_enum(20_000, 250))))
        error = refusal(checker, pb.Structure(json_schema=nested("anyOf", 14)))
        assert_refused(error, Bad(pb.Structure(), "json_schema", "schema too large"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that reach a child."""
    texts: list[str] = []
    build = BuilderProcess.build

    def counted(self: BuilderProcess, kind: str, text: str) -> Built | Unusable:
        texts.append(text)
        return build(self, kind, text)

    monkeypatch.setattr(BuilderProcess, "build", counted)
    return texts


@pytest.mark.parametrize("structure", [pb.Structure(regex="a"), BAD["regex_class"].structure, CRASHES])
def test_equal_grammars_are_built_once(model: TextModel, builds: list[str], structure: pb.Structure) -> None:
    async def run(checker: GrammarChecker) -> list[str | BaseException]:
        return await asyncio.gather(*(checker.check(structure) for _ in range(10)), return_exceptions=True)

    with contextlib.closing(GrammarChecker(limits(), model)) as checker:
        outcomes = asyncio.run(run(checker)) + asyncio.run(run(checker))
    assert len(outcomes) == 20
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert len(builds) == 1


def test_what_took_all_its_time_is_not_tried_again(model: TextModel, builds: list[str]) -> None:
    with contextlib.closing(GrammarChecker(limits(grammar_timeout_s=SHORT_S), model)) as checker:
        for _ in range(2):
            assert "takes longer" in refusal(checker, SLOW).message
    assert builds == [SLOW.json_schema]


def test_a_child_that_stands_still_is_no_grammars_fault(model: TextModel, builds: list[str]) -> None:
    before = children()
    with contextlib.closing(GrammarChecker(limits(grammar_timeout_s=SHORT_S), model)) as checker:
        assert checker.check_blocking(pb.Structure(regex="first"))
        (child,) = children() - before
        psutil.Process(child).send_signal(signal.SIGSTOP)
        error = refusal(checker, pb.Structure(regex="a"))
        assert error.code == grpc.StatusCode.UNAVAILABLE
        assert error.retry_after_s
        assert "gets no time" in error.message
        assert checker.check_blocking(pb.Structure(regex="a")), "it is not remembered, and another child takes over"
    assert builds == ["first", "a", "a"]


def test_what_was_seen_is_forgotten_in_the_end(
    model: TextModel, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "_CACHED_MAX", 2)
    with contextlib.closing(GrammarChecker(limits(), model)) as checker:
        for regex in ("a", "b", "a", "c", "a", "b"):
            checker.check_blocking(pb.Structure(regex=regex))
    assert builds == ["a", "b", "c", "b"]


def test_whoever_leaves_does_not_take_the_grammar_along(model: TextModel) -> None:
    async def run(checker: GrammarChecker) -> str:
        leaver = asyncio.create_task(checker.check(pb.Structure(regex="a")))
        stayer = asyncio.create_task(checker.check(pb.Structure(regex="a")))
        await asyncio.sleep(0)
        leaver.cancel()
        return await stayer

    with contextlib.closing(GrammarChecker(limits(), model)) as checker:
        assert asyncio.run(run(checker))


def test_a_check_for_which_nobody_waits_any_more_is_not_begun(
    model: TextModel, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "BUILDERS_MAX", 1)

    async def run(checker: GrammarChecker) -> None:
        slow = asyncio.create_task(checker.check(SLOW))
        leavers = [asyncio.create_task(checker.check(pb.Structure(regex=regex))) for regex in ("a", "a", "b")]
        stayer = asyncio.create_task(checker.check(pb.Structure(regex="b")))
        await asyncio.sleep(0)
        for leaver in leavers:
            leaver.cancel()
        with pytest.raises(RequestError, match="takes longer"):
            await slow
        assert await stayer

    with contextlib.closing(GrammarChecker(limits(grammar_timeout_s=SHORT_S), model)) as checker:
        asyncio.run(run(checker))
        assert builds == [SLOW.json_schema, "b"]
        assert checker.check_blocking(pb.Structure(regex="a"))


def test_too_many_waiting_are_turned_away(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "PENDING_MAX", 1)

    async def run(checker: GrammarChecker) -> RequestError:
        slow = asyncio.create_task(checker.check(SLOW))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as refused:
            await checker.check(pb.Structure(regex="a"))
        with pytest.raises(RequestError, match="takes longer"):
            await slow
        return refused.value

    with contextlib.closing(GrammarChecker(limits(grammar_timeout_s=SHORT_S), model)) as checker:
        error = asyncio.run(run(checker))
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after_s


def test_a_child_that_somebody_ends_is_no_grammars_fault(model: TextModel) -> None:
    before = children()

    async def run(checker: GrammarChecker) -> RequestError:
        assert await checker.check(pb.Structure(regex="a"))
        (idle,) = children() - before
        psutil.Process(idle).kill()
        psutil.wait_procs([psutil.Process(idle)], timeout=10)
        assert await checker.check(pb.Structure(regex="b")), "the next one takes its place"
        slow = asyncio.create_task(checker.check(SLOW))
        await asyncio.sleep(0.1)
        (busy,) = children() - before
        psutil.Process(busy).kill()
        with pytest.raises(RequestError) as refused:
            await slow
        assert await checker.check(pb.Structure(regex="c"))
        return refused.value

    with contextlib.closing(GrammarChecker(limits(), model)) as checker:
        error = asyncio.run(run(checker))
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert "signal 9" in error.message


def test_closing_ends_the_children_and_what_they_do(model: TextModel) -> None:
    before = children()
    checker = GrammarChecker(limits(), model)

    async def run() -> RequestError:
        await checker.check(pb.Structure(regex="a"))
        slow = asyncio.create_task(checker.check(SLOW))
        await asyncio.sleep(0.1)
        assert children() > before
        checker.close()
        with pytest.raises(RequestError) as refused:
            await slow
        return refused.value

    assert "stopping" in asyncio.run(run()).message
    assert children() == before


def test_closing_does_not_wait_for_a_child_that_is_starting(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before, starting = children(), threading.Event()
    await_ready = BuilderProcess.await_ready

    def hung(self: BuilderProcess) -> None:
        self._process.send_signal(signal.SIGSTOP)
        starting.set()
        await_ready(self)

    monkeypatch.setattr(BuilderProcess, "await_ready", hung)
    checker = GrammarChecker(limits(), model)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(checker.check_blocking, pb.Structure(regex="a"))
        assert starting.wait(60)
        checker.close()
        with pytest.raises(RequestError, match="stopping"):
            asked.result()
    assert children() == before


def test_an_unused_checker_starts_no_child(model: TextModel) -> None:
    before = children()
    with contextlib.closing(GrammarChecker(limits(), model)) as checker:
        assert checker.check_blocking(pb.Structure()) == ""
        assert refusal(checker, pb.Structure(json_object=False))
        assert children() == before


def test_a_model_without_end_tokens_takes_no_structure(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, images=False, generation_config={})
    (folder / "config.json").write_text(json.dumps({"vocab_size": 400}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with contextlib.closing(GrammarChecker(limits(), TextModel.load(str(folder)))) as checker:
        error = refusal(checker, pb.Structure(json_object=True))
    assert error.code == grpc.StatusCode.FAILED_PRECONDITION
    assert "eos_token" in error.message


def ending_of_a_child(grammar: pb.Structure, script: str = "") -> int:
    """How a child ends that is given a schema and then left alone: its exit status. `script` runs before it starts."""
    vocabulary = Vocabulary(byte_level_tokenizer().to_str(), 400, (2,), chars_max=10_000)
    requests = [
        {**dataclasses.asdict(vocabulary), "timeout_s": SHORT_S},
        {"kind": "json_schema", "text": grammar.json_schema},
    ]
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from airside.controller.gateway import grammar_builder\n{script}\ngrammar_builder.main()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    child.communicate("".join(json.dumps(request) + "\n" for request in requests).encode(), timeout=60)
    return child.returncode


def test_a_child_whose_parent_is_gone_ends_by_itself() -> None:
    assert ending_of_a_child(pb.Structure(json_schema="{}")) == 0
    assert ending_of_a_child(SLOW) == -signal.SIGPROF


@pytest.mark.parametrize("memory_mb", [1, 60])
def test_a_child_that_gets_no_more_memory_ends(memory_mb: int) -> None:
    large = pb.Structure(json_schema=large_enum(60_000, 250))
    less = f"grammar_builder._MEMORY_BYTES = {memory_mb} << 20"
    assert ending_of_a_child(large, less) == -signal.SIGABRT


@contextlib.contextmanager
def started_builder(model: TextModel, timeout_s: float) -> Iterator[BuilderProcess]:
    vocabulary = Vocabulary(model.tokenizer_json(), model.vocab_size, tuple(model.end_ids), chars_max=10_000)
    with contextlib.closing(BuilderProcess(vocabulary, timeout_s)) as builder:
        builder.await_ready()
        yield builder


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGPROF, "takes longer"), (signal.SIGABRT, "too much memory"), (signal.SIGSEGV, "nested too deeply")],
)
def test_a_child_that_is_gone_says_why_by_its_signal(model: TextModel, number: signal.Signals, words: str) -> None:
    before = children()
    with started_builder(model, 20.0) as builder:
        (pid,) = children() - before
        psutil.Process(pid).send_signal(number)
        outcome = builder.build("json_schema", SLOW.json_schema)
        assert isinstance(outcome, Unusable)
        assert words in outcome.why
        assert not builder.alive


def test_a_child_that_reads_nothing_does_not_hold_its_user(model: TextModel) -> None:
    with started_builder(model, SHORT_S) as builder:
        builder._process.send_signal(signal.SIGSTOP)
        with pytest.raises(BuilderLost, match="gets no time"):
            builder.build("json_schema", large_enum(1000, 250))  # more than a pipe holds
        assert not builder.alive


def test_a_child_of_which_an_answer_is_outstanding_is_not_used_again(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> bytes:
        raise RuntimeError

    with started_builder(model, 20.0) as builder:
        with monkeypatch.context() as patch:
            patch.setattr(builder, "_read_line", unreadable)
            with pytest.raises(RuntimeError):
                builder.build("regex", "a")
        assert not builder.alive


def test_a_gateway_with_a_thousand_clients_checks_grammars(model: TextModel) -> None:
    num_wanted, (soft, hard) = 1200, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * num_wanted:
        pytest.skip("not so many descriptors may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * num_wanted), hard))
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(num_wanted)]
    try:
        with contextlib.closing(GrammarChecker(limits(), model)) as checker:
            assert checker.check_blocking(pb.Structure(regex="a"))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
