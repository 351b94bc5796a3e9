/* attnspan.h as strict C99: what its inline functions make, for capi_test.cpp to look at. */
#include "attnspan/attnspan.h"

attnspan_options options_from_c(void);
attnspan_forward_args forward_args_from_c(float* query, float* key, float* value, float* out);

attnspan_options options_from_c(void) { return attnspan_options_init(); }

/* one head, two queries, three keys, head_dim 1 */
attnspan_forward_args forward_args_from_c(float* query, float* key, float* value, float* out) {
  attnspan_forward_args args = attnspan_forward_args_init();
  args.query = attnspan_contiguous(query, ATTNSPAN_F32, 4, 1, 2, 1, 1);
  args.key = attnspan_contiguous(key, ATTNSPAN_F32, 4, 1, 3, 1, 1);
  args.value = attnspan_contiguous(value, ATTNSPAN_F32, 4, 1, 3, 1, 1);
  args.out = attnspan_contiguous(out, ATTNSPAN_F32, 4, 1, 2, 1, 1);
  return args;
}
