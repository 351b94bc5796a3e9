// Exact attention, forward, in core WGSL: no extension, no subgroups, f32 arithmetic, any storage format.
// common: formats params sequence row_tile load codes dense_rows cache_rows key_address score store store_quad split products
//
// One workgroup computes TILE_ROWS query rows of one head. It walks over the keys that its rows see, TILE_KEYS
// at a time: scores = query . key, score transform, mask by two integers, online softmax, out += p . value.
// Thread (ty, tx) owns rows 8 ty .. 8 ty + 7: of the scores keys 4 tx .. 4 tx + 3, of out the vec4 columns
// tx, tx + TX, ... Both products are the same step, 8 x 4 x 4 multiplications on 12 vec4 out of workgroup memory.
//
// What a thread keeps has names, not indices: an index that a compiler leaves to run time moves an array out of the
// registers. For the same reason each thread reads exactly four vec4 of query, of keys and of values a step, with
// addresses clamped instead of branches: all are under way at once. (Fetching a step ahead costs registers, so
// that fewer workgroups share a multiprocessor: 10% slower on an H200.)

// ---- tiles: src/webgpu/tiles.hpp has the table. TX = TILE_KEYS / 4 threads share a row
override THREADS: u32 = 32u;        // TILE_ROWS / 8 * TILE_KEYS / 4
override TILE_ROWS: u32 = 32u;
override TILE_KEYS: u32 = 32u;
override DIM_QUADS: u32 = 4u;       // vec4s of head_dim staged at a time
override VALUE_KEYS: u32 = 4u;      // keys of the value tile staged at a time, a multiple of 4
override COLUMN_VECS: u32 = 4u;     // vec4 columns of out that a thread owns, 1, 2 or 4
override STAGE_VECS: u32 = 272u;    // the larger of the query + key chunk and the value chunk

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> query: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> key: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> value: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> key_scale: array<u32>;
@group(0) @binding(5) var<storage, read> value_scale: array<u32>;
@group(0) @binding(6) var<storage, read> side: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<atomic<u32>>;
@group(0) @binding(8) var<storage, read_write> lse: array<u32>;
var<workgroup> stage: array<vec4<f32>, STAGE_VECS>;
var<workgroup> probabilities: array<vec4<f32>, TILE_ROWS * TILE_KEYS / 4u + TILE_ROWS / 8u>;
var<workgroup> row_values: array<vec4<f32>, TILE_ROWS * TILE_KEYS / 16u>;

