override THREADS: u32 = 32u;        // OWN / 8 * OTHER / 4
override OWN: u32 = 32u;            // rows (or keys) whose gradient the workgroup owns
override OTHER: u32 = 32u;          // keys (or rows) of a tile that it walks over
override DIM_QUADS: u32 = 4u;       // vec4s of a head dim staged at a time
override CHUNK: u32 = 4u;           // rows of the last product staged at a time, a multiple of 4
override COLUMN_VECS: u32 = 4u;     // vec4 columns of the gradient that a thread owns, 1, 2 or 4
override STAGE_VECS: u32 = 272u;
override DOUT_FORMAT: u32 = 15u;
