# Image of the operator, without engine and server. Build it from the root of the repository: make images
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN useradd --uid 10001 --create-home --home-dir /home/octavo --shell /usr/sbin/nologin octavo
WORKDIR /src
COPY constraints.txt ./
COPY operator/pyproject.toml operator/README.md operator/
COPY images/requirements.py images/
RUN python images/requirements.py operator > requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY operator operator
RUN pip install --no-cache-dir --no-deps ./operator && rm -rf /src/operator
USER 10001
WORKDIR /home/octavo
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 8080
ENTRYPOINT ["octavo-operator"]
CMD ["--help"]
