# A thin layer over the CMake presets: `make demo` and `make test` work on a machine that has only git and make.
PRESET ?= release
BUILD := build/$(PRESET)
JOBS ?= $(shell nproc)
HEADROOM := $(BUILD)/bin/headroom
# e.g. CMAKE_FLAGS=-DHEADROOM_WARNINGS_AS_ERRORS=ON, when a build folder is made
CMAKE_FLAGS ?=
SOURCES = $$(git ls-files '*.cpp' '*.h')

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

# The guide's experiment, whose memory is mostly weights, and a deeper network, whose memory is mostly activations.
demo: setup $(BUILD)/build.ninja
	cmake --build --preset $(PRESET) -j $(JOBS) --target headroom_app
	$(HEADROOM) compare --model mlp --dataset fashion-mnist --optim sgd --learning_rate 1e-3 --lr_scheduler_type constant \
	    --max_grad_norm 0 --shuffle false --global_batch_size 64 --per_device_train_batch_size 16 --num_train_epochs 1 \
	    --memory_budget 5500KiB --output_dir $(BUILD)/demo/mlp --disable_tqdm
	$(HEADROOM) compare --model resnet --model_config blocks=16,norm=0 --dataset fashion-mnist --optim adamw --learning_rate 2e-3 \
	    --lr_scheduler_type cosine --warmup_steps 10 --global_batch_size 64 --max_steps 60 \
	    --memory_budget 8MiB --output_dir $(BUILD)/demo/resnet --disable_tqdm

# The program and the library as a Debian package, beside the build's other files.
package: build
	cd $(BUILD) && cpack -G DEB

format:
	clang-format-14 -i $(SOURCES)

check-format:
	clang-format-14 --dry-run --Werror $(SOURCES)

clean:
	rm -rf build
