"""House rules that a program can check."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".proto"}
LINES_MAX = 500
FUNCTION_LINES_MAX = 60
TOP_LEVEL = {
    "pyproject.toml",
    "controller",
    "workers",
    "vision_workers",
    "proto",
    "csrc",
    "tests",
    "cluster",
    "benchmarks",
    "examples",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "CMakeLists.txt",
}


def tracked() -> list[Path]:
    """What is in the repository, or will be with the next commit."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listing.splitlines() if (ROOT / line).is_file()]


def sources() -> list[Path]:
    return [path for path in tracked() if path.suffix in SOURCE_SUFFIXES and "_pb2" not in path.name]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_top_level_is_as_agreed() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize("folder", ["controller", "workers", "vision_workers", "proto", "csrc", "tests", "cluster"])
def test_each_folder_says_what_it_is(folder: str) -> None:
    assert len((ROOT / folder / "README.md").read_text().splitlines()) >= 8


def test_files_are_short_enough_to_be_one_noun() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := p.read_text().count("\n")) > LINES_MAX}
    assert not long


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources()
        if path.suffix == ".py"
        for node in functions(path)
        if node.end_lineno is not None and node.end_lineno - node.lineno > FUNCTION_LINES_MAX
    ]
    assert not long


def test_nothing_is_left_undone_or_swallowed() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError|except( Exception)?:\s*pass")
    here = Path(__file__).resolve()
    found = [str(p.relative_to(ROOT)) for p in sources() if p != here and marks.search(p.read_text())]
    assert not found


def test_environment_is_read_in_one_place() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in sources()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in {"controller", "workers", "vision_workers", "proto", "cluster"}
        and re.search(r"os\.(environ|getenv)", path.read_text())
    }
    assert readers <= {"cluster/environment.py", "workers/environment.py"}


def test_ray_is_known_in_one_place() -> None:
    users = {path.parent for path in sources() if re.search(r"^\s*(import|from) ray\b", path.read_text(), re.MULTILINE)}
    assert users == {ROOT / "cluster" / "supervisor"}


def test_the_architecture_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([\w./]*\w\.(?:py|cpp|h|proto)|[\w/]+/)`", text))
    files = [path.relative_to(ROOT) for path in tracked()]
    known = {f"/{path}" for path in files} | {f"/{folder}/" for path in files for folder in path.parents}
    assert len(named) > 50
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in known)]


def test_engine_core_is_pure() -> None:
    impure = re.compile(r"#include <(chrono|thread|mutex|fstream|random|iostream|filesystem|atomic|future)>|\brand\(")
    found = [path.name for path in (ROOT / "csrc" / "engine").glob("*.[ch]*") if impure.search(path.read_text())]
    assert not found


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    outs = ("--python_out=", "--grpc_python_out=", "--mypy_out=quiet:", "--mypy_grpc_out=quiet:")
    flags = ["-Iairside/proto=proto", *(f"{out}{tmp_path}" for out in outs)]
    plugins = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", *flags, "airside/proto/airside.proto"]
    subprocess.run(command, cwd=ROOT, env=plugins, check=True)
    made = {path.name: path.read_text() for path in (tmp_path / "airside" / "proto").iterdir()}
    assert made == {path.name: path.read_text() for path in (ROOT / "proto").glob("airside_pb2*")}, "run `make proto`"


def test_no_large_files() -> None:
    large = [str(path.relative_to(ROOT)) for path in tracked() if path.stat().st_size > 15_000_000]
    assert not large
