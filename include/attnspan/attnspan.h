#ifndef ATTNSPAN_ATTNSPAN_H
#define ATTNSPAN_ATTNSPAN_H
/* attnspan in C: the calls of attention.hpp as plain structs and status codes. attention.hpp has the formulas
 * and the contract; the fields here have the same names and meanings.
 *
 * - Every call returns a status; attnspan_last_error() has the message. Nothing throws, aborts or prints.
 * - Structs begin with their own size. Make them with the attnspan_..._init functions, which fill in
 * defaults: a library that is newer than the header then knows which fields the caller has. attnspan_tensor
 * and attnspan_kv_rows are embedded in others and never grow.
 * - Tensors are borrowed for the length of a call. A tensor of rank 0 is not given. A null pointer to a
 * struct means its defaults.
 * - Calls may run at the same time from several threads on different outputs. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum attnspan_status {
  ATTNSPAN_OK = 0,
  ATTNSPAN_INVALID_ARGUMENT = 1, /* an argument contradicts the contract */
  ATTNSPAN_UNSUPPORTED = 2,      /* the contract allows it, the chosen backend does not */
  ATTNSPAN_UNAVAILABLE = 3,      /* the backend or device is not on this machine */
  ATTNSPAN_IO = 4,
  ATTNSPAN_OUT_OF_MEMORY = 5,
  ATTNSPAN_INTERNAL = 6
} attnspan_status;

enum { ATTNSPAN_F32 = 0, ATTNSPAN_F16 = 1, ATTNSPAN_BF16 = 2, ATTNSPAN_I32 = 3 };      /* dtypes */
enum { ATTNSPAN_CPU = 0, ATTNSPAN_CUDA = 1, ATTNSPAN_WEBGPU = 2, ATTNSPAN_METAL = 3 }; /* devices */
enum { ATTNSPAN_BOTTOM_RIGHT = 0, ATTNSPAN_TOP_LEFT = 1, ATTNSPAN_OFFSET = 2 };        /* diagonals */
enum {
  ATTNSPAN_KV_F32 = 0,
  ATTNSPAN_KV_F16 = 1,
  ATTNSPAN_KV_BF16 = 2,
  ATTNSPAN_KV_Q8 = 3,
  ATTNSPAN_KV_TBQ4 = 4
};

/* A view of up to four dimensions: the first element lies byte_offset bytes behind data; strides in elements.
 */
typedef struct attnspan_tensor {
  void* data;
  int64_t byte_offset;
  int32_t dtype;
  int32_t device;
  int32_t rank; /* 0: not given */
  int32_t reserved;
  int64_t shape[4];
  int64_t stride[4];
} attnspan_tensor;

typedef struct attnspan_options {
  size_t struct_size;
  float softmax_scale; /* 0 = 1 / sqrt(head_dim) */
  float softcap;       /* 0 = off */
  int32_t causal;
  int32_t nan_guard;
  int32_t diagonal_kind;
  int32_t reserved;
  int64_t diagonal_offset; /* with ATTNSPAN_OFFSET */
  int64_t window_left;     /* inclusive; -1 = unlimited, the default */
  int64_t window_right;
  attnspan_tensor key_start, key_end;         /* int32 [seqlen_q] or [batch, seqlen_q] */
  attnspan_tensor cu_seqlens_q, cu_seqlens_k; /* int32 [batch + 1] */
  attnspan_tensor seqused_k;                  /* int32 [batch] */
  attnspan_tensor bias;                       /* f32, broadcastable to [batch, heads, seqlen_q, seqlen_k] */
  attnspan_tensor alibi_slopes;               /* f32 [heads] or [batch, heads] */
  attnspan_tensor sinks;                      /* f32 [heads] */
} attnspan_options;

/* Rows of K, or of V, in a cache; strides of codes in bytes, of scales in f16 elements (kv_view.hpp). */
typedef struct attnspan_kv_rows {
  int32_t format;
  int32_t reserved;
  int64_t dim;
  void* codes;
  int64_t codes_byte_offset;
  int64_t page_stride, head_stride, token_stride;
  void* scales;
  int64_t scales_byte_offset;
  int64_t scale_page_stride, scale_head_stride, scale_token_stride;
} attnspan_kv_rows;

