#!/usr/bin/env bash
# Builds the Python package in .venv and runs its tests. What is missing is installed from PyPI: the module alone
# needs a few MB; PyTorch (for the operators and the tests against it) some GB, once. ATTNSPAN_PYTHON names another
# interpreter that has everything already. With --install-only nothing is built or run.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${ATTNSPAN_PYTHON:-$PWD/.venv/bin/python}
if [ ! -x "$python" ]; then
  python3 -m venv .venv 2>/dev/null || { python3 -m pip install -q virtualenv && python3 -m virtualenv -q .venv; }
fi
missing=$("$python" - <<'PY'
import importlib.util
wanted = {"numpy": "numpy", "nanobind": "nanobind", "scikit_build_core": "scikit-build-core", "pytest": "pytest",
          "hypothesis": "hypothesis", "torch": "torch", "expecttest": "expecttest", "transformers": "transformers"}
print(" ".join(package for module, package in wanted.items() if importlib.util.find_spec(module) is None))
PY
)
if [ -n "$missing" ]; then
  echo "installing $missing into ${python%/bin/python}"
  # shellcheck disable=SC2086
  "$python" -m pip install -q --disable-pip-version-check $missing
fi

if [ "${1:-}" = --install-only ]; then exit 0; fi

launcher=()
command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
mkdir -p build
cmake --preset release "${launcher[@]}" -DATTNSPAN_BUILD_PYTHON=ON -DPython_EXECUTABLE="$python" \
  >build/python.configure.log 2>&1 || { tail -30 build/python.configure.log >&2; exit 1; }
cmake --build --preset release -j "${JOBS:-$(nproc)}" --target attnspan_python attnspan_python_stub | tail -1
PYTHONPATH=build/release/python "$python" -m pytest -q tests/python "$@"
