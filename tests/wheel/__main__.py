"""A wheel for each Python, with a hook for several torches: `build` makes them in dist/, `test` tries them.

    python -m tests.wheel build 2.11 2.12 2.13 2.14 2.15
    python -m tests.wheel test 2.11 2.15
    python -m tests.wheel build 2.13 --pythons 3.10 3.12  # or all: those that are found on PATH; else this one

Each torch has an environment of its own under build/wheel, kept for the next time; the kernels are compiled once, and
the operators, for all torches, with the headers of the newest. With
HOOKSTATS_CUDA=1 there are some for GPUs. A wheel is installed and tried where no compiler is found: what it records,
its page, and the tests of tests/quick.txt that need no compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.conftest import ROOT

WORK, DIST = ROOT / "build" / "wheel", ROOT / "dist"
TOOLS = ("setuptools>=77", "wheel", "ninja", "pybind11")
TRIED_WITH = ("pytest", "pytest-xdist", "pyarrow", "pandas")
# Of tests/quick.txt, what needs a compiler, the sources, or other people's trainers and models.
NEED_MORE = (
    *("tests/kernels", "tests/cuda_on_cpu", "tests/graphs", "tests/docs", "tests/integrations", "tests/test_"),
    *("tests/calibration", "tests/glue"),
)
SMOKE = """
import sys, torch, hookstats
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
with hookstats.attach(model, every=1, sinks=hookstats.record("run")) as monitor:
    for _ in range(20):
        loss = model(torch.randn(32, 8)).square().mean()
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        monitor.step(loss=loss)
assert len(hookstats.load("run")) == 20
hookstats.report.write("run", "page.html")
built = hookstats.build_info()
if "without" in sys.argv:
    assert built["torch"] is None and built["without_glue"] == "HOOKSTATS_GLUE=none", built
else:
    # The glue of a minor version serves all its patches.
    assert built["torch"].split(".")[:2] == torch.__version__.split(".")[:2], built
    print(f"torch {torch.__version__}: glue for {built['torch']} of {', '.join(built['glues'])}")