typedef struct attnspan_kv_view {
  size_t struct_size;
  int32_t device;
  int32_t reserved;
  int64_t batch, kv_heads, page_size, num_pages, max_seqlen;
  attnspan_kv_rows key, value;
  attnspan_tensor block_table;    /* int32 [batch, pages per sequence]; not given: page b is sequence b's */
  attnspan_tensor seqlens;        /* int32 [batch] */
  attnspan_tensor first_position; /* int32 [batch], multiples of page_size; not given: 0 */
} attnspan_kv_view;

typedef struct attnspan_forward_args {
  size_t struct_size;
  attnspan_tensor query;
  attnspan_tensor key, value; /* or, instead of both: */
  const attnspan_kv_view* cache;
  attnspan_tensor out;
  attnspan_tensor lse;   /* optional */
  attnspan_tensor probs; /* optional, f32 [batch, heads, seqlen_q, seqlen_k]: the reference backend only */
  const attnspan_options* options;
} attnspan_forward_args;

typedef struct attnspan_backward_args {
  size_t struct_size;
  attnspan_tensor query, key, value, out, lse, dout;
  attnspan_tensor dlse; /* optional */
  attnspan_tensor dq, dk, dv;
  attnspan_tensor d_sinks; /* optional, f32 [heads]; needs sinks in the options */
  const attnspan_options* options;
} attnspan_backward_args;

typedef struct attnspan_merge_args {
  size_t struct_size;
  attnspan_tensor out_a, lse_a, out_b, lse_b;
  attnspan_tensor out, lse; /* may be a's or b's */
} attnspan_merge_args;

typedef struct attnspan_execution {
  size_t struct_size;
  const char* backend; /* null or "auto": ATTNSPAN_BACKEND, else the first that supports the problem */
  int32_t threads;     /* CPU threads; 0 = all */
  int32_t reserved;
  void* stream;    /* cudaStream_t; device tensors only */
  void* workspace; /* device scratch; null = allocated inside */
  size_t workspace_bytes;
} attnspan_execution;

typedef struct attnspan_result {
  size_t struct_size;
  char backend[32];           /* the backend that ran */
  int64_t nonfinite_replaced; /* with nan_guard */
} attnspan_result;

typedef struct attnspan_backend_info {
  size_t struct_size;
  char name[32];
  int32_t available;
  int32_t device;
  char description[256]; /* device and instruction set; why not, if it is not available; cut to fit */
} attnspan_backend_info;

/* "0.1.0" */
const char* attnspan_version(void);
/* The message of the last call on this thread that did not return ATTNSPAN_OK: one line that names the
 * argument, what was found and what was expected. Valid until this thread's next call. */
const char* attnspan_last_error(void);

/* execution and result may be null. On an error nothing was written. */
attnspan_status attnspan_forward(const attnspan_forward_args* args, const attnspan_execution* execution,
                                 attnspan_result* result);
attnspan_status attnspan_backward(const attnspan_backward_args* args, const attnspan_execution* execution,
                                  attnspan_result* result);
/* forward over a cache (args->cache) for the newest 0 to 16 rows of each sequence */
attnspan_status attnspan_decode(const attnspan_forward_args* args, const attnspan_execution* execution,
                                attnspan_result* result);
attnspan_status attnspan_merge_states(const attnspan_merge_args* args, const attnspan_execution* execution,
                                      attnspan_result* result);

/* ATTNSPAN_OK: the named backend runs exactly these arguments. ATTNSPAN_UNSUPPORTED: it does not, and
 * attnspan_last_error() says why. */
attnspan_status attnspan_forward_supports(const attnspan_forward_args* args, const char* backend);
attnspan_status attnspan_backward_supports(const attnspan_backward_args* args, const char* backend);

/* Scratch that a call needs on its device (0 on the CPU). */
attnspan_status attnspan_forward_workspace_bytes(const attnspan_forward_args* args,
                                                 const attnspan_execution* execution, size_t* bytes);
