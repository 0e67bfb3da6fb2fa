# snapmla.  `make demo` and `make test` need no step before them; `make help` lists the rest.
# Everything is built in build/.  Override on the command line: CC, CXX, NVCC, CUDA_HOME, ARCH.
#
# ARCH is the GPU that machine code is made for.  PTX for compute capability 8.0 goes with it, so
# the same programs start on every other GPU since Ampere, where the driver compiles it at first use.

NVCC      ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc) nvcc)
CUDA_HOME ?= $(abspath $(dir $(shell readlink -f $(NVCC) || echo /usr/local/cuda/bin/nvcc))..)
ARCH      ?= sm_90a
ARCHS     ?= sm_80 sm_89 sm_90a sm_100 sm_120
export CC CXX NVCC CUDA_HOME ARCH ARCHS

# where `make figures` writes, and what it says of the tree that was measured
CHARTS    ?= examples/charts
NOTE      ?= $(shell git rev-parse --short HEAD 2>/dev/null)

CFLAGS    ?= -O3
NVCCFLAGS ?= -O3
code       = -gencode arch=$(1:sm_%=compute_%),code=$(1)
ptx80      = -gencode arch=compute_80,code=compute_80
run_code   = $(call code,$(ARCH)) $(ptx80)
all_code   = $(foreach arch,$(ARCHS),$(call code,$(arch)))
nvcc       = $(NVCC) -std=c++17 $(NVCCFLAGS) -Werror all-warnings -Xcompiler -Wall,-Wextra --threads 0 -I.
# Kernels that keep a few registers in local memory (README, Limits): for sm_90a the Hopper kernels of 64
# and of 32 rows, for sm_100 the general kernel of 16.
no_spills  = $(if $(filter 90a 100,$*),,-Xptxas -warn-spills,-warn-lmem-usage)
# AddressSanitizer and UBSan.  A C caller may put any number into an enum: it is refused, not a fault.
checked    = -g -fsanitize=address -fsanitize=undefined -fno-sanitize-recover=all
c99        = $(CC) -std=c99 $(CFLAGS) -Wall -Wextra -Werror -isystem $(CUDA_HOME)/include -I.
cudart     = -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lpthread -lm
# libcmocka is looked for beside the program first: build/ can be carried to a machine without it
cmocka     = -lcmocka -Wl,-rpath,'$$ORIGIN'

headers    = snapmla.cuh snapmla_ref.h
tiny       = examples/tiny_mla
tiny_cpu   = $(tiny)/tiny_mla.c $(tiny)/model.c $(tiny)/backend_cpu.c
tiny_gpu   = $(tiny_cpu) $(tiny)/backend_gpu.cu
tiny_h     = $(wildcard $(tiny)/*.h)
gpu_tests  = build/gpu_util.o $(patsubst tests/%.c,build/%.o,$(wildcard tests/test_gpu*.c))
have_cublas = $(wildcard $(CUDA_HOME)/include/cublas_v2.h)
examples    = $(filter-out $(if $(have_cublas),,%/04_mla_layer.cu), \
                $(wildcard examples/*.cu examples/*/*.cu))

help:
	@echo 'make demo      a small MLA language model writes text from a SnapMLA cache'
	@echo 'make test      every test that can run on this machine; GPU tests skip where there is no GPU'
	@echo 'make examples  the programs of examples/, in build/'
	@echo 'make bench     speed of decode and of the data flow (needs a GPU)'
	@echo 'make figures   measures all numbers of README.md into CHARTS (needs a GPU; CHARTS is $(CHARTS))'
	@echo 'make sanitize  SANITIZE_CASES under the tools SANITIZERS of compute-sanitizer (needs a GPU)'
	@echo 'make fuzz      libFuzzer over the reference, the host checks and the readers, FUZZ_SECONDS each'
	@echo 'make clean     remove build/'
	@echo 'Variables: CC CXX NVCC CUDA_HOME ARCH (now $(ARCH))'

demo:
	@tests/need.sh cc
	@if $(NVCC) --version >/dev/null 2>&1; then $(MAKE) --no-print-directory build/tiny_mla && build/tiny_mla; \
	 else echo 'demo: no nvcc (CUDA Toolkit 12.8 or newer): built for the CPU reference alone'; \
	      $(MAKE) --no-print-directory build/tiny_mla_cpu && build/tiny_mla_cpu; fi

test:
	@tests/run.sh

examples: build/01_minimal build/02_from_c build/03_cuda_graph build/bench build/accuracy \
  build/chart build/tiny_mla build/libsnapmla.so $(if $(have_cublas),build/04_mla_layer)

bench: build/bench
	build/bench --preset headline,dataflow

