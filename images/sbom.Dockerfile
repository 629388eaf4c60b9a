# List the Python packages of the image IMAGE as packages.cdx.json, in CycloneDX's format: SAVE=DIR images/build
ARG IMAGE
FROM ${IMAGE} AS listing
USER 0
RUN python -m venv /tmp/tool && /tmp/tool/bin/pip install --no-cache-dir 'cyclonedx-bom>=7,<8' \
 && /tmp/tool/bin/cyclonedx-py environment --output-reproducible --of JSON -o /packages.cdx.json "$(command -v python)"

FROM scratch
COPY --from=listing /packages.cdx.json /
