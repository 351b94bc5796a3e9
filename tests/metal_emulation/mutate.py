#!/usr/bin/env python3
"""Breaks the Metal shaders one small way at a time, and checks that a test notices each time.

    tests/metal_emulation/mutate.py BUILD                the whole list (mutants.py): writes mutants.md
    tests/metal_emulation/mutate.py BUILD --only TEXT    the mutants whose name contains TEXT
    tests/metal_emulation/mutate.py BUILD --sample       the few that continuous integration tries

BUILD is a configured build with metal_grid_test and metal_emulation_test built from the tree as it is. A mutant
compiles the one shader file that it changes, for f32 tiles only, and meets first the test that noticed it last time
(mutants.md), then those of its kernels. What survives is built for every type and meets them all, in each
schedule. Exit status 1 if a mutant survives.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

from mutants import SHADERS, all_mutants

HERE = pathlib.Path(__file__).resolve().parent
REWRITE = HERE / "emulator/rewrite.sed"
RESULTS = HERE / "mutants.md"
SCHEDULES = ["skewed", "reverse", "shuffled", "forward"]

# One barrier, one tile bound, one mask edge, and one of the kernels without tiles.
SAMPLE = [
    "forward.metal: without barrier 3 (threadgroup_barrier)",
    "forward.metal: `key < range.end; key +=` -> `key + 1 < range.end; key +=`",
    "span.h: `p.window_right + 1` -> `p.window_right`",
    "unfused.metal: `key >= span.begin && key < span.end` -> `key >= span.begin`",
]

# The types that are left out at first: instantiations of templates, and the tests whose names say that they need them.
OTHER_TYPES = re.compile(r'ATTNSPAN_INSTANTIATE\("[^()]*_b?f16",[^()]*\)')
OTHER_TYPES_TESTS = "*f16*:*_product_*:MetalMerge.JoinsTheHalvesOfTheKeys"
FAULTS = ("race:", "uninitialised read", "divergence", "of a tensor of", "of threadgroup memory", "not bound", "infinity")


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


class Build:
    """Compiles and links as the build does, with one shader object replaced."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()
        self.compile = {}
        for entry in json.loads((self.folder / "compile_commands.json").read_text()):
            name = pathlib.Path(entry["file"]).name
            if name.endswith(".metal.cpp"):
                self.compile[name] = shlex.split(entry["command"])
        self.link, self.binary = {}, {}
        for target in ("metal_grid_test", "metal_emulation_test"):
            lines = run(["ninja", "-C", self.folder, "-t", "commands", target], check=True).stdout.splitlines()
            command = next(l for l in reversed(lines) if f"-o tests/{target}" in l)
            # CMake wraps the link: ": && c++ ... -o tests/X ... && cd ... && post-build steps"
            self.link[target] = shlex.split(command.split("&&")[1])
            self.binary[target] = self.folder / "tests" / target

    def make(self, mutant, work, every_type):
        """Test binaries with the mutant in them, or the compiler's complaint."""
        generated = pathlib.Path(work)
        unit = mutant.unit + ".cpp"
        for path in SHADERS.iterdir():
            if path.suffix == ".metal" and path.name != mutant.unit:
                continue
            text = mutant.text if path.name == mutant.shader else path.read_text()
            rewritten = run(["sed", "-E", "-f", REWRITE], input=text, check=True).stdout
            if not every_type:
                rewritten = OTHER_TYPES.sub("", re.sub(r"\\\n", "", rewritten))
            name = unit if path.name == mutant.unit else path.name
            (generated / name).write_text(f'#line 1 "{SHADERS / path.name}"\n' + rewritten)
        command = [a for a in self.compile[unit] if pathlib.Path(a).name != "ccache"]
        replaced = command[command.index("-o") + 1]
        command[command.index("-o") + 1] = str(generated / (unit + ".o"))
        command[command.index("-c") + 1] = str(generated / unit)
        command = [f"-I{generated}" if a.startswith("-I") and a.endswith("metal_emulation/shaders") else a
                   for a in command]
        compiled = run(command, cwd=self.folder)
        if compiled.returncode:
            return None, compiled.stderr
        binaries = {}
        for target in {binary for binary, _, _ in tests_of(mutant.unit)}:
            # The mutant comes first: of an inline function in several objects, the linker keeps the first.
            command = [a for a in self.link[target] if a != replaced]
            first = next(i for i, argument in enumerate(command) if argument.endswith(".o"))
            command.insert(first, str(generated / (unit + ".o")))
            binaries[target] = command[command.index("-o") + 1] = str(generated / target)
            linked = run(command, cwd=self.folder)
            if linked.returncode:
                sys.exit(f"mutate.py: {target} does not link:\n{linked.stderr}")
        return binaries, ""