# tests/readme_tables.sh --write then puts them into README.md and draws the charts
figures: build/bench build/accuracy
	build/bench --preset all --note '$(NOTE)' --csv $(CHARTS)/speed.csv
	build/accuracy --note '$(NOTE)' --csv $(CHARTS)/accuracy.csv

# Small shapes with every decode kernel, both modes, splits, holes, combine and the data flow.  All quick
# tests under one tool: make sanitize SANITIZERS=memcheck SANITIZE_CASES=
# Some tests provoke errors of CUDA's API on purpose.  What cudaMemset wrote, initcheck takes as written:
# for it, plan and workspace are left as they were allocated; outputs stay filled.
SANITIZERS     ?= memcheck synccheck initcheck racecheck
SANITIZE_CASES ?= test_hand_computed test_causal_at_split_ends test_negative_entries \
  test_more_splits_than_a_round test_quantize_q_rotated test_append_norm test_copy_pages test_fetch_ranges
sanitize: build/test_gpu
	@bad=0; for tool in $(SANITIZERS); do echo "== $$tool"; fill= ; api= ; \
	  [ $$tool != initcheck ] || fill=SNAPMLA_TEST_UNFILLED=1; \
	  [ $$tool != memcheck ] || api='--report-api-errors no'; \
	  env SNAPMLA_TEST_QUICK=1 $$fill compute-sanitizer --tool $$tool $$api --error-exitcode 9 \
	    --print-limit 20 build/test_gpu $(SANITIZE_CASES) || bad=1; done; exit $$bad

FUZZ_SECONDS ?= 600
fuzz: $(addprefix build/libfuzzer_,tiny_mla ref host)
	tests/fuzz/seeds.sh build/corpus_tiny_mla && mkdir -p build/corpus_ref build/corpus_host
	cd build && for name in tiny_mla ref host; do ./libfuzzer_$$name -max_total_time=$(FUZZ_SECONDS) \
	    -max_len=8192 -timeout=20 -print_final_stats=1 corpus_$$name || exit 1; done

clean:
	rm -rf build

build build/arch:
	mkdir -p $@

# --- examples ---
build/01_minimal: examples/01_minimal.cu $(headers) | build
	$(nvcc) $(run_code) -o $@ $<

build/03_cuda_graph: examples/03_cuda_graph.cu $(headers) | build
	$(nvcc) $(run_code) -o $@ $<

build/bench: examples/bench.cu examples/bench_util.h examples/bench_dataflow.h $(headers) | build
	$(nvcc) $(run_code) -o $@ $<

build/accuracy: examples/accuracy.cu $(headers) | build
	$(nvcc) $(run_code) -Xcompiler -fopenmp -o $@ $<

build/accuracy_cpu: examples/accuracy.cu snapmla_ref.h | build
	$(CC) -x c -std=c99 -O3 -Wall -Wextra -Werror -DNO_GPU -fopenmp -o $@ $< -lm

build/chart: examples/chart.c examples/svg_chart.h | build
	$(CC) -std=c99 -O2 -Wall -Wextra -Werror -o $@ $< -lm

build/04_mla_layer: examples/04_mla_layer.cu snapmla.cuh | build
	$(nvcc) $(run_code) -o $@ $< -lcublas

# what examples/05_embed/embed.py loads
build/libsnapmla.so: snapmla.cuh | build
	$(nvcc) $(run_code) -Xcompiler -fPIC -shared -x cu -DSNAPMLA_IMPLEMENTATION -o $@ $<

build/02_from_c: examples/02_from_c/main.c build/02_from_c.o $(headers)
	$(c99) -o $@ $< build/02_from_c.o $(cudart) -lstdc++

build/02_from_c.o: examples/02_from_c/snapmla.cu snapmla.cuh | build
	$(nvcc) $(run_code) -c -o $@ $<

build/tiny_mla: $(tiny_gpu) $(tiny_h) $(headers) | build
	$(nvcc) $(run_code) -DTINY_MLA_GPU -o $@ $(tiny_gpu)

build/tiny_mla_cpu: $(tiny_cpu) $(tiny_h) snapmla_ref.h | build
	$(CC) -std=c99 -O3 -Wall -Wextra -Werror -o $@ $(tiny_cpu) -lm -lpthread

# --- tests: C99, linked with one implementation object ---
build/impl.o: tests/impl.cu snapmla.cuh | build
	$(nvcc) $(run_code) -c -o $@ $<

build/impl_ptx80.o: tests/impl.cu snapmla.cuh | build
	$(nvcc) $(ptx80) -c -o $@ $<

build/arch/impl_sm_%.o: tests/impl.cu snapmla.cuh | build/arch
	$(nvcc) $(no_spills) $(call code,sm_$*) -c -o $@ $<