"""
HERE = "{}.{}".format(*sys.version_info)


def main() -> None:
    def minor(word: str) -> str:
        if not re.fullmatch(r"\d+\.\d+", word):
            raise argparse.ArgumentTypeError(f"expected a minor version such as {HERE}, got {word!r}")
        return word

    def python(word: str) -> str:
        return word if word == "all" else minor(word)

    parser = argparse.ArgumentParser("tests.wheel", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["build", "test"])
    parser.add_argument("torches", nargs="+", type=minor)
    parser.add_argument("--pythons", nargs="+", type=python, default=[HERE], metavar="PYTHON")
    asked = parser.parse_args()
    if asked.what == "build":
        for old in DIST.glob("*.whl"):
            old.unlink()
    torches = sorted(asked.torches, key=lambda each: [int(n) for n in each.split(".")])  # the newest last
    for interpreter in interpreters() if asked.pythons == ["all"] else asked.pythons:
        {"build": build, "test": test}[asked.what](torches, interpreter)


def interpreters() -> list[str]:
    """The CPythons from 3.10 on that PATH has."""
    found = {HERE}
    for minor in range(10, 20):
        command = shutil.which(f"python3.{minor}")
        program = "import sys, venv; assert sys.implementation.name == 'cpython'"
        if command and subprocess.run([command, "-c", program], capture_output=True).returncode == 0:
            found.add(f"3.{minor}")
    return sorted(found, key=lambda each: int(each.split(".")[1]))


def wheels(python: str) -> list[Path]:
    return list(DIST.glob(f"*-cp{python.replace('.', '')}-*.whl"))


def build(torches: list[str], interpreter: str) -> None:
    lib = WORK / f"lib-{interpreter}"
    for minor in torches:
        # That of the tests has compiled it already.
        is_here = interpreter == HERE and torch.__version__.startswith(f"{minor}.")
        python = sys.executable if is_here else environment(minor, interpreter)
        run(python, "setup.py", "build_ext", "--build-lib", str(lib), cwd=ROOT)
    one = WORK / "one"
    shutil.rmtree(one, ignore_errors=True)
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(one), ".", cwd=ROOT)
    (made,) = one.glob("*.whl")
    run(python, "-m", "wheel", "unpack", "-d", str(one), str(made), cwd=ROOT)
    (package,) = one.glob("*/hookstats")
    shutil.rmtree(package / "_glue")  # build/ may have kept that of other torches
    for minor in torches:
        glue = f"_glue/torch{minor.replace('.', '_')}"
        shutil.copytree(lib / "hookstats" / glue, package / glue, dirs_exist_ok=True)
    libraries = sorted(package.rglob("*.so"))
    run("strip", "--strip-unneeded", *map(str, libraries), cwd=ROOT)
    DIST.mkdir(exist_ok=True)
    run(python, "-m", "wheel", "pack", "-d", str(DIST), str(package.parent), cwd=ROOT)
    (made,) = wheels(interpreter)
    run(python, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_of(libraries), str(made), cwd=DIST)
    (made,) = wheels(interpreter)
    for path in libraries:
        print(f"{path.stat().st_size / 2**20:6.2f} MB  {path.relative_to(package)}")
    print(f"{made.stat().st_size / 2**20:6.2f} MB  {made.relative_to(ROOT)}")


def platform_of(libraries: list[Path]) -> str:
    """The oldest glibc that has all that they ask of it (PEP 600)."""
    said = subprocess.run(["readelf", "-W", "-V", *map(str, libraries)], capture_output=True, text=True, check=True)
    newest = max((int(major), int(minor)) for major, minor in re.findall(r"\bGLIBC_(\d+)\.(\d+)", said.stdout))
    return f"manylinux_{newest[0]}_{newest[1]}_{os.uname().machine}"


def test(torches: list[str], interpreter: str) -> None:
    (wheel,) = wheels(interpreter)
    for minor in torches:
        python = environment(minor, interpreter)
        run(python, "-m", "pip", "install", "-q", *TRIED_WITH, cwd=ROOT)
        run(python, "-m", "pip", "uninstall", "-q", "-y", "hookstats", cwd=ROOT)
        with tempfile.TemporaryDirectory() as folder:
            where = Path(folder)
            alone = {"PATH": str(Path(python).parent)}
            begin = time.monotonic()
            run(python, "-m", "pip", "install", "-q", "--no-deps", str(wheel), cwd=where, **alone)
            took = time.monotonic() - begin
            run(python, "-c", SMOKE, cwd=where, **alone)
            shutil.rmtree(where / "run")
            run(python, "-c", SMOKE, "without", cwd=where, HOOKSTATS_GLUE="none", **alone)
            run(python, "-m", "hookstats", "doctor", cwd=where, **alone)
            print(f"Python {interpreter}, torch {minor}: installed in {took:.1f} s", flush=True)
            for each in ("tests", "docs", "benchmarks"):
                shutil.copytree(ROOT / each, where / each)
            shutil.copy2(ROOT / "pyproject.toml", where)
            quick = (ROOT / "tests" / "quick.txt").read_text().splitlines()
            chosen = [each for each in quick if not each.startswith(NEED_MORE)]
            run(python, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", *chosen, cwd=where, **alone)


def environment(minor: str, interpreter: str) -> str:
    """The Python of an environment with this torch."""
    folder = WORK / f"torch{minor}-python{interpreter}"
    python = folder / "bin" / "python"
    if not (folder / ".done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable if interpreter == HERE else f"python{interpreter}", "-m", "venv", str(folder), cwd=ROOT)
        run(str(python), "-m", "pip", "install", "-q", f"torch=={minor}.*", "numpy", *TOOLS, cwd=ROOT)
        (folder / ".done").touch()
    return str(python)


def run(*command: str, cwd: Path, **changed: str) -> None:
    subprocess.run(command, cwd=cwd, check=True, env=os.environ | changed)


if __name__ == "__main__":
    main()
