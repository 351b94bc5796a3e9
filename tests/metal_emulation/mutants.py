"""The mutants of the Metal shaders: each barrier removed in turn, and the edits below, which move tile bounds and
mask edges by one or drop them."""

import pathlib
import re
import sys

SHADERS = pathlib.Path(__file__).resolve().parents[2] / "src/metal/shaders"

# file, text that occurs once, what it becomes
EDITS = [
    # mask edges (span.h)
    ("span.h", "p.window_right + 1", "p.window_right"),
    ("span.h", "position - p.window_left", "position - p.window_left + 1"),
    ("span.h", "if (HAS_KEY_START) begin", "if (false) begin"),
    ("span.h", "if (HAS_KEY_END) end", "if (false) end"),
    ("span.h", "if (HAS_LENGTHS) s.seqlen_k", "if (false) s.seqlen_k"),
    ("span.h", "t.lengths[batch * p.lengths_batch]", "t.lengths[batch]"),
    ("span.h", "t.first_position[batch * p.first_position_batch]", "t.first_position[batch]"),
    ("span.h", "if (p.diagonal_kind == 0) s.diagonal", "if (false) s.diagonal"),
    ("span.h", "HAS_FIRST_POSITION ? t.first_position[batch * p.first_position_batch] : 0", "0"),
    ("span.h", "return {row_span(t, p, s, first).begin, row_span(t, p, s, last).end};",
     "return {row_span(t, p, s, first).begin, row_span(t, p, s, first).end};"),
    ("span.h", "return {row_span(t, p, s, last).begin, row_span(t, p, s, first).end};",
     "return {row_span(t, p, s, first).begin, row_span(t, p, s, last).end};"),
    ("span.h", "min(begin + whole, hull.end)", "min(begin + whole, hull.end - 1)"),
    ("span.h", "p.partial_pitch > 0 ? long(s.batch) * p.partial_pitch : s.q_row0", "s.q_row0"),
    ("span.h", "p.partial_pitch > 0 ? long(s.batch) * p.partial_pitch : s.q_row0", "long(s.batch) * p.partial_pitch"),
    ("span.h", "hull.begin + split * whole", "hull.begin + split * share"),
    ("span.h", "kv_head * GROUP + packed_row % GROUP", "kv_head * GROUP"),
    # the edge of a tile (softmax.h, forward.metal)
    ("softmax.h", "key >= row.span.begin && ", ""),
    ("softmax.h", "key < row.span.end", "key <= row.span.end"),
    ("softmax.h", "seen[n] = !score.masked;", ""),
    ("softmax.h", "was_empty ? largest : max(row.m, largest)", "max(row.m, largest)"),
    ("forward.metal", "key < core.begin || key", "key"),
    ("forward.metal", "key + ATTNSPAN_STREAMED_ROWS > core.end", "key + ATTNSPAN_STREAMED_ROWS > core.end + 1"),
    ("forward.metal", "key < core.begin || key + ATTNSPAN_STREAMED_ROWS > core.end", "false"),
    # tile bounds
    ("forward.metal", "key < range.end; key +=", "key + 1 < range.end; key +="),
    ("forward.metal", "|| first_row >= s.seqlen_q * GROUP) return;", "|| first_row > s.seqlen_q * GROUP) return;"),
    ("forward.metal", "s.seqlen_q < p.least_rows || ", ""),
    ("forward.metal", "s.seqlen_q > p.most_rows || ", ""),
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
    ("tiles.h", "layout.scores + rows * padded_row(ATTNSPAN_STREAMED_ROWS, 4) * 4, rows",
     "layout.scores + rows * ATTNSPAN_STREAMED_ROWS * 4, rows"),
    ("tiles.h", "return columns + 16 / element_bytes;", "return columns - 8;"),
    ("merge.metal", "s.seqlen_q < p.least_rows || s.seqlen_q > p.most_rows || ", ""),
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

# What is compiled again with a mutated header: the kernels that depend on it most.
UNITS = {"backward.h": "backward.metal", "constants.h": "forward.metal"}
UNIT_OF_EDIT = {"1.0f - capped * capped": "backward.metal"}


class Mutant:
    def __init__(self, shader, line, name, text, unit):
        self.shader, self.line, self.text, self.unit = shader, line, text, unit
        self.name = f"{shader}: {name}"  # stays when lines move


def barriers(shader, text):
    pattern = r"^( *)((?:threadgroup|simdgroup|row_group)_barrier(?:<\w+>)?\([^)]*\));"
    for number, match in enumerate(re.finditer(pattern, text, re.M), 1):
        line = text.count("\n", 0, match.start()) + 1
        kind = re.match(r"\w+", match.group(2)).group()
        yield line, f"without barrier {number} ({kind})", text[: match.start(2)] + text[match.end(2):]


def unit_of(shader, old=""):
    return UNIT_OF_EDIT.get(old) or UNITS.get(shader) or (shader if shader.endswith(".metal") else "forward.metal")


def all_mutants():
    found = []
    for path in sorted(SHADERS.iterdir()):
        for line, name, text in barriers(path.name, path.read_text()):
            found.append(Mutant(path.name, line, name, text, unit_of(path.name)))
    for shader, old, new in EDITS:
        text = (SHADERS / shader).read_text()
        if text.count(old) != 1:
            sys.exit(f"mutants.py: {shader}: found {text.count(old)} times, expected once: {old}")
        line = text.count("\n", 0, text.index(old)) + 1
        name = f"`{old}` -> `{new}`".replace("\n", " ").replace("|", "\\|")
        found.append(Mutant(shader, line, re.sub(" +", " ", name), text.replace(old, new), unit_of(shader, old)))
    return found