attnspan_status attnspan_backward_workspace_bytes(const attnspan_backward_args* args,
                                                  const attnspan_execution* execution, size_t* bytes);

/* Views of caches in f32, f16 or bf16: dense [batch, max_seqlen, kv_heads, dim], and pages [num_pages,
 * page_size, kv_heads, dim] with a block table. */
attnspan_status attnspan_dense_cache(const attnspan_tensor* key, const attnspan_tensor* value,
                                     const attnspan_tensor* seqlens, attnspan_kv_view* view);
attnspan_status attnspan_paged_cache(const attnspan_tensor* key, const attnspan_tensor* value,
                                     const attnspan_tensor* block_table, const attnspan_tensor* seqlens,
                                     attnspan_kv_view* view);

/* Backends in the order in which "auto" tries them; index from 0. */
int32_t attnspan_backend_count(void);
attnspan_status attnspan_backend_at(int32_t index, attnspan_backend_info* info);

/* ---- KvCache: keys and values of many sequences in pages (kv_cache.hpp has the meanings)
 *
 * A cache is used by one thread at a time. */

typedef struct attnspan_kv_cache attnspan_kv_cache;

enum { ATTNSPAN_ENCODE_QUALITY = 0, ATTNSPAN_ENCODE_FAST = 1 };

typedef struct attnspan_kv_cache_config {
  size_t struct_size;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t head_dim_v; /* 0 = head_dim */
  int32_t key_format, value_format;
  int32_t value_is_key; /* MLA: a value is the first head_dim_v of its key */
  int32_t encode_mode;
  int64_t page_size; /* a power of two >= 16 */
  int64_t batch;     /* sequences at the start */
  int64_t max_pages; /* 0 = no limit */
  int64_t reserve_tokens;
  int64_t window;       /* keys that the newest token sees; -1 = all */
  int64_t first_tokens; /* with formats of their own, never recycled */
  int32_t first_key_format, first_value_format;
  int32_t threads; /* of append; 0 = all */
  int32_t reserved;
} attnspan_kv_cache_config;

typedef struct attnspan_kv_cache_memory {
  size_t struct_size;
  int64_t bytes_per_token, first_bytes_per_token;
  int64_t pages_used, pages_shared, pages_reserved;
  int64_t bytes_used, bytes_reserved;
  int64_t tokens;
  int64_t saturated_scales; /* stored as 65504 since the cache was made or loaded */
} attnspan_kv_cache_memory;

/* config: null = defaults (attnspan_kv_cache_config_init). Destroy what was created, converted or loaded. */
attnspan_status attnspan_kv_cache_create(const attnspan_kv_cache_config* config, attnspan_kv_cache** cache);
void attnspan_kv_cache_destroy(attnspan_kv_cache* cache); /* null is fine */
attnspan_status attnspan_kv_cache_get_config(const attnspan_kv_cache* cache,
                                             attnspan_kv_cache_config* config);
attnspan_status attnspan_kv_cache_get_memory(const attnspan_kv_cache* cache,
                                             attnspan_kv_cache_memory* memory);

/* Sequences, released ones included; tokens of one; the first position that a window has left of it. */
attnspan_status attnspan_kv_cache_batch(const attnspan_kv_cache* cache, int64_t* batch);
attnspan_status attnspan_kv_cache_seqlen(const attnspan_kv_cache* cache, int64_t sequence, int64_t* tokens);
attnspan_status attnspan_kv_cache_first_position(const attnspan_kv_cache* cache, int64_t sequence,
                                                 int64_t* position);

/* key [tokens, kv_heads, head_dim] and value [tokens, kv_heads, head_dim_v] to the end of one sequence; or
 * sequence = ATTNSPAN_EVERY_SEQUENCE and a leading dimension of batch. value is null where values are part of
 * keys. saturated may be null: how many scales saturated. On an error nothing was appended. */
#define ATTNSPAN_EVERY_SEQUENCE (-1)
attnspan_status attnspan_kv_cache_append(attnspan_kv_cache* cache, int64_t sequence,
                                         const attnspan_tensor* key, const attnspan_tensor* value,
                                         int64_t* saturated);
