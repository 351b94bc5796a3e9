// A product of two tiles in registers: a thread has eight rows of one and a vec4 of the other, and everything has a name.
struct Four { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }
struct Eight {  // one vec4 for each row of a thread
  a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>, e: vec4<f32>, f: vec4<f32>, g: vec4<f32>, h: vec4<f32>
}
struct PerRow { lo: vec4<f32>, hi: vec4<f32> }  // one number for each row of a thread
// sum += w.x v.a + w.y v.b + w.z v.c + w.w v.d, row by row
fn weighed(w: vec4<f32>, v: Four, sum: vec4<f32>) -> vec4<f32> {
  return fma(vec4<f32>(w.w), v.d, fma(vec4<f32>(w.z), v.c, fma(vec4<f32>(w.y), v.b, fma(vec4<f32>(w.x), v.a, sum))));
}
fn add_weighed(sum: Eight, w: Eight, v: Four) -> Eight {
  return Eight(weighed(w.a, v, sum.a), weighed(w.b, v, sum.b), weighed(w.c, v, sum.c), weighed(w.d, v, sum.d),
               weighed(w.e, v, sum.e), weighed(w.f, v, sum.f), weighed(w.g, v, sum.g), weighed(w.h, v, sum.h));
}
fn scaled(v: Eight, by: PerRow) -> Eight {
  return Eight(v.a * by.lo.x, v.b * by.lo.y, v.c * by.lo.z, v.d * by.lo.w,
               v.e * by.hi.x, v.f * by.hi.y, v.g * by.hi.z, v.h * by.hi.w);
}
