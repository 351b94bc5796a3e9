// Where the row of key `position` lies: x = page or batch entry, y = row inside it.
fn key_place(s: Sequence, position: i32) -> vec2<u32> {
  let offset = u32(position - s.key_begin);
  if (p.block_table == NONE) { return vec2<u32>(s.batch, s.k_row0 + offset); }
  var page = offset >> p.page_shift;
  if (p.page_size != (1u << p.page_shift)) { page = offset / p.page_size; }
  let token = offset - page * p.page_size;
  return vec2<u32>(side[p.block_table + s.batch * p.block_table_row + page * p.block_table_column], token);
}
fn address(rows: Rows, place: vec2<u32>, head: u32) -> u32 {
  return rows.base + place.x * rows.batch + head * rows.head + place.y * rows.row;
}
