// The sequence of row tile `tile`. Packed batches list their tiles one sequence after the other; else the last rows
// come first, because under a causal mask they have the most keys, and a device is full until the last workgroup.
struct RowTile { batch: u32, row0: i32 }
fn row_tile_of(tile: u32, batch: u32, tile_rows: u32) -> RowTile {
  if (p.cu_seqlens_q == NONE) {
    return RowTile(batch, i32(((p.seqlen_q + tile_rows - 1u) / tile_rows - 1u - tile) * tile_rows));
  }
  var left = tile;
  for (var b = 0u; b < p.batch; b++) {
    let rows = side[p.cu_seqlens_q + b + 1u] - side[p.cu_seqlens_q + b];
    let tiles = (rows + tile_rows - 1u) / tile_rows;
    if (left < tiles) { return RowTile(b, i32(left * tile_rows)); }
    left -= tiles;
  }
  return RowTile(NONE, 0);
}
