# One image for the three services: docker-compose.yml picks the command.
FROM python:3.11-slim-bookworm

# The CPU kernels are compiled for the machine they run on, at the first start.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# Where pip finds torch: empty takes the default index (CUDA builds on x86-64); give an index with CPU builds for a
# smaller image.
ARG TORCH_INDEX=""

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY specdec specdec
COPY draft_service draft_service
COPY target_service target_service
COPY gateway gateway
COPY tandem tandem
RUN PIP_CONSTRAINT=/app/constraints.txt PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --no-cache-dir .

RUN useradd --create-home tandem && mkdir -p /models /cache && chown tandem /models /cache
USER tandem
ENV XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
ENTRYPOINT ["tandem"]
CMD ["--help"]
