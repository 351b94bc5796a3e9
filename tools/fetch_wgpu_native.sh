#!/bin/sh
# Fetches wgpu-native (webgpu.h, wgpu.h and the shared library) into .deps/wgpu-native: the Python wheel `wgpu`
# carries all three, so that no build of wgpu-native is needed. Does nothing when the pinned version is there.
#   tools/fetch_wgpu_native.sh [WHEEL_FILE]
set -eu
version=0.32.0
cd "$(dirname "$0")/.."
root=.deps/wgpu-native
[ "$(cat $root/version 2>/dev/null || true)" = "$version" ] && exit 0
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
wheel=${1:-}
if [ -z "$wheel" ]; then
  python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" "wgpu==$version"
  wheel=$(echo "$download"/wgpu-*.whl)
fi
mkdir -p $root/include/webgpu $root/lib
python3 - "$wheel" "$root" <<'PYTHON'
import sys, zipfile
wheel, root = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
wanted = {"webgpu.h": "include/webgpu/webgpu.h", "wgpu.h": "include/webgpu/wgpu.h"}
for name in wheel.namelist():
    base = name.rsplit("/", 1)[-1]
    if base.startswith(("libwgpu_native", "wgpu_native")):
        wanted[base] = "lib/" + base.replace("-release", "")
for name in wheel.namelist():
    target = wanted.get(name.rsplit("/", 1)[-1])
    if target:
        with open(f"{root}/{target}", "wb") as file:
            file.write(wheel.read(name))
PYTHON
echo "$version" > $root/version
echo "wgpu-native of the wheel wgpu $version: $root"
