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

from ._errors import missing

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
        machine = ", ".join(
            value if isinstance(value, str) else f"{name} {value}"
            for name, value in machine.items()
            if isinstance(value, (str, int, float))
        )
    return data, str(machine)


def unit_of(name: str) -> str | None:
    """The key of UNITS that a field's name ends with."""
    return next((unit for unit in UNITS if name == unit or name.endswith("_" + unit)), None)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def panels_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One panel for each section: its unit, the names of its rows, the values of each series, and what share of the
    machine's peak the first of them is. A row without a value in the panel's unit is left out."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        title = str(record.get("section", record.get("phase", "")))
        if measured_units(record):
            sections.setdefault(title, []).append(record)
    panels = []
    for title, rows in sections.items():
        unit = next(unit for unit in UNITS if any(unit in measured_units(row) for row in rows))
        rows = [row for row in rows if unit in measured_units(row)]
        series = list(dict.fromkeys(name for row in rows for name in row if unit_of(name) == unit))
        panels.append(
            {
                "title": title,
                "unit": UNITS[unit],
                "rows": row_names(rows),
                "series": {
                    name: [row.get(name) if is_number(row.get(name)) else None for row in rows]
                    for name in series
                },
                "shares": [row.get("share_of_peak") for row in rows],
            }
        )
    return panels


def measured_units(record: dict[str, Any]) -> set[str]:
    return {unit for name, value in record.items() if is_number(value) and (unit := unit_of(name))}


def row_names(records: list[dict[str, Any]]) -> list[str]:
    """Each record's name or key, or the fields in which it differs from others and which are no measurement."""
    skipped = ("section", "phase", "date", "command")

    def described(name: str, value: Any) -> bool:
        if name in skipped or unit_of(name) or isinstance(value, (float, dict, list)):
            return False
        return len(records) == 1 or any(record.get(name) != value for record in records)

    def name_of(record: dict[str, Any]) -> str:
        if "name" in record:
            return str(record["name"])
        if "key" in record:  # "decode: 1 x 4096, ...": the panel has the first word
            return str(record["key"]).removeprefix(f"{record.get('phase')}: ")
        return ", ".join(f"{name} {value}" for name, value in record.items() if described(name, value))

    return [name_of(record) for record in records]


BAR, ROW_GAP, PANEL_GAP, WIDTH = 0.17, 0.1, 0.75, 11  # inches


def draw(panels: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Horizontal bars, a group for each row; a row has bars only for the series that it was measured in."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def height(panel: dict[str, Any]) -> float:
        bars = sum(value is not None for values in panel["series"].values() for value in values)
        return BAR * bars + ROW_GAP * len(panel["rows"])

    heights = [height(panel) for panel in panels]
    figure, all_axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(WIDTH, sum(heights) + PANEL_GAP * len(panels) + 0.4),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for panel, axes in zip(panels, all_axes[:, 0]):
        draw_panel(panel, axes)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_panel(panel: dict[str, Any], axes: Any) -> None:
    top, middles = 0.0, []
    for row in range(len(panel["rows"])):
        begin = top
        for index, (name, values) in enumerate(panel["series"].items()):
            if values[row] is None:
                continue
            colour = COLOURS[index % len(COLOURS)]
            axes.barh(top + BAR / 2, values[row], 0.9 * BAR, color=colour, label=name)
            share = panel["shares"][row] if index == 0 else None
            text = f"{values[row]:.3g}" if values[row] < 1000 else f"{values[row]:,.0f}"
            text += "" if share is None else f"  ({share:.0%} of peak)"
            axes.annotate(
                text,
                (values[row], top + BAR / 2),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
            top += BAR
        middles.append((begin + top) / 2)
        top += ROW_GAP
    axes.set_yticks(middles, panel["rows"], fontsize=7)
    axes.set_ylim(top, -ROW_GAP)
    axes.margins(x=0.15)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel(panel["unit"], fontsize=8)
    axes.set_title(panel["title"], fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if len(panel["series"]) > 1:
        handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
        axes.legend(handles.values(), handles, fontsize=7, frameon=False)


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
    try:
        draw(panels, machine, out)
    except ModuleNotFoundError as error:
        print(missing("attnspan.plot", error, "matplotlib"), file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
