/* driver.c - runs a fuzz program without libFuzzer: PROGRAM RUNS [SEED-FILE...]

   Inputs are random bytes, and mutated copies of the seed files if there are any: bytes and numbers
   replaced, runs removed, doubled or taken from another seed.  Repeatable: the same inputs each time. */
#include <signal.h>
#include <unistd.h>

#include "fuzz.h"

enum { kMost = 1 << 16, kMaxSeeds = 64 };

static unsigned char input[kMost];
static size_t input_size;
static unsigned char *seed_bytes[kMaxSeeds];
static size_t seed_size[kMaxSeeds];
static uint64_t state = 0x9e3779b97f4a7c15u;

static uint64_t rnd(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % below;
}

/* The input that ended the process, for the next run. */
static void on_signal(int signal_number)
{
    static const char text[] = "the input is in fuzz_crash.bin\n";
    FILE *file = fopen("fuzz_crash.bin", "wb");
    if (file) {
        fwrite(input, 1, input_size, file);
        fclose(file);
    }
    if (write(2, text, sizeof text - 1) < 0) _exit(3);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void mutate(int seeds)
{
    for (uint64_t n = 1 + rnd(6); n > 0; n--) {
        const size_t at = input_size ? (size_t)rnd(input_size) : 0;
        const size_t left = input_size - at;
        size_t run = left ? 1 + (size_t)rnd(left < 64 ? left : 64) : 0;
        switch (rnd(6)) {
        case 0:
            if (left) input[at] = (unsigned char)rnd(256);
            break;
        case 1:
            if (left) input[at] ^= (unsigned char)(1u << rnd(8));
            break;
        case 2:
            memmove(input + at, input + at + run, left - run);
            input_size -= run;
            break;
        case 3:
            if (input_size + run > kMost) break;
            memmove(input + at + run, input + at, left);
            input_size += run;
            break;
        case 4:
            for (size_t i = 0; i < run; i++)
                if (rnd(2)) input[at + i] = (unsigned char)"0123456789-.eE,:[]{}\"\\ \n"[rnd(24)];
            break;
        default:
            if (seeds) {
                const int other = (int)rnd((uint64_t)seeds);
                const size_t from = seed_size[other] ? (size_t)rnd(seed_size[other]) : 0;
                if (run > seed_size[other] - from) run = seed_size[other] - from;
                memcpy(input + at, seed_bytes[other] + from, run);
            }
        }
    }
}

static int read_seed(const char *path, int n)
{
    FILE *file = fopen(path, "rb");
    if (!file) return -1;
    seed_bytes[n] = (unsigned char *)malloc(kMost);
    if (!seed_bytes[n]) {
        fclose(file);
        return -1;
    }
    seed_size[n] = fread(seed_bytes[n], 1, kMost, file);
    fclose(file);
    return 0;
}

int main(int argc, char **argv)
{
    const long runs = argc > 1 ? atol(argv[1]) : 0;
    const int seeds = argc - 2 < kMaxSeeds ? argc - 2 : kMaxSeeds;
    if (runs < 1) {
        fprintf(stderr, "usage: %s RUNS [SEED-FILE...]\n", argv[0]);
        return 2;
    }
    for (int i = 0; i < seeds; i++) {
        if (read_seed(argv[i + 2], i)) {
            fprintf(stderr, "%s: cannot read %s\n", argv[0], argv[i + 2]);
            return 2;
        }
    }
    signal(SIGABRT, on_signal);
    for (long run = 0; run < runs; run++) {
        const int seed = seeds ? (int)rnd((uint64_t)seeds + 1) : seeds;
        if (run < seeds || seed < seeds) { /* every seed once as it is */
            const int n = run < seeds ? (int)run : seed;
            input_size = seed_size[n];
            memcpy(input, seed_bytes[n], input_size);
            if (run >= seeds) mutate(seeds);
        } else {
            input_size = (size_t)rnd(512);
            for (size_t i = 0; i < input_size; i++) input[i] = (unsigned char)rnd(256);
        }
        LLVMFuzzerTestOneInput(input, input_size);
    }
    printf("%ld inputs\n", runs);
    for (int i = 0; i < seeds; i++) free(seed_bytes[i]);
    return 0;
}
