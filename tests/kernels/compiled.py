"""Record of the sources of CUDA kernels that were compiled, and held to their bounds, for all architectures.

    python -m tests.kernels.compiled          # exit code 0: those that lie here
    python -m tests.kernels.compiled record   # after `make kernels ARCH=all`, which does it

CI compiles the kernels for one architecture where the recorded sources are these, and else for all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECORD = Path(__file__).with_name("compiled.json")
ALL = {"8.0", "9.0", "10.0", "12.0"}


def sources(folder: Path) -> list[Path]:
    """List the files of csrc/cuda and the headers that these include."""
    found, waiting = set[Path](), list(folder.glob("cuda/*"))
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
            waiting += [included for name in names if (included := (path.parent / name).resolve()).exists()]
    return sorted(found)


def hash_of_sources() -> str:
    folder = (ROOT / "csrc").resolve()
    digest = hashlib.sha256()
    for path in sources(folder):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(words: list[str]) -> int:
    here = hash_of_sources()
    if words == ["record"]:
        built = json.loads((ROOT / "hookstats" / "_built.json").read_text())
        architectures = {each.partition("+")[0] for each in built["architectures"]}
        if not architectures >= ALL:
            print(f"expected a build for {sorted(ALL)}, got one for {sorted(architectures)}: make kernels ARCH=all")
            return 1
        RECORD.write_text(json.dumps({"sources": here, "nvcc": built["cuda"]}, indent=2) + "\n")
        return 0
    recorded = json.loads(RECORD.read_text())
    if recorded["sources"] == here:
        print(f"The CUDA kernels are those that nvcc {recorded['nvcc']} compiled for all architectures ({here[:12]}).")
        return 0
    print(f"The CUDA kernels have changed ({here[:12]}; for all architectures: {recorded['sources'][:12]}).")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
