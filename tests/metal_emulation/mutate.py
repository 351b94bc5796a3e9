#!/usr/bin/env python3
"""Breaks the Metal shaders one small way at a time, and checks that a test notices each time.

    tests/metal_emulation/mutate.py BUILD [--sample N] [--only TEXT] [--skip N]

BUILD is a configured build with metal_grid_test and metal_emulation_test built. Mutants: every barrier removed in
turn, and the edits of EDITS: tile bounds and mask edges moved by one, edges dropped. Exit status 1 if one survives.
"""

import argparse
import json
import os
import pathlib
import random
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHADERS = ROOT / "src/metal/shaders"
REWRITE = ROOT / "tests/metal_emulation/emulator/rewrite.sed"
SCHEDULES = ["skewed", "reverse", "shuffled", "forward"]

# file, text that occurs once, what it becomes
EDITS = [
    # mask edges (span.h)
    ("span.h", "p.window_right + 1", "p.window_right"),
    ("span.h", "position - p.window_left", "position - p.window_left + 1"),
    ("span.h", "if (HAS_KEY_START) begin", "if (false) begin"),
    ("span.h", "if (HAS_KEY_END) end", "if (false) end"),
    ("span.h", "if (HAS_LENGTHS) s.seqlen_k", "if (false) s.seqlen_k"),
    ("span.h", "if (p.diagonal_kind == 0) s.diagonal", "if (false) s.diagonal"),
    ("span.h", "HAS_FIRST_POSITION ? t.first_position[batch] : 0", "0"),
    ("span.h", "return {row_span(t, p, s, first).begin, row_span(t, p, s, last).end};",
     "return {row_span(t, p, s, first).begin, row_span(t, p, s, first).end};"),
    ("span.h", "return {row_span(t, p, s, last).begin, row_span(t, p, s, first).end};",
     "return {row_span(t, p, s, first).begin, row_span(t, p, s, last).end};"),
    ("span.h", "min(begin + whole, hull.end)", "min(begin + whole, hull.end - 1)"),
    ("span.h", "hull.begin + split * whole", "hull.begin + split * share"),
    ("span.h", "kv_head * GROUP + packed_row % GROUP", "kv_head * GROUP"),
    # the edge of a tile (softmax.h, forward.metal)
    ("softmax.h", "key >= row.span.begin && ", ""),
    ("softmax.h", "key < min(row.span.end, end)", "key <= min(row.span.end, end)"),
    ("softmax.h", "key < min(row.span.end, end)", "key < row.span.end"),
    ("softmax.h", "seen[n] = !score.masked;", ""),
    ("softmax.h", "was_empty ? largest : max(row.m, largest)", "max(row.m, largest)"),
    ("softmax.h", "if (count > 0.0f) row.m", "row.m"),
    ("forward.metal", "key < core.begin || key", "key"),
    ("forward.metal", "key + ATTNSPAN_STREAMED_ROWS > min(core.end, range.end)",
     "key + ATTNSPAN_STREAMED_ROWS > min(core.end, range.end) + 1"),
    ("forward.metal", "key < core.begin || key + ATTNSPAN_STREAMED_ROWS > min(core.end, range.end)", "false"),
    # tile bounds
    ("forward.metal", "key < range.end; key +=", "key + 1 < range.end; key +="),
    ("forward.metal", "if (first_row >= s.seqlen_q * GROUP) return;", "if (first_row > s.seqlen_q * GROUP) return;"),
    ("forward.metal", "min(first_row + kRows, s.seqlen_q * GROUP) - 1", "min(first_row + kRows, s.seqlen_q * GROUP)"),
    ("forward.metal", "if (first_row + r >= rows) continue;", "if (first_row + r > rows) continue;"),
    ("forward.metal", "first < KEY_WIDTH; first += CHUNK", "first + CHUNK <= KEY_WIDTH; first += CHUNK"),
    ("forward.metal", "if (column >= VALUE_WIDTH) continue;", "if (column + 8 > VALUE_WIDTH) continue;"),
    ("forward.metal", "d < HEAD_DIM_V; d += 32) store_element", "d < VALUE_WIDTH - 1; d += 32) store_element"),
    ("stage.h", "return (columns + 7) / 8 * 8;", "return columns / 8 * 8;"),
    ("stage.h", "code >= 0 && first + c < KEY_WIDTH", "first + c < KEY_WIDTH"),
    ("stage.h", "code >= 0 && first + c < VALUE_WIDTH", "first + c < VALUE_WIDTH"),
    ("stage.h", "code >= 0 && first + c < KEY_WIDTH", "code >= 0"),
    ("stage.h", "first_row + r < rows;", "first_row + r <= rows;"),
    ("stage.h", "exists && first + c < dim", "exists"),
    ("stage.h", "HAS_BLOCK_TABLE && key < end", "HAS_BLOCK_TABLE"),
    ("stage.h", "token = token % p.page_size;", ""),
    ("stage.h", "const bool exists = key < end;", "const bool exists = key <= end;"),
    ("tiles.h", "layout.factors + rows * 4;", "layout.factors + rows * 2;"),
    ("tiles.h", "return columns + 16 / element_bytes;", "return columns - 8;"),
    ("merge.metal", "packed_row / kSplitRows * kSplitRows", "packed_row"),
    ("merge.metal", "i < splits; ++i) {\n    if", "i + 1 < splits; ++i) {\n    if"),
    ("merge.metal", "if (weight_a != 0.0f) ", ""),
    # scores
    ("score.h", "s.masked = bias <= -1e30f;", "s.masked = bias < -1e30f;"),
    ("score.h", "1.0f - capped * capped", "1.0f"),
    ("score.h", "fabs(float(r.position - key))", "float(r.position - key)"),
    # backward
    ("backward.h", "return first_row + r < s.seqlen_q * GROUP;", "return first_row + r <= s.seqlen_q * GROUP;"),
    ("backward.h", "return r < count;", "return r <= count;"),
    ("backward.h", "key < row.span.begin || ", ""),
    ("backward.h", "key >= row.span.end", "key > row.span.end"),
    ("backward.h", "if (score.masked) return {0.0f, 0.0f};", ""),
    ("backward.metal", "hull.begin >= first_key + kKeys", "hull.begin >= first_key + kKeys - 1"),
    ("backward.metal", "hull.end <= first_key ||", "hull.end <= first_key + 1 ||"),
    ("backward.metal", "(PACKED ? s.seqlen_k : p.seqlen_k) - first_key", "s.seqlen_k - first_key"),
    ("backward.metal", "min(kRows, rows - first_row)", "kRows"),
    ("backward.metal", "min(ROWS, count)", "ROWS"),
    ("backward.metal", "min(keys.count, hull.end - key)", "keys.count - 1"),
    ("backward.metal", "if (HAS_DLSE) sum -=", "if (false) sum -="),
    # unfused
    ("unfused.metal", "if (key < span.begin || key >= span.end) continue;", "if (key >= span.end) continue;"),
    ("unfused.metal", "key >= span.begin && key < span.end", "key >= span.begin"),
    ("unfused.metal", "if (!is_masked(score)) probability", "probability"),
    # append
    ("append.metal", "if (row >= p.seqlen_new) return;", "if (row > p.seqlen_new) return;"),
    ("append.metal", "block * 32 < HEAD_DIM", "block * 32 + 31 < HEAD_DIM"),
    ("append.metal", "d < HEAD_DIM ? load_element(t.rows, from + d) : 0.0f;\n  rotate_row",
     "load_element(t.rows, from + d);\n  rotate_row"),
]


