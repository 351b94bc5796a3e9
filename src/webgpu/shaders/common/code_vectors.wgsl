// Codes out of 16-byte vectors, without their scale.
var<workgroup> centroids: array<f32, 512>;  // 16 centroids of tbq4, one copy for each of 32 banks
fn stage_centroids(thread: u32, threads: u32) {
  for (var e = thread; e < 512u; e += threads) { centroids[e] = centroid(e >> 5u); }
}
// The four values in the lower half of `codes`.
fn tbq4_quad(codes: u32, lane: u32) -> vec4<f32> {
  return vec4<f32>(centroids[((codes << 5u) & 0x1e0u) | lane], centroids[((codes << 1u) & 0x1e0u) | lane],
                   centroids[((codes >> 3u) & 0x1e0u) | lane], centroids[((codes >> 7u) & 0x1e0u) | lane]);
}
// Quads in a 16-byte vector.
fn quads_in_vector(format: u32) -> u32 {
  if (format == F32_VEC) { return 1u; }
  if (format == Q8) { return 4u; }
  return select(2u, 8u, format == TBQ4);
}
