# Image of the router, without torch and weights. Build it from the root of the repository: make images
# Its last layer is our own packages, as in engine.Dockerfile.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS sources
RUN pip install --no-cache-dir hatchling
COPY engine engine
COPY server server
RUN pip install --no-cache-dir --no-deps --no-build-isolation --target /opt/sources ./engine ./server

FROM ${BASE}
RUN useradd --uid 10001 --create-home --home-dir /home/octavo --shell /usr/sbin/nologin octavo \
 && echo /opt/sources > "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/octavo.pth"
WORKDIR /src
COPY constraints.txt ./
COPY images/requirements.py images/
COPY engine/pyproject.toml engine/
COPY server/pyproject.toml server/
RUN python images/requirements.py engine server > requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
ENV PATH=/opt/sources/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /home/octavo
EXPOSE 8080
ENTRYPOINT ["octavo"]
CMD ["route", "--help"]
COPY --from=sources /opt/sources /opt/sources
