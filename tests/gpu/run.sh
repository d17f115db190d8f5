#!/bin/bash
# Runs on the machine with the GPU, in the repository's root: bash tests/gpu/run.sh PART… (build, image, tune OPTIONS…, cache OPTIONS…).
# What each part shows and how long it takes is in README.md beside this file.
set -euo pipefail
cd "$(dirname "$0")/../.."

CELL=${CELL:-llama-cu130-sm90}
PACK=${PACK:-.make/gpu}       # what travelled
WORK=${WORK:-.make/gpu-work}  # what is made there, kept while the machine is warm
OUT=${OUT:-$WORK/out}         # what comes back
PYTHON=${PYTHON:-python3}
DOCKERFILE=images/rendered/$CELL/Dockerfile
export PYTHONUNBUFFERED=1

say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
die() { echo "error: $*" >&2; exit 1; }

# What of CUDA this machine has, wherever it is: a toolkit, or the wheels that PyTorch came with.
find_file() {
  local found; found=$(find -L ${CUDA_PLACES:-/usr/local /opt /usr/lib} -name "$1" -print -quit 2>/dev/null || true)
  [ -n "$found" ] || die "no $1 below ${CUDA_PLACES:-/usr/local, /opt or /usr/lib}"
  echo "$found"
}

show_machine() {
  ! command -v nvidia-smi >/dev/null || nvidia-smi --query-gpu=name,memory.total,memory.free,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv
  say "$(getconf GNU_LIBC_VERSION), $(nproc) cores, $(free -g | awk '/^Mem/ {print $2, "GiB,", $7, "available"}'), $("$PYTHON" --version)"
  # The driver's folder is mounted from outside: the loader may not have been told of it.
  if [ -d /usr/local/nvidia/lib64 ] && ! ldconfig -p | grep libcuda.so.1 >/dev/null; then ldconfig /usr/local/nvidia/lib64; fi
}

