# Everything from a fresh machine with Python 3.11+, make and a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-exhaustive test-stalls test-tp test-page chaos soak fuzz rolling kernels formats test-typescript test-clients test-schemas lint protos released-protos docs lock chart compose test-observability bench dist install clean
.DEFAULT_GOAL := demo

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer; this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

# The bundled pair generates through a gateway, a draft service and a target service over gRPC.
demo: $(STAMP)
	$(BIN)/tandem demo

# Two workers, each with its own files; prints the ten slowest tests. Processes that tests start find their modules compiled.
TEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10

# TESTS="tests/gateway tests/specdec" runs a part of them.
test: $(STAMP)
	$(TEST) $(TESTS)

# The same, and all combinations and seeds that `make test` leaves out.
test-exhaustive: $(STAMP)
	$(TEST) -m "exhaustive or not exhaustive" --timeout 900

# The same as `make test` while every process stands still for 100 ms twice a second, and drafts open late: what fails depends
# on the machine's speed.
test-stalls: $(STAMP)
	PYTHONPATH=$(CURDIR)/tests/stalls $(TEST) $(TESTS)

# Targets split over 2 and 4 ranks: every kind of model, ranks that die, torchrun.
test-tp: $(STAMP)
	$(BIN)/python -m pytest -m "exhaustive or not exhaustive" --timeout 900 tests/engine/parallel \
	  tests/target_service/test_tensor_parallel.py tests/target_service/test_split_models.py tests/e2e/test_tensor_parallel.py

# The page in a real browser (Debian: chromium), checked by axe-core; ARGS="--record" renews its recording and screenshot.
test-page: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright==1.65.2
	$(BIN)/npm ci --prefix tests/page --no-audit --no-fund --ignore-scripts
	$(BIN)/python -m pytest tests/page/browser.py $(ARGS)

# Faults at random under ten streams: SECONDS for toy services and as long for the bundled pair, drawn from SEED.
chaos: SECONDS ?= 120
chaos: $(STAMP)
	$(BIN)/python -m tests.reliability.chaos --seconds $(SECONDS) --seed $(or $(SEED),1) $(if $(REAL),--real)

# A mixed load for SECONDS; memory and file descriptors must stay flat.
soak: SECONDS ?= 600
soak: $(STAMP)
	$(BIN)/python -m tests.reliability.soak --seconds $(SECONDS) --seed $(or $(SEED),1)

# CASES invented inputs for REST, gRPC, the target and every drafter, drawn from SEED.
fuzz: CASES ?= 100000
fuzz: $(STAMP)
	$(BIN)/python -m tests.reliability.fuzz.trial --cases $(CASES) --seed $(or $(SEED),1)

# Two gateways, two targets and two drafts: each process is replaced under load, ROUNDS times.
rolling: ROUNDS ?= 1
rolling: $(STAMP)
	$(BIN)/python -m tests.reliability.rolling --rounds $(ROUNDS)

