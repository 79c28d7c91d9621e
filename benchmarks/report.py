"""From the newest JSON in benchmarks/results/ to benchmarks/README.md and its picture: python -m benchmarks.report"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS = ["hookstats", "hookstats + per_tensor histogram", "hookstats + per_channel histogram"]
SHORT = ["moments, norms, counts", "+ histogram per tensor", "+ histogram per channel"]


Found = tuple[Path, dict[str, Any]]


def results(kind: str) -> list[Found]:
    """List the results that have figures, the newest first; of one day, first the one that ran the most."""
    found = [(path, json.loads(path.read_text())) for path in (HERE / "results").glob(f"{kind}-*.json")]
    found = [(path, record) for path, record in found if record.get("figures")]

    def age(each: Found) -> tuple[Any, ...]:
        path, record = each
        return record["date"], -len(record.get("not_run", [])), path.stat().st_mtime

    return sorted(found, key=age, reverse=True)


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def by_case(figures: list[dict[str, Any]], case: str) -> dict[str, dict[str, dict[str, Any]]]:
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for figure in figures:
        if figure[case] is None:  # a benchmark by itself
            continue
        cases.setdefault(figure[case], {})[figure["name"]] = figure
    return cases


def gpu_page(path: Path, record: dict[str, Any]) -> list[str]:
    gpu = record["gpu"]
    cases = by_case(record["figures"], "case")
    lines = [
        f"## {gpu['name']}",
        "",
        f"{gpu['multiprocessors']} multiprocessors, {gpu['l2_mib']:.0f} MiB of L2, driver {gpu['driver']}, torch "
        f"{record['torch']}, CUDA {record['hookstats']['cuda']}, {record['date']}, commit {record['commit']}; "
        f"[{path.name}](results/{path.name}). The table shows the median device time of one call. A CUDA graph holds "
        "many calls, which take turns on buffers of 512 MB or more together. *read* is our own kernel that only reads "
        "the buffer ([floor.cu](floor.cu)); the brackets have the ratio to it.",
        "",
        *floor_lines(cases),
    ]
    compared = {case: names for case, names in cases.items() if OURS[0] in names and "eager operators" in names}
    others = [name for name in next(iter(compared.values()), {}) if name not in (*OURS, "read floor")]
    if compared:
        lines += ["", "The same statistics by other means, and parts of them, in the same run:", ""]
        lines += [row("us", "hookstats", *others), row("---", "---", *["---"] * len(others))]
    for case, names in compared.items():
        lines.append(row(case, *[number(names[n]["median_us"]) if n in names else "-" for n in (OURS[0], *others)]))
    lines += ["", *many_lines(cases, "us"), *training_lines(record.get("training", []), bandwidth(cases))]
    lines += softmax_lines(record.get("softmax", []))
    return [*lines, *said_lines(record)]


def bandwidth(cases: dict[str, dict[str, dict[str, Any]]]) -> float | None:
    """The fastest read of a run, in GB/s."""
    return max((names["read floor"]["gb_per_s"] for names in cases.values()), default=None)


def floor_lines(cases: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """One tensor, beside a mere read of it."""
    lines = [row("", "read", *SHORT), row("---", "---", "---", "---", "---")]
    for case, names in cases.items():
        if OURS[0] not in names:
            continue
        read = names["read floor"]
        ours = [f"{number(names[n]['median_us'])} us ({names[n]['times_floor']:.2f})" for n in OURS if n in names]
        lines.append(row(case, f"{number(read['median_us'])} us, {read['gb_per_s']:.0f} GB/s", *ours))
    return lines


def softmax_lines(figures: list[dict[str, Any]]) -> list[str]:
    """The softmax of rows; `logsumexp` gives one of its five numbers."""
    cases = by_case(figures, "case")
    if not cases:
        return []
    names = list(next(iter(cases.values())))
    lines = ["The softmax of rows of logits:", "", row("us", *names), row("---", *["---"] * len(names))]
    lines += [row(case, *[number(found[name]["median_us"]) for name in names]) for case, found in cases.items()]
    return [*lines, ""]


def first_page(path: Path, record: dict[str, Any]) -> list[str]:
    """Render the results of `make gpu-first`: sanitizers, tests, a training step, and the decisive figures."""
    cases = by_case(record["figures"], "case")
    steps = [{**figure, "group": "training step, eager"} for figure in record.get("step", [])]
    lines = [
        "### `make gpu-first`",
        "",
        f"{record['gpu']['name']}, driver {record['gpu']['driver']}, torch {record['torch']}, CUDA "
        f"{record['hookstats']['cuda']}, {record['date']}, commit {record['commit']}; "
        f"[{path.name}](results/{path.name}).",
        "",
        *training_lines(steps, bandwidth(cases)),
        *floor_lines(cases),
        "",
    ]
    lines += where_lines(record.get("where", []))
    closing = record.get("closing", [])
    if closing:
        size = closing[0]["bytes"] / 1e6
        lines += [f"What the training thread waits for, where the state is {size:.0f} MB and every second step is "]
        lines[-1] += "measured:"
        lines += ["", *(f"- {each['name']}: {each['median_ms']:.2f} ms" for each in closing), ""]
    lines += ["The parts of the run:", ""]
    for part in record["parts"]:
        said = [line.strip("= ") for line in part["said"] if " passed" in line or "SUMMARY: " in line]
        built_instead = part["name"] == "load" and any(each["name"] == "build" for each in record["parts"])
        if said or (part["status"] != 0 and not built_instead):
            ended = [] if said else [f"ended with status {part['status']}", *part["said"][-1:]]
            lines.append(f"- {part['name']}, {part['seconds']:.0f} s: {'; '.join(ended + said)}")
    lines += [f"- failed: `{test}`" for test in record.get("tests", {}).get("which_failed", [])]
    return [*lines, *(f"- not run: {each}" for each in record.get("not_run", [])), ""]


def where_lines(figures: list[dict[str, Any]]) -> list[str]:
    """A step by what runs on the GPU, a column for each contender."""
    if not figures:
        return []
    lines = ["Where the time of such a step goes, by torch's profiler (ms of a step; launches are ours):", ""]
    lines += [row("", *[each["name"] for each in figures]), row("---", *["---"] * len(figures))]
    kinds = ["hookstats", "matrix products", "attention", "optimizer", "copies", "others", "idle"]
    for key in ["step", *kinds, "launches", "MHz", "watts"]:
        if key in figures[0]:
            lines.append(row(key, *[number(each[key]) if key in each else "-" for each in figures]))
    return [*lines, ""]


def said_lines(record: dict[str, Any]) -> list[str]:
    """List the times that stand in no table, and what could not be measured."""
    lines = [f"- {each['name']}: {each['ms']:.1f} ms" for each in record.get("first_use", [])]
    lines += [f"- {each['name']}: {each['us']:.1f} us" for each in record.get("totals", [])]
    for each in record.get("not_measured", []):
        lines.append(f"- {each['group']}: {each['name']}: not measured: {each['why']}")
    for part in record.get("parts", []):
        if part["status"] != 0:
            lines.append(f"- {part['name']}: ended with status {part['status']}: {' '.join(part['said'][-1:])}")
    lines += [f"- not run: {each}" for each in record.get("not_run", [])]
    return ["Beside that:", "", *lines, ""] if lines else []


def hook_lines(figures: list[dict[str, Any]]) -> list[str]:
    """List what a hook costs the host, from the groups that begin with "hooks"."""
    groups = {group: names for group, names in by_case(figures, "group").items() if group.startswith("hooks")}
    if not groups:
        return []
    lines = [
        "The cost of a hook on the host: a chain of modules that do next to nothing runs on one thread, all contenders "
        "in turns. The table shows the median ns per module, for forward and backward together unless a direction is "
        "named. *added* is the difference from an empty forward hook; beside a thread that computes in Python all the "
        "time, it is the difference from no hook.",
        "",
        row("", "modules", "ns per module", "added", "%"),
        row("---", "---", "---", "---", "---"),
    ]
    for group, names in groups.items():
        where = group.removeprefix("hooks").removeprefix(": ")
        for name, each in names.items():
            ns, added = (1e6 * each[key] / each["modules"] for key in ("median_ms", "added_ms"))
            percent = 100 * each["added_ms"] / names[each["compared_with"]]["median_ms"]
            more = ["-", "-"] if name == each["compared_with"] else [f"{added:+.0f}", f"{percent:+.1f}"]
            lines.append(row(f"{where}: {name}" if where else name, each["modules"], f"{ns:.0f}", *more))
    return [*lines, ""]


def training_lines(figures: list[dict[str, Any]], gb_per_s: float | None = None) -> list[str]:
    """Training steps; with a read bandwidth, also what is added over the time it takes to read what is hooked."""
    groups = {group: names for group, names in by_case(figures, "group").items() if group.startswith("training step, ")}
    if not groups:
        return []
    some = next(iter(next(iter(groups.values())).values()))
    threads = f", {some['threads']} thread{'s' * (some['threads'] > 1)}" if "threads" in some else ""
    lines = [
        f"A training step (forward, backward, AdamW) of a Llama-shaped model with {number(some['parameters'] / 1e6)} M "
        f"parameters and {some['tokens']} tokens{threads}. The outputs of all modules and their gradients are watched. "
        "The table shows the median ms, and the difference from the bare step; all contenders run in turns.",
        "",
    ]
    columns = ["step, ms", "added, ms", "added, %", "hooked, MB", "state, MB"]
    columns += ["a step's memory, MB", "added / reading what is hooked"] if gb_per_s else []
    for group, names in groups.items():
        lines += [row(group.removeprefix("training step, "), *columns), row("---", *["---"] * len(columns))]
        for name, each in names.items():
            base = names[each["compared_with"]]["median_ms"]
            added = "-" if name == each["compared_with"] else f"{each['added_ms']:+.3g}"
            percent = "-" if name == each["compared_with"] else f"{100 * each['added_ms'] / base:+.1f}"
            cells = [number(each["median_ms"]), added, percent, megabytes(each, "hooked_bytes")]
            cells.append(megabytes(each, "state_bytes"))
            if gb_per_s:
                hooked = each.get("hooked_bytes")
                ratio = f"{each['added_ms'] * gb_per_s * 1e6 / hooked:.2f}" if hooked else "-"
                cells += [megabytes(each, "step_bytes"), ratio]
            lines.append(row(name, *cells))
        lines.append("")
    return lines


def many_lines(cases: dict[str, dict[str, dict[str, Any]]], unit: str) -> list[str]:
    """Many tensors at once."""
    many = {case: names for case, names in cases.items() if "hookstats, together" in names}
    if not many:
        return []
    names = list(next(iter(many.values())))
    lines = [
        "A model's parameters or their gradients, channels = dimension 0, and for comparison their L2 norms alone:",
        "",
        row(unit, *names),
        row("---", *["---"] * len(names)),
    ]
    lines += [row(case, *[number(found[n][f"median_{unit}"]) for n in names]) for case, found in many.items()]
    return [*lines, ""]


def closing_lines(figures: list[dict[str, Any]]) -> list[str]:
    """List the costs of a step that ends with channels and histograms, and of one that ends with totals."""
    found = [each for each in figures if each["group"] == "closing a step"]
    if not found:
        return []
    times = " and ".join(f"{number(each['median_ms'])} ms with {each['name']}" for each in found)
    first = found[0]
    return [f"Closing a measured step of {first['sites']} sites of {first['channels']} channels takes {times}.", ""]


def megabytes(figure: dict[str, Any], key: str) -> str:
    return number(figure[key] / 2**20) if key in figure else "-"


def ratio_lines(processor: str, kernels: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """List each case's time as a multiple of `x.sum()`: fastest against fastest."""
    lines = [
        f"The fastest call of each case on this processor ({processor}), as a multiple of the time that `x.sum()` "
        "takes to read the same tensor. The goal for moments is 2:",
        "",
        row("", *SHORT),
        row("---", *["---"] * len(SHORT)),
    ]
    for case, found in kernels.items():
        read = found["x.sum()"]["min_ms"]
        lines.append(row(case, *[f"{found[name]['min_ms'] / read:.2f}" for name in OURS]))
    return [*lines, ""] if kernels else []