class Build:
    """Compiles and links as the build does, with some shader objects replaced."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()
        commands = json.loads((self.folder / "compile_commands.json").read_text())
        self.compile = {}
        for entry in commands:
            name = pathlib.Path(entry["file"]).name
            if name.endswith(".metal.cpp"):
                self.compile[name] = shlex.split(entry["command"])
        self.link = {}
        for target in ("metal_grid_test", "metal_emulation_test"):
            lines = subprocess.run(["ninja", "-C", self.folder, "-t", "commands", target], check=True,
                                   capture_output=True, text=True).stdout.splitlines()
            command = next(l for l in reversed(lines) if f"-o tests/{target}" in l)
            # CMake wraps the link: ": && c++ ... -o tests/X ... && cd ... && post-build steps"
            self.link[target] = shlex.split(command.split("&&")[1])

    def units_of(self, shader):
        """What is compiled again: the shader, or for a header the one whose tests know it best."""
        if shader.endswith(".metal"):
            return [shader + ".cpp"]
        if shader.startswith("backward"):
            return ["backward.metal.cpp"]
        extra = {"span.h": ["merge.metal.cpp"], "score.h": ["backward.metal.cpp"]}
        return ["forward.metal.cpp"] + extra.get(shader, [])

    def make(self, shader, text, work):
        """Binaries with `shader` replaced, or the compiler's complaint."""
        source = pathlib.Path(work) / shader
        source.write_text(text)
        generated = pathlib.Path(work) / "generated"
        generated.mkdir(exist_ok=True)
        for path in SHADERS.iterdir():
            original = source if path.name == shader else path
            name = path.name + (".cpp" if path.suffix == ".metal" else "")
            rewritten = subprocess.run(["sed", "-E", "-f", REWRITE, original], check=True, capture_output=True, text=True)
            (generated / name).write_text(f'#line 1 "{SHADERS / path.name}"\n' + rewritten.stdout)
        objects = {}
        running = []
        for unit in self.units_of(shader):
            command = list(self.compile[unit])
            if pathlib.Path(command[0]).name == "ccache":
                command = command[1:]
            output = command[command.index("-o") + 1]
            objects[output] = str(generated / (unit + ".o"))
            command[command.index("-o") + 1] = objects[output]
            command[command.index("-c") + 1] = str(generated / unit)
            command = [f"-I{generated}" if a.endswith("metal_emulation/shaders") and a.startswith("-I") else a
                       for a in command if not re.fullmatch("-O[0-3s]", a)] + ["-O1"]
            running.append(subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, text=True))
        complaints = [p.communicate()[1] for p in running]
        if any(p.returncode for p in running):
            return None, next(c for c, p in zip(complaints, running) if p.returncode)
        binaries = {}
        for target in sorted({binary for binary, _, _ in runs_of(shader)}):
            command = self.link[target]
            command = [objects.get(a, a) for a in command]
            binaries[target] = str(pathlib.Path(work) / target)
            command[command.index("-o") + 1] = binaries[target]
            linked = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
            if linked.returncode:
                sys.exit(f"mutate.py: {target} does not link:\n{linked.stderr}")
        return binaries, ""


