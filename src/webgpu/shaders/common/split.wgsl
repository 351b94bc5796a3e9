// The part of `keys` that split number `split` works on: whole tiles, from the length of the sequence alone.
fn share_of(keys: vec2<i32>, split: u32, tile_keys: i32) -> vec2<i32> {
  if (p.splits == 1u) { return keys; }
  let length = max(keys.y - keys.x, 0);
  let even = (length + i32(p.max_splits) - 1) / i32(p.max_splits);
  let share = (max(even, i32(p.min_split_keys)) + tile_keys - 1) / tile_keys * tile_keys;
  let begin = min(keys.x + i32(split) * share, max(keys.y, keys.x));
  return vec2<i32>(begin, min(begin + share, keys.y));
}
