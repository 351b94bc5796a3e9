#!/bin/sh
# run_fuzzer.sh FUZZER CORPUS SEEDS...: searches for ATTNSPAN_FUZZ_SECONDS (default 10); what it finds new goes to
# CORPUS, inputs that fail beside it. ATTNSPAN_FUZZ_SEED fixes the search (0: another one each time);
# ATTNSPAN_FUZZ_MAX_BYTES bounds an input (4096).
fuzzer=$1 corpus=$2
shift 2
mkdir -p "$corpus"
exec "$fuzzer" -seed="${ATTNSPAN_FUZZ_SEED:-0}" -max_total_time="${ATTNSPAN_FUZZ_SECONDS:-10}" -max_len="${ATTNSPAN_FUZZ_MAX_BYTES:-4096}" -timeout=10 -rss_limit_mb=2048 -verbosity=0 \
  -print_final_stats=1 -artifact_prefix="$corpus-failed-" "$corpus" "$@"
