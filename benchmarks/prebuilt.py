"""An extension that was built before, for a machine whose time is short.

    make gpu-prebuilt                      # into build/gpu-prebuilt
    python -m benchmarks.prebuilt load     # there: puts it into hookstats/ and tries it on the GPU

It has kernels for sm_90, and glue for Python 3.12 and torch 2.11. What was built from other sources, or does not run,
is refused: then one builds.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "gpu-prebuilt"
PACKAGE = ROOT / "hookstats"
BUILT = ("_kernels.so", "_ops.so", "_built.json", "_glue")
TRIAL = (
    "import torch; from hookstats import _native; assert not _native.WITHOUT_GLUE, _native.WITHOUT_GLUE\n"
    "if torch.cuda.is_available(): _native.reserve_scratch(torch.device('cuda', 0))"
)


def hash_of_sources() -> str:
    """Hash all sources that are compiled, and the flags they are compiled with."""
    digest = hashlib.sha256()
    for path in sorted([ROOT / "setup.py", *(each for each in (ROOT / "csrc").rglob("*") if each.is_file())]):
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def put(source: Path, target: Path) -> None:
    """Copy what was built from one folder into another."""
    for name in BUILT:
        if (target / name).is_dir():
            shutil.rmtree(target / name)
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
        copy(source / name, target / name)


def pack() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    put(PACKAGE, FOLDER)
    (FOLDER / "sources").write_text(hash_of_sources())
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    print(f"{FOLDER}: {sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {len(files)} files")
    return 0


def load() -> int:
    if not FOLDER.exists():
        print(f"expected {FOLDER.name} beside the other builds: make gpu-prebuilt")
        return 1
    if (FOLDER / "sources").read_text() != hash_of_sources():
        print("expected what was built from these sources, got what was built from others: make gpu-prebuilt")
        return 1
    put(FOLDER, PACKAGE)
    return subprocess.run([sys.executable, "-c", TRIAL], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit({"pack": pack, "load": load}[sys.argv[1]]())
