# Every target sets itself up from a bare Python 3.11 to 3.13: `make demo` is the first thing to try.
#   PYTHON=python3.12   the interpreter to build the environment with
#   VENV=.venv          where that environment lives
#   ARGS="..."          more arguments for the command behind the target
#   TESTS="..."         what `make test` runs

.DELETE_ON_ERROR:
.PHONY: demo test lint docs notebooks example compile-tpu compile-cuda emulate nets clean

SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
TESTS ?= tests
BIN = $(VENV)/bin

demo: $(VENV)/.demo
	$(BIN)/jaxops demo $(ARGS)

test: $(VENV)/.test
	$(BIN)/pytest -n 2 --dist worksteal --nbmake $(TESTS) $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# The site, in build/site. A warning, a broken link or a public name that no page shows is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site $(ARGS)
	@echo "Open $(CURDIR)/build/site/index.html"

notebooks: $(VENV)/.test
	$(BIN)/pytest --nbmake notebooks $(ARGS)

# Installed beside the environment, which stays as it is: an installed operator changes what explain finds.
example: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --upgrade --target build/example \
		./examples/jaxops-rms-norm
	PYTHONPATH=$(CURDIR)/build/example $(BIN)/pytest examples/jaxops-rms-norm $(ARGS)

# The compilers see what users would give them.
compile-tpu compile-cuda: export JAX_DISABLE_MOST_OPTIMIZATIONS = 0

compile-tpu compile-cuda: compile-%: $(VENV)/.test
	$(BIN)/jaxops targets --install $* >/dev/null
	$(BIN)/pytest -n 2 -m "$*_compile and not slow" tests/compile_targets $(ARGS)

# The interpreter's tests of TPU kernels, on the code that is compiled for these chips; "at-once" and "two-cores" interpret.
CHIPS ?= tpu-v5e tpu-v6e tpu-v7x
emulate: $(VENV)/.test
	$(BIN)/jaxops targets --install tpu >/dev/null
	for chip in $(CHIPS); do \
		$(BIN)/pytest -n 2 --emulate $$chip $$(grep -l "mark.emulated" tests/*/test_*.py) $(ARGS) || exit 1; done

# Whether values, memory, explanations, programs and replayed times are as recorded; ARGS="--only values" checks a part.
nets: $(VENV)/.test
	$(BIN)/python -m benchmarks.nets check $(ARGS)

clean:
	rm -rf .venv .venv-* build dist
	find . -type d \( -name __pycache__ -o -name .hypothesis -o -name .mypy_cache -o -name .pytest_cache -o -name .ruff_cache \) \
		-prune -exec rm -rf {} +

# An environment with this repository and the extra that the stamp is named after; that of `dev` holds all of them.
INSTALLED = demo test lint docs dev
THEN_.demo = ; then the demo trains for about 2 minutes
$(INSTALLED:%=$(VENV)/.%): pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || \
		{ echo "jaxops needs Python 3.11, 3.12 or 3.13: name one with PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "Installing jaxops[$(patsubst .%,%,$(@F))] into $(@D), about a minute the first time$(THEN_$(@F))"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile --editable \
		'.[$(patsubst .%,%,$(@F))]'
	@touch $@ $(if $(filter %/.dev,$@),$(INSTALLED:%=$(@D)/.%))
