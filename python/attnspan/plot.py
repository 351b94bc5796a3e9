"""Plots of what `attnspan bench` measured: python -m attnspan.plot bench.json [-o bench.png]

The JSON is a list of records, a file of one record a line, or an object with the list under "results". Records with the
same "section" (or "phase") share a panel; every rate in a record ("tflops", "attnspan_tflops", "gb_per_s", ...) is a bar.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

# What a number is, by the end of its name: the unit on the axis. In order of preference; a panel shows one unit.
UNITS = {
    "tflops": "TFLOP/s",
    "gflops": "GFLOP/s",
    "tbs": "TB/s",
    "tb_per_s": "TB/s",
    "gbs": "GB/s",
    "gb_per_s": "GB/s",
    "tokens_per_second": "tokens/s",
    "ms": "ms",
    "us": "us",
    "seconds": "s",
}
COLOURS = ("#1f4e79", "#d98c3f", "#5b8c5a", "#8c5b7f", "#777777")


def read_records(path: pathlib.Path) -> tuple[list[dict[str, Any]], str]:
    """The records of a file, and what it says about the machine."""
    text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        try:
            data = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}: found no JSON ({error}), expected what attnspan bench writes"
            ) from None
    machine = ""
    if isinstance(data, dict):
        machine, data = data.get("machine", ""), data.get("results")
    if not isinstance(data, list) or not all(isinstance(record, dict) for record in data):
        raise ValueError(
            f'{path}: found no list of records, expected one, or an object with one under "results"'
        )
    if isinstance(machine, dict):
        machine = ", ".join(str(value) for value in machine.values() if isinstance(value, (str, int, float)))
    return data, str(machine)


def unit_of(name: str) -> str | None:
    """The key of UNITS that a field's name ends with."""
    return next((unit for unit in UNITS if name == unit or name.endswith("_" + unit)), None)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def panels_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One panel for each section: its unit, the names of its rows, and the values of each series."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        title = str(record.get("section", record.get("phase", "")))
        if any(is_number(value) and unit_of(name) for name, value in record.items()):
            sections.setdefault(title, []).append(record)
    panels = []
    for title, rows in sections.items():
        found = {unit_of(name) for row in rows for name, value in row.items() if is_number(value)}
        unit = next(unit for unit in UNITS if unit in found)
        series = list(dict.fromkeys(name for row in rows for name in row if unit_of(name) == unit))
        panels.append(
            {
                "title": title,
                "unit": UNITS[unit],
                "rows": [row_name(row) for row in rows],
                "series": {
                    name: [row.get(name) if is_number(row.get(name)) else None for row in rows]
                    for name in series
                },
            }
        )
    return panels


def row_name(record: dict[str, Any]) -> str:
    """The record's name, or what tells it from the others: its fields that are no measurement."""
    if "name" in record:
        return str(record["name"])
    skipped = ("section", "phase", "date", "command")
    return ", ".join(
        f"{name} {value}"
        for name, value in record.items()
        if name not in skipped and not unit_of(name) and not isinstance(value, (float, dict, list))
    )


def draw(panels: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [max(1.0, 0.3 * len(panel["rows"]) * max(1, 0.7 * len(panel["series"]))) for panel in panels]
    figure, all_axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(10, sum(heights) + 0.9 * len(panels) + 0.4),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for panel, axes in zip(panels, all_axes[:, 0]):
        thickness = 0.8 / len(panel["series"])
        for index, (name, values) in enumerate(panel["series"].items()):
            places = [row + (index + 0.5) * thickness - 0.4 for row in range(len(values))]
            bars = axes.barh(
                places,
                [value or 0 for value in values],
                thickness * 0.9,
                label=name,
                color=COLOURS[index % len(COLOURS)],
            )
            labels = ["" if value is None else f"{value:.3g}" for value in values]
            axes.bar_label(bars, labels, padding=3, fontsize=7)
        axes.set_yticks(range(len(panel["rows"])), panel["rows"], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(panel["unit"], fontsize=8)
        axes.set_title(panel["title"], fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        if len(panel["series"]) > 1:
            axes.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attnspan.plot", description=__doc__.split("\n")[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument(
        "-o", "--out", type=pathlib.Path, help="PNG, SVG or PDF; default: beside the JSON, as PNG"
    )
    options = parser.parse_args(arguments)
    try:
        records, machine = read_records(options.json)
        panels = panels_of(records)
        if not panels:
            units = ", ".join(UNITS)
            raise ValueError(
                f"{options.json}: found no measurement, expected fields that end in one of {units}"
            )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    out = options.out or options.json.with_suffix(".png")
    draw(panels, machine, out)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