def tests_of(unit):
    """(binary, filter, environment) of everything that runs the kernels of a shader file."""
    own = ("metal_emulation_test", "Metal*", {})
    grid = {"forward.metal": "*/forward_metal_*:*/decode_metal_*:*/cache_metal_*", "backward.metal": "*/backward_metal_*"}
    if unit == "unfused.metal":
        unfused = "*/forward_metal_*:*/backward_metal_*:*/cache_metal_*"
        return [("metal_grid_test", unfused + ":-*_packed_*:*_product_*", {"ATTNSPAN_METAL_UNFUSED": "1"}), own]
    if unit == "backward.metal":
        return [("metal_grid_test", grid[unit], {})]
    return [("metal_grid_test", grid[unit], {}), own] if unit in grid else [own]


def failure(binary, tests, schedule, environment):
    """(test, what it said) of the first test that fails, or None."""
    command = [str(binary), "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={tests}"]
    environment = {**os.environ, **environment, "ATTNSPAN_METAL_SCHEDULE": schedule}
    try:
        done = run(command, env=environment, timeout=120)
    except subprocess.TimeoutExpired:
        return tests, "does not end"
    if done.returncode == 0:
        return None
    if "no kernel is called" in done.stdout:
        sys.exit(f"mutate.py: a test needs a type that was left out: {' '.join(command)}\n{done.stdout[:1500]}")
    test = re.search(r"\[  FAILED  \] ([\w/.]+)", done.stdout)
    said = next((l.strip() for l in done.stdout.splitlines() if any(kind in l for kind in FAULTS)), None)
    if said:
        said = re.sub(r".*?((?:race|uninitialised|divergence|access|infinity).*)", r"\1", said)
        said = re.sub(r" \(thread \d+ of threadgroup.*| at /\S+$", "", said)
    elif done.returncode != 1:
        said = f"ends with {done.returncode}"
    return test.group(1) if test else tests, said or "wrong result"


def notice(build, mutant, recorded):
    """'schedule, test: what it said', or None where nothing notices the mutant."""
    for every_type in (False, True):
        with tempfile.TemporaryDirectory() as work:
            binaries, complaint = build.make(mutant, work, every_type)
            if binaries is None:
                if "static assertion" in complaint:
                    return "the compiler: a static assertion of tiles.hpp or tiles.h"
                sys.exit(f"mutate.py: {mutant.name} does not compile:\n{complaint}")
            if recorded and not every_type:
                schedule, test = recorded
                for binary, _, environment in tests_of(mutant.unit):
                    if failure(build.binary[binary], test, schedule, environment):
                        sys.exit(f"mutate.py: {test} ({schedule}) fails without a mutant")
                    found = failure(binaries[binary], test, schedule, environment)
                    if found:
                        return f"{schedule}, {found[0]}: {found[1]}"
            for schedule in SCHEDULES:
                for binary, tests, environment in tests_of(mutant.unit):
                    if not every_type:
                        tests += (":" if ":-" in tests else ":-") + OTHER_TYPES_TESTS
                    found = failure(binaries[binary], tests, schedule, environment)
                    if found:
                        return f"{schedule}, {found[0]}: {found[1]}"
    return None


def read_results():
    """name -> (schedule, test) of mutants.md"""
    recorded = {}
    for line in RESULTS.read_text().splitlines() if RESULTS.exists() else []:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        match = re.match(r"(\w+), ([\w/.]+): ", cells[3]) if len(cells) == 5 else None
        if match:
            recorded[cells[1]] = match.groups()
    return recorded


def write_results(results, seconds):
    noticed = sum(1 for _, text in results if text)
    lines = [
        "# Mutants of the Metal shaders\n",
        f"`tests/metal_emulation/mutate.py BUILD` wrote this on {datetime.date.today()}: {len(results)} mutants, "
        f"{noticed} noticed, {len(results) - noticed} survive,",
        f"{seconds / 60:.0f} minutes on one core of a shared machine. It reads the tests again, to begin with them.\n",
        "Not in the list, since it is no fault: `factors` of forward_layout may overlap the offsets of the keys. Those are read",
        "for the last time before the barrier that comes before the first factor is written.\n",
        "| mutant | line | noticed by |", "|---|---|---|"]
    lines += [f"| {mutant.name} | {mutant.line} | {text or '**SURVIVES**'} |" for mutant, text in results]
    RESULTS.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    build, recorded, start = Build(args.build), read_results(), time.monotonic()
    chosen = [m for m in all_mutants() if args.only in m.name and (not args.sample or m.name in SAMPLE)]
    if args.sample and len(chosen) != len(SAMPLE):
        sys.exit("mutate.py: SAMPLE names a mutant that does not exist")
    results = []
    for mutant in chosen:
        began = time.monotonic()
        results.append((mutant, notice(build, mutant, recorded.get(mutant.name))))
        print(f"{mutant.name} (line {mutant.line})\n    {results[-1][1] or 'SURVIVES'} "
              f"[{time.monotonic() - began:.0f} s]", flush=True)
    survivors = sum(1 for _, text in results if not text)
    print(f"{len(results)} mutants, {len(results) - survivors} noticed, {survivors} survive")
    if not args.only and not args.sample:
        write_results(results, time.monotonic() - start)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
