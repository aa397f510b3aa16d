# make demo | test | families | fuzz | lint | docs | bench | clean. Everything runs in .venv; nothing is installed outside it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := torch>=2.11,<2.14

.PHONY: demo test families fuzz lint docs bench clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python examples/moving_shapes/demo.py --out build/demo

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

families: $(STAMP)
	FAMILIES=all $(BIN)/python -m pytest -n auto tests/families

# Seconds of each fuzzer; two run at a time.
FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m fuzz.run --seconds $(FUZZ_SECONDS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The notice that is switched off is about a successor of MkDocs.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	@found=0; for script in benchmarks/*.py; do \
	    if [ -f "$$script" ]; then found=1; echo "== $$script"; $(BIN)/python "$$script" || exit 1; fi; \
	done; [ $$found -eq 1 ] || { echo "no benchmark in benchmarks/"; exit 1; }

# torch goes first, so that resolving the rest finds it satisfied and does not replace it.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
