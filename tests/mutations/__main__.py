"""Puts in each fault, runs its tests, and prints which were caught. In a copy of the sources, under build/mutations."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT
from tests.mutations import Mutant, csrc, laws, misplaced, pages, rooms, tools

COPY = ROOT / "build" / "mutations"
SECONDS = 600  # after which tests that never end have caught their fault
# Which of the faults in csrc is on: the place of a mutant among all of them, from 1.
SWITCH = """#include <cstdlib>
inline const int hookstats_mutant = std::getenv("HOOKSTATS_MUTANT") ? std::atoi(std::getenv("HOOKSTATS_MUTANT")) : 0;
"""


def main(words: list[str]) -> int:
    mutants = csrc.MUTANTS + rooms.MUTANTS + pages.MUTANTS + laws.MUTANTS + tools.MUTANTS
    chosen = [each for each in mutants if not words or any(word in each.name + each.file for word in words)]
    wrong = [line for each in chosen if (line := misplaced(each, ROOT))]
    assert not wrong, "\n".join(wrong)
    compiled = any(is_compiled(each) for each in chosen)
    copy_sources(csrc.MUTANTS if compiled else [])
    if compiled:
        build = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(build, cwd=COPY, check=True, env=os.environ | {"HOOKSTATS_CUDA": "0"})
        # Compiling it takes minutes on a busy machine, which are not those of the first test.
        harness = [sys.executable, "-c", "from tests.cuda_on_cpu.loading import load_harness; load_harness()"]
        subprocess.run(harness, cwd=COPY, check=True)
    else:
        for path in [
            *ROOT.glob("hookstats/_glue/*/*.so"),
            *ROOT.glob("hookstats/_*.so"),
            *ROOT.glob("hookstats/_*.json"),
        ]:
            target = COPY / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    survived = 0
    passing = {tests: run(tests, None) == "survived" for tests in dict.fromkeys(each.tests for each in chosen)}
    for each in chosen:
        start = time.monotonic()
        result = verdict(each) if passing[each.tests] else "not run: the tests fail without it"
        survived += result != "caught"
        print(f"{result:9} {time.monotonic() - start:4.0f} s  {each.file}: {each.name}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} were caught")
    return int(survived > 0)


def is_compiled(mutant: Mutant) -> bool:
    return mutant.file.startswith("csrc/")


def copy_sources(compiled: list[Mutant]) -> None:
    """Writes only what is different, so that only that is compiled again."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    wanted = {name for name in names if name and (ROOT / name).is_file()}
    for path in [path for path in COPY.rglob("*.py") if str(path.relative_to(COPY)) not in wanted]:
        path.unlink()
    for name in wanted:
        content = (ROOT / name).read_bytes()
        faults = {number: each for number, each in enumerate(compiled, 1) if each.file == name}
        if faults:
            content = with_switches(content.decode(), faults).encode()
        if compiled and name == "csrc/stats.h":
            content = content.replace(b"#pragma once\n", b"#pragma once\n" + SWITCH.encode(), 1)
        if not (COPY / name).exists() or (COPY / name).read_bytes() != content:
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            (COPY / name).write_bytes(content)


def with_switches(source: str, faults: dict[int, Mutant]) -> str:
    """C++ in which each of these is chosen when it runs."""
    for number, each in faults.items():
        if each.text.endswith(";"):
            switched = f"{{ if (hookstats_mutant == {number}) {{ {each.replacement} }} else {{ {each.text} }} }}"
        else:
            switched = f"(hookstats_mutant == {number} ? ({each.replacement}) : ({each.text}))"
        source = source.replace(each.text, switched)
    return source


def verdict(mutant: Mutant) -> str:
    if is_compiled(mutant):
        return run(mutant.tests, csrc.MUTANTS.index(mutant) + 1)
    path = COPY / mutant.file
    source = path.read_text()
    path.write_text(source.replace(mutant.text, mutant.replacement))
    try:
        return run(mutant.tests, None)
    finally:
        path.write_text(source)


def run(tests: str, mutant: int | None) -> str:
    # Files of bytecode are told apart by their second and size, which two faults may share.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "HOOKSTATS_MUTANT": str(mutant or 0)}
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)], cwd=COPY, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "caught"
    if done.returncode in (0, 5) and "passed" not in done.stdout:
        return "no tests"
    return "survived" if done.returncode == 0 else "caught"


if __name__ == "__main__":
    assert Path.cwd() == ROOT, f"expected to be run in {ROOT}"
    sys.exit(main(sys.argv[1:]))