# The kernels on vectors of all kinds: x86 without AVX-512, without AVX, and NEON under QEMU (Debian: g++-aarch64-linux-gnu,
# qemu-user or qemu-user-static).
NEON := $(VENV)/neon-products
QEMU := $(shell command -v qemu-aarch64 || echo qemu-aarch64-static)
kernels: $(STAMP)
	CXX="g++ -mno-avx512f" $(BIN)/python -m pytest --quiet --numprocesses 2 tests/engine/native
	CXX="g++ -mno-avx" $(BIN)/python -m pytest --quiet --numprocesses 2 tests/engine/native
	aarch64-linux-gnu-g++ -O3 -std=c++17 -static -pthread -fno-exceptions -fno-rtti -fno-math-errno -fno-trapping-math \
	  -ffp-contract=off -Ispecdec tests/engine/native/products.cpp engine/native/*.cpp -o $(NEON)
	$(QEMU) $(NEON)

# Small quantised checkpoints, written anew by AutoRound and GPTQModel in an environment of their own, are read bit for bit.
FORMATS := $(abspath $(VENV))/formats
formats: $(STAMP)
	$(PYTHON) -m venv $(FORMATS)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(FORMATS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch transformers --requirement tests/engine/quantised/published/requirements.txt
	$(FORMATS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gptqmodel==7.7.0
	cd $(FORMATS) && bin/python $(CURDIR)/tests/engine/quantised/published/make_files.py files  # GPTQModel logs where it runs
	TANDEM_FORMATS=$(FORMATS)/files $(BIN)/python -m pytest tests/engine/quantised/test_published_files.py

# The npm package in clients/typescript: made from the protos, tried against `tandem serve`, then packed and installed elsewhere.
test-typescript: $(STAMP)
	set -e; export PATH="$(abspath $(BIN)):$$PATH" PROTOC="python -m grpc_tools.protoc" npm_config_fund=false npm_config_audit=false; \
	  (cd clients/typescript; npm ci --ignore-scripts; npm run check-package); \
	  python -m tests.clients.serve npm --prefix clients/typescript test

# The clients that users have (docs/clients.md), each in an environment of its own; CLIENTS="openai langchain" runs some.
test-clients: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.clients.run $(CLIENTS)

# The JSON Schema Test Suite, from the source distribution of jsonschema, against the grammars of schemas.
test-schemas: $(STAMP)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary jsonschema \
	  --dest $(VENV)/schemas jsonschema==4.26.0
	$(BIN)/python -m tests.target_service.grammar.check_suite $(VENV)/schemas/jsonschema-4.26.0.tar.gz

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The committed stubs in specdec/v1; a test compares them with what this makes.
protos: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Iprotos \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. protos/specdec/v1/*.proto

# What tests compare the protos with: their descriptors, taken at a release.
released-protos: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Iprotos --descriptor_set_out=protos/released.binpb protos/specdec/v1/*.proto

# The lists of options in docs/; a test compares them with what this makes.
docs: $(STAMP)
	$(BIN)/python -m tandem.cli.reference

# requirements.lock, what the image installs: every package with the hashes of its files.
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --extra build --extra otel --constraints constraints.txt --python-version 3.11 --universal \
	  --generate-hashes --no-annotate --custom-compile-command "make lock" --upgrade --output-file requirements.lock

# tests/deploy/rendered, what Helm makes of deploy/helm/tandem; `make test` looks at these files.
chart: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check helm-python-sdk==0.2.2
	$(BIN)/python -m tests.deploy.render

# The image and docker-compose.yml, tried as a user would; needs Docker.
compose: $(STAMP)
	$(BIN)/python -m tests.e2e.compose

# A real Prometheus over `tandem serve`: every query of the dashboard and the alerts has data. Needs prometheus and promtool.
test-observability: $(STAMP)
	$(BIN)/python -m tests.deploy.observability

# Plain against speculative decoding, on the bundled target and on the same padded to 200 M parameters.
bench: $(STAMP)
	$(BIN)/tandem bench --compare hf
	$(BIN)/tandem bench --compare hf --pad-target 200M

# sdist and wheel, and the small wheel for the environments of other engines. The first wheel is installed into an empty
# environment outside the checkout and generates there, without a compiler and with the prebuilt kernels.
dist: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m build --wheel --outdir dist/engine_plugin deploy/engine_plugin
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	  $(PYTHON) -m venv "$$folder/env"; \
	  export PIP_CONSTRAINT=$(CURDIR)/constraints.txt; unset PYTHONPATH; \
	  "$$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check dist/*.whl; \
	  cd "$$folder"; export CXX=/nonexistent XDG_CACHE_HOME="$$folder/cache"; \
	  env/bin/tandem --version; env/bin/tandem generate "def main(argv):" --max-tokens 32; \
	  env/bin/python -c "from engine.native.library import load; print(load().path)"

clean:
	rm -rf $(VENV) build dist *.egg-info
