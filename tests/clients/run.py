"""One trainer, with hookstats or without, in this process: python -m tests.clients.run FILE FOLDER [--bare | --both]

Lines of the file that end in ``# +`` are those that hookstats adds. With --bare they are cut out, so nothing of it is
imported. The result goes to FOLDER/result.json. With --both it trains in either way, each in a process forked from this
one, which has imported the packages that the file imports; the results go to FOLDER/bare and FOLDER/watched.

A file that says ``RANKS = 2`` trains in as many processes, with torchrun's environment. One that says
``COMPILES = True`` leaves its weights in FOLDER/weights.*.npz: a program with hookstats in it may round differently.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ADDED = "# +"


def cut(source: str) -> tuple[str, int]:
    """The source without the lines that hookstats adds, each blank so that the others keep their numbers; how many."""
    lines = source.split("\n")
    return "\n".join("" if line.endswith(ADDED) else line for line in lines), sum(
        line.endswith(ADDED) for line in lines
    )


def weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers; of DTensors, the parts of this rank."""
    for name, value in sorted(model.state_dict().items()):
        yield name, getattr(value, "_local_tensor", value).detach().cpu().contiguous()


def digest(model: torch.nn.Module) -> str:
    """Hash the bits of all parameters and buffers."""
    made = hashlib.sha256()
    for name, value in weights(model):
        made.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        made.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def forked(ranks: int) -> tuple[int, list[int]]:
    """Starts the other ranks of a training. Returns the rank of this process, and on rank 0 the ids of the others."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    others, rank = list[int](), 0
    for other in range(1, ranks):
        others.append(os.fork())
        if not others[-1]:
            others, rank = [], other
            break
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return rank, others


def gathered(result: dict[str, Any], others: list[int]) -> dict[str, Any]:
    """Add the other ranks' weights and warnings to rank 0's result."""
    assert [os.waitpid(other, 0)[1] for other in others] == [0] * len(others)
    for rank in range(1, len(others) + 1):
        other = json.loads(Path(f"rank{rank}.json").read_text())
        told = [f"rank {rank}: {text}" for text in other["warnings"]]
        result |= {"digest": result["digest"] + other["digest"], "warnings": result["warnings"] + told}
    return result


def reported(folder: Path) -> dict[str, Any]:
    """Return what was recorded, and a page of it."""
    import hookstats
    from hookstats import report

    run = hookstats.load(folder / "runs")
    report.write(folder / "runs", folder / "report.html")
    return {
        "steps": len(run),
        "sites": len({site for snapshot in run for site in snapshot}),
        "findings": [f"{f.severity} {f.rule} in step {f.step}: {f.sentence}" for f in run.findings],
        "report": (folder / "report.html").stat().st_size,
    }


def main(file: Path, folder: Path, bare: bool) -> None:
    source, added = cut(file.read_text())
    names: dict[str, Any] = {"__name__": "client", "__file__": str(file)}
    exec(compile(source if bare else file.read_text(), file, "exec"), names)
    os.chdir(folder)
    rank, others = forked(names["RANKS"]) if "RANKS" in names else (0, [])
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002, of which others draw
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        model = names["train"]()
        seconds = time.perf_counter() - start
    told = [str(warning.message) for warning in caught if str(warning.message).startswith("hookstats")]
    result = {"seconds": seconds, "digest": digest(model), "added": added, "warnings": told}
    is_compiled = names.get("COMPILES", False)
    if is_compiled:
        np.savez(f"weights.{rank}.npz", **{name: value.double().numpy() for name, value in weights(model)})
    if rank:
        Path(f"rank{rank}.json").write_text(json.dumps(result))
    else:
        result = gathered(result, others) | {"is_compiled": is_compiled} | ({} if bare else reported(Path(".")))
        Path("result.json").write_text(json.dumps(result))
    assert bare == ("hookstats" not in sys.modules), "the bare run imports nothing of hookstats"


def both(file: Path, folder: Path) -> None:
    exec(compile(cut(file.read_text())[0], file, "exec"), {"__name__": "client", "__file__": str(file)})
    children = []
    for name in ("bare", "watched"):
        (folder / name).mkdir()
        child = os.fork()
        if not child:
            return main(file, folder / name, name == "bare")
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


if __name__ == "__main__":
    run_in = (Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
    both(*run_in) if "--both" in sys.argv else main(*run_in, "--bare" in sys.argv)
