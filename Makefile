# A thin layer over the CMake presets: `make demo` and `make test` work on a machine that has only git and make.
PRESET ?= release
BUILD := build/$(PRESET)
JOBS ?= $(shell nproc)
HEADROOM := $(BUILD)/bin/headroom
# e.g. CMAKE_FLAGS=-DHEADROOM_WARNINGS_AS_ERRORS=ON, when a build folder is made
CMAKE_FLAGS ?=
SOURCES = $$(git ls-files --cached --others --exclude-standard '*.cpp' '*.h')

.PHONY: all setup build test test-fast demo package format check-format clean

all: build

setup:
	@scripts/install-packages

$(BUILD)/build.ninja: | setup
	cmake --preset $(PRESET) $(CMAKE_FLAGS)

build: setup $(BUILD)/build.ninja
	cmake --build --preset $(PRESET) -j $(JOBS)

test: build
	ctest --preset $(PRESET)

test-fast: build
	ctest --preset $(PRESET) -L fast

# First a GPT, whose memory is mostly activations, then the experiment that guides show, whose memory
# is mostly weights.
demo: setup $(BUILD)/build.ninja
	cmake --build --preset $(PRESET) -j $(JOBS) --target headroom_app
	$(HEADROOM) compare --model gpt --model_config n_layer=6,n_head=6,n_embd=384,block_size=256 \
	    --dataset /usr/share/common-licenses/GPL-3 --learning_rate 1e-3 --global_batch_size 32 \
	    --per_device_train_batch_size 8 --max_steps 1 --memory_budget 300MiB \
	    --output_dir $(BUILD)/demo/gpt --disable_tqdm
	$(HEADROOM) compare --model mlp --dataset fashion-mnist --optim sgd --learning_rate 1e-3 \
	    --lr_scheduler_type constant --max_grad_norm 0 --shuffle false --global_batch_size 64 \
	    --per_device_train_batch_size 16 --num_train_epochs 1 --memory_budget 5500KiB \
	    --output_dir $(BUILD)/demo/mlp --disable_tqdm

# The program and the library as a Debian package, beside the build's other files.
package: build
	cd $(BUILD) && cpack -G DEB

format:
	clang-format-14 -i $(SOURCES)

check-format:
	clang-format-14 --dry-run --Werror $(SOURCES)

clean:
	rm -rf build