use_wheels() {
  [ -d "$PACK/wheels" ] || return 0
  if [ ! -d "$WORK/site" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$PACK"/wheels/*.whl
  fi
  export PYTHONPATH=$(realpath "$WORK")/site
  # Some package there may be called `tests` as well, and one with an __init__ comes before ours.
  "$PYTHON" -c 'import tests.gpu' 2>/dev/null || : >tests/__init__.py
}

# The -D words of one stage of the cell's Dockerfile, so that what is built here is what the image holds.
flags_of() {
  sed -n "/^FROM .* AS $1\$/,/cmake --build/p" "$DOCKERFILE" | grep -oE -- "-D[A-Z_]+=('[^']*'|[^ ]+)" | tr -d "'" \
    | grep -vE '^-D(CMAKE_CUDA_COMPILER|CUDAToolkit_ROOT)='
}

build() {
  local nvcc links name found tree=$WORK/llama.cpp engine=$WORK/built
  nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null) || die "no nvcc: not on PATH, not in /usr/local/cuda/bin"
  say "$("$nvcc" --version | sed -n 's/.*release/release/p') of $nvcc, $(cmake --version | head -1), ninja $(ninja --version)"
  [ -d "$tree" ] || "$PYTHON" -m tarfile -e "$PACK/source.tar.xz" "$WORK"
  # The toolkit may have no names to link with: as in the image, a stub for the driver's, and cuBLAS where it is.
  mkdir -p "$WORK/links"
  links=$(realpath "$WORK/links")
  grep -rhoE '\bcu(Ctx|Device|Get|Mem)[A-Za-z0-9]+' "$tree/ggml/src/ggml-cuda" | sort -u | sed 's/.*/int &(void) { return 0; }/' >"$WORK/stub.c"
  gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$WORK/links/libcuda.so" "$WORK/stub.c"
  for name in cublas cublasLt; do
    found=$(find_file "lib$name.so.13")
    ln -sf "$found" "$links/lib$name.so"
  done
  found=$(find_file cublas_v2.h)
  export CPATH=${found%/*}
  mapfile -t cpu < <(flags_of compile)
  mapfile -t gpu < <(flags_of compile-cuda)
  local began=$SECONDS
  cmake -S "$tree" -B "$WORK/out" -G Ninja "${cpu[@]}" >"$WORK/cmake-cpu.log" || { cat "$WORK/cmake-cpu.log"; die "cmake"; }
  cmake -S "$tree" -B "$WORK/out-cuda" -G Ninja "${gpu[@]}" -DCMAKE_CUDA_COMPILER="$nvcc" \
    -DCUDA_cuda_driver_LIBRARY="$links/libcuda.so" -DCUDA_cublas_LIBRARY="$links/libcublas.so" \
    -DCUDA_cublasLt_LIBRARY="$links/libcublasLt.so" >"$WORK/cmake-cuda.log" || { cat "$WORK/cmake-cuda.log"; die "cmake"; }
  # Ends by itself before the call does: what is compiled is kept, and the same call goes on.
  timeout 500 ninja -C "$WORK/out-cuda" ggml-cuda | tail -1 || die "not finished: the same call goes on"
  say "CUDA backend after $((SECONDS - began)) s"
  timeout $((560 - SECONDS)) ninja -C "$WORK/out" llama-server llama-fit-params llama-perplexity | tail -1 \
    || die "not finished: the same call goes on"
  say "built in $((SECONDS - began)) s with $(nproc) cores"
  mkdir -p "$engine" "$OUT"
  cp -a "$WORK"/out/bin/*.so* "$WORK"/out/bin/llama-* "$WORK"/out-cuda/bin/libggml-cuda.so "$engine/"
  find "$engine" -type f -exec strip --strip-unneeded {} +
  prove "$engine"
  if ((SECONDS < 540)); then # brought back, it can travel the next time: for a fresh machine
    tar -C "$WORK" -czf - built | split -b 15m - "$OUT/built.tar.gz."
    du -ch "$OUT"/built.tar.gz.* | tail -1
  fi
}

# The image's own binaries on this machine's C library and cuBLAS.
image() {
  [ -d "$WORK/engine" ] || "$PYTHON" -m tarfile -e "$PACK/image.tar.xz" "$WORK"
  prove "$WORK/engine"
}

# $1: loads on this C library, has its CUDA libraries, and every small model decodes without a kernel made on the spot.
prove() {
  local wants has name found
  wants=$(grep -ahoE 'GLIBC_2\.[0-9]+' "$1"/llama-server "$1"/*.so | sort -uV | tail -1)
  has=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
  [ "$(printf '%s\n' "${wants#GLIBC_}" "$has" | sort -V | tail -1)" = "$has" ] || die "$1 wants ${wants}, this machine has $has"
  say "glibc: $1 wants ${wants#GLIBC_}, this machine has $has"
  for name in libcudart.so.13 libcublas.so.13 libcublasLt.so.13; do
    [ -e "$1/$name" ] && continue
    found=$(find_file "$name")
    ln -s "$found" "$1/$name" # beside the engine, where $ORIGIN looks
    say "$name is this machine's: $found"
  done
  nvidia-smi -L || die "no NVIDIA GPU answers: whether the kernels run cannot be told here"
  use_wheels
  mkdir -p "$OUT"
  # -c: the project's configuration wants plugins that are not there, and then nobody knows the mark.
  CUDA_DISABLE_PTX_JIT=1 APPLIANCE_ENGINE_DIR=$(realpath "$1") "$PYTHON" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q -s \
    -W ignore::pytest.PytestUnknownMarkWarning --junitxml "$OUT/kernels-$(basename "$1").xml" tests/gpu
}

# What an image has beside its engine, for the engine that is here: written by the verb that images use.
write_facts() {
  local pairs
  engine=${ENGINE:-}
  for found in "$WORK/built" "$WORK/engine"; do [ -n "$engine" ] || [ ! -d "$found" ] || engine=$found; done
  [ -n "$engine" ] || die "no engine: run the part build or image first, or give ENGINE=DIR"
  use_wheels
  mkdir -p "$WORK/facts" "$OUT"
  pairs=$(sed -n "s/.*--kv-pairs '\([^']*\)'.*/\1/p" "$DOCKERFILE")
  "$PYTHON" -m appliance engine-facts --bin "$engine/llama-server" --kv-pairs "$pairs" --out "$WORK/facts/engine_facts.json"
  sed "s/@BUILD_ID@/gpu-$(basename "$engine")/" "images/rendered/$CELL/image_facts.json" >"$WORK/facts/image_facts.json"
}

tune() {
  write_facts
  [ ! -d "$PACK/results" ] || cp -n "$PACK"/results/rows-*.jsonl "$WORK/"
  say "tuning on $engine"
  "$PYTHON" -m tests.gpu.tune --engine "$engine" --facts "$WORK/facts" --work "$WORK" --out "$OUT" \
    --until-s "$((570 - SECONDS))" "$@"
}

# Decode by depth with each type of the KV cache, all else the same.
cache() {
  write_facts
  say "types of the KV cache on $engine"
  "$PYTHON" -m tests.gpu.cache --engine "$engine" --facts "$WORK/facts" --work "$WORK" --out "$OUT" "$@"
}

mkdir -p "$WORK"
[ $# -gt 0 ] || die "which part? build, image, tune, cache"
show_machine
while [ $# -gt 0 ]; do
  part=$1
  shift
  case $part in
    build | image) "$part" ;;
    tune | cache) "$part" "$@"; break ;;
    *) die "unknown part '$part': build, image, tune, cache" ;;
  esac
done
