# One image for the three services: docker-compose.yml picks the command.
FROM python:3.11-slim-bookworm

# Compiles the CPU kernels below, and what Triton makes at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# Empty: torch as locked, with its hashes (CUDA builds on x86-64). For a smaller image give a package index with CPU
# builds; torch is then the version of constraints.txt as that index has it, and everything else as locked.
ARG TORCH_INDEX=""

WORKDIR /app
COPY requirements.lock constraints.txt ./
RUN if [ -z "${TORCH_INDEX}" ]; then \
        pip install --no-cache-dir --require-hashes -r requirements.lock; \
    else \
        awk '/^[^ ]/ { keep = !/^(torch|triton|nvidia-|cuda-)/ } keep' requirements.lock > /tmp/rest.lock \
        && pip install --no-cache-dir --require-hashes --no-deps -r /tmp/rest.lock \
        && pip install --no-cache-dir --no-deps -c constraints.txt --extra-index-url "${TORCH_INDEX}" torch; \
    fi

COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY specdec specdec
COPY engine engine
COPY draft_service draft_service
COPY target_service target_service
COPY gateway gateway
COPY tandem tandem
COPY tandem_integrations tandem_integrations
RUN pip install --no-cache-dir --no-deps --no-build-isolation . && pip check

# Owners of volumes that are made on first use are those of these folders.
RUN useradd --uid 10001 --create-home tandem \
    && mkdir -p /models /cache /run/tandem /certs/ca /certs/gateway /certs/target /certs/draft \
    && chown -R tandem /models /cache /run/tandem /certs
USER 10001
ENV XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
STOPSIGNAL SIGTERM
ENTRYPOINT ["tandem"]
CMD ["--help"]
