#!/usr/bin/env bash
# The Python package in the build folder, its demo and its tests.
#
#   demo      builds, and runs examples/python/demo.py; installs numpy and nanobind (some MB) where they are missing
#   test      builds, and runs tests/python; installs what they import: PyTorch is some GB, once
#   install   only what `test` would install
#   find PACKAGE...   prints the interpreter that has those packages, if there is one
#
# The interpreter is ATTNSPAN_PYTHON, or .venv (made here; it sees the PyTorch of python3 where that has one), or, before
# there is a .venv, the virtual environment that is active, if it has PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."

has() {  # has PYTHON PACKAGE...
  local python=$1
  shift
  "$python" - "$@" <<'PY' 2>/dev/null
import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))
PY
}

find_python() {  # the first of the three that has them; a system's interpreter is reached through a .venv
  local candidate
  for candidate in "${ATTNSPAN_PYTHON:-.venv/bin/python}" python3; do
    if has "$candidate" "$@"; then echo "$candidate"; return 0; fi
  done
  return 1
}

make_venv() {
  local options=()
  has python3 torch && options=(--system-site-packages)
  python3 -m venv "${options[@]}" .venv 2>/dev/null ||
    { python3 -m pip install -q virtualenv && python3 -m virtualenv -q "${options[@]}" .venv; }
}

python=${ATTNSPAN_PYTHON:-$PWD/.venv/bin/python}
[ ! -x "$python" ] && [ -n "${VIRTUAL_ENV:-}" ] && has python3 torch && python=$(command -v python3)

install() {  # install PACKAGE...: from PyPI, those that are missing
  [ -x "$python" ] || make_venv
  local package missing=()
  for package in "$@"; do has "$python" "${package//-/_}" || missing+=("$package"); done
  [ ${#missing[@]} = 0 ] && return 0
  echo "installing ${missing[*]} into ${python%/bin/python}"
  "$python" -m pip install -q --disable-pip-version-check "${missing[@]}"
}

build() {
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  mkdir -p build
  cmake --preset release "${launcher[@]}" -DATTNSPAN_BUILD_PYTHON=ON -DPython_EXECUTABLE="$python" \
    >build/python.configure.log 2>&1 || { tail -30 build/python.configure.log >&2; return 1; }
  cmake --build --preset release -j "${JOBS:-$(nproc)}" --target attnspan_python attnspan_python_stub | tail -1
}

word=${1:-help}
[ $# -gt 0 ] && shift
for_demo=(numpy nanobind)
for_tests=(numpy nanobind pytest hypothesis torch expecttest transformers)
case $word in
  find)    find_python "$@" ;;
  install) install "${for_tests[@]}" ;;
  demo)    install "${for_demo[@]}" && build && PYTHONPATH=$PWD/build/release/python "$python" examples/python/demo.py ;;
  test)    install "${for_tests[@]}" && build && PYTHONPATH=$PWD/build/release/python "$python" -m pytest -q tests/python "$@" ;;
  *)       sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; [ "$word" = help ] ;;
esac