struct Block { s: Sequence, head: u32, kv_head: u32, row0: i32, last_row: i32, key_end: i32, first_column: u32 }
struct Thread { index: u32, tx: u32, ty: u32 }
// ---- memory to registers to workgroup memory, four vec4 a thread and step; a vec4 of padding after four rows keeps the banks apart
fn fetch_query(b: Block, e: u32, first_quad: u32) -> vec4<f32> {
  let row = u32(min(b.row0 + i32(e / DIM_QUADS), b.last_row));
  let quad = first_quad + e % DIM_QUADS;
  let v = query_quad(address(p.query, vec2<u32>(b.s.batch, b.s.q_row0 + row), b.head), min(quad, (p.head_dim - 1u) / 4u));
  return select(vec4<f32>(), v, 4u * quad < p.head_dim);  // keys beyond head_dim meet a zero here
}
fn fetch_key(b: Block, k0: i32, e: u32, first_quad: u32) -> vec4<f32> {
  let place = key_place(b.s, min(k0 + i32(e / DIM_QUADS), b.key_end - 1));
  return key_quad(address(p.key, place, b.kv_head), address(p.key_scale, place, b.kv_head),
                  min(first_quad + e % DIM_QUADS, (p.head_dim - 1u) / 4u));
}
fn fetch_value(b: Block, k0: i32, e: u32) -> vec4<f32> {
  let columns = TILE_KEYS / 4u * COLUMN_VECS;
  let place = key_place(b.s, min(k0 + i32(e / columns), b.key_end - 1));
  return value_quad(address(p.value, place, b.kv_head), address(p.value_scale, place, b.kv_head),
                    min(b.first_column + e % columns, (p.head_dim_v - 1u) / 4u));
}
// One step of the scores: DIM_QUADS of every row of query and of every key.
struct Chunk { query: Four, key: Four }
fn fetch_chunk(b: Block, k0: i32, first_quad: u32, thread: u32) -> Chunk {
  return Chunk(Four(fetch_query(b, thread, first_quad), fetch_query(b, thread + THREADS, first_quad),
                    fetch_query(b, thread + 2u * THREADS, first_quad), fetch_query(b, thread + 3u * THREADS, first_quad)),
               Four(fetch_key(b, k0, thread, first_quad), fetch_key(b, k0, thread + THREADS, first_quad),
                    fetch_key(b, k0, thread + 2u * THREADS, first_quad), fetch_key(b, k0, thread + 3u * THREADS, first_quad)));
}
fn fetch_values(b: Block, k0: i32, thread: u32) -> Four {
  return Four(fetch_value(b, k0, thread), fetch_value(b, k0, thread + THREADS), fetch_value(b, k0, thread + 2u * THREADS),
              fetch_value(b, k0, thread + 3u * THREADS));
}
fn padded(e: u32) -> u32 { return e + e / (4u * DIM_QUADS); }
fn stage_chunk(b: Block, k0: i32, first_quad: u32, thread: u32) {
  let first_key = TILE_ROWS * DIM_QUADS + TILE_ROWS / 4u;
  workgroupBarrier();
  let c = fetch_chunk(b, k0, first_quad, thread);
  stage[padded(thread)] = c.query.a;
  stage[padded(thread + THREADS)] = c.query.b;
  stage[padded(thread + 2u * THREADS)] = c.query.c;
  stage[padded(thread + 3u * THREADS)] = c.query.d;
  stage[first_key + padded(thread)] = c.key.a;
  stage[first_key + padded(thread + THREADS)] = c.key.b;
  stage[first_key + padded(thread + 2u * THREADS)] = c.key.c;
  stage[first_key + padded(thread + 3u * THREADS)] = c.key.d;
  workgroupBarrier();
}
fn stage_values(b: Block, k0: i32, thread: u32) {
  workgroupBarrier();
  let v = fetch_values(b, k0, thread);
  stage[thread] = v.a;
  stage[thread + THREADS] = v.b;
  stage[thread + 2u * THREADS] = v.c;
  stage[thread + 3u * THREADS] = v.d;
  workgroupBarrier();
}

// ---- the steps of one tile, in the order of the equations

