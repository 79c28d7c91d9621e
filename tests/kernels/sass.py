"""Counts the instructions of the CUDA kernels' hot loops in SASS, the GPU's machine code, where no GPU can time them.

python -m tests.kernels.sass FILE prints the figures of an extension or a cubin as instructions.json has them. It
needs cuobjdump and nvdisasm: from the CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

GPU = "sm_90"
# accumulate_kernel<scalar_t, kPack, kPlaces, Walker, kind, kFlight> of csrc/cuda/accumulate.h: whole tensors, in packs
# of four, with as many bytes on their way as most GPUs have room for.
KERNEL = re.compile(
    r"accumulate_kernelI(f|NS_8BFloat16E)Li4E"
    r"(Li4ENS0_10LineWalker|Li1ENS0_10NearWalker|Li1ENS0_10LineWalker|Li4ENS0_19Unaligned\w+?r|Li1ENS0_19Unaligned\w+?r)"
    r"ELNS_13HistogramKindE([012])ELi128EE"
)
SCALARS = {"f": "float32", "NS_8BFloat16E": "bfloat16"}
SCHEDULES = {
    "Li4ENS0_10LineWalker": "rows",
    "Li1ENS0_10NearWalker": "planes",
    "Li1ENS0_10LineWalker": "flat",
    "Li4ENS0_19UnalignedLineWalker": "unaligned rows",
    "Li1ENS0_19UnalignedNearWalker": "unaligned planes",
}
KINDS = ("moments", "+ per tensor", "+ per channel")
LOOP_VALUES = 4 * 4  # of a thread, in one round of the hot loop: Ring::kGroup packs
TILE_VALUES = 128 * 4  # between two rounds of the loop around it: TileSums::kMostPacks packs

Figures = dict[str, dict[str, int]]


def tool(name: str) -> str | None:
    """Find a tool of the CUDA toolkit: on PATH, or in NVIDIA's wheel for it."""
    if found := shutil.which(name):
        return found
    try:
        files = metadata.files(f"nvidia-cuda-{name}") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == name), None)


def missing_tools() -> list[str]:
    return [name for name in ("cuobjdump", "nvdisasm") if tool(name) is None]


def cuobjdump(file: Path, *arguments: str) -> str:
    dump, disassemble = tool("cuobjdump"), tool("nvdisasm")
    if not (dump and disassemble):
        sys.exit(f"expected cuobjdump and nvdisasm, did not find {' and '.join(missing_tools())}")
    path = os.pathsep.join([str(Path(disassemble).parent), os.environ.get("PATH", os.defpath)])
    command = [dump, *arguments, "-arch", GPU, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}).stdout


def label(kernel: str) -> str | None:
    """For example "rows bfloat16 + per tensor"; None for a kernel that is not counted."""
    match = KERNEL.search(kernel)
    return match and f"{SCHEDULES[match[2]]} {SCALARS[match[1]]} {KINDS[int(match[3])]}"


def count(file: Path) -> Figures:
    """By kernel: instructions of the hot loop, and of the tile's loop around it without the loops inside."""
    names = [line.split()[-1] for line in cuobjdump(file, "-symbols").splitlines() if " ENTRY " in line]
    wanted = [name for name in names if label(name)]
    if not wanted:
        return {}
    figures: Figures = {}
    for function in cuobjdump(file, "-sass", "-fun", ",".join(wanted)).split("Function : ")[1:]:
        loop, tile = count_loops(function)
        figures[label(function.split("\n", 1)[0]) or ""] = {"loop": loop, "tile": tile}
    return dict(sorted(figures.items()))


def count_loops(sass: str) -> tuple[int, int]:
    """Count a function's loops. A loop is what a branch back spans; the hot one is the longest without another inside
    that copies asynchronously into shared memory (LDGSTS)."""
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    places = [int(address, 16) for address, _ in found]
    instructions = [text for _, text in found]
    loops = []
    for last, text in enumerate(instructions):
        branch = re.search(r"\bBRA.* 0x([0-9a-f]+)$", text)
        if branch and int(branch[1], 16) < places[last]:
            loops.append(range(places.index(int(branch[1], 16)), last + 1))

    def inside(loop: range) -> list[range]:
        return [each for each in loops if each != loop and each[0] in loop and each[-1] in loop]

    copying = [loop for loop in loops if not inside(loop) and any("LDGSTS" in instructions[i] for i in loop)]
    hot = max(copying, key=len)
    tile = min((loop for loop in loops if hot in inside(loop)), key=len, default=range(0))
    nested = {i for loop in inside(tile) for i in loop}
    return len(hot), len(tile) - len(nested)


def grown(figures: Figures, recorded: Figures) -> list[str]:
    """A line for each kernel that is missing, new, or takes more instructions than recorded."""
    lines = [f"{name}: expected in both, recorded: {name in recorded}" for name in figures.keys() ^ recorded.keys()]
    for name in figures.keys() & recorded.keys():
        for part, values in (("loop", LOOP_VALUES), ("tile", TILE_VALUES)):
            before, now = recorded[name][part], figures[name][part]
            if now > before:
                lines.append(
                    f"{name}: expected at most {before} instructions in the {part}, {before / values:.3f} for each "
                    f"value; got {now}, {now / values:.3f}"
                )
    return sorted(lines)


if __name__ == "__main__":
    print(json.dumps(count(Path(sys.argv[1])), indent=2))
