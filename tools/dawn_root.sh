#!/bin/sh
# The WebGPU backend on Dawn, without a GPU: a Debian testing root with Dawn's package and two CPU Vulkan drivers, the
# project built in it with ATTNSPAN_WEBGPU=dawn, the tests of the backend and its grid run in it.
#   tools/dawn_root.sh [ROOT]          default ROOT: .deps/dawn-root. Needs root, mmdebstrap, 2.5 GB and 8 minutes
# Drivers: lavapipe (Mesa), then SwiftShader (out of Debian's chromium package; subgroups of 4).
set -eu
cd "$(dirname "$0")/.."
root=$(realpath -m "${1:-.deps/dawn-root}")
packages=libwebgpu-dawn-dev,mesa-vulkan-drivers,g++,cmake,ninja-build,pkg-config,libhwy-dev,libtbb-dev,libgtest-dev,libgmock-dev,nlohmann-json3-dev,libcli11-dev,libxxhash-dev
mirror=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb [^h]*\(http[^ ]*\).*/\1/p' /etc/apt/sources.list.d/debian.sources \
  /etc/apt/sources.list 2>/dev/null | head -1)
if [ ! -e "$root/usr/lib/x86_64-linux-gnu/cmake/Dawn/DawnConfig.cmake" ] || [ ! -e "$root/usr/include/hwy" ]; then
  command -v mmdebstrap >/dev/null || apt-get -qq install -y --no-install-recommends mmdebstrap
  rm -rf "$root"
  mkdir -p "$(dirname "$root")"
  mmdebstrap --aptopt='Acquire::Check-Valid-Until "false"' --variant=minbase --include="$packages" forky "$root" "$mirror"
fi
# SwiftShader is one file of a large package: it is unpacked, not installed.
if [ ! -e "$root/opt/swiftshader/libvk_swiftshader.so" ]; then
  chroot "$root" sh -c 'cd /tmp && apt-get -qq update && apt-get -qq download chromium-common && dpkg-deb -x chromium-common_*.deb chromium
    mkdir -p /opt/swiftshader && cp chromium/usr/lib/chromium/libvk_swiftshader.so chromium/usr/lib/chromium/vk_swiftshader_icd.json /opt/swiftshader
    rm -rf chromium chromium-common_*.deb'
fi
mkdir -p "$root/src"
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xf - -C "$root/src"
chroot "$root" sh -c "cd /src && cmake -Wno-dev -G Ninja -B build/dawn -DCMAKE_BUILD_TYPE=Release -DATTNSPAN_CUDA=OFF \
  -DATTNSPAN_WEBGPU=dawn -DATTNSPAN_BUILD_CLI=OFF -DATTNSPAN_CPU_TARGETS=one >build.log && ninja -C build/dawn grid_test webgpu_test"
for driver in /usr/share/vulkan/icd.d/lvp_icd.json /opt/swiftshader/vk_swiftshader_icd.json; do
  echo "== $driver"
  chroot "$root" sh -c "cd /src && export XDG_RUNTIME_DIR=/tmp VK_ICD_FILENAMES=$driver VK_DRIVER_FILES=$driver
    build/dawn/tests/webgpu_test --gtest_brief=1 && build/dawn/tests/grid_test --gtest_filter='*_webgpu_*' --gtest_brief=1"
done
