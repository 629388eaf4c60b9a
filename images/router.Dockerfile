# Image of the router, without torch and weights. Build it from the root of the repository: make images
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE}
WORKDIR /src
COPY constraints.txt ./
COPY engine/pyproject.toml engine/README.md engine/
COPY server/pyproject.toml server/README.md server/
COPY images/requirements.py images/
RUN python images/requirements.py engine server > requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

COPY engine engine
COPY server server
RUN pip install --no-cache-dir --no-deps ./engine ./server \
 && useradd --uid 10001 --create-home --home-dir /home/octavo --shell /usr/sbin/nologin octavo && rm -rf /src
USER 10001
WORKDIR /home/octavo
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 8080
ENTRYPOINT ["octavo"]
CMD ["route", "--help"]