build/arch/%.o: examples/%.cu $(headers) $(tiny_h) $(wildcard examples/*.h) | build/arch
	mkdir -p $(@D) && $(nvcc) $(all_code) -DTINY_MLA_GPU -c -o $@ $<

build/arch/%.o: examples/%.c $(headers) | build/arch
	mkdir -p $(@D) && $(c99) -c -o $@ $<

examples_all_archs: $(examples:examples/%.cu=build/arch/%.o) build/arch/02_from_c/main.o
	@$(if $(have_cublas),:,echo 'left out: examples/04_mla_layer.cu, cuBLAS has no header here')

build/libcmocka.so.0: | build
	cp -L "$$($(CC) -print-file-name=libcmocka.so)" $@

build/test_ref: tests/test_ref.c tests/test_util.h snapmla_ref.h | build/libcmocka.so.0
	$(c99) -o $@ $< $(cmocka) -lm -lpthread

build/test_tiny_mla: tests/test_tiny_mla.c tests/test_util.h $(tiny_cpu) $(tiny_h) snapmla_ref.h \
  | build/libcmocka.so.0
	$(c99) -o $@ $< $(cmocka) -lm -lpthread

build/test_ref_checked: tests/test_ref.c tests/test_util.h snapmla_ref.h | build/libcmocka.so.0
	$(CC) -std=c99 -O1 $(checked) -Wall -Wextra -Werror -I. -o $@ $< $(cmocka) -lm -lpthread

# --- fuzzing: with tests/fuzz/driver.c for make test, with clang's libFuzzer for make fuzz ---
fuzz_cc    = $(1) -std=c99 -O1 $(checked) -Wall -Wextra -Werror -isystem $(CUDA_HOME)/include -I.
fuzz_nvcc  = $(NVCC) -std=c++17 -O1 $(ptx80) $(addprefix -Xcompiler ,$(checked) -fno-sanitize=enum $(1)) -I.
fuzz_h     = tests/fuzz/fuzz.h $(headers)

build/fuzz_ref build/fuzz_tiny_mla: build/fuzz_%: tests/fuzz/fuzz_%.c tests/fuzz/driver.c $(fuzz_h) \
  $(tiny_cpu) $(tiny_h) | build
	$(call fuzz_cc,$(CC)) -o $@ $< tests/fuzz/driver.c -lm

build/fuzz_host: tests/fuzz/fuzz_host.c tests/fuzz/driver.c build/fuzz_impl.o $(fuzz_h) | build
	$(call fuzz_cc,$(CC)) -c -o $@.o $< && $(call fuzz_cc,$(CC)) -c -o $@_driver.o tests/fuzz/driver.c
	$(CXX) $(checked) -o $@ $@.o $@_driver.o build/fuzz_impl.o $(cudart)

build/fuzz_impl.o: tests/impl.cu snapmla.cuh | build
	$(call fuzz_nvcc) -c -o $@ $<

build/libfuzzer_ref build/libfuzzer_tiny_mla: build/libfuzzer_%: tests/fuzz/fuzz_%.c $(fuzz_h) \
  $(tiny_cpu) $(tiny_h) | build
	$(call fuzz_cc,clang) -fsanitize=fuzzer -o $@ $< -lm

build/libfuzzer_host: tests/fuzz/fuzz_host.c $(fuzz_h) tests/impl.cu | build
	$(call fuzz_nvcc,-fsanitize=fuzzer-no-link) -ccbin clang -c -o $@_impl.o tests/impl.cu
	$(call fuzz_cc,clang) -fsanitize=fuzzer-no-link -c -o $@.o $<
	clang++ $(checked) -fsanitize=fuzzer -o $@ $@.o $@_impl.o $(cudart)

build/%.o: tests/%.c tests/test_util.h tests/gpu_util.h tests/gpu_rows.h $(headers) | build
	$(c99) -c -o $@ $<

build/test_plan.o: tests/test_plan.cu tests/test_util.h snapmla.cuh | build
	$(nvcc) $(run_code) -c -o $@ $<

build/test_plan: build/test_plan.o | build/libcmocka.so.0
	$(CXX) -o $@ $^ $(cmocka) $(cudart)

build/test_api: build/test_api.o build/impl.o | build/libcmocka.so.0
	$(CXX) -o $@ $^ $(cmocka) $(cudart)

build/test_gpu: $(gpu_tests) build/impl.o | build/libcmocka.so.0
	$(CXX) -o $@ $^ $(cmocka) $(cudart)

build/test_gpu_ptx80: $(gpu_tests) build/impl_ptx80.o | build/libcmocka.so.0
	$(CXX) -o $@ $^ $(cmocka) $(cudart)

build/test_wrong_arch: build/test_wrong_arch.o build/arch/impl_sm_80.o | build/libcmocka.so.0
	$(CXX) -o $@ $^ $(cmocka) $(cudart)

.PHONY: help demo test fuzz examples examples_all_archs bench figures sanitize clean
.DELETE_ON_ERROR:
