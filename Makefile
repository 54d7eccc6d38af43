# make demo: set up, then export the demo checkpoint and answer prompts with it.   make test: set up, then lint and run the tests.
# make cuda: the CUDA kernels and the TensorRT plugin, for any GPU of sm_80 or later; needs no GPU.
# make test-slow: the tests that take longer (every random shape, sanitizers, fuzzing, nvcc, TensorRT for RTX, the wheel).
BIN := .venv/bin
OUT := out/demo

.PHONY: demo cuda test test-slow lint wheel setup clean
.DEFAULT_GOAL := demo

setup: .venv/.ready

.venv/.ready: pyproject.toml CMakeLists.txt $(wildcard tools/setup/* plugins/cpu/* plugins/cpu/*/*) plugins/qwenrt/plugins/schema.py
	bash tools/setup/setup.sh

demo: setup
	$(BIN)/qwenrt export tools/demo/checkpoint $(OUT) --force
	PYTHONPATH=tools $(BIN)/python -m demo.show $(OUT)
	$(BIN)/qwenrt generate $(OUT) --chat --thinking "27+58=?"

cuda: setup
	-bash tools/setup/tensorrt.sh headers
	$(BIN)/cmake -S . -B build/dev -G Ninja -DQWENRT_CUDA=ON -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(BIN)/cmake --build build/dev --target cuda

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest --durations=10

test-slow: setup
	$(BIN)/pytest -m slow --durations=10

wheel: setup
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf .venv build dist out
