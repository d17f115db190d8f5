#!/bin/bash
# Gathers, where there is a network, what a machine without one lacks: below .make/gpu, to be copied there.
#   bash tests/gpu/pack.sh source wheels image
set -euo pipefail
cd "$(dirname "$0")/../.."

CELL=${CELL:-llama-cu130-sm90}
PACK=${PACK:-.make/gpu}
PYTHON=${PYTHON:-.venv/bin/python}
LIMIT_MIB=56 # of 64 for the whole tree; the rest of it is 6
WHEELS=(--only-binary :all: --no-deps --require-hashes --python-version 3.12 --implementation cp)
for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do WHEELS+=(--platform "manylinux_${glibc}_x86_64"); done

# llama.cpp as the images take it, with their patches: the sdist itself, of 76 MB, would not fit.
source_() {
  local work patch; work=$(mktemp -d)
  "$PYTHON" -m pip install -q --require-hashes --only-binary :all: --target "$work/backend" -r images/locks/llama-source-backend.txt
  PYTHONPATH=$work/backend "$PYTHON" -m pip download -q --no-deps --require-hashes --no-binary :all: --no-build-isolation \
    -d "$work" -r images/locks/llama-source.txt
  mkdir "$work/src"
  tar -xzf "$work"/*.tar.gz -C "$work/src" --strip-components 2 --wildcards '*/vendor/llama.cpp'
  local patches; patches=$(sed -n '/AS compile-cuda$/,/^RUN/s/.*for patch in \(.*\); do patch.*/\1/p' "images/rendered/$CELL/Dockerfile")
  for patch in ${patches:?none named for $CELL}; do patch -s -d "$work/src/llama.cpp" -p1 <"images/patches/$patch"; done
  rm -rf "$work"/src/llama.cpp/{models,docs,.git} # 113 of 150 MB, for its own tests and readers
  tar -C "$work/src" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -c llama.cpp | xz -6 >"$PACK/source.tar.xz"
  rm -rf "$work"
}

# What `appliance` and tests/shapes import, for that machine's Python 3.12, with the hashes of the project's locks.
wheels() {
  rm -rf "$PACK/wheels"
  "$PYTHON" -m pip download -q -d "$PACK/wheels" "${WHEELS[@]}" -r images/locks/appliance.txt
  awk '/^[a-z]/ {ours = /^gguf==/} ours' images/locks/dev.txt >"$PACK/gguf.txt"
  "$PYTHON" -m pip download -q -d "$PACK/wheels" "${WHEELS[@]}" -r "$PACK/gguf.txt"
  rm "$PACK/gguf.txt"
}

# The engine out of the built image, as it is, but for cuBLAS: 600 MB, of which that machine has its own.
image() {
  local work id; work=$(mktemp -d)
  id=$(docker create "appliance:$CELL")
  docker cp --quiet "$id:/opt/llama" "$work/engine"
  docker rm "$id" >/dev/null
  rm -f "$work"/engine/libcublas*
  tar -C "$work" -c engine | xz -6 >"$PACK/image.tar.xz"
  rm -rf "$work"
}

mkdir -p "$PACK"
for part in "$@"; do
  case $part in
    source) source_ ;;
    wheels | image) "$part" ;;
    *) echo "error: unknown part '$part': source, wheels, image" >&2; exit 2 ;;
  esac
done
du -ah --max-depth=1 "$PACK"
size=$(du -sm "$PACK" | cut -f1)
if ((size > LIMIT_MIB)); then
  echo "error: $PACK is $size MiB, more than $LIMIT_MIB: send its parts one by one (README.md)" >&2
  exit 1
fi
