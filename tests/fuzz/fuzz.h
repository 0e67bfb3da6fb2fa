/* fuzz.h - what the fuzz programs share: numbers out of the input, and memory that is exactly as long
   as the caller owes it, so that AddressSanitizer sees the first byte too much.

   A program is LLVMFuzzerTestOneInput(); it is linked with libFuzzer (make fuzz) or with driver.c
   (make test).  FUZZ_CHECK ends the process: both report the input that did it. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FUZZ_CHECK(condition)                                                              \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                       \
        }                                                                                  \
    } while (0)

typedef __int128 wide; /* sums and products of what a desc holds */

static const uint8_t *fuzz_at, *fuzz_end;

/* The next bytes of the input, as a number; zeros behind its end. */
static inline uint64_t fuzz_bytes(int n)
{
    uint64_t x = 0;
    for (int i = 0; i < n; i++) x = x << 8 | (fuzz_at < fuzz_end ? *fuzz_at++ : 0);
    return x;
}

/* True once in about n times. */
static inline int fuzz_one_in(int n) { return fuzz_bytes(1) % (unsigned)n == (unsigned)n - 1; }

static inline int64_t fuzz_absurd(void)
{
    static const int64_t edges[] = {-1,
                                    INT32_MAX,
                                    INT32_MIN,
                                    INT64_MAX,
                                    INT64_MIN,
                                    INT64_MAX / 2,
                                    (int64_t)1 << 31,
                                    (int64_t)1 << 32,
                                    ((int64_t)1 << 32) + 1,
                                    (int64_t)1 << 62,
                                    INT64_MAX / 512,
                                    INT64_MAX - 15};
    const unsigned pick = (unsigned)fuzz_bytes(1) % 16;
    return pick < 12 ? edges[pick] : (int64_t)fuzz_bytes(8);
}

/* Mostly 0 .. below - 1, sometimes a number from the edge of what its type holds. */
static inline int64_t fuzz_number(int below)
{
    const unsigned b = (unsigned)fuzz_bytes(1);
    return b < 240 ? (int64_t)(b % (unsigned)below) : fuzz_absurd();
}
static inline int64_t fuzz_multiple(int below, int of)
{
    const int64_t n = fuzz_number(below);
    return n >= 0 && n < below ? n * of : n;
}
static inline int32_t fuzz_int(int below) { return (int32_t)(uint64_t)fuzz_number(below); }

/* ---- memory ---- */
enum { kFuzzBlocks = 64, kFuzzMost = 1 << 18 };
static void *fuzz_block[kFuzzBlocks];
static int fuzz_blocks;
static wide fuzz_taken; /* over kFuzzMost: the desc is legal, but its arrays cannot be had */

/* Exactly `bytes` bytes of noise.  Not NULL for 0 bytes. */
static inline void *fuzz_new(wide bytes)
{
    unsigned char *p;
    uint32_t x = (uint32_t)fuzz_bytes(2) * 2654435761u + 1;
    if (bytes < 0) bytes = 0;
    fuzz_taken += bytes;
    if (fuzz_taken > kFuzzMost) return NULL;
    FUZZ_CHECK(fuzz_blocks < kFuzzBlocks);
    p = (unsigned char *)malloc((size_t)bytes + !bytes);
    FUZZ_CHECK(p != NULL);
    for (size_t i = 0; i < (size_t)bytes; i++) {
        x = x * 1664525u + 1013904223u;
        p[i] = (unsigned char)(x >> 24);
    }
    fuzz_block[fuzz_blocks++] = p;
    return p;
}

static inline void fuzz_begin(const uint8_t *data, size_t size)
{
    fuzz_at = data;
    fuzz_end = data + size;
    fuzz_blocks = 0;
    fuzz_taken = 0;
}

static inline void fuzz_finish(void)
{
    while (fuzz_blocks > 0) free(fuzz_block[--fuzz_blocks]);
}

#ifdef __cplusplus
extern "C"
#endif
    int
    LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
