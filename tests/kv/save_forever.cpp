// For cache_file_test: saves two caches in turn to one file until it is killed. Arguments: the file.

#include <cstdio>

#include "saved_versions.hpp"

int main(int, char** argv) {
  const attnspan::KvCache versions[2] = {attnspan::kv_test::version(0), attnspan::kv_test::version(1)};
  std::puts("ready");
  std::fflush(stdout);
  for (int i = 1;; ++i) versions[i % 2].save(argv[1]);
}
