/* The C ABI in one page: the backends of this machine, causal attention, and one decoding step over a cache.
 */

#include <attnspan/attnspan.h>
#include <stdio.h>
#include <stdlib.h>

/* 1 sequence of 200 tokens, 8 query heads over 2 KV heads, head_dim 64 */
enum { SEQLEN = 200, HEADS = 8, KV_HEADS = 2, DIM = 64 };

static float query[SEQLEN * HEADS * DIM], key[SEQLEN * KV_HEADS * DIM], value[SEQLEN * KV_HEADS * DIM];
static float out[SEQLEN * HEADS * DIM], token[HEADS * DIM];

static void fill(float* values, size_t count) {
  size_t i;
  for (i = 0; i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX - 0.5F;
}

/* Every call returns a status; the message says which argument, what was found and what was expected. */
static int failed(attnspan_status status) {
  if (status != ATTNSPAN_OK) fprintf(stderr, "status %d: %s\n", (int)status, attnspan_last_error());
  return status != ATTNSPAN_OK;
}

static void list_backends(void) {
  int32_t i;
  printf("attnspan %s\n", attnspan_version());
  for (i = 0; i < attnspan_backend_count(); ++i) {
    attnspan_backend_info info = attnspan_backend_info_init();
    if (failed(attnspan_backend_at(i, &info))) return;
    printf("  %-10s %s%s\n", info.name, info.available ? "" : "not here: ", info.description);
  }
}

int main(void) {
  attnspan_forward_args args = attnspan_forward_args_init();
  attnspan_options options = attnspan_options_init();
  attnspan_result result = attnspan_result_init();
  attnspan_kv_view cache = attnspan_kv_view_init();
  int32_t seqlens[1] = {SEQLEN};
  attnspan_tensor lengths = attnspan_contiguous(seqlens, ATTNSPAN_I32, 1, 1, 0, 0, 0);
  float largest = 0;
  int i;

  list_backends();
  fill(query, SEQLEN * HEADS * DIM);
  fill(key, SEQLEN * KV_HEADS * DIM);
  fill(value, SEQLEN * KV_HEADS * DIM);

  /* Forward: [batch, seqlen, heads, dim] */
  options.causal = 1;
  args.query = attnspan_contiguous(query, ATTNSPAN_F32, 4, 1, SEQLEN, HEADS, DIM);
  args.key = attnspan_contiguous(key, ATTNSPAN_F32, 4, 1, SEQLEN, KV_HEADS, DIM);
  args.value = attnspan_contiguous(value, ATTNSPAN_F32, 4, 1, SEQLEN, KV_HEADS, DIM);
  args.out = attnspan_contiguous(out, ATTNSPAN_F32, 4, 1, SEQLEN, HEADS, DIM);
  args.options = &options;
  if (failed(attnspan_forward(&args, NULL, &result))) return EXIT_FAILURE;
  printf("forward on %s\n", result.backend);

  /* Decode: the last query against the same keys and values as a cache */
  if (failed(attnspan_dense_cache(&args.key, &args.value, &lengths, &cache))) return EXIT_FAILURE;
  args = attnspan_forward_args_init();
  args.query = attnspan_contiguous(query + (SEQLEN - 1) * HEADS * DIM, ATTNSPAN_F32, 4, 1, 1, HEADS, DIM);
  args.cache = &cache;
  args.out = attnspan_contiguous(token, ATTNSPAN_F32, 4, 1, 1, HEADS, DIM);
  if (failed(attnspan_decode(&args, NULL, &result))) return EXIT_FAILURE;
  for (i = 0; i < HEADS * DIM; ++i) {
    const float difference = token[i] - out[(SEQLEN - 1) * HEADS * DIM + i];
    if (difference > largest) largest = difference;
    if (-difference > largest) largest = -difference;
  }
  printf("decode on %s differs from forward's last row by %.1e\n", result.backend, (double)largest);
  return largest < 1e-5F ? EXIT_SUCCESS : EXIT_FAILURE;
}