// scores += query . key over the staged chunk: rows 8 ty .., keys 4 tx ..
fn add_dot_products(scores: Eight, t: Thread) -> Eight {
  var s = scores;
  let q_at = 8u * t.ty * DIM_QUADS + 2u * t.ty;
  let k_at = TILE_ROWS * DIM_QUADS + TILE_ROWS / 4u + 4u * t.tx * DIM_QUADS + t.tx;
  for (var d = 0u; d < DIM_QUADS; d++) {
    let k = Four(stage[k_at + d], stage[k_at + DIM_QUADS + d], stage[k_at + 2u * DIM_QUADS + d],
                 stage[k_at + 3u * DIM_QUADS + d]);
    let by_dim = Four(vec4<f32>(k.a.x, k.b.x, k.c.x, k.d.x), vec4<f32>(k.a.y, k.b.y, k.c.y, k.d.y),
                      vec4<f32>(k.a.z, k.b.z, k.c.z, k.d.z), vec4<f32>(k.a.w, k.b.w, k.c.w, k.d.w));
    let q = q_at + d;
    s = add_weighed(s, Eight(stage[q], stage[q + DIM_QUADS], stage[q + 2u * DIM_QUADS], stage[q + 3u * DIM_QUADS],
                             stage[q + 4u * DIM_QUADS + 1u], stage[q + 5u * DIM_QUADS + 1u],
                             stage[q + 6u * DIM_QUADS + 1u], stage[q + 7u * DIM_QUADS + 1u]), by_dim);
  }
  return s;
}
// One logit, or NO_SCORE where the row's span or the bias masks the key.
fn masked_logit(b: Block, row: i32, span: vec2<i32>, key: i32, qk: f32) -> f32 {
  if (key < span.x || key >= span.y) { return NO_SCORE; }
  return logit(b.s, b.head, row, key, qk);
}
// Score transform and mask of a tile that needs them, in `probabilities`, where an index may be one of run time: this
// code is long, and stands here once instead of 32 times.
fn logits(b: Block, k0: i32, t: Thread, qk: Eight) -> Eight {
  let at = 8u * t.ty * (TILE_KEYS / 4u) + t.ty + t.tx;
  put_rows(at, qk);
  for (var i = 0u; i < 8u; i++) {
    let row = min(b.row0 + i32(8u * t.ty + i), b.last_row);
    var span = span_of(b.s, row);
    span.y = min(span.y, b.key_end);
    for (var c = 0u; c < 4u; c++) {
      let x = probabilities[at + i * (TILE_KEYS / 4u)];
      let y = masked_logit(b, row, span, k0 + i32(4u * t.tx + c), x[c]);
      probabilities[at + i * (TILE_KEYS / 4u)] = select(x, vec4<f32>(y), vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(c));
    }
  }
  return probability_rows(at);
}
fn put_rows(at: u32, v: Eight) {
  probabilities[at] = v.a;
  probabilities[at + TILE_KEYS / 4u] = v.b;
  probabilities[at + 2u * (TILE_KEYS / 4u)] = v.c;
  probabilities[at + 3u * (TILE_KEYS / 4u)] = v.d;
  probabilities[at + 4u * (TILE_KEYS / 4u)] = v.e;
  probabilities[at + 5u * (TILE_KEYS / 4u)] = v.f;
  probabilities[at + 6u * (TILE_KEYS / 4u)] = v.g;
  probabilities[at + 7u * (TILE_KEYS / 4u)] = v.h;
}
fn largest(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn total(v: vec4<f32>) -> f32 { return (v.x + v.y) + (v.z + v.w); }
fn row_value_at(x: u32, t: Thread) -> u32 { return x * (TILE_ROWS / 4u) + 2u * t.ty; }
// The maximum of m and of the scores of all TX threads that share the rows.
fn maxima(m: PerRow, s: Eight, t: Thread) -> PerRow {
  row_values[row_value_at(t.tx, t)] = vec4<f32>(largest(s.a), largest(s.b), largest(s.c), largest(s.d));
  row_values[row_value_at(t.tx, t) + 1u] = vec4<f32>(largest(s.e), largest(s.f), largest(s.g), largest(s.h));
  workgroupBarrier();
  var most = m;
  for (var x = 0u; x < TILE_KEYS / 4u; x++) {
    most.lo = max(most.lo, row_values[row_value_at(x, t)]);
    most.hi = max(most.hi, row_values[row_value_at(x, t) + 1u]);
  }
  return most;
}
fn exponentials(s: vec4<f32>, m: f32) -> vec4<f32> { return select(exp(s - m), vec4<f32>(), s <= vec4<f32>(NO_SCORE)); }
// exp(s - m) into workgroup memory; returns this thread's own sums.
fn write_probabilities(s: Eight, m: PerRow, t: Thread) -> PerRow {
  let e = Eight(exponentials(s.a, m.lo.x), exponentials(s.b, m.lo.y), exponentials(s.c, m.lo.z), exponentials(s.d, m.lo.w),
                exponentials(s.e, m.hi.x), exponentials(s.f, m.hi.y), exponentials(s.g, m.hi.z), exponentials(s.h, m.hi.w));
  put_rows(8u * t.ty * (TILE_KEYS / 4u) + t.ty + t.tx, e);
  return PerRow(vec4<f32>(total(e.a), total(e.b), total(e.c), total(e.d)),
                vec4<f32>(total(e.e), total(e.f), total(e.g), total(e.h)));
}
fn probability_rows(at: u32) -> Eight {
  return Eight(probabilities[at], probabilities[at + TILE_KEYS / 4u], probabilities[at + 2u * (TILE_KEYS / 4u)],
               probabilities[at + 3u * (TILE_KEYS / 4u)], probabilities[at + 4u * (TILE_KEYS / 4u)],
               probabilities[at + 5u * (TILE_KEYS / 4u)], probabilities[at + 6u * (TILE_KEYS / 4u)],
               probabilities[at + 7u * (TILE_KEYS / 4u)]);
}
// Four staged keys of value column `c` of this thread.
fn value_rows(j: u32, c: u32, tx: u32) -> Four {
  let columns = TILE_KEYS / 4u * COLUMN_VECS;
  let at = 4u * j * columns + c * (TILE_KEYS / 4u) + tx;
  return Four(stage[at], stage[at + columns], stage[at + 2u * columns], stage[at + 3u * columns]);
}
// The sums over all threads that share the rows.
fn row_sums(l: PerRow, t: Thread) -> PerRow {
  workgroupBarrier();
  row_values[row_value_at(t.tx, t)] = l.lo;
  row_values[row_value_at(t.tx, t) + 1u] = l.hi;
  workgroupBarrier();
  var sum = PerRow();
  for (var x = 0u; x < TILE_KEYS / 4u; x++) {
    sum.lo += row_values[row_value_at(x, t)];
    sum.hi += row_values[row_value_at(x, t) + 1u];
  }
  return sum;
}
// ---- results
fn write_lse(b: Block, tile_row: u32, split: u32, m: vec4<f32>, l: vec4<f32>) {
  for (var i = 0u; i < 4u; i++) {
    let row = b.row0 + i32(tile_row + i);
    if (row <= b.last_row) {
      let at = p.lse.base + split * p.lse_split + b.s.batch * p.lse.batch + b.head * p.lse.head
             + (b.s.q_row0 + u32(row)) * p.lse.row;
      lse[at >> 2u] = select(0xff800000u, bitcast<u32>(m[i] + log(max(l[i], 1e-37))), l[i] > 0.0);  // -inf: sees no key
    }
  }
}
// One vec4 column of every thread, through workgroup memory: rows are written side by side.
fn write_column(b: Block, column: u32, split: u32, rows: Eight, t: Thread) {
  let threads_x = TILE_KEYS / 4u;
  let at = 8u * t.ty * threads_x + t.tx;
  workgroupBarrier();
  stage[at] = rows.a;
  stage[at + threads_x] = rows.b;
  stage[at + 2u * threads_x] = rows.c;
  stage[at + 3u * threads_x] = rows.d;
  stage[at + 4u * threads_x] = rows.e;
  stage[at + 5u * threads_x] = rows.f;
  stage[at + 6u * threads_x] = rows.g;
  stage[at + 7u * threads_x] = rows.h;
  workgroupBarrier();
  for (var e = t.index; e < TILE_ROWS * threads_x; e += THREADS) {
    let row = b.row0 + i32(e / threads_x);
    let d = 4u * (b.first_column + column * threads_x + e % threads_x);
    if (row <= b.last_row && d < p.head_dim_v) {
      let out_row = address(p.out, vec2<u32>(b.s.batch, b.s.q_row0 + u32(row)), b.head) + split * p.out_split;
      store_quad(out_row, d, p.head_dim_v, stage[e]);
    }
  }
}
struct Sums { m: vec4<f32>, l: vec4<f32>, scale: vec4<f32> }
// The sink as one more state; `scale` is what out is multiplied by.
fn with_sink(head: u32, m: vec4<f32>, l: vec4<f32>) -> Sums {
  var s = Sums(m, l, vec4<f32>(1.0));
  if (p.sinks != NONE && side[p.sinks + head] != 0xff800000u) {
    let sink = bitcast<f32>(side[p.sinks + head]);
    s.m = max(select(vec4<f32>(NO_SCORE), m, l > vec4<f32>()), vec4<f32>(sink));
    s.scale = exp(m - s.m);
    s.l = l * s.scale + exp(vec4<f32>(sink) - s.m);
  }
  s.scale = select(vec4<f32>(), s.scale / s.l, s.l > vec4<f32>());
  return s;
}

@compute @workgroup_size(THREADS)
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  let split = group.x % p.splits;
  let column_block = group.x / p.splits % p.column_blocks;
  let tile = row_tile_of(group.x / p.splits / p.column_blocks, group.z, TILE_ROWS);
  if (tile.batch == NONE) { return; }
  let s = sequence_of(tile.batch);
  if (tile.row0 >= s.seqlen_q) { return; }
  let t = Thread(thread, thread % (TILE_KEYS / 4u), thread / (TILE_KEYS / 4u));
  let last_row = min(tile.row0 + i32(TILE_ROWS), s.seqlen_q) - 1;
  // Spans never decrease with the row: the tile's keys lie between the first row's begin and the last row's end.
  let first_span = span_of(s, tile.row0);
  let last_span = span_of(s, last_row);
  let keys = share_of(vec2<i32>(first_span.x, last_span.y), split, i32(TILE_KEYS));
  let inside = vec2<i32>(last_span.x, min(first_span.y, keys.y));  // seen by every row
  let plain = p.softcap == 0.0 && p.bias == NONE && p.alibi == NONE;
  let b = Block(s, group.y, group.y / p.group, tile.row0, last_row, keys.y, column_block * TILE_KEYS / 4u * COLUMN_VECS);

  var m = PerRow(vec4<f32>(NO_SCORE), vec4<f32>(NO_SCORE));
  var l = PerRow();  // of this thread's own keys
  var out0 = Eight();
  var out1 = Eight();
  var out2 = Eight();
  var out3 = Eight();
  for (var k0 = keys.x; k0 < keys.y; k0 += i32(TILE_KEYS)) {
    // scores = query . key
    var x = Eight();  // said aloud: a declaration alone is not renewed by every compiler in a loop
    for (var d0 = 0u; 4u * d0 < p.head_dim; d0 += DIM_QUADS) {
      stage_chunk(b, k0, d0, thread);
      x = add_dot_products(x, t);
    }
    if (plain && k0 >= inside.x && k0 + i32(TILE_KEYS) <= inside.y) {
      x = scaled(x, PerRow(vec4<f32>(p.softmax_scale), vec4<f32>(p.softmax_scale)));
    } else {
      x = logits(b, k0, t, x);
    }
    // online softmax
    let m_new = maxima(m, x, t);
    let decay = PerRow(exp(m.lo - m_new.lo), exp(m.hi - m_new.hi));
    m = m_new;
    let sums = write_probabilities(x, m, t);
    l = PerRow(fma(l.lo, decay.lo, sums.lo), fma(l.hi, decay.hi, sums.hi));
    out0 = scaled(out0, decay);
    if (COLUMN_VECS > 1u) { out1 = scaled(out1, decay); }
    if (COLUMN_VECS > 2u) { out2 = scaled(out2, decay); }
    if (COLUMN_VECS > 2u) { out3 = scaled(out3, decay); }
    // out += p . value
    for (var v0 = 0u; v0 < TILE_KEYS; v0 += VALUE_KEYS) {
      stage_values(b, k0 + i32(v0), thread);
      for (var j = 0u; j < VALUE_KEYS / 4u; j++) {
        let w = probability_rows(8u * t.ty * (TILE_KEYS / 4u) + t.ty + v0 / 4u + j);
        out0 = add_weighed(out0, w, value_rows(j, 0u, t.tx));
        if (COLUMN_VECS > 1u) { out1 = add_weighed(out1, w, value_rows(j, 1u, t.tx)); }
        if (COLUMN_VECS > 2u) { out2 = add_weighed(out2, w, value_rows(j, 2u, t.tx)); }
        if (COLUMN_VECS > 2u) { out3 = add_weighed(out3, w, value_rows(j, 3u, t.tx)); }
      }
    }
  }
  l = row_sums(l, t);
  let lo = with_sink(b.head, m.lo, l.lo);
  let hi = with_sink(b.head, m.hi, l.hi);
  if (t.tx == 0u && column_block == 0u && p.lse.base != NONE) {
    write_lse(b, 8u * t.ty, split, lo.m, lo.l);
    write_lse(b, 8u * t.ty + 4u, split, hi.m, hi.l);
  }
  let scale = PerRow(lo.scale, hi.scale);
  write_column(b, 0u, split, scaled(out0, scale), t);
  if (COLUMN_VECS > 1u) { write_column(b, 1u, split, scaled(out1, scale), t); }
  if (COLUMN_VECS > 2u) { write_column(b, 2u, split, scaled(out2, scale), t); }
  if (COLUMN_VECS > 2u) { write_column(b, 3u, split, scaled(out3, scale), t); }
}