def cpu_page(path: Path, record: dict[str, Any]) -> list[str]:
    cases = by_case(record["figures"], "group")
    lines = [
        f"## {record['processor']}",
        "",
        f"{record['threads']} threads, {record['capability']}, torch {record['torch']}, {record['date']}, commit "
        f"{record['commit']}; [{path.name}](results/{path.name}). Median ms of one call.",
        "",
    ]
    kernels = {case: found for case, found in cases.items() if OURS[0] in found}
    names = list(next(iter(kernels.values()), {}))
    if kernels:
        lines += [row("ms", *names), row("---", *["---"] * len(names))]
    for case, found in kernels.items():
        lines.append(row(case, *[number(found[name]["median_ms"]) if name in found else "-" for name in names]))
    lines += ["", *ratio_lines(record["processor"], kernels)]
    lines += [*many_lines(cases, "ms"), *hook_lines(record["figures"]), *closing_lines(record["figures"])]
    return [*lines, *training_lines(record["figures"])]


def picture(record: dict[str, Any], path: Path) -> None:
    """Ratio to the floor over the size, of the row-wise bf16 cases of normal values."""
    from matplotlib import pyplot

    cases = by_case(record["figures"], "case")
    plain = {case: names for case, names in cases.items() if case.startswith("rows") and case.endswith("B bf16")}
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, label in zip(OURS, SHORT, strict=True):
        points = sorted((names[name]["bytes"], names[name]["times_floor"]) for names in plain.values())
        axes.plot([size / 2**20 for size, _ in points], [ratio for _, ratio in points], "o-", label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(xscale="log", xlabel="MB of bf16", ylabel="time / time of reading it", ylim=(0, None))
    axes.set_title(f"{record['gpu']['name']}: one tensor, bf16 rows")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    lines = [
        "# Measured",
        "",
        "`python -m benchmarks.report` writes this page from the JSON in results/. NOTES.md has notes on how the "
        "kernels reached these times.",
        "",
    ]
    alone, first, cpu = results("gpu"), results("gpufirst"), results("cpu")
    if alone:
        picture(alone[0][1], HERE / "results" / "gpu.png")
        lines += [*gpu_page(*alone[0]), "![Ratio to the read floor over the size](results/gpu.png)", ""]
    for gpu in dict.fromkeys(record["gpu"]["name"] for _, record in first):
        lines += first_page(*next(found for found in first if found[1]["gpu"]["name"] == gpu))
    if cpu:
        lines += cpu_page(*cpu[0])
    (HERE / "README.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
