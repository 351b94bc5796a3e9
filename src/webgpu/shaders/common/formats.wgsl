// How rows lie in memory. RUNTIME: the parameters say it (fewer pipelines, slower loads).
const F32_VEC = 0u;
const F16_VEC = 1u;
const BF16_VEC = 2u;
const Q8 = 3u;
const TBQ4 = 4u;
const F32_ANY = 5u;   // any alignment, any head_dim
const F16_ANY = 6u;
const BF16_ANY = 7u;
const RUNTIME = 15u;
override QUERY_FORMAT: u32 = 15u;
override KEY_FORMAT: u32 = 15u;
override VALUE_FORMAT: u32 = 15u;
override OUT_FORMAT: u32 = 15u;
