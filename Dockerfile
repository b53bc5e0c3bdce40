FROM python:3.13.12-slim-bookworm AS server
# The compiler is for the codec's CPU kernels, which are built for the processor at hand on first use.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home server \
    && install --directory --owner server --mode 0700 /var/cache/server
ENV HF_HUB_OFFLINE=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/var/cache/server
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY LICENSE README.md pyproject.toml ./
COPY src src
RUN pip install --constraint constraints.txt '.[serve,otlp]'
USER server
WORKDIR /home/server
ENTRYPOINT ["mamba-checkpoint-cache"]
CMD ["serve", "--host", "0.0.0.0"]
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:30000/health', timeout=4)"]

# The images below have no program that could ask whether they are well.
FROM busybox:1.37.0-musl AS probe
RUN mkdir /empty

FROM otel/opentelemetry-collector:0.160.0 AS collector
COPY --from=probe /bin/busybox /probe/busybox

FROM grafana/tempo:2.10.8 AS tempo
COPY --from=probe /bin/busybox /probe/busybox
COPY --from=probe --chown=10001:10001 /empty /var/tempo