def runs_of(shader):
    """(binary, filter, environment) in the order in which they most likely notice."""
    grid = "metal_grid_test"
    everything = "*/forward_metal_*:*/decode_metal_*:*/cache_metal_*"
    own = ("metal_emulation_test", "Metal*", {})
    unfused = (grid, "*/forward_metal_*:*/backward_metal_*:*/cache_metal_*:-*_packed_*:*_product_*",
               {"ATTNSPAN_METAL_UNFUSED": "1"})
    if shader in ("append.metal", "merge.metal"):
        return [own]
    if shader == "unfused.metal":
        return [unfused, own]
    if shader.startswith("backward"):
        return [(grid, "*/backward_metal_*", {})]
    if shader == "score.h":
        return [(grid, everything + ":*/backward_metal_*", {})]
    return [(grid, everything, {}), own]


def first_failure(binaries, shader):
    """What notices the mutant: 'schedule: message', or None."""
    for schedule in SCHEDULES:
        for binary, tests, environment in runs_of(shader):
            command = [binaries[binary], "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={tests}"]
            env = {**os.environ, **environment, "ATTNSPAN_METAL_SCHEDULE": schedule}
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
            except subprocess.TimeoutExpired:
                return f"{schedule}: does not end"
            if done.returncode == 0:
                continue
            for kind in ("race:", "uninitialised read", "divergence", "of a tensor of", "of threadgroup memory"):
                line = next((l for l in done.stdout.splitlines() if kind in l), None)
                if line:
                    return f"{schedule}: {line.strip()[:150]}"
            return f"{schedule}: wrong result" if done.returncode == 1 else f"{schedule}: ends with {done.returncode}"
    return None


def mutants():
    """(shader, line, description, text) of every mutant."""
    for path in sorted(SHADERS.iterdir()):
        text = path.read_text()
        for match in re.finditer(r"^( *)((?:threadgroup|simdgroup|row_group)_barrier(?:<\w+>)?\([^)]*\));", text, re.M):
            line = text.count("\n", 0, match.start()) + 1
            mutated = text[: match.start(2)] + text[match.end(2):]
            yield path.name, line, "without " + match.group(2).split("(")[0], mutated
    for shader, old, new in EDITS:
        text = (SHADERS / shader).read_text()
        if text.count(old) != 1:
            sys.exit(f"mutate.py: {shader}: found {text.count(old)} times, expected once: {old}")
        line = text.count("\n", 0, text.index(old)) + 1
        yield shader, line, f"{old!r} -> {new!r}", text.replace(old, new)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--sample", type=int, help="only this many mutants, drawn anew every day")
    parser.add_argument("--only", default="", help="only mutants whose name contains this")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first SKIP, to go on after an interruption")
    args = parser.parse_args()
    build = Build(args.build)
    chosen = [m for m in mutants() if args.only in f"{m[0]}:{m[1]} {m[2]}"][args.skip:]
    if args.sample:
        chosen = random.sample(chosen, min(args.sample, len(chosen)))
    survivors = 0
    for shader, line, description, text in chosen:
        with tempfile.TemporaryDirectory() as work:
            binaries, complaint = build.make(shader, text, work)
            if binaries is None and complaint.count("static assertion") == 0:
                sys.exit(f"mutate.py: {shader}:{line} {description} does not compile:\n{complaint}")
            noticed = first_failure(binaries, shader) if binaries else "the compiler: static assertion"
        survivors += noticed is None
        print(f"{shader}:{line} {description}\n    {noticed or 'SURVIVES'}", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - survivors} noticed, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
