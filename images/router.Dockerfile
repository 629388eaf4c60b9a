# The router: no torch, no weights. Build from the root of the repository: make images
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
WORKDIR /src
COPY constraints.txt ./
COPY engine/pyproject.toml engine/README.md engine/
COPY server/pyproject.toml server/README.md server/
COPY images/requirements.py images/
RUN python images/requirements.py engine server > requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

# What it does for each request is compiled to C (tools/compile_router.py).
FROM dependencies AS compiled
RUN pip install --no-cache-dir --constraint constraints.txt mypy setuptools \
 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends gcc libc6-dev \
    $(test -e "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || echo python3-dev) \
 && rm -rf /var/lib/apt/lists/*
COPY engine engine
COPY server server
RUN pip install --no-cache-dir --no-deps --target /opt/sources ./engine ./server
COPY tools/compile_router.py tools/
RUN python tools/compile_router.py /opt/sources

FROM dependencies
RUN useradd --uid 10001 --create-home --home-dir /home/octavo --shell /usr/sbin/nologin octavo \
 && echo /opt/sources > "$(python -c 'import site; print(site.getsitepackages()[0])')/octavo.pth" && rm -rf /src
COPY --from=compiled /opt/sources /opt/sources
USER 10001
WORKDIR /home/octavo
ENV PATH=/opt/sources/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 8080
ENTRYPOINT ["octavo"]
CMD ["route", "--help"]