/* Keeps the first tokens of a sequence. */
attnspan_status attnspan_kv_cache_trim(attnspan_kv_cache* cache, int64_t sequence, int64_t tokens);
attnspan_status attnspan_kv_cache_add_sequence(attnspan_kv_cache* cache, int64_t* sequence);
/* A new sequence that shares the pages of `source`; whoever writes to a shared page gets a copy. */
attnspan_status attnspan_kv_cache_fork(attnspan_kv_cache* cache, int64_t source, int64_t* sequence);
attnspan_status attnspan_kv_cache_release(attnspan_kv_cache* cache, int64_t sequence);

/* The view over all sequences for attnspan_forward and attnspan_decode, valid until the cache changes. A
 * cache with first tokens needs two spans: refused. */
attnspan_status attnspan_kv_cache_view(const attnspan_kv_cache* cache, attnspan_kv_view* view);
/* Attention over `count` sequences (null: all), first tokens and windows included. args without key, value
 * and cache. */
attnspan_status attnspan_kv_cache_forward(const attnspan_kv_cache* cache, const int64_t* sequences,
                                          int64_t count, const attnspan_forward_args* args,
                                          const attnspan_execution* execution, attnspan_result* result);

/* The same tokens in other formats. The cache itself stays. */
attnspan_status attnspan_kv_cache_convert(const attnspan_kv_cache* cache, int32_t key_format,
                                          int32_t value_format, int32_t encode_mode,
                                          attnspan_kv_cache** converted);
/* A file that holds the old cache or the new one, whole, at any moment; and one that is mapped and checked.
 */
attnspan_status attnspan_kv_cache_save(const attnspan_kv_cache* cache, const char* path);
attnspan_status attnspan_kv_cache_load(const char* path, int32_t threads, attnspan_kv_cache** cache);

/* ---- structs with their sizes and defaults */

#ifdef __cplusplus
#define ATTNSPAN_ZERO \
  {}
#else
#define ATTNSPAN_ZERO \
  { 0 }
#endif
#define ATTNSPAN_DEFINE_INIT(type)       \
  static inline type type##_init(void) { \
    type value = ATTNSPAN_ZERO;          \
    value.struct_size = sizeof(value);   \
    return value;                        \
  }
ATTNSPAN_DEFINE_INIT(attnspan_kv_view)
ATTNSPAN_DEFINE_INIT(attnspan_forward_args)
ATTNSPAN_DEFINE_INIT(attnspan_backward_args)
ATTNSPAN_DEFINE_INIT(attnspan_merge_args)
ATTNSPAN_DEFINE_INIT(attnspan_execution)
ATTNSPAN_DEFINE_INIT(attnspan_result)
ATTNSPAN_DEFINE_INIT(attnspan_backend_info)
ATTNSPAN_DEFINE_INIT(attnspan_kv_cache_memory)

static inline attnspan_options attnspan_options_init(void) {
  attnspan_options value = ATTNSPAN_ZERO;
  value.struct_size = sizeof(value);
  value.window_left = -1;
  value.window_right = -1;
  return value;
}

static inline attnspan_kv_cache_config attnspan_kv_cache_config_init(void) {
  attnspan_kv_cache_config value = ATTNSPAN_ZERO;
  value.struct_size = sizeof(value);
  value.kv_heads = 1;
  value.head_dim = 64;
  value.key_format = value.value_format = ATTNSPAN_KV_F16;
  value.first_key_format = value.first_value_format = ATTNSPAN_KV_F16;
  value.page_size = 64;
  value.batch = 1;
  value.window = -1;
  return value;
}

/* A dense row-major tensor; unused extents are ignored. */
static inline attnspan_tensor attnspan_contiguous(void* data, int32_t dtype, int32_t rank, int64_t n0,
                                                  int64_t n1, int64_t n2, int64_t n3) {
  attnspan_tensor tensor = ATTNSPAN_ZERO;
  const int64_t shape[4] = {n0, n1, n2, n3};
  int64_t stride = 1;
  int32_t i;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  for (i = rank - 1; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = stride;
    stride *= shape[i];
  }
  return tensor;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ATTNSPAN_ATTNSPAN_H */
